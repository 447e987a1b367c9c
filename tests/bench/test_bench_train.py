"""`python -m bench.train` with tiny models and a small script instead of diffusers' scripts."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from training import history

from bench import benchmark_inputs, encode, job_steps, report, run_kilnworks, train, train_rows
from bench.diffusers_script_hooks import Stopwatch
from bench.report import Row, publish
from bench.run_diffusers_scripts import SCRIPTS, Peer, PeerTime
from bench.train_rows import ROWS, TINY
from bench.training_step_workloads import (
    THREADS,
    WRONG_INPUT,
    Context,
    InputFiles,
    Workload,
    compare_steps,
)
from configs.errors import Failed
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch.runtime import TheRuntime

FULL, LORA = SCRIPTS["sdxl", "full"], SCRIPTS["sdxl", "lora"]
TOY = replace(TINY, pictures=6, batch=2)
#: A script that calls the same library functions as the real ones, on random latents.
TOY_SCRIPT = """
import argparse, torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel
parser = argparse.ArgumentParser()
parser.add_argument("--pretrained_model_name_or_path")
parser.add_argument("--max_train_steps", type=int)
parser.add_argument("--learning_rate", type=float)
options, _ = parser.parse_known_args()
torch.manual_seed(0)
accelerator = Accelerator()
folder = options.pretrained_model_name_or_path
schedule = DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet").train()
optimizer = torch.optim.AdamW(unet.parameters(), lr=options.learning_rate)
data = torch.utils.data.DataLoader(torch.randn(2 * options.max_train_steps, 4, 8, 8), batch_size=2)
unet, optimizer, data = accelerator.prepare(unet, optimizer, data)
for latents in data:
    noise = torch.randn_like(latents)
    timesteps = torch.randint(0, 1000, (len(latents),))
    added = {"text_embeds": torch.randn(2, 64), "time_ids": torch.rand(2, 6) * 32}
    noisy = schedule.add_noise(latents, noise, timesteps)
    prediction = unet(
        noisy, timesteps, torch.randn(2, 77, 128), added_cond_kwargs=added, return_dict=False
    )[0]
    target = schedule.get_velocity(latents, noise, timesteps)
    loss = torch.nn.functional.mse_loss(prediction, target)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_stopwatch_splits_a_step_into_fetch_encode_and_body_and_sums_precomputing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Stopwatch()
    clock = 0.0
    monkeypatch.setattr(watch, "now", lambda: clock)

    def work(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    def fetch(loader: object) -> Iterator[int]:
        for number in range(3):
            work(1)
            yield number

    # A CLIP encoder with a projection calls one without; the time counts once.
    encode = watch.encoder(watch.encoder(lambda: work(2)))
    for _ in watch.batches(fetch)(None):
        encode()
        work(4)
    assert watch.steps == [{"fetch": 1, "encode": 2, "body": 6}] * 3
    for _ in range(2):
        watch.mapping(lambda: work(3))()
    assert watch.precomputing[0] == 2 * 3
    slow_first = [{"fetch": 9.0, "encode": 9.0, "body": 9.0}, *watch.steps]
    time = PeerTime.from_steps(slow_first, warm_up=1)
    assert (time.iteration, time.precomputed, time.training) == (7, 5, 4)


@pytest.mark.slow
@pytest.mark.parametrize("bench", [train, encode])
def test_a_missing_interpreter_is_an_error_before_the_rows(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = str(tmp_path / "python")
    given = ["--diffusers-examples", str(tmp_path), "--peer-python", python]
    assert bench.main(given) == WRONG_INPUT
    assert f"error: --peer-python {python}: " in capsys.readouterr().err


def test_loop_time_excludes_the_warm_up() -> None:
    progress = {"event": "progress", "memory_bytes": 7}
    events = [
        {"event": "start", "time": 0.0},
        {**progress, "step": 5, "time": 100.0, "data_wait": 0.9},
        {**progress, "step": 10, "time": 102.0, "data_wait": 0.1},
        {**progress, "step": 15, "time": 105.0, "data_wait": 0.3},
    ]
    time = run_kilnworks.LoopTime.from_events(events, batch_size=4)
    assert time == run_kilnworks.LoopTime(0.5, 0.2, 8.0, 7, None)


def test_step_ratio_excludes_encoding_in_the_step() -> None:
    mine = [run_kilnworks.LoopTime(2.0, 0.0, 1.0, 1, None)] * 3
    encodes = [PeerTime(fetch=2.0, encode=2.0, body=4.0)] * 3
    row = compare_steps("step", encodes, mine)
    assert row.ratios == {"step": 2.0, "step_training_only": 1.0, "step_whole_iteration": 3.0}
    assert row.figures["peer_encode_seconds"]["rounds"] == 3
    row = compare_steps("step", [PeerTime(fetch=2.0, encode=0.0, body=4.0)] * 3, mine)
    assert row.ratios == {"step": 3.0, "step_training_only": 2.0}


def test_last_line_is_json_with_the_skipped_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [Row("fast", {"fast": 1.5}, {"steps": 3}), Row("none", skipped="no device")]
    publish("toy", rows, {"machine": {}}, tmp_path / "toy.json")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "toy.json").read_text())
    assert last["ratios"] == {"fast": 1.5}
    assert last["skipped"] == {"none": "no device"}


