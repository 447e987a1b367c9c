"""Streamed blocks train as resident ones, to the bit, and are copied to the device alone."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from altered_rows import of_rows
from driver_process import DriverProcess
from jobs import MakeJob, assert_equal, start, start_with_base
from torch._dynamo.utils import counters

from runtimes.contract import State
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.process.questions import GpuStepRequest, StepMemory
from runtimes.torch.gpu_step_memory import step_memory
from runtimes.torch.kernels import DeviceHooks
from runtimes.torch.step import keep_channels_last
from runtimes.torch.stream_blocks import stream_blocks
from runtimes.torch_models.vae_text_encoders import Encoder

pytestmark = pytest.mark.slow
StartJob = Callable[..., Any]  # of conftest.py: a Child

LORA: dict[str, Any] = {
    **{"method": "lora", "gradient_checkpointing": "blocks", "mixed_precision": "bf16"},
    **{"steps": 3, "micro_batch_size": 2},
}
NF4 = {"lora": {"rank": 4, "base_precision": "nf4"}}
INT8 = {"lora": {"rank": 4, "base_precision": "int8"}}
PLAIN = {"lora": {"rank": 4}}
BLOCKS = 8  # of deep-flux: three of two streams, five of one


@pytest.fixture
def job_of(make_job: MakeJob, tiny_model: Any, write_latents: Any, tmp_path: Path) -> MakeJob:
    """A job of a tiny model, by its name."""

    def make(name: str, **settings: Any) -> TrainJob:
        model = tiny_model(name)
        info = Encoder(Base.open(model), device="cpu").info
        latents = write_latents(tmp_path / "latents", [{"train/8x8": 9}], **info)
        return make_job(name, model=str(model), latents=latents, **{**LORA, **settings})

    return make


def trained(job: TrainJob) -> tuple[list[float], State]:
    """Losses, gradient norms and held-out errors of two steps, programs, and the state after."""
    torch._dynamo.reset()
    counters.clear()
    runtime, batch = start(job)
    figures = []
    for step in range(2):
        with runtime.evaluating():
            figures += runtime.errors(batch(step)).tolist()
        output = runtime.step(batch(step), 1e-2)
        figures += [float(output.loss), float(output.grad_norm)]
    assert not counters["graph_break"]
    return [*figures, counters["stats"]["unique_graphs"]], runtime.state()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deep-flux", PLAIN),
        ("deep-flux", NF4),
        ("deep-flux", {**INT8, "compile": "blocks"}),
        ("tiny-sdxl", {}),
        *(pytest.param(f, {}, marks=pytest.mark.extended) for f in ("tiny-sd3", "tiny-flux2")),
        *(pytest.param(f, NF4, marks=pytest.mark.extended) for f in ("tiny-qwen-image",)),
        pytest.param("tiny-z-image", INT8, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_streaming_changes_no_bit(
    job_of: MakeJob, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(DeviceHooks, "compile_backend", "aot_eager")
    # After a test of runtime jax in this process, torchax's device counts as an accelerator.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    figures, state = trained(job_of(name, **settings))
    streamed, same = trained(job_of(name, stream_blocks=99, **settings))
    assert streamed == figures
    assert_equal(same, state)


@pytest.mark.parametrize("settings", [PLAIN, NF4, {**INT8, "compile": "blocks"}], ids=str)
def test_a_prior_pass_reads_the_blocks_once_more(
    job_of: MakeJob, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Of three steps, the second has no prior row."""
    monkeypatch.setattr(DeviceHooks, "compile_backend", "aot_eager")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    figures, copies = [], []
    for blocks in (0, 99):
        job = job_of("deep-flux", stream_blocks=blocks, **{**settings, "micro_batch_size": None})
        runtime, batch = start_with_base(job)
        for step in range(3):
            output = runtime.step(of_rows(batch, ["is_prior"])(step), 1e-2)
            figures.append((float(output.loss), float(output.grad_norm)))
            copies.append(runtime._stream.copies if runtime._stream else 0)
    assert figures[:3] == figures[3:]
    both_ways, cold = 2 * (BLOCKS - 2), BLOCKS
    first, plain, prior = np.diff(copies[2:]).tolist()
    assert (first, plain, prior) == (cold + BLOCKS + BLOCKS - 2, both_ways, both_ways + BLOCKS)
    assert runtime._stream is not None and runtime._stream.late == 3


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    """A process of an emulated Ascend host, which counts memory and copies."""
    chips.require("npu")
    with chips.standing_in("npu"):
        driver = Path(__file__).with_name("npu_driver.py")
        process = DriverProcess(driver, sys.executable, tmp_path_factory.mktemp("npu"))
    with closing(process):
        yield process


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (PLAIN, BLOCKS),
        (NF4, BLOCKS),
        pytest.param(INT8, BLOCKS, marks=pytest.mark.extended),
        pytest.param(PLAIN, 5, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_a_device_holds_two_blocks_and_what_the_plan_says(
    host: DriverProcess, job_of: MakeJob, settings: dict[str, Any], count: int
) -> None:
    """The two blocks at each turn are still there; a copy to the host would fail in the driver."""
    job = job_of("deep-flux", device="npu", **settings)
    resident = host.call("streamed", asdict(job))
    job = job_of("deep-flux", device="npu", stream_blocks=count, **settings)
    streamed = host.call("streamed", asdict(job))
    assert streamed["losses"] == resident["losses"]
    assert streamed["adapters"] == resident["adapters"]
    each = 2 * (count - 2) * (job.train["global_batch_size"] // job.train["micro_batch_size"])
    assert streamed["copies"] == [each + 2, each, each]
    assert streamed["late"] == 1  # the first of all
    saved = resident["peak"] - streamed["peak"]
    everything, plan = (planned(job, blocks) for blocks in (0, count))
    assert peak(everything) - peak(plan) == pytest.approx(saved, rel=0.01)
    assert peak(plan) == pytest.approx(streamed["peak"], rel=0.02)
    assert (plan.streamed, len(plan.streaming)) == (streamed["pinned"], BLOCKS + 1)


@pytest.mark.extended
@pytest.mark.parametrize("settings", [INT8, NF4], ids=str)
def test_the_plan_streams_as_few_blocks_as_a_small_card_needs(
    job_of: MakeJob, start_job: StartJob, settings: dict[str, Any]
) -> None:
    """The whole job with its checkpoint, on a card of 3% more than the plan of five blocks says."""
    chips.require("npu")
    peaks = {count: peak(planned(job_of("deep-flux", **settings), count)) for count in (0, 4, 5)}
    card = {"KILN_EMULATED_MEMORY": str(int(1.03 * peaks[5]))}
    assert peaks[5] * 1.03 < peaks[4] < peaks[0]

    def run(count: int) -> tuple[int, str]:
        job = job_of("deep-flux", device="npu", stream_blocks=count, **settings)
        with chips.standing_in("npu"):
            child = start_job(job, **card)
        events = list(child.events())
        return child.end(), "".join(e["message"] for e in events if e["event"] == "error")

    assert run(5) == (0, "")
    for fewer in (0, 4):
        code, words = run(fewer)
        assert code == 1
        assert words.startswith("the device is too small: set what `kiln plan --gpu` advises (")
        assert "NPU out of memory. Tried to allocate" in words


def planned(job: TrainJob, blocks: int) -> StepMemory:
    step = step_memory(GpuStepRequest(job.model, job.train, 32))  # autocast of the CPU is another
    return step.with_streamed(blocks)


def peak(plan: StepMemory) -> int:
    """Bytes on the device, of micro-batches of two samples."""
    return plan.weights + plan.optimizer + sum(plan.peak(2, accumulating=True).values())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deep-flux", INT8),
        pytest.param("deep-flux", NF4, marks=pytest.mark.extended),
        pytest.param("tiny-sdxl", PLAIN, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_one_step_has_the_plan_of_any_number_of_blocks(
    job_of: MakeJob, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    """Compared with steps of networks whose blocks are streamed."""
    job = job_of(name, **settings)
    request = GpuStepRequest(job.model, job.train, 32)
    step = step_memory(request)
    for count in (4, len(step.streaming) - 1):
        streams: list[Any] = []

        def stream(network: Any, count: int = count, streams: list[Any] = streams) -> None:
            keep_channels_last(network)
            streams.append(stream_blocks(network, count, torch.device("cpu")))

        with monkeypatch.context() as patched:
            patched.setattr("runtimes.torch.gpu_step_memory.keep_channels_last", stream)
            streamed = step_memory(request)
        pinned = streams[0].arena.nbytes
        expected = replace(streamed, streamed=pinned, streaming=step.streaming)
        assert replace(step.with_streamed(count), seconds=streamed.seconds) == expected
