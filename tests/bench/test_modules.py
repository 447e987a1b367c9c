"""Imports of all modules of bench/ and demo/, and each benchmark on a minimal workload."""

import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kiln_command import environment

import bench
import demo
from bench import (
    benchmark_inputs,
    checkpoint,
    describe,
    encode,
    gpu,
    loader,
    report,
    run_kilnworks,
    same_picture,
    scale,
)
from bench.train_rows import CUDA_ROWS, TINY, full_size_row, sd2, sdxl
from bench.training_step_workloads import Context, Workload
from configs.settings.train import Train

MODULES = [
    f"{package.__name__}.{found.name}"
    for package in (bench, demo)
    for found in pkgutil.iter_modules(package.__path__)
    if not found.ispkg
]
#: The tiny model with two pictures.
SMALLEST = Workload("smallest", TINY.write, pictures=2, size=TINY.size, batch=2)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """One round of two steps, without diffusers' scripts."""
    return Context(tmp_path, None, rounds=1, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_module_imports_and_has_a_docstring(name: str) -> None:
    assert (import_module(name).__doc__ or "").strip()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", CUDA_ROWS)
def test_cuda_rows_are_skipped_without_cuda(name: str, context: Context) -> None:
    row = context.row(name, CUDA_ROWS[name])
    assert (row.skipped, row.failed) == ("no CUDA device", "")


def test_rows_of_a_model_share_its_files() -> None:
    """Context writes them once for equal workloads."""
    assert all(workload(4) == workload(4) for workload in (sd2, sdxl))


@pytest.mark.soak
def test_full_size_row_has_loop_figures(context: Context) -> None:
    """On a CPU with a tiny model."""
    figures = full_size_row(context, "row", SMALLEST, "lora").figures
    assert figures["images_per_second"]["median"] == pytest.approx(2 / figures["seconds"]["median"])


@pytest.mark.soak
def test_gpu_variants_are_measured_one_by_one(tmp_path: Path, tiny_sd: Path) -> None:
    """On a CPU with a tiny UNet; a variant that fails does not end the others."""
    model = gpu.Model("tiny", "the/tiny", "unet", 64, 2)
    eager = {"compile": "none"}
    variants = {"wrong": (model, {"device": "cuda:99"}), "right": (model, eager)}
    wrong, right = gpu.run_piece(
        variants, gpu.job_maker(tmp_path, lambda *_: tiny_sd), tmp_path, 1, together=2
    )
    assert "cuda:99" in wrong.failed
    assert right.figures["images_per_second"] == pytest.approx(2 / right.figures["seconds"])
    assert right.figures["memory_gb"] > 0 and right.figures["tflop_per_image"] > 0


def test_a_variant_that_prints_no_stacks_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in the driver, which SIGABRT does not end."""
    deaf, number = tmp_path / "python", tmp_path / "number"
    deaf.write_text(f"#!/bin/sh\ntrap '' ABRT\necho $$ > {number}\nexec sleep 60\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    monkeypatch.setattr(gpu, "END", 1.0)
    row = gpu._measure_alone("name", tmp_path / "job.json", 1, 1, limit=1.0)
    assert row.failed.startswith("did not end within 1 s")
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


@pytest.mark.soak
def test_a_flow_transformer_is_measured_as_a_unet_is(tmp_path: Path, tiny_flux: Path) -> None:
    model = gpu.Model("tiny", "the/tiny", "transformer", 64, 2)
    settings = {**gpu.FLOW, **gpu.LORA, "device": "cpu", "compile": "none"}
    make = gpu.job_maker(tmp_path, lambda *_: tiny_flux)
    (row,) = gpu.run_piece({"flux": (model, settings)}, make, tmp_path, steps=1)
    assert row.figures["images_per_second"] > 0


def test_loaders_take_turns_and_ratios_are_those_of_rounds(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's speed changes between rounds, so a ratio of two medians would be 2."""
    clock, started = [0.0], []
    seconds = {"ours": iter((1, 1, 2, 4)), "webdataset": iter((1, 1, 4, 4))}

    def epochs(name: str) -> loader.Epoch:
        def epoch() -> Iterator[loader.Batch]:
            yield dict.fromkeys(loader.NAMES, np.zeros((2, 1), np.float32))
            clock[0] += next(seconds[name])
            started.append(name)

        return epoch

    monkeypatch.setattr(loader.time, "perf_counter", lambda: clock[0])
    context.rounds = 3
    row = loader.compare({name: epochs(name) for name in seconds}, 1, 2, context)
    assert row.ratios == {"rate_vs_webdataset": 1.0}
    turns = ["ours", "webdataset", "webdataset", "ours", "ours", "webdataset"]
    assert started[2:] == turns  # after an epoch of each to warm up


def test_grain_reads_with_a_thread_per_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grain

    given: list[int] = []
    options = grain.ReadOptions

    def noted(**chosen: int) -> grain.ReadOptions:
        given.append(chosen["num_threads"])
        return options(**chosen)

    monkeypatch.setattr(grain, "ReadOptions", noted)
    url = benchmark_inputs.write_random_latents(tmp_path, loader.SDXL, 4, 64, shards=2)
    (batch,) = loader.grain_batches(url, tmp_path, 4)()
    assert batch["mean"].shape == (4, 4, 8, 8)
    assert given == [os.cpu_count()]


def test_encoders_take_turns_and_theirs_runs_as_in_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers' scripts turn on neither deterministic algorithms nor cuDNN's benchmark mode."""
    calls: list[str] = []
    modes: set[tuple[bool, bool]] = set()

    def make_deterministic(enabled: bool = True) -> None:
        torch.backends.cudnn.benchmark = not enabled
        torch.backends.cudnn.deterministic = enabled

    def theirs(*_: object) -> None:
        calls.append("theirs")
        modes.add((torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark))

    encoder = SimpleNamespace(images=lambda _: calls.append("ours"), texts=lambda _: None)
    for name in ("benchmark", "deterministic"):
        monkeypatch.setattr(torch.backends.cudnn, name, False)
    monkeypatch.setattr("runtimes.torch.device.make_deterministic", make_deterministic)
    monkeypatch.setattr(encode, "open_encoder", lambda _: encoder)
    monkeypatch.setattr(encode, "_encode_as_diffusers_scripts", theirs)
    small = replace(encode.SD2, side=8, batch=1, batches=1, device="cpu", dtype="float32")
    encode.published_row(Context(tmp_path, None, 2, 1), "small", encoders=small)
    assert calls[2:6] == ["ours", "theirs", "theirs", "ours"]  # after a batch to warm up
    assert modes == {(False, False)}


@pytest.mark.soak
def test_encoders_of_true_size_are_compared(context: Context) -> None:
    """On a CPU with two small pictures."""
    small = replace(encode.SD2, side=64, batch=2, batches=1, device="cpu", dtype="float32")
    row = encode.published_row(context, "encode_sd2", encoders=small)
    assert row.ratios.keys() == {"encode_sd2_vs_diffusers"}
    assert all(
        row.figures[name]["median"] > 0 for name in ("images_per_second", "captions_per_second")
    )


def test_every_gpu_variant_has_valid_settings() -> None:
    names = [name for piece in gpu.PIECES.values() for name in piece]
    assert len(set(names)) == len(names)
    for piece in gpu.PIECES.values():
        for model, settings in piece.values():
            configs = benchmark_inputs.published(model.hub_id)
            assert (configs / model.denoiser / "config.json").is_file()
            Train(**{name: value for name, value in settings.items() if name != "runtime"})


def test_variants_in_the_table_of_the_documents_exist_as_described() -> None:
    """An eager or deterministic row has a variant with these settings."""
    text = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text(encoding="utf-8")
    table = text.partition("| variant | card |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    variants = {name: v for piece in gpu.PIECES.values() for name, v in piece.items()}
    assert len(cells) >= 6
    for cell in cells:
        _, settings = variants[cell.split("`")[1]]
        assert settings.get("deterministic", False) == ("deterministic" in cell), cell
        assert (settings.get("compile") == "none") == ("eager" in cell), cell


def test_measured_variants_become_rows_of_the_page(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / gpu.PAGE).read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    figures = {
        **{"images_per_second": 151.52, "mfu": 0.374, "memory_gb": 65.41, "batch": 64},
        **{"load_seconds": 15.2, "warm_up_seconds": 117.6},
    }
    rows = [report.Row("sd2_full", figures=figures), report.Row("sd2_lora", failed="too slow")]
    gpu.add_to_table(page, rows, "NVIDIA H200", date(2026, 12, 1))
    added = "| `sd2_full`, batch 64 | H200 | 151.5 | 37% | 65.4 GB | 15 + 118 s | 2026-12-01 |"
    before, line, after = page.read_text(encoding="utf-8").partition(f"\n{added}")
    assert line and before + after == text
    last_row = before.splitlines()[-1]
    assert last_row.count("|") == added.count("|") and after.startswith("\n\n")


def test_a_page_without_the_table_is_a_wrong_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.touch()
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["sd2", "--page", str(page)])
    assert "page.md has no table | variant | card |" in capsys.readouterr().err


def test_an_unknown_variant_is_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["sd2", "--only", "sdxl_full"])
    assert "sd2 has no variant sdxl_full; it has sd2_full, " in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoint_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    """A state has whole arrays, so it is larger than the 0.02 GB that were asked for."""
    written, seconds = checkpoint.measure(str(tmp_path), gigabytes=0.02, rounds=1)
    files = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert written == pytest.approx(files, rel=1e-3)
    assert written == 4 * checkpoint.ARRAY_BYTES
    assert seconds.keys() == {"copy", "write", "verify", "read"}


@pytest.mark.soak
def test_checkpoint_rates_of_two_processes(tmp_path: Path) -> None:
    found = checkpoint.row(str(tmp_path), gigabytes=0.1, rounds=1, processes=2)
    phases = {"copy", "write", "verify", "read"}
    assert found.failed == ""
    assert found.figures.keys() == {"gigabytes", *(f"{phase}_gb_per_second" for phase in phases)}
    assert found.figures["gigabytes"] == 8 * checkpoint.ARRAY_BYTES / 1e9


@pytest.mark.soak
def test_loaders_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert loader.main(["--quick"]) == 0
    ratios = json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"]
    assert ratios.keys() == {"rate_vs_webdataset", "rate_vs_grain"}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "row", "steps"),
    [
        ("list", "10,000 list", {"first", "unchanged", "grown"}),
        ("rows", "1,000 rows", {"download_plan", "download", "encode"}),
        ("shards", "1,000 shards", {"commit", "load", "verify", "gc_mark", "gc_collect"}),
    ],
)
def test_steps_of_a_large_run_are_measured(
    what: str, row: str, steps: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale.main([what, "--quick"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert {f"{step}_peak_mib" for step in steps} <= figures[row].keys()


@pytest.mark.soak
def test_grouping_of_made_up_pictures_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert describe.main(["--quick", "--only", "hashes", "embeddings"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    for kind, count in (("hashes", 10_000), ("embeddings", 1000)):
        assert figures[kind]["pictures"] == count
        assert figures[kind]["copies_found"] == 1
        assert figures[kind]["false_joins"] == 0


@pytest.mark.soak
def test_encode_rates_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert encode.main(["--quick"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    loop = {"rate_vs_bare_loop", "cpu_vs_bare_loop"}
    assert found["ratios"].keys() == loop | {"scaling_2", "scaling_4"}
    assert found["figures"]["devices"]["device_busy_on_1"]["rounds"] == 1


@pytest.mark.soak
def test_whole_run_is_timed_by_stage(tmp_path: Path) -> None:
    model = TINY.write(tmp_path / "model")
    images = benchmark_inputs.write_images(tmp_path / "images", 2, TINY.size)
    settings = {"steps": 2, "global_batch_size": 2, "device": "cpu", "sample_every_n_steps": 0}
    whole, stages = run_kilnworks.whole_run(images, model, tmp_path, TINY.size, settings)
    assert stages.keys() == {"download", "encode", "train"}
    assert sum(stages.values()) < whole
    (weights,) = (tmp_path / "store/train").rglob("unet/*.safetensors")
    assert weights.stat().st_size > 0


@pytest.mark.soak
def test_variants_are_compared_with_the_first(
    tiny_sdxl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    twice = {name: ("torch", "cpu", {}) for name in ("torch", "again")}
    monkeypatch.setattr(same_picture, "VARIANTS", twice)
    options = ("num_inference_steps=2", "num_images_per_prompt=2", "guidance_scale=3")
    words = [str(tiny_sdxl), "a red cat", *(word for o in options for word in ("-o", o))]
    assert same_picture.main([*words, "--out", str(tmp_path / "page.png")]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert {name: row["max_difference_levels"] for name, row in figures.items()} == {
        "torch": 0,
        "again": 0,
    }
    assert all(row["pictures"] == 2 for row in figures.values())
    assert (tmp_path / "page.png").is_file()


def test_difference_of_pictures_is_in_levels() -> None:
    first = np.full((2, 4, 4, 3), 200, np.uint8)
    other = first.copy()
    other[1, 0, 0] = 7
    found = same_picture._compare(other, first)
    assert found == {"pictures": 2, "max_difference_levels": 193, "different_fraction": 3 / 96}
