"""Several processes at one run: the numbers of one process, and one checkpoint or none."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs import MakeJob, curve, outputs
from kiln_command import jobs_of
from safetensors.numpy import load_file
from tolerances import GOLDEN
from training import history
from waiting import wait_until

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.__main__ import main
from runtimes.process.job import Events, TrainJob, write_job
from runtimes.process.launcher import Ranks, Stop
from runtimes.torch.device import choose_device
from runtimes.torch.parallel import DataParallel, FullySharded, chunk_rows
from runtimes.train.checkpoints import Checkpoints
from runtimes.train.training_loop import train

StartJob = Callable[..., Any]  # of conftest.py: a Child
#: One process takes 3 + 3 + 2 samples at a time, two take 3 + 1, four take 2.
SETTINGS: dict[str, Any] = {
    "global_batch_size": 8,
    "micro_batch_size": 3,
    "steps": 6,
    "ema_decay": 0.9,
    # Adam divides by the root of a squared gradient: where that is rounding, so would be the step.
    "adam_epsilon": 1e-3,
}
FULL: dict[str, Any] = {"train_text_encoder": True}
LORA = {"method": "lora", "lora": {"target_modules": "all", "rank": 3}}


def assert_same_run(one: TrainJob, other: TrainJob) -> None:
    for found, expected in zip(history(other), history(one), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)  # standard errors too
    for path in Path(one.out).rglob("*.safetensors"):
        theirs = load_file(Path(other.out) / path.relative_to(one.out))
        for name, array in load_file(path).items():
            np.testing.assert_allclose(theirs[name], array, atol=5e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fsdp", "method"),
    [
        pytest.param("all", FULL, id="full-fsdp"),
        pytest.param(1, LORA, id="lora-data", marks=pytest.mark.extended),
        pytest.param(1, FULL, id="full-data", marks=pytest.mark.soak),
        pytest.param("all", LORA, id="lora-fsdp", marks=pytest.mark.soak),
    ],
)
def test_two_processes_take_the_steps_of_one(
    make_job: MakeJob, start_job: StartJob, fsdp: Any, method: dict[str, Any]
) -> None:
    """They measure alike what is held out, and one of them speaks and writes."""
    settings = {**SETTINGS, **method, "logging_steps": 1, "checkpointing_steps": 4}
    settings["holdout_loss"] = {"every_n_steps": 3, "samples": 4, "draws": 2}
    one = make_job("one", **settings)
    assert train(one, Events(), Stop())
    two = make_job("two", **settings, processes=2, fsdp=fsdp)
    child = start_job(two)
    steps = [(event["event"], event["step"]) for event in child.events() if "step" in event]
    assert child.end() == 0
    assert_same_run(one, two)
    assert [line["step"] for line in history(two) if "validation_loss" in line] == [3, 6]
    assert steps.count(("checkpoint", 4)) == steps.count(("progress", 4)) == 1
    assert curve(two, "loss") == list(range(1, 7))


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [FULL, pytest.param(LORA, marks=pytest.mark.soak)], ids=["full", "lora"]
)
def test_two_shard_groups_take_the_steps_of_one_process(
    make_job: MakeJob, start_job: StartJob, method: dict[str, Any]
) -> None:
    """They resume from its checkpoint, and it from theirs. Each process has two micro-batches."""
    settings = {**SETTINGS, **method, "micro_batch_size": 1, "steps": 5, "logging_steps": 1}
    settings |= {"max_grad_norm": 0.05, "holdout_loss": {"every_n_steps": 5, "draws": 2}}
    one = make_job("one", **settings, checkpointing_steps=3)
    assert train(one, Events(), Stop())
    groups = make_job("groups", **settings, checkpointing_steps=4, processes=4, fsdp=2)
    shutil.copytree(one.work, groups.work, dirs_exist_ok=True)
    child = start_job(groups)
    assert child.step_of_first("start") == 3
    assert child.end() == 0
    assert_same_run(one, groups)
    assert all(line["grad_norm"] > 0.05 for line in history(one)), "every step is clipped"
    saved = Checkpoints(groups.work, 9).latest()
    assert saved is not None and saved.step == 4
    shutil.rmtree(groups.out)
    assert train(make_job("groups", **settings), Events(), Stop())
    assert_same_run(one, groups)


class GatheredInFloat32(FullySharded):
    def __init__(self, ranks: Ranks, device: torch.device, settings: Train) -> None:
        super().__init__(ranks, device, settings)
        self._gathered = torch.float32


@pytest.mark.extended
@pytest.mark.slow
def test_gathers_in_bfloat16_change_no_bit(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA if there is one, with compiled blocks. The process group has one process.

    Without AVX-512, a CPU's bfloat16 kernels round some sums otherwise: losses differ after four
    steps.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {**SETTINGS, "device": device, "deterministic": True, "mixed_precision": "bf16"}
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        jobs = []
        for kind in (FullySharded, GatheredInFloat32):
            monkeypatch.setattr(
                "runtimes.torch.runtime.open_parallel",
                lambda settings, ranks, device, kind=kind: kind(ranks, device, settings),
            )
            jobs.append(make_job(kind.__name__, **settings))
            assert train(jobs[-1], Events(), Stop())
    finally:
        dist.destroy_process_group()
    half, single = jobs
    found, expected = ([line["loss"] for line in history(job)] for job in jobs)
    if device == "cuda" or torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert found == expected
        assert_same_run(single, half)
    else:
        assert found == pytest.approx(expected, rel=GOLDEN["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("sharded", {"compile": "none"}, id="full-fsdp"),
        pytest.param("sharded", {"compile": "blocks"}, id="compiled-fsdp"),
        pytest.param("replicated", {"compile": "none", **LORA}, id="lora-data"),
    ],
)
def test_nccl_s_code_paths_take_the_steps_of_a_single_process(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    """A process group of one process, because NCCL refuses a second one on the same GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    given = {**SETTINGS, **settings, "device": "cuda", "deterministic": True}
    one, grouped = make_job("one", **given), make_job("grouped", **given)
    assert train(one, Events(), Stop())

    def open_grouped(settings: Train, ranks: Ranks, device: torch.device) -> Any:
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        return FullySharded(ranks, device, settings) if kind == "sharded" else DataParallel(ranks)

    monkeypatch.setattr("runtimes.torch.runtime.open_parallel", open_grouped)
    try:
        assert train(grouped, Events(), Stop())
    finally:
        dist.destroy_process_group()
    assert_same_run(one, grouped)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [pytest.param(1, marks=pytest.mark.soak), "all"])
