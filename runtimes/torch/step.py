"""One training step: forward and backward pass of each micro-batch, then the update.

With `train.fused_backward` the backward pass updates each weight as soon as its gradient is there,
and frees the gradient.

CUDA graphs of a forward and backward pass are launched by one call of the host. A step of SDXL with
4 samples has thousands of kernels, and an H100 computes them faster than Python launches them. A
graph replays them on the same memory: inputs are copied into its own tensors, and its gradients are
always the same tensors.

The update is gradient clipping, the optimizer and the EMA of the weights. `HostCopies` makes NumPy
arrays of a device's tensors.

A UNet keeps its activations channels-last (NHWC), the fastest layout for its convolutions.

diffusers' attention blocks convert activations to NCHW. That costs one copy in the block and one
before the next convolution, in the forward and in the backward pass.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from numpy.typing import NDArray

from configs.errors import Refused
from configs.secrets import one_line
from configs.settings.train import Train
from runtimes.contract import Owners, SavedState, State, StateShapes, StepBatch, StepOutput
from runtimes.optimizer_state import ema_decay_at, owned_copies, read_state_arrays, swapped
from runtimes.torch.kernels import DeviceHooks, attention_kernel
from runtimes.torch.make_optimizer import Optimizer, Parameters, Tensors
from runtimes.torch.parallel import SingleProcess
from runtimes.torch_models.activation_memory import Inputs, micro_batches, sender
from runtimes.torch_models.network import Network, as_base, has_dropout, seed_dropout

#: Passes of a shape before its first capture: compilation and cuDNN's search cannot be captured.
EAGER_PASSES = 3
#: Owner of gradients that no graph has made; a graph that adds to them would write to freed memory.
EAGER = "eager"
#: Tensors of Inputs that a pass reads, besides the conditioning; the last two may be None.
ARRAYS = ("noisy_latents", "timesteps", "target", "weight", "loss_mask", "huber_delta")
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
            Refused: the pass has an operation that CUDA cannot capture.
        """
        shapes = (tuple((n, t.shape, t.dtype) for n, t in _tensors(inputs)), denominator)
        owner = self._owner()
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
        for kind, graph in self._graphs.items():  # live gradients do not share an address
            if graph.gradients and graph.gradients[0][1].data_ptr() == existing.data_ptr():
                return kind
        return EAGER

    def _capture(self, inputs: Inputs, denominator: int) -> _Graph:
        static = copy.copy(inputs)
        static.conditioning = {name: t.clone() for name, t in inputs.conditioning.items()}
        for name in ARRAYS:
            if getattr(inputs, name) is not None:
                setattr(static, name, getattr(inputs, name).clone())
        before = [p.grad for p in self._parameters]
        graph = torch.cuda.CUDAGraph()
        try:
            # The loader's thread may allocate during the capture, which the default mode prohibits.
            with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                loss = self._backward(static, denominator)
        except RuntimeError as error:
            # The end of a failed capture raises an error of its own.
            cause = error.__context__ or error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise Refused(
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
        for (_, mine), (_, source) in zip(_tensors(self.inputs), _tensors(inputs), strict=True):
            mine.copy_(source, non_blocking=True)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient  # the optimizer drops its reference
        return self.loss


def _tensors(inputs: Inputs) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ARRAYS:
        if getattr(inputs, name) is not None:
            yield name, getattr(inputs, name)
    yield from sorted(inputs.conditioning.items())


#: Bytes of one of the two staging buffers.
STAGE = 64 * 2**20


class HostCopies:
    """Float32 NumPy copies of tensors.

    From CUDA, pieces pass through two pinned buffers in turn: the device fills one buffer while
    the host empties the other. An array is complete after `finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stages = [_Stage(), _Stage()] if device.type == "cuda" else []

    def copy(self, tensor: torch.Tensor) -> NDArray[np.float32]:
        """A new array for a tensor's values, which must not change before `finish`."""
        array = np.empty(tensor.shape, np.float32)
        target = torch.from_numpy(array)
        if not self._stages:
            target.copy_(tensor.detach())
            return array
        source = tensor.detach().float().contiguous().flatten()
        size = STAGE // 4
        for piece, place in zip(source.split(size), target.flatten().split(size), strict=True):
            self._stages.reverse()
            self._stages[0].begin(piece, place)
        return array

    def finish(self) -> None:
        """Wait for the copies that have begun."""
        for stage in reversed(self._stages):
            stage.end()


class _Stage:
    """One pinned buffer, and the copy through it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(STAGE // 4, pin_memory=True)
        self._filled = torch.cuda.Event()
        self._place: torch.Tensor | None = None

    def begin(self, piece: torch.Tensor, place: torch.Tensor) -> None:
        self.end()
        self._buffer[: piece.numel()].copy_(piece, non_blocking=True)
        self._filled.record(_stream(piece.device))
        self._place = place

    def end(self) -> None:
        if self._place is not None:
            self._filled.synchronize()
            self._place.copy_(self._buffer[: self._place.numel()])
            self._place = None


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the copies from a device, which need not be the thread's current stream."""
    return torch.cuda.current_stream(device)


class Update:
    """Gradient clipping, an optimizer on float32 masters, and their exponential moving average.

    optimizer_state.py gives the decay of the average.

    Args:
        parameters: float32 masters of this process, by State's keys.
        settings: optimizer, clipping and EMA.
        parallel: reduces norms, and gathers or shards State; None is a single process.
        device_hooks: hooks of the device; None is the CPU.
    """

    def __init__(
        self,
        parameters: Parameters,
        settings: Train,
        parallel: SingleProcess | None = None,
        device_hooks: DeviceHooks | None = None,
    ) -> None:
        self._parameters = parameters
        self._settings = settings
        self._parallel = parallel or SingleProcess()
        self._device_hooks = device_hooks or DeviceHooks(torch.device("cpu"))
        self._masters: list[torch.nn.Parameter] = list(parameters.values())
        frees_gradients = self._parallel.frees_gradients
        self._optimizer = Optimizer(parameters, settings, frees_gradients=frees_gradients)
        self._norms: dict[torch.nn.Parameter, torch.Tensor] = {}  # of gradients that are freed
        if settings.fused_backward:
            for parameter in self._masters:
                parameter.register_post_accumulate_grad_hook(self._step_in_backward)
        self._average: list[torch.Tensor] | None = None
        if settings.keeps_average:
            self._average = [p.detach().clone() for p in self._masters]
            # A swap must not allocate: it also follows an out-of-memory error.
            largest = max(self._masters, key=torch.Tensor.numel)
            self._scratch = torch.empty_like(largest.detach()).flatten()
        self._step = 0

    def begin(self, learning_rate: float) -> None:
        """Set the denoiser's learning rate, before a backward pass that updates the weights."""
        self._optimizer.set_learning_rate(learning_rate)

    def apply(self, learning_rate: float) -> torch.Tensor:
        """Clip the gradients, update the weights and the EMA, and clear the gradients.

        Args:
            learning_rate: learning rate of the denoiser.

        Returns:
            The global L2 norm of the gradients before clipping, a scalar on the device.
        """
        if self._settings.fused_backward:
            norms = [self._norms[master] for master in self._masters if master in self._norms]
            norm = torch.linalg.vector_norm(torch.stack(norms))
            self._norms.clear()
        else:
            norm = self._clip()
            self._optimizer.step(learning_rate)
        self._update_average()
        self._device_hooks.mark_step()
        self._step += 1
        return norm

    def _step_in_backward(self, parameter: torch.nn.Parameter) -> None:
        """Update a weight and free its gradient, a hook of the backward pass."""
        assert parameter.grad is not None
        self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        self._optimizer.step_alone(parameter)

    def _update_average(self) -> None:
        decay = ema_decay_at(self._step, self._settings)
        if self._average is None or decay == 1:
            return
        if self._settings.optimizer == "adamw_schedule_free":
            z = list(self._optimizer.state_tensors()["z"].values())
            with torch.no_grad():  # x = y + (1 - 1 / beta1) (z - y), as the library's `eval`
                torch._foreach_copy_(self._average, self._masters)
                torch._foreach_lerp_(self._average, z, 1 - 1 / self._settings.adam_betas[0])
            return
        share: Any = self._device_hooks.scalar(1 - decay)
        if isinstance(share, torch.Tensor):
            share = [share] * len(self._average)
        with torch.no_grad():
            torch._foreach_lerp_(self._average, self._masters, share)

    def _clip(self) -> torch.Tensor:
        most = self._settings.max_grad_norm
        norm = None if most is None else self._device_hooks.clip_grad_norm(self._masters, most)
        if norm is not None:
            return norm
        foreach = self._device_hooks.foreach
        norm = self._parallel.total_norm(self._masters, foreach=foreach)
        if most is not None and not _surely_below(most, norm):
            torch.nn.utils.clip_grads_with_norm_(self._masters, most, norm, foreach=foreach)
        return norm

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context, the model has the EMA weights, if any. Raises WeightsLost."""
        return swapped(self._swap, self._swap)

    def _swap(self) -> None:
        """Swap weights and EMA in place: FSDP's modules refer to the memory of their shards."""
        for parameter, average in zip(self._masters, self._average or (), strict=False):
            kept = self._scratch[: parameter.numel()].view(parameter.shape)
            kept.copy_(parameter.detach())
            parameter.data.copy_(average)
            average.copy_(kept)

    def shapes(self) -> StateShapes:
        """Shapes of the full arrays of weights, optimizer state and EMA."""
        return {
            group: {name: self._parallel.full_shape(name, t) for name, t in tensors.items()}
            for group, tensors in self._tensors().items()
        }

    def state(self, owners: Owners | None = None, rank: int = 0) -> State:
        """As Runtime.state: weights, optimizer state and EMA. Collective."""
        copies = HostCopies(self._masters[0].device)
        state = owned_copies(self._tensors(), owners, rank, copies.copy, self._parallel.gather_full)
        copies.finish()
        return state

    def restore(self, state: SavedState, step: int) -> None:
        """Restore a state that was saved after `step` steps.

        Raises:
            Refused: the state has other names or shapes than this model.
        """
        groups = self._tensors()
        arrays = read_state_arrays(state, self.shapes(), self._parallel.local_rows)
        with torch.no_grad():
            for group, name, rows in arrays:
                groups[group][name].copy_(torch.from_numpy(rows))
        self._step = step
        if step:
            self._optimizer.set_step(step)
        else:
            self._optimizer.start()

    def scalars(self) -> dict[str, float]:
        """As Runtime.scalars."""
        return self._optimizer.scalars()

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """As Runtime.restore_scalars."""
        self._optimizer.set_scalars(scalars)

    def _tensors(self) -> dict[str, Tensors]:
        groups = {"weights": {name: p.detach() for name, p in self._parameters.items()}}
        groups |= self._optimizer.state_tensors()
        if self._average is not None:
            groups["ema"] = dict(zip(self._parameters, self._average, strict=True))
        return groups


def _surely_below(most: float, norm: torch.Tensor) -> bool:
    """Whether clipping is known to have no effect. Only a CPU is asked: reading a device's norm
    would wait for the device."""
    return norm.device.type == "cpu" and float(norm) + 1e-6 < most  # torch adds the same 1e-6


@dataclass(frozen=True)
class Step:
    """The training step of a network on its device.

    Args:
        network: the trained network.
        forward: the network as `parallel` wraps it.
        update: update of the masters.
        parallel: collectives and sharding over the run's processes.
        device_hooks: hooks of the device.
        settings: micro-batch size, compute dtype and seed.
        rank: rank of this process.
        prior: the network that predicts targets of prior rows, see `prior_network`.
    """

    network: Network
    forward: Callable[..., torch.Tensor]
    update: Update
    parallel: SingleProcess
    device_hooks: DeviceHooks
    settings: Train
    rank: int
    prior: Network

    def __post_init__(self) -> None:
        """Raise Refused where CUDA graphs are set and the step cannot be captured."""
        if not self.settings.cuda_graphs:
            return
        if self._has_dropout:
            raise Refused("train.cuda_graphs: this model has dropout; set false")
        if self.parallel.world > 1:  # torchrun and mpirun ignore train.processes
            raise Refused("train.cuda_graphs is for one process; set false")

    def __call__(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        loss = torch.zeros((), device=self.device_hooks.device)
        self.update.begin(learning_rate)
        for inputs in batch.on_device or self.inputs(batch):
            # Ranks that share weights gather them together, so each runs the pass or none does.
            if inputs.has_prior or (self.parallel.sharded and inputs.is_prior is not None):
                self._set_prior_targets(inputs)
            if self._has_dropout:
                seed_dropout(self.settings.seed, batch.step, inputs.first, self.rank)
            with self.parallel.accumulating(last=inputs.last):
                loss += self._pass(inputs, batch.denominator)
            if not inputs.last:
                self.device_hooks.mark_step()
        self.parallel.gather_gradients()
        return StepOutput(self.parallel.sum_over_ranks(loss), self.update.apply(learning_rate))

    def _set_prior_targets(self, inputs: Inputs) -> None:
        """A forward pass of the base, before the step's own, which it leaves as it is."""
        with attention_kernel(self.settings.attention), self.autocast(), as_base(self.prior):
            inputs.set_prior_targets(self.prior)
        self.device_hooks.mark_step()

    def backward(self, inputs: Inputs, denominator: int) -> torch.Tensor:
        """Add a micro-batch's gradients to those of the parameters.

        Args:
            inputs: the micro-batch.
            denominator: as in StepBatch.

        Returns:
            The micro-batch's part of the loss, a scalar.
        """
        # The backward pass recomputes blocks, by the same kernel.
        with attention_kernel(self.settings.attention):
            with self.autocast():
                errors = inputs.errors(self.forward)
            part = (inputs.weight * errors).sum() / denominator
            # DDP and FSDP average gradients over processes; the step needs their sum.
            (part * self.parallel.world).backward()
        return part.detach()

    def release_graphs(self) -> None:
        """Free the memory of CUDA graphs, if there are any. Between steps only."""
        if isinstance(self._pass, CudaGraphs):
            self._pass.release()

    def inputs(self, batch: StepBatch) -> Iterator[Inputs]:
        """The batch's micro-batches, copied to the device."""
        send = sender(self.device_hooks.device)
        return micro_batches(batch, self.settings.micro_batch_size, send)

    def autocast(self) -> AbstractContextManager[None]:
        """Context of computation in the compute dtype."""
        dtype = getattr(torch, self.settings.compute_dtype)
        enabled = dtype != torch.float32
        return torch.autocast(
            self.device_hooks.device.type,
            dtype if enabled else None,
            enabled=enabled,
            cache_enabled=self.device_hooks.autocast_caches_casts,
        )

    @cached_property
    def _pass(self) -> Callable[[Inputs, int], torch.Tensor]:
        if not self.settings.cuda_graphs:
            return self.backward
        return CudaGraphs(self.network, self.backward)

    @cached_property
    def _has_dropout(self) -> bool:
        return has_dropout(self.network)


#: Devices with channels-last convolution weights. torch_npu raises an error for them, and Gaudi's
#: compiler chooses layouts itself.
CHANNELS_LAST = ("cpu", "cuda")


def memory_format(device: torch.device, *, sharded: bool) -> torch.memory_format:
    """The fastest memory format of convolution weights that the device supports.

    FSDP shards dimension 0 of contiguous weights only.

    Args:
        device: device of the weights.
        sharded: whether FSDP shards the weights.
    """
    fastest = device.type in CHANNELS_LAST and not sharded
    return torch.channels_last if fastest else torch.contiguous_format


def keep_channels_last(network: torch.nn.Module) -> None:
    """Make a network's attention blocks return channels-last activations without a copy."""
    for module in network.modules():
        if isinstance(module, Transformer2DModel):
            module._get_output_for_continuous_inputs = MethodType(_output, module)


def _output(
    self: Any,
    hidden_states: torch.Tensor,  # [B, h * w, D]
    residual: torch.Tensor,  # [B, C, h, w]
    batch_size: int,
    height: int,
    width: int,
    inner_dim: int,
) -> torch.Tensor:
    """Transformer2DModel._get_output_for_continuous_inputs without its `contiguous()`."""

    def to_picture(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.reshape(batch_size, height, width, -1).permute(0, 3, 1, 2)

    if self.use_linear_projection:
        return to_picture(self.proj_out(hidden_states)) + residual
    return self.proj_out(to_picture(hidden_states)) + residual
