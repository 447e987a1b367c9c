"""What a run leaves is the average of its weights, if one was kept."""

from pathlib import Path

import numpy as np
import pytest

from artifacts.safetensors import Arrays, read_floats
from configs.train import Train
from runtimes.process.job import TrainJob
from runtimes.train.result import write_result

BASE = Path(__file__).parents[3] / "demo" / "base"


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("averaged", [True, False])
def test_what_is_left_is_the_average_if_one_was_kept(
    tmp_path: Path, method: str, averaged: bool
) -> None:
    settings = Train(method=method, ema_decay=0.9 if averaged else None)  # type: ignore[arg-type]
    name = "conv_in.weight" if method == "full" else "mid.to_q.lora_A.weight"

    def filled(value: float) -> Arrays:
        return {f"unet.{name}": np.full((2, 3), value, np.float32)}

    state = {"weights": filled(1), "exp_avg": filled(2)} | ({"ema": filled(3)} if averaged else {})
    job = TrainJob(
        runtime="torch",
        model=str(BASE),
        latents="",
        train=settings.model_dump(mode="json"),
        work=str(tmp_path),
        out=str(tmp_path / "out"),
    )
    files = write_result(job, state, ["{}"])
    weights = next(file for file in files if file.endswith(".safetensors"))
    _, arrays = read_floats(tmp_path / "out" / weights)
    assert [array.mean() for array in arrays.values()] == [3 if averaged else 1]