def test_two_processes_run_frozen_text_encoders_as_one_does(
    fsdp: Any,
    tiny_sdxl: Path,
    make_job: MakeJob,
    start_job: StartJob,
    both_forms: Callable[..., tuple[str, str]],
) -> None:
    given = {**SETTINGS, "latents": both_forms(tiny_sdxl)[1], "text_dtype": "float32", "steps": 3}
    one = make_job("one", **given)
    assert train(one, Events(), Stop())
    two = make_job("two", **given, processes=2, fsdp=fsdp)
    assert start_job(two).end() == 0
    assert_same_run(one, two)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("method", [{}, LORA], ids=["full", "lora"])
def test_in_half_precision_shares_compute_what_one_process_does(
    make_job: MakeJob, start_job: StartJob, method: dict[str, Any]
) -> None:
    """Norms and embeddings are in float32 in both; what is cast is cast alike."""
    settings = {**SETTINGS, **method, "mixed_precision": "bf16", "steps": 3}
    one = make_job("one", **settings)
    assert train(one, Events(), Stop())
    two = make_job("two", **settings, processes=2, fsdp="all")
    assert start_job(two).end() == 0
    losses = [[line["loss"] for line in history(job)] for job in (one, two)]
    np.testing.assert_allclose(*losses, rtol=2e-3)  # other shapes are rounded otherwise


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([(2, "all"), (2, "all")], id="2-2-1"),
        pytest.param([(4, "all"), (2, 1)], id="4-2-1", marks=pytest.mark.soak),
        pytest.param([(4, 2), (2, "all"), (4, 2)], id="4by2-2-4by2-1", marks=pytest.mark.soak),
    ],
)
def test_the_count_may_change_at_a_resume(
    make_job: MakeJob, start_job: StartJob, counts: list[tuple[int, Any]]
) -> None:
    settings = {**SETTINGS, "steps": 40, "logging_steps": 1, "holdout_loss": {"every_n_steps": 5}}
    one = make_job("one", **settings)
    assert train(one, Events(), Stop())
    step = 0
    for count, fsdp in counts:
        some = make_job("some", **settings, processes=count, fsdp=fsdp)
        child = start_job(some)
        assert child.step_of_first("start") == step
        child.step_of_first("progress")
        child.process.terminate()
        assert child.end() == 143
        saved = Checkpoints(some.work, 9).latest()
        assert saved is not None and step < saved.step < 40
        step = saved.step
    assert train(make_job("some", **settings), Events(), Stop())
    assert_same_run(one, some)
    assert history(one)[4]["validation_loss"] is not None


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_a_rank_reads_the_rows_that_fsdp_shards_to_it(world: int) -> None:
    for count in range(1, 20):
        rows = torch.arange(count * 2.0).view(count, 2)
        chunks = [*rows.chunk(world), *[rows[:0]] * world][:world]
        for rank, chunk in enumerate(chunks):
            assert torch.equal(rows[chunk_rows(count, rank, world)], chunk)


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)


