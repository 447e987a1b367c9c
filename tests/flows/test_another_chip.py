"""A run that is killed on one runtime goes on on another: the same recipe with `-o runtime=`."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import chips
import compiled_programs
import in_process
import numpy as np
import published
import pytest
from command import ROOT, command, environment, jobs_of
from safetensors.numpy import load_file

from configs.load import load_recipe

pytestmark = pytest.mark.slow
STEPS, SAVED = 12, 4
LOSS = 1e-4  # relative, as the conformance suite allows of two runtimes
WEIGHTS = 1e-3  # relative to the largest weight of a tensor
WAIT = 600  # seconds, of a machine however busy
Overrides = dict[str, Any]


@pytest.fixture
def recipe(small: Overrides, tiny_sdxl: Path, tiny_clip: Path) -> Overrides:
    """Overrides of `digits` for a few steps of a tiny model in float32."""
    return {
        **small,
        "model.path": str(tiny_sdxl),
        "evaluate.clip": str(tiny_clip),
        "evaluate.judges": [],
        "train.steps": STEPS,
        "train.lr_warmup_steps": 2,
        "train.checkpointing_steps": SAVED,
        "train.sample_every_n_steps": 0,
    }


def held_at(step: int) -> Overrides:
    """Settings that change nothing of what is trained, and keep training busy at a step: once its
    checkpoint is on its way, pictures are drawn that take a thousand steps each."""
    return {"train.sample_every_n_steps": step, "evaluate.num_inference_steps": 1000}


def saved(store: Path) -> list[int]:
    """The steps whose checkpoints are committed."""
    found = store.glob("train/*/checkpoints/step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def killed_at(step: int, folder: Path, overrides: Overrides, api: str) -> str:
    """What `kiln run` says until it and its training are killed after the checkpoint of a step."""
    log, store, until = folder / f"{step}.log", Path(overrides["store"]), time.monotonic() + WAIT
    with log.open("wb") as lines:
        flow = subprocess.Popen(
            command("run", "digits", overrides={**overrides, **held_at(step)}),
            env=environment(folder, api),
            cwd=ROOT,
            stdout=lines,
            stderr=lines,
            start_new_session=True,
        )
    try:
        while step not in saved(store):
            said = log.read_text(errors="replace")
            assert flow.poll() is None and time.monotonic() < until, said
            time.sleep(0.05)
        jobs = jobs_of(flow.pid)
        assert jobs
        for process in (*jobs, flow.pid):
            os.killpg(process, signal.SIGKILL)
        assert flow.wait(WAIT) == -signal.SIGKILL
    finally:
        flow.kill()
    assert saved(store)[-1] == step
    return log.read_text(errors="replace")


def test_a_run_is_killed_on_torch_goes_on_on_jax_and_back(
    tmp_path: Path, recipe: Overrides, api: str
) -> None:
    compiled_programs.keep(Path(recipe["store"]))
    assert "resuming" not in killed_at(4, tmp_path, recipe, api)
    with chips.standing_in("jax"):
        said = killed_at(8, tmp_path, {**recipe, "runtime": "jax"}, api)
    assert re.findall(r"train: resuming from step (\d+)", said) == ["4"]

    report = in_process.finetune(tmp_path, "digits", recipe, api)
    assert report["status"] == "published"
    assert published.manifest(report, "train")["run"]["resumed_from"] == 8
    assert [path.name for path in published.folder(report, "train").parent.iterdir()] == [
        report["stages"]["train"]["key"]
    ]
    alone = published.train_apart(load_recipe("digits", recipe), report, tmp_path / "alone")
    losses = [line["loss"] for line in published.history(published.folder(report, "train"))]
    expected = [line["loss"] for line in published.history(alone)]
    assert losses[:4] == expected[:4]
    assert losses[4:8] != expected[4:8]  # jax's last bits are its own
    assert losses == pytest.approx(expected, rel=LOSS)
    name = "unet/diffusion_pytorch_model.safetensors"
    weights = load_file(published.folder(report, "train") / name)
    for layer, array in load_file(alone / name).items():
        furthest = np.abs(weights[layer] - array).max()
        assert furthest <= WEIGHTS * max(np.abs(array).max(), 1e-3), layer