@pytest.mark.parametrize("name", [name for name in ROWS if "vs_diffusers" in name])
def test_rows_with_diffusers_scripts_are_skipped_without_them(name: str, tmp_path: Path) -> None:
    row = Context(tmp_path, None, rounds=1, steps=2).row(name, ROWS[name])
    assert "--diffusers-examples" in row.skipped
    assert not row.failed


@pytest.fixture
def without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """One round of two steps, of a model and latents that do not exist."""
    context = Context(tmp_path, None, rounds=1, steps=2)
    monkeypatch.setattr(context, "files", lambda _: InputFiles(tmp_path, tmp_path, ""))
    monkeypatch.setattr(run_kilnworks, "open_latents", lambda _: None)
    return context


def test_jax_row_compares_jax_with_eager_and_with_compiled_torch(
    without_files: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {("torch", "auto"): 3.0, ("torch", "blocks"): 1.0, ("jax", "auto"): 2.0}

    def timed(job: TrainJob) -> run_kilnworks.LoopTime:
        found = seconds[job.runtime, job.train["compile"]]
        return run_kilnworks.LoopTime(found, 0.0, 1.0, 1, None)

    monkeypatch.setattr(run_kilnworks, "time_loop", timed)
    monkeypatch.setattr(train_rows, "find_spec", lambda _: True)
    monkeypatch.delenv(THREADS, raising=False)
    row = without_files.row("jax", ROWS["jax"])
    assert row.failed == ""
    assert row.ratios == {"jax_over_torch": 1.5, "jax_over_torch_compile": 0.5}


@pytest.mark.parametrize(
    ("loss", "norm", "complaint"),
    [(1e-7, 1e-7, ""), (np.nan, 0.0, "nan"), (1e-4, 0.0, "0.0001"), (0.0, 1e-2, "0.01")],
)
def test_equal_losses_fail_if_losses_or_gradient_norms_differ_or_are_nan(
    loss: float,
    norm: float,
    complaint: str,
    without_files: Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = SimpleNamespace(run=lambda *_, **__: None)
    monkeypatch.setattr(without_files, "peer_with", lambda _: peer)
    found = {"max_relative_loss_difference": loss, "max_relative_grad_norm_difference": norm}
    monkeypatch.setattr(report, "run_module", lambda *_: found)
    row = without_files.row("equal_losses", ROWS["equal_losses"])
    assert complaint in row.failed
    assert bool(row.failed) == bool(complaint)


def test_a_loss_that_becomes_nan_is_not_dropped() -> None:
    assert np.isnan(job_steps.largest([1e-7, np.nan, 1e-7]))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    examples = tmp_path_factory.mktemp("examples")
    (examples / FULL).write_text(TOY_SCRIPT)
    (examples / LORA).write_text("raise SystemExit('out of luck')")
    peer = Peer(examples, sys.executable)
    return Context(tmp_path_factory.mktemp("bench"), peer, rounds=1, steps=2)


@pytest.mark.extended
@pytest.mark.slow
def test_overhead_of_the_loop_is_timed(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by 3 s per step."""
    seconds = [0.0]
    step = TheRuntime.step

    def timed(runtime: TheRuntime, *arguments: Any) -> Any:
        seconds[0] += 3.0
        return step(runtime, *arguments)

    monkeypatch.setattr(TheRuntime, "step", timed)
    monkeypatch.setattr(job_steps, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    job = context.job(TOY, "full", tmp_path)
    found = job_steps.compare_with_loop(job, rounds=2, steps=2)
    assert [found[name]["median"] for name in ("ratio", "loop_seconds", "bare_seconds")] == [
        *(1.0, 3.0, 3.0)
    ]
    assert found["ratio"]["rounds"] == 2


@pytest.mark.soak
def test_recorded_steps_have_equal_losses_in_our_runtime(context: Context, tmp_path: Path) -> None:
    assert context.peer is not None
    files, record = context.files(TOY), tmp_path / "record"
    record.mkdir()
    options = {"max_train_steps": 4, "learning_rate": 1e-3}
    run = context.peer.run(FULL, files.model, files.images, tmp_path, record=record, **options)
    assert len(run.steps) == 4
    assert run.memory_bytes > 0
    job = context.job(TOY, "full", tmp_path, steps=4, learning_rate=1e-3, snr_gamma=None)
    found = job_steps.compare_losses(job, record)
    assert found["steps"] == 4
    assert found["max_relative_loss_difference"] < 1e-5
    assert found["max_relative_grad_norm_difference"] < 1e-5
    weighted = context.job(TOY, "full", tmp_path, steps=4, learning_rate=1e-3, snr_gamma=0.5)
    assert job_steps.compare_losses(weighted, record)["max_relative_loss_difference"] > 1e-2


@pytest.mark.soak
def test_error_contains_the_output_of_a_failed_script(context: Context, tmp_path: Path) -> None:
    assert context.peer is not None
    with pytest.raises(Failed, match="out of luck"):
        context.peer.run(LORA, tmp_path, tmp_path, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_full_size_pipeline_is_encoded_and_trained(
    family: str, context: Context, tmp_path: Path
) -> None:
    """Of a narrow UNet with the published inputs."""
    published = train_rows.SD2_CONFIGS if family == "sd" else train_rows.SDXL_CONFIGS
    model = tmp_path / published.name
    for configs in (published, published.with_name(f"{published.name}-small-encoders")):
        shutil.copytree(configs, tmp_path / configs.name)
    unet = model / "unet/config.json"
    levels = {
        "block_out_channels": [32, 32],
        "attention_head_dim": 2,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": 1,
    }
    unet.write_text(json.dumps(json.loads(unet.read_text()) | levels))
    workload = Workload(
        f"full-size-{family}",
        lambda folder: benchmark_inputs.write_full_size(folder, model),
        pictures=2,
        size=64,
        batch=2,
        family=family,
    )
    assert Base.open(context.files(workload).model).family.name == family
    job = context.job(workload, "full", tmp_path)
    run_kilnworks.time_loop(job)
    losses = [line["loss"] for line in history(job)]
    assert len(losses) == job.train["steps"]
    # The initial loss is about the variance of the velocity target, which is 1.
    assert 0.5 < losses[0] < 2.0 and np.isfinite(losses).all()
