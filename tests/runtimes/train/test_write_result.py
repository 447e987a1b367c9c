"""What a run leaves is the average of its weights, if one was kept."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.core import url_to_fs
from gcsfs.retry import HttpError
from store_servers import UrlOf

from artifacts.compare_and_swap import read
from artifacts.errors import WAITS
from artifacts.lock import Claim, LockLost, hold, seize
from artifacts.records import FileEntry
from artifacts.safetensors import Arrays, read_floats, write_arrays
from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.train.training_loop import write_result

BASE = Path(__file__).parents[3] / "demo" / "base"


def make_job(settings: Train, folder: Path, out: str, claim: Claim | None = None) -> TrainJob:
    train, work = settings.model_dump(mode="json"), str(folder)
    return TrainJob("torch", str(BASE), latents="", train=train, work=work, out=out, claim=claim)


def paths(files: list[FileEntry]) -> list[str]:
    return [file.path for file in files]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("averaged", [True, False])
def test_what_is_left_is_the_average_if_one_was_kept(
    tmp_path: Path, method: str, averaged: bool
) -> None:
    settings = Train(method=method, ema_decay=0.9 if averaged else None)  # type: ignore[arg-type]
    name = "conv_in.weight" if method == "full" else "mid.to_q.lora_A.weight"
    job = make_job(settings, tmp_path, str(tmp_path / "out"))

    def filled(value: float) -> Arrays:
        return {f"unet.{name}": np.full((2, 3), value, np.float32)}

    state = {"weights": filled(1), "exp_avg": filled(2)} | ({"ema": filled(3)} if averaged else {})
    files = write_result(job, Base.of(job), state, ["{}"])
    weights = next(file for file in files if file.path.endswith(".safetensors"))
    _, arrays = read_floats(tmp_path / "out" / weights.path)
    assert [array.mean() for array in arrays.values()] == [3 if averaged else 1]


@pytest.mark.parametrize("failures", [1, 3, 4])
def test_trained_weights_outlast_a_store_that_does_not_respond(
    tmp_path: Path, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    job, waited = make_job(Train(), tmp_path, url_of("memory")), list[float]()
    state = {"weights": {"unet.conv_in.weight": np.ones((2, 3), np.float32)}}

    def unreachable(*arguments: Any) -> None:
        if len(waited) < failures:
            raise HttpError({"code": 503, "message": "Service Unavailable"})
        write_arrays(*arguments)

    monkeypatch.setattr("runtimes.train.training_loop.write_arrays", unreachable)
    monkeypatch.setattr(time, "sleep", waited.append)
    if failures > len(WAITS):
        with pytest.raises(HttpError):
            write_result(job, Base.of(job), state, ["{}"])
    else:
        assert "unet/diffusion_pytorch_model.safetensors" in paths(
            write_result(job, Base.of(job), state, ["{}"])
        )
    assert waited == list(WAITS[:failures])


def test_expired_credentials_are_no_outage(
    tmp_path: Path, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expired(*_: Any) -> None:
        raise PermissionError("The provided token has expired.")

    monkeypatch.setattr("runtimes.train.training_loop.write_arrays", expired)
    monkeypatch.setattr(time, "sleep", pytest.fail)
    job = make_job(Train(), tmp_path, url_of("memory"))
    state = {"weights": {"unet.conv_in.weight": np.ones((2, 3), np.float32)}}
    with pytest.raises(PermissionError, match="has expired"):
        write_result(job, Base.of(job), state, ["{}"])


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_weights_of_a_builder_that_lost_its_lock_replace_none(
    tmp_path: Path, url_of: UrlOf, kind: str, method: str
) -> None:
    """The process of a paused builder goes on; another builder has committed meanwhile."""
    out = url_of(kind)
    fs, root = url_to_fs(out)
    name = "conv_in.weight" if method == "full" else "mid.to_q.lora_A.weight"
    settings = Train(method=method)  # type: ignore[arg-type]

    def state(value: float) -> dict[str, Arrays]:
        return {"weights": {f"unet.{name}": np.full((2, 3), value, np.float32)}}

    with hold(fs, f"{root}/lock.json") as paused:
        late = make_job(settings, tmp_path, out, paused.claim)
        assert write_result(late, Base.of(late), state(1), ["{}"])
        with seize(fs, f"{root}/lock.json", read(fs, f"{root}/lock.json")) as other:
            assert other is not None
            owned = make_job(settings, tmp_path, out, other.claim)
            files = paths(write_result(owned, Base.of(owned), state(2), ["{}"]))
        committed = {path: fs.cat_file(f"{root}/{path}") for path in files}
        with pytest.raises(LockLost):
            write_result(late, Base.of(late), state(3), ["{}", "{}"])
    assert {path: fs.cat_file(f"{root}/{path}") for path in files} == committed
