"""Which passes are captured and replayed, on a CPU.

A stand-in of CUDA's graph runs the pass at each replay. Graphs of a GPU are tested by
conformance/test_training.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.torch import step
from runtimes.torch.kernels import DeviceHooks
from runtimes.torch.parallel import SingleProcess
from runtimes.torch.step import CudaGraphs, Step, Update
from runtimes.torch_models.activation_memory import Inputs


class Graph:
    """Repeats the arithmetic of its capture on the same tensors."""

    def __init__(self) -> None:
        self.replay: Any = None


class Graphs:
    """CudaGraphs of a network with one weight w, whose loss is w * sum(latents)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.calls: list[str] = []
        self._capturing: Graph | None = None
        self._error = error
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        self.graphs = CudaGraphs(self, self._backward)  # type: ignore[arg-type]

    def trained(self) -> dict[str, torch.nn.Parameter]:
        return {"w": self.weight}

    @contextmanager
    def _capture(self, graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing = None
            if self._error is not None:
                raise RuntimeError("the capture failed due to a previous error")

    def _backward(self, inputs: Inputs, denominator: int) -> torch.Tensor:
        if self._capturing is None:
            self.calls.append("eager")
            total = inputs.noisy_latents.sum() / denominator
            (self.weight * total).backward()
            return total.clone()
        if self._error is not None:
            raise self._error
        return self._recorded(self._capturing, inputs, denominator)

    def _recorded(self, graph: Graph, inputs: Inputs, denominator: int) -> torch.Tensor:
        """A capture computes nothing; a replay writes to the capture's tensors."""
        self.calls.append("capture")
        loss, adds = torch.full((), torch.nan), self.weight.grad is not None
        if self.weight.grad is None:
            self.weight.grad = torch.full((), torch.nan)
        gradient = self.weight.grad

        def replay() -> None:
            self.calls.append("replay")
            loss.copy_(inputs.noisy_latents.sum() / denominator)
            gradient.copy_(gradient + loss if adds else loss)

        graph.replay = replay
        return loss

    def step(self, *latents: float, size: int = 1) -> list[str]:
        """The calls of a step of some micro-batches; its gradient and losses are checked."""
        self.calls.clear()
        for value in latents:
            loss = self.graphs(inputs(value, size), 2)
            assert float(loss) == pytest.approx(value * size / 2)
        assert float(self.weight.grad) == pytest.approx(sum(latents) * size / 2)  # type: ignore[arg-type]
        self.weight.grad = None
        return list(self.calls)


def inputs(value: float, size: int) -> Inputs:
    latents = np.full((size, 1, 1, 1), value, np.float32)
    ones = np.ones(size, np.float32)
    batch = StepBatch(
        step=0,
        noisy_latents=latents,
        target=latents,
        timesteps=ones,
        weight=ones,
        conditioning={"sizes": ones},
        denominator=2,
    )
    return Inputs(batch, torch.from_numpy)


def test_a_shape_is_captured_after_a_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    assert [graphs.step(n) for n in (1, 2, 3)] == [["eager"]] * 3
    assert graphs.step(4) == ["capture", "replay"]
    assert graphs.step(5) == graphs.step(6) == ["replay"]


def test_micro_batches_add_to_the_gradients_of_the_graph_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = Graphs(monkeypatch)
    assert graphs.step(1, 2, 3, 4) == ["eager"] * 4, "a graph would add to memory that is freed"
    assert graphs.step(1, 2, 3) == ["capture", "replay", "capture", "replay", "replay"]
    assert graphs.step(3, 2, 1) == ["replay"] * 3


def test_a_pass_without_a_graph_frees_the_memory_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for n in range(4):
        graphs.step(n)
    assert graphs.step(1, size=2) == ["eager"]
    assert graphs.step(1) == ["capture", "replay"]
    for n in range(2):
        graphs.step(n, size=2)
    assert graphs.step(1) == graphs.step(2, size=2) == ["capture", "replay"]
    assert graphs.step(1) == graphs.step(2, size=2) == ["replay"]


def test_released_graphs_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for n in range(5):
        graphs.step(n)
    graphs.graphs.release()
    assert graphs.step(1) == ["capture", "replay"]


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (RuntimeError("operation not permitted"), Refused, "set false: operation not permitted"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "out of memory"),
    ],
)
def test_a_failed_capture_names_its_own_error(
    error: Exception, raised: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs(monkeypatch, error)
    for n in range(step.EAGER_PASSES):
        graphs.step(n)
    with pytest.raises(raised, match=words):
        graphs.step(1)


@pytest.mark.parametrize(
    ("dropout", "world", "words"), [(0.1, 1, "has dropout"), (0.0, 2, "is for one process")]
)
def test_a_step_that_cannot_be_captured_is_refused(dropout: float, world: int, words: str) -> None:
    network: Any = torch.nn.Dropout(dropout)
    parallel, settings = SingleProcess(), Train(cuda_graphs=True)
    parallel.world = world
    hooks, update = DeviceHooks(torch.device("cpu")), cast(Update, None)
    with pytest.raises(Refused, match=words):
        Step(network, network, update, parallel, hooks, settings, rank=0, prior=network)
