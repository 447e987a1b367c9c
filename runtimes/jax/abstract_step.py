"""The training step with abstract arrays (shapes and dtypes), to compile it without devices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding

from configs.settings.train import Train
from runtimes.jax import scan_blocks
from runtimes.jax.mesh import Mesh
from runtimes.jax.step import Step, names_without_gradient, stack_micro_batches, trained_names
from runtimes.jax.torchax_bridge import as_function, recompute_blocks
from runtimes.pipeline_folder.folder import Base
from runtimes.process.questions import TpuStepRequest
from runtimes.spmd import splash_attention
from runtimes.torch_models.network import FlopCounter, Network, sample_batch


class AbstractStep:
    """The training step of a request on a list of devices.

    Args:
        request: model, settings and resolution.
        settings: settings of the request, parsed.
        devices: devices of a topology; they need not exist.
        hosts: number of processes; each supplies its share of a batch.
    """

    def __init__(
        self, request: TpuStepRequest, settings: Train, devices: list[Any], hosts: int
    ) -> None:
        exact = "highest" if settings.compute_dtype == "float32" else "default"
        jax.config.update("jax_default_matmul_precision", exact)
        base = Base.of(request)
        plain = settings.model_copy(update={"gradient_checkpointing": "none"})
        network = Network.without_weights(request, base, plain)
        self._settings = settings
        self._has_prior = request.has_prior
        self._network = network
        self._hosts = hosts
        self._mesh = Mesh(settings.fsdp, devices)
        self._splash = self._mesh.splash_attention()
        self._counter = FlopCounter(network)
        self._loops = list[scan_blocks.Loop]()
        size = (request.resolution, request.resolution)
        given: dict[str, Any] = {"text": network.encodes_text, "references": request.references}
        self._batch = sample_batch(base, network, size, **given)
        recompute_blocks(network, settings, self._mesh)
        self._names = trained_names(network)
        share = settings.global_batch_size // hosts
        self._size = settings.micro_batch(hosts)
        self.micro_batches = -(-share // self._size)
        self.parameters = sum(p.numel() for p in network.trained().values())

    def lower(self) -> Any:
        """The lowered step; call `compile()` on it."""
        state = self._state()
        untouched = names_without_gradient(self._counter, self._network, self._batch)
        predict = as_function(self._network, training=True, splash=self._splash)
        scanned = scan_blocks.scanned_names(self._network)
        step = Step(predict, self._settings, self._mesh, self._names, untouched, scanned)
        batch = self._stacked()
        seeds = np.zeros(batch["weight"].shape[0], np.uint32)
        arguments = state, self._frozen(), batch, seeds, np.zeros(4, np.float32), np.float32(1)
        with scan_blocks.recording() as loops:
            traced = step.compiled(state).trace(*arguments)
        self._loops = loops
        return traced.lower(lowering_platforms=(self._mesh.platform,))

    @property
    def has_loops(self) -> bool:
        """Whether the program loops over micro-batches and over equal blocks."""
        return self._mesh.has_loops

    def lower_loop_bodies(self) -> list[tuple[int, Any]]:
        """Iterations that XLA's cost analysis of the lowered step omits, and what each computes.

        Equal loops share an item. Call `lower` first.
        """
        if not self.has_loops:
            return []
        equal: dict[str, list[scan_blocks.Loop]] = {}
        for loop in self._loops:
            equal.setdefault(str((loop.weights, loop.carry, loop.others)), []).append(loop)
        with splash_attention.counted(0):
            return [
                (sum(loop.count - 1 for loop in loops), self._lower_body(loops[0]))
                for loops in equal.values()
            ]

    def _lower_body(self, loop: scan_blocks.Loop) -> Any:
        """An iteration's forward and backward pass, with recomputation.

        Gradients of further arguments, such as the time embedding, are small and left out.
        """

        def run(trained: Any, frozen: Any, carry: Any, others: Any, gradient: Any) -> Any:
            def forward(trained: Any, carry: Any) -> Any:
                return loop.block(frozen | trained, jax.random.key(0), carry, others)

            output, backward = jax.vjp(forward, trained, carry)
            return output, backward(gradient)

        trained = {name: loop.weights[name] for name in loop.trained}
        frozen = {name: loop.weights[name] for name in loop.weights.keys() - loop.trained}
        traced = jax.jit(run).trace(trained, frozen, loop.carry, loop.others, loop.carry)
        return traced.lower(lowering_platforms=(self._mesh.platform,))

    def flops_per_image(self) -> float | None:
        """FLOPs of a forward and backward pass per image, without recomputation."""
        return self._counter.of(self._batch)

    def kernel_flops(self) -> float:
        """FLOPs of attention kernels per device and lowered step, recomputation included.

        The backward kernel computes five products of the size of the forward kernel's two.
        """
        if self._splash is None:
            return 0.0
        recomputed = self._settings.gradient_checkpointing == "blocks"
        passes = 1 + recomputed + 5 / 2
        forward = sum(self._splash.forward_flops) / self._mesh.count
        return forward * passes * self.micro_batches

    def argument_bytes(self) -> int:
        """Bytes of all arguments per device."""
        leaves = jax.tree.leaves((self._state(), self._frozen(), self._stacked()))
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in leaves
        )

    def prior_bytes(self) -> int:
        """Bytes per device of the base's copy for prior targets, which no argument of the step is.

        The runtime shards it as the weights.
        """
        if not self._has_prior or self._settings.method != "full":
            return 0
        width = jnp.dtype(self._settings.compute_dtype).itemsize
        weights = self._state()["weights"].values()
        return width * sum(math.prod(w.sharding.shard_shape(w.shape)) for w in weights)

    def _state(self) -> dict[str, dict[str, ShapeDtypeStruct]]:
        def shape(parameter: torch.Tensor) -> ShapeDtypeStruct:
            size = tuple(parameter.shape)
            return ShapeDtypeStruct(size, jnp.float32, sharding=self._mesh.array_sharding(size))

        groups = ["weights", "exp_avg", "exp_avg_sq"]
        groups += ["ema"] if self._settings.ema_decay is not None else []
        shapes = {name: shape(p) for name, p in self._network.trained().items()}
        return dict.fromkeys(groups, shapes)

    def _frozen(self) -> dict[str, ShapeDtypeStruct]:
        trained = set(self._names.values())
        half = jnp.dtype(self._settings.compute_dtype)

        def abstract(name: str, tensor: torch.Tensor) -> ShapeDtypeStruct:
            dtype: Any = half if tensor.is_floating_point() else jnp.int32
            if name.startswith("frozen_clip.") and dtype is half:  # as `frozen_arrays` has it
                dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
            return ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=self._mesh.replicated)

        tensors = (*self._network.named_parameters(), *self._network.named_buffers())
        return {name: abstract(name, t) for name, t in tensors if name not in trained}

    def _stacked(self) -> dict[str, Any]:
        """Abstract arrays of a global batch, as jax/step.py stacks them."""
        local = self._mesh.count // self._hosts
        rows = -(-self._size // local) * local * self._hosts
        parts = self.micro_batches
        spread: NamedSharding = self._mesh.row_sharding(axis=1)

        def shape(array: Any) -> ShapeDtypeStruct:
            return ShapeDtypeStruct((parts, rows, *array.shape[2:]), array.dtype, sharding=spread)

        stacked = stack_micro_batches(
            self._batch, None, self._mesh, jnp.dtype(self._settings.compute_dtype)
        )
        return dict(jax.tree.map(shape, stacked))
