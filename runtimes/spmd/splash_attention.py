"""Attention on TPUs by JAX's splash attention kernel, which does not store the logits.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention` (as flash attention, arXiv
2205.14135). It has no partitioning rule, so `jax.shard_map` runs it on each device's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from runtimes.spmd.tpu_sharding import AXES

#: The kernel's blocks are multiples of a vector register's lanes, so sequences are padded to it.
LANES = 128
#: Largest block of queries or keys: a block of logits is 4 MiB of a TPU's vector memory.
LARGEST_BLOCK = 1024
#: The same for heads of more than LANES channels. The backward pass with blocks of 1,024 needs
#: 16.7 MiB on a v4, whose compiler allots 16 MiB to a kernel.
LARGEST_BLOCK_OF_WIDE_HEADS = 512
#: Largest head; no block compiled for larger heads, such as a VAE's 512.
LARGEST_HEAD = 256
#: With fewer queries or keys (captions have 77), XLA's own operations move fewer bytes on a v5p.
SHORTEST = 512
#: Name, for jax.checkpoint's policies, of the kernel's output and log-sum-exp.
KEPT = "splash_attention"
#: Largest block of keys of the backward kernel, in blocks of logits. The kernel writes a partial
#: gradient of the queries for each. For heads of 64, four need 17.3 MiB; a kernel has 16 MiB.
BLOCKS_OF_KEYS = 2
#: Largest block of queries of the backward kernel. With 1,024, two blocks of keys need 16.1 MiB.
LARGEST_BLOCK_OF_QUERIES = 512


Typed = Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class SplashAttention:
    """The use of the kernel in one trace.

    Args:
        mesh: its devices share the rows of each batch.
        interpret: run the kernel by Pallas' interpreter, on any device.
    """

    mesh: Mesh | AbstractMesh
    interpret: bool = False
    #: FLOPs of each traced call's forward pass on all devices, which XLA's cost analysis lacks.
    forward_flops: list[float] = field(default_factory=list)

    def suits(self, query: Typed, key: Typed, mask: Typed | None = None) -> bool:
        """Whether the kernel can run, and is better than XLA's own operations.

        Args:
            query: [B, H, T, D].
            key: [B, H, S, D].
            mask: must exclude the same keys from all queries and heads, as padding does: bool
                [B or 1, 1, 1, S].
        """
        if mask is not None and (mask.dtype != bool or mask.shape[1:-1] != (1, 1)):
            return False
        half = query.dtype == key.dtype and query.dtype in (jnp.bfloat16, jnp.float16)
        divisible = query.shape[0] % self.mesh.size == 0
        long = min(query.shape[2], key.shape[2]) >= SHORTEST and query.shape[3] <= LARGEST_HEAD
        return (half or self.interpret) and divisible and long

    def __call__(
        self, query: Array, key: Array, value: Array, scale: float, kept: Array | None = None
    ) -> Array:
        """Attention output [B, H, T, D] in the dtype of `value`.

        Args:
            query: [B, H, T, D]; B is a multiple of the number of devices.
            key: [B, H, S, D].
            value: [B, H, S, D].
            scale: factor of the logits.
            kept: [B or 1, 1, 1, S] bool; False excludes a key, such as padding of a caption.
        """
        if times := _TIMES.get():
            self.forward_flops.extend([4.0 * math.prod(query.shape) * key.shape[2]] * times)
        rows = query.shape[0]
        length = query.shape[2]
        keys = key.shape[2]
        arrays = [_padded(array) for array in (query * scale, key, value)]
        padding = arrays[1].shape[2] - keys
        if kept is not None or padding:
            kept = jnp.ones((1, 1, 1, keys), bool) if kept is None else kept
            kept = jnp.broadcast_to(kept[:, 0, 0], (rows, keys))
            arrays.append(jnp.pad(kept, ((0, 0), (0, padding))).astype(jnp.int32))
        spread = PartitionSpec(AXES)

        def local(query: Array, key: Array, value: Array, *kept: Array) -> Array:
            kernel: Any = self._kernel(query, key)
            if not kept:
                return cast(Array, jax.vmap(kernel)(query, key, value))
            # The kernel attends within a segment: queries and kept keys are segment 1.
            segments = SegmentIds(jnp.ones(query.shape[2], jnp.int32), *kept)
            axes: Any = SegmentIds(None, 0)  # type: ignore[arg-type]
            run = jax.vmap(kernel, in_axes=(0, 0, 0, axes))
            return cast(Array, run(query, key, value, segments))

        specs = (spread,) * len(arrays)
        sharded = jax.shard_map(
            local, mesh=self.mesh, in_specs=specs, out_specs=spread, check_vma=False
        )
        return sharded(*arrays)[:, :, :length].astype(value.dtype)

    def _kernel(self, query: Array, key: Array) -> splash_attention_kernel.SplashAttentionKernel:
        """The kernel for padded arrays."""
        lengths = (query.shape[2], key.shape[2])
        mask = splash_attention_mask.MultiHeadMask(
            [splash_attention_mask.FullMask(lengths) for _ in range(query.shape[1])]
        )
        largest = LARGEST_BLOCK if query.shape[3] <= LANES else LARGEST_BLOCK_OF_WIDE_HEADS
        block_q, block_kv = (_block(length, largest) for length in lengths)
        blocks = splash_attention_kernel.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=_block(lengths[0], LARGEST_BLOCK_OF_QUERIES),
            block_kv_dkv=_block(lengths[1], BLOCKS_OF_KEYS * block_kv, block_kv),
            block_kv_dkv_compute=block_kv,
            use_fused_bwd_kernel=True,
        )
        return splash_attention_kernel.make_splash_mha_single_device(
            mask, block_sizes=blocks, interpret=self.interpret, residual_checkpoint_name=KEPT
        )


_CURRENT: ContextVar[SplashAttention | None] = ContextVar("splash_attention", default=None)
#: How many calls a traced call stands for.
_TIMES: ContextVar[int] = ContextVar("calls_of_a_traced_call", default=1)


@contextmanager
def holding(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    """Within the context, which receives the value, a variable has it."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def using(kernel: SplashAttention | None) -> AbstractContextManager[Any]:
    """Within the context, runtime jax attends by the kernel where it suits."""
    return holding(_CURRENT, kernel)


def current() -> SplashAttention | None:
    """The kernel of the enclosing `using`."""
    return _CURRENT.get()


def counted(times: int) -> AbstractContextManager[Any]:
    """Within the context, a traced call counts as so many calls, as in a loop."""
    return holding(_TIMES, _TIMES.get() * times)


def _padded(array: Array) -> Array:
    """[B, H, T, D] with zeros up to a multiple of LANES along T."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % LANES), (0, 0)))


def _block(length: int, largest: int, unit: int = LANES) -> int:
    """The largest multiple of a unit, up to a limit, that divides a padded length."""
    return next(size for size in range(largest - largest % unit, 0, -unit) if length % size == 0)
