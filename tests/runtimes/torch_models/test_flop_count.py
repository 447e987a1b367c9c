"""The FLOPs of a step are counted without computing it."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import loader_of

from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch.runtime import TheRuntime
from runtimes.torch_models.network import FlopCounter, Network

pytestmark = pytest.mark.slow

MakeJob = Callable[..., TrainJob]


def batch_of(job: TrainJob) -> StepBatch:
    return loader_of(job).batch(0)


def count(job: TrainJob, **changes: object) -> float:
    counter = FlopCounter(Network.load(job, Base.of(job), Train(**job.train)))
    return counter.of(replace(batch_of(job), **changes))  # type: ignore[arg-type]


def test_a_convolution_costs_what_its_shape_says(make_job: MakeJob) -> None:
    """2 operations a weight and pixel, and twice that backward; once where no input needs it."""

    class OneConvolution(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = torch.nn.Conv2d(4, 8, 3, padding=1)

        def forward(self, latents: torch.Tensor, *others: object) -> torch.Tensor:
            return self.unet(latents)

    batch = batch_of(make_job())
    size, _, height, width = batch.noisy_latents.shape
    forward = 2 * size * height * width * 4 * 8 * 9
    assert FlopCounter(OneConvolution()).of(batch) == 2 * forward


@pytest.mark.extended
def test_recomputing_is_not_counted_and_adapters_cost_less(make_job: MakeJob) -> None:
    full = count(make_job())
    assert full == count(make_job(gradient_checkpointing="blocks"))
    assert full < count(make_job(train_text_encoder=True))
    assert full / 3 < count(make_job(method="lora", lora={"rank": 1})) < full
    half = make_job(method="lora", lora={"rank": 1}, mixed_precision="bf16")
    assert count(half) == count(make_job(method="lora", lora={"rank": 1}))


def test_counting_takes_no_memory_and_leaves_the_network_alone(make_job: MakeJob) -> None:
    job = make_job()
    network = Network.load(job, Base.of(job), Train(**job.train))
    before = {name: p.clone() for name, p in network.named_parameters()}
    counter = FlopCounter(network)
    assert {p.device.type for p in counter.network.parameters()} == {"meta"}
    assert counter.of(batch_of(job)) > 0
    for name, parameter in network.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_a_profile_is_a_trace_of_the_steps_within(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    runtime = TheRuntime()
    runtime.load(job, Base.of(job))
    with runtime.profile(str(tmp_path / "profile")):
        runtime.step(batch_of(job), 1e-3)
    (path,) = (tmp_path / "profile").glob("*.pt.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::convolution_backward", "Optimizer.step#AdamW.step"} <= names
