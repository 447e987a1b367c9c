"""Every module of the benchmarks and of the demo is imported; each benchmark's smallest path."""

import json
import pkgutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from command import environment

import bench
import demo
from bench import inputs, ours, same_picture, train_mindspore
from bench.steps import Context, Scale
from bench.train_cuda import CUDA_ROWS, sd2, sdxl, true_size_row
from bench.train_rows import TINY
from runtimes.registry import probe_runtime

MODULES = [
    f"{package.__name__}.{found.name}"
    for package in (bench, demo)
    for found in pkgutil.iter_modules(package.__path__)
    if not found.ispkg
]
#: Two pictures of the tiny model, and two steps a round.
SMALLEST = Scale("smallest", TINY.write, pictures=2, size=TINY.size, batch=2)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """One round, without the scripts that are compared with."""
    return Context(tmp_path, None, rounds=1, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_imported(name: str) -> None:
    assert (import_module(name).__doc__ or "").strip()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", CUDA_ROWS)
def test_rows_that_need_cuda_are_left_out_without_it(name: str, context: Context) -> None:
    row = context.row(name, CUDA_ROWS[name])
    assert (row.left_out, row.failed) == ("no CUDA device", "")


def test_the_rows_of_a_model_share_its_inputs() -> None:
    """Context makes them once for scales that are equal."""
    assert all(scale(4) == scale(4) for scale in (sd2, sdxl))


@pytest.mark.soak
def test_a_row_of_true_size_has_our_loop_and_every_choice(context: Context) -> None:
    """On a CPU, at toy size: what needs CUDA says that it does not run."""
    figures = true_size_row(context, "row", SMALLEST, "lora").figures
    assert figures["images_per_second"]["median"] == pytest.approx(2 / figures["seconds"]["median"])
    choices = figures["options"]
    assert {"as_it_is", "not_fused_adamw", "gradient_checkpointing", "compile"} <= choices.keys()
    assert all(isinstance(found, float) or "does not run" in found for found in choices.values())
    assert isinstance(choices["as_it_is"], float)


@pytest.mark.soak
def test_a_step_of_mindones_is_compared_with_ours(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probe_runtime("mindspore")
    if not found.available:
        pytest.skip(found.reason)
    small = Scale("small", inputs.write_pipeline, pictures=4, size=32, batch=2)
    monkeypatch.setattr(train_mindspore, "SMALL", small)
    row = train_mindspore.step_row(context, "step", mode="pynative")
    assert row.ratios.keys() == {"step", "step_memory"}
    assert row.figures["ratio"]["rounds"] == 1 and row.figures["batch"] == 2


@pytest.mark.soak
def test_a_whole_run_is_timed_stage_by_stage(tmp_path: Path) -> None:
    model = TINY.write(tmp_path / "model")
    images = inputs.write_images(tmp_path / "images", 2, TINY.size)
    settings = {"steps": 2, "global_batch_size": 2, "device": "cpu", "sample_every_n_steps": 0}
    whole, stages = ours.whole_run(images, model, tmp_path, TINY.size, settings)
    assert stages.keys() == {"download", "encode", "train"}
    assert sum(stages.values()) < whole
    (weights,) = (tmp_path / "store/train").rglob("unet/*.safetensors")
    assert weights.stat().st_size > 0


@pytest.mark.soak
def test_drawers_are_compared_with_the_first(
    tiny_sdxl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    twice = {name: ("torch", "cpu", {}) for name in ("torch", "again")}
    monkeypatch.setattr(same_picture, "DRAWERS", twice)
    options = ("num_inference_steps=2", "num_images_per_prompt=2", "guidance_scale=3")
    words = [str(tiny_sdxl), "a red cat", *(word for o in options for word in ("-o", o))]
    assert same_picture.main([*words, "--out", str(tmp_path / "page.png")]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert {name: row["most_levels_apart"] for name, row in told.items()} == {
        "torch": 0,
        "again": 0,
    }
    assert all(row["pictures"] == 2 for row in told.values())
    assert (tmp_path / "page.png").is_file()


def test_how_far_pictures_are_apart_is_told_in_levels() -> None:
    first = np.full((2, 4, 4, 3), 200, np.uint8)
    other = first.copy()
    other[1, 0, 0] = 7
    found = same_picture._compared(other, first)
    assert found == {"pictures": 2, "most_levels_apart": 193, "share_of_values_apart": 3 / 96}