@pytest.mark.soak
def test_whoever_is_killed_they_end_with_the_same_bytes(
    make_job: MakeJob, start_job: StartJob, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "steps": 60, "checkpointing_steps": 7, "logging_steps": 1}
    whole = make_job("whole", **settings, processes=2)
    assert start_job(whole).end() == 0

    job = make_job("broken", **settings, processes=2)
    child = start_job(job)
    assert child.step_of_first("checkpoint") == 7
    (second,) = jobs_of(child.process.pid)
    os.kill(second, signal.SIGKILL)
    errors = [event for event in child.events() if event["event"] == "error"]
    assert child.end() == 1
    assert [error["message"] for error in errors] == [
        "process 1 of the run (from 0) was killed by SIGKILL"
    ]

    child = start_job(job)
    assert 7 <= child.step_of_first("start") < 60
    child.step_of_first("progress")
    rest = jobs_of(child.process.pid)
    child.process.kill()
    assert child.end() == -signal.SIGKILL
    wait_until_gone(rest)

    child = start_job(job)
    assert 7 <= child.step_of_first("start") < 60
    step = child.step_of_first("progress")
    # One is told, all of them stop after the same step.
    (second,) = jobs_of(child.process.pid)
    os.kill(second, signal.SIGTERM)
    assert child.end() == 143
    saved = Checkpoints(job.work, 9).latest()
    assert saved is not None and step <= saved.step < 60

    # torchrun may start them as well.
    write_job(job, tmp_path / "torchrun.json")
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run += ["--standalone", "--no-python", sys.executable, "-P", "-m", "runtimes"]
    run += [str(tmp_path / "torchrun.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert outputs(job) == outputs(whole)


def test_a_batch_that_cannot_be_shared_is_refused(
    make_job: MakeJob,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stop, "listen", lambda stop: None)  # the signals are pytest's
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():  # as torchrun says it
        monkeypatch.setenv(name, value)
    write_job(make_job(global_batch_size=4), tmp_path / "job.json")
    assert main([str(tmp_path / "job.json")]) == 2
    assert "global_batch_size 4 cannot be shared by 3 processes" in capfd.readouterr().err


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_process_without_a_device_of_its_own_is_refused(device: str) -> None:
    with pytest.raises(Refused, match="processes"):
        choose_device(device, Ranks(rank=99, world=100, local_rank=99, local_world=100))
