"""Attention on TPUs by JAX's splash attention kernel, within PyTorch/XLA's graph.

JAX lowers the kernel's forward and backward pass to HLO, which the graph calls.
`torch_xla.experimental.splash_attention` supports neither captions nor their padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import torch
import torch_xla
from jax import Array, ShapeDtypeStruct
from jax.sharding import AbstractMesh
from torch_xla.core import xla_builder

from runtimes.spmd.splash_attention import SplashAttention
from runtimes.spmd.tpu_sharding import AXES
from runtimes.xla.mesh import ATTENTION, replace_operator

jax.config.update("jax_platforms", "cpu")  # PyTorch/XLA has the TPU
jax.config.update("jax_use_shardy_partitioner", False)  # PyTorch/XLA partitions by GSPMD


class XlaAttention:
    """scaled_dot_product_attention of XLA arrays, by the kernel where it suits.

    Args:
        mesh_shape: devices along `data` and `fsdp`; they share the rows of each batch.
        interpret: run the kernel by Pallas' interpreter, on a CPU.
    """

    def __init__(self, mesh_shape: tuple[int, int], *, interpret: bool = False) -> None:
        self._kernel = SplashAttention(AbstractMesh(mesh_shape, AXES), interpret=interpret)
        self._platform = "cpu" if interpret else "tpu"
        self._lowered = cache(self._lower)

    def register(self) -> None:
        """Replace the operator in this process."""
        replace_operator(ATTENTION, self)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As torch.nn.functional.scaled_dot_product_attention."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        arrays = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
        shapes = [_shape(array) for array in arrays]
        plain = dropout_p or is_causal or enable_gqa or query.ndim != 4
        if plain or not self._kernel.suits(*shapes[:2], *shapes[3:]):
            options = {"scale": scale, "enable_gqa": enable_gqa}
            arguments = (query, key, value, attn_mask, dropout_p, is_causal)
            return ATTENTION.decompose(*arguments, **options)
        return _Call.apply(self.program(shapes, scale), *arrays)

    def program(self, shapes: Sequence[ShapeDtypeStruct], scale: float) -> _Program:
        """The lowered kernel for a query, key, value and, optionally, a mask of these shapes."""
        return self._lowered(tuple(shapes), scale)

    def _lower(self, shapes: tuple[ShapeDtypeStruct, ...], scale: float) -> _Program:
        structure: Any = None  # of what the backward pass needs

        def forward(*arrays: Array) -> list[Array]:
            def attend(query: Array, key: Array, value: Array) -> Array:
                return self._kernel(query, key, value, scale, *arrays[3:])

            nonlocal structure
            output, pull_back = jax.vjp(attend, *arrays[:3])
            kept, structure = jax.tree.flatten(pull_back)
            return [output, *kept]

        def backward(*arrays: Array) -> list[Array]:
            return list(jax.tree.unflatten(structure, arrays[:-1])(arrays[-1]))

        output, *kept = jax.eval_shape(forward, *shapes)
        return _Program(self._hlo(forward, shapes), self._hlo(backward, [*kept, output]))

    def _hlo(self, function: Callable[..., Any], shapes: Sequence[Any]) -> Any:
        traced = jax.jit(function, keep_unused=True).trace(*shapes)
        return traced.lower(lowering_platforms=(self._platform,)).compiler_ir("hlo")


@dataclass
class _Program:
    """HLO of the forward pass, whose first output is the attention's, and of the backward pass."""

    forward: Any
    backward: Any

    def __post_init__(self) -> None:
        make = xla_builder.computation_from_module_proto
        protos = [p.as_serialized_hlo_module_proto() for p in (self.forward, self.backward)]
        self._computations = [make("splash_attention", proto) for proto in protos]

    def run(self, number: int, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of the forward pass, number 0, or the backward pass, 1."""
        call = torch_xla._XLAC._xla_user_computation
        return list(call("xla::splash_attention", list(arrays), self._computations[number]))


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: _Program, *arrays: torch.Tensor) -> torch.Tensor:
        output, *kept = program.run(0, arrays)
        ctx.save_for_backward(*kept)
        ctx.program = program
        ctx.masks = len(arrays) - 3
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.program.run(1, [*ctx.saved_tensors, *gradients]), *[None] * ctx.masks


def _shape(array: torch.Tensor) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(tuple(array.shape), str(array.dtype).removeprefix("torch."))
