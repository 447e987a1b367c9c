"""Forward and backward passes as CUDA graphs, which the host launches by one call.

A step of SDXL with 4 samples has thousands of kernels, and an H100 computes them faster than Python
launches them. A graph replays them on the same memory: inputs are copied into its own tensors, and
its gradients are always the same tensors.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from configs.secrets import one_line
from runtimes.contract import WrongInput
from runtimes.torch_models.micro_batches import Inputs
from runtimes.torch_models.network import Network

#: Passes of a shape before its first capture: compilation and cuDNN's search cannot be captured.
EAGER_PASSES = 3
#: Owner of gradients that no graph has made; a graph that adds to them would write to freed memory.
EAGER = "eager"
#: Tensors of Inputs, besides the conditioning.
ARRAYS = ("noisy_latents", "timesteps", "target", "weight")
#: Computes a micro-batch's gradients and its part of the loss, given the loss's denominator.
Backward = Callable[[Inputs, int], torch.Tensor]


class CudaGraphs:
    """Captures and replays passes, by the shapes of their inputs.

    All graphs share one memory pool, which passes without a graph cannot use: such a pass frees it
    first. A pass that adds to a graph's gradients, as the second micro-batch of a step does, has a
    graph of its own.

    Args:
        network: the trained network.
        backward: the pass to capture.
    """

    def __init__(self, network: Network, backward: Backward) -> None:
        self._parameters = list(network.trained().values())
        self._backward = backward
        self._passes: Counter[object] = Counter()
        self._graphs: dict[object, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, inputs: Inputs, denominator: int) -> torch.Tensor:
        """As `backward`; the result is valid until the next call.

        Raises:
            WrongInput: the pass has an operation that CUDA cannot capture.
        """
        shapes, owner = (_shapes(inputs), denominator), self._owner()
        kind = shapes, owner
        if kind in self._graphs:
            return self._graphs[kind].replay(inputs)
        if owner == EAGER or self._passes[shapes] < EAGER_PASSES:
            self._passes[shapes] += 1
            if owner is None:
                self.release()
            return self._backward(inputs, denominator)
        graph = self._graphs[kind] = self._capture(inputs, denominator)
        return graph.replay(inputs)

    def release(self) -> None:
        """Free the memory of all graphs; the next passes capture them again. Between steps only."""
        if self._graphs:
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()

    def _owner(self) -> object:
        """The kind of the graph whose gradients the parameters have; None if they have none."""
        existing = next((p.grad for p in self._parameters if p.grad is not None), None)
        if existing is None:
            return None
        for kind, graph in self._graphs.items():  # its gradients live, so an address is one's own
            if graph.gradients and graph.gradients[0][1].data_ptr() == existing.data_ptr():
                return kind
        return EAGER

    def _capture(self, inputs: Inputs, denominator: int) -> _Graph:
        static = copy.copy(inputs)
        static.conditioning = {name: t.clone() for name, t in inputs.conditioning.items()}
        for name in ARRAYS:
            setattr(static, name, getattr(inputs, name).clone())
        before = [p.grad for p in self._parameters]
        graph = torch.cuda.CUDAGraph()
        try:
            # The loader's thread may allocate meanwhile, which the default mode prohibits.
            with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                loss = self._backward(static, denominator)
        except RuntimeError as error:
            # The end of a failed capture raises an error of its own.
            cause = error.__context__ or error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise WrongInput(
                "train.cuda_graphs: CUDA cannot capture this model's step; set false: "
                f"{one_line(cause)}"
            ) from None
        pairs = zip(self._parameters, before, strict=True)
        made = [(p, p.grad) for p, old in pairs if old is None and p.grad is not None]
        return _Graph(graph, static, loss, made)


@dataclass(frozen=True)
class _Graph:
    """A captured pass: its inputs, its loss and the gradients that it creates."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    loss: torch.Tensor
    gradients: list[tuple[torch.Tensor, torch.Tensor]]  # of parameters

    def replay(self, inputs: Inputs) -> torch.Tensor:
        for (_, mine), (_, given) in zip(_tensors(self.inputs), _tensors(inputs), strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient  # the optimizer drops its reference
        return self.loss


def _tensors(inputs: Inputs) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ARRAYS:
        yield name, getattr(inputs, name)
    yield from sorted(inputs.conditioning.items())


def _shapes(inputs: Inputs) -> object:
    return tuple((name, t.shape, t.dtype) for name, t in _tensors(inputs))
