"""Scan over consecutive equal blocks, so that a program contains each kind of block once.

`jax.lax.scan` runs the blocks as a loop over their stacked weights. With FSDP an iteration gathers
the weights of its own block only, as ZeRO-3 does (arXiv 1910.02054): neither the forward pass nor
recomputation keeps the whole model on a chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec

from runtimes.jax.mesh import Mesh
from runtimes.spmd.splash_attention import holding

#: Whether iterating over a BlockList yields EqualBlocks: only while JAX traces a training pass.
_SCANNING: ContextVar[bool] = ContextVar("scanning", default=False)

Weights = dict[str, Array]
Carry = tuple[Array, ...]
#: `(weights, key, carry, others) -> carry` of one block; `others` are the same for every block.
CallBlock = Callable[[Weights, Array, Carry, list[Array]], Carry]
#: Policy of jax.checkpoint; None recomputes all of a block.
Policy = Callable[..., bool] | None


@dataclass(frozen=True)
class Loop:
    """A traced loop. XLA's cost analysis counts a single iteration.

    Args:
        count: number of iterations.
        block: one iteration, with its gathers and recomputation.
        weights: shapes of one block's weights, sharded.
        trained: names of the weights that have gradients.
        carry: shapes of the block's input.
        others: shapes of its other arguments.
    """

    count: int
    block: CallBlock
    weights: dict[str, ShapeDtypeStruct]
    trained: frozenset[str]
    carry: tuple[ShapeDtypeStruct, ...]
    others: list[ShapeDtypeStruct]


#: The loops that are traced within `recording`.
_LOOPS: ContextVar[list[Loop] | None] = ContextVar("loops", default=None)


class EqualBlocks:
    """Two or more consecutive blocks that differ in their weights alone."""

    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        self.blocks = tuple(blocks)
        named = blocks[0].named_parameters()
        #: Names of trained parameters in a block; while JAX traces, no tensor requires a gradient.
        self.trained = frozenset(name for name, p in named if p.requires_grad)


class BlockList(torch.nn.ModuleList):
    """A denoiser's list of blocks; within `scanning`, it yields equal blocks as a single block."""

    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        super().__init__(blocks)
        groups = [list(equal) for _, equal in groupby(blocks, _form)]
        #: The blocks in order, consecutive equal blocks as EqualBlocks.
        self.groups = [group[0] if len(group) == 1 else EqualBlocks(group) for group in groups]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.groups) if _SCANNING.get() else super().__iter__()


def _form(block: torch.nn.Module) -> tuple[Any, ...]:
    """A value that is equal for blocks that compute the same function of their weights."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = [(name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in tensors]
    return type(block), str(block), shapes


def scanning() -> AbstractContextManager[Any]:
    """Within the context, equal blocks of BlockLists are scanned."""
    return holding(_SCANNING, True)


def recording() -> AbstractContextManager[list[Loop]]:
    """Within the context, the list receives every loop that is traced."""
    return holding(_LOOPS, [])


def use_block_lists(part: torch.nn.Module, classes: Sequence[str]) -> None:
    """Replace the lists of a component's blocks by BlockLists; names of weights stay.

    Args:
        classes: classes of blocks whose output is the next block's input.
    """
    for module in list(part.modules()):
        for name, child in list(module.named_children()):
            blocks = list(child) if type(child) is torch.nn.ModuleList else []
            if blocks and all(type(block).__name__ in classes for block in blocks):
                setattr(module, name, BlockList(blocks))


def scanned_names(network: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters of all EqualBlocks, in the network."""
    lists = (module for module in network.modules() if isinstance(module, BlockList))
    groups = (group for each in lists for group in each.groups)
    equal = (group for group in groups if isinstance(group, EqualBlocks))
    own = {id(p) for group in equal for block in group.blocks for p in block.parameters()}
    return frozenset(name for name, p in network.named_parameters() if id(p) in own)


def scan_blocks(
    call: CallBlock,
    weights: Sequence[Weights],
    keys: Array,
    carry: Carry,
    others: list[Array],
    *,
    mesh: Mesh,
    trained: frozenset[str],
    policy: Policy,
) -> Carry:
    """Call n equal blocks one after another.

    Args:
        call: function of a block, the same for all blocks.
        weights: weights of each block, by their names in it.
        keys: [n] keys of random numbers.
        carry: input of the first block; each block's output has its shapes and dtypes.
        others: further arguments of every block.
        mesh: mesh of the devices.
        trained: names of the weights that are sharded along `fsdp`, which an iteration gathers.
        policy: what a block's backward pass need not recompute.

    Returns:
        The last block's output.
    """
    sharded = trained if mesh.fsdp > 1 else frozenset[str]()
    stacked = {name: jnp.stack([each[name] for each in weights]) for name in weights[0]}
    for name in sharded:
        spec = mesh.array_sharding(weights[0][name].shape).spec
        spread = NamedSharding(mesh.mesh, PartitionSpec(None, *spec))
        stacked[name] = jax.lax.with_sharding_constraint(stacked[name], spread)

    def block(weights: Weights, key: Array, carry: Carry, others: list[Array]) -> Carry:
        whole = {name: _gather(mesh, weights[name]) for name in sharded}
        return call(weights | whole, key, carry, others)

    alone = jax.checkpoint(block, policy=policy)
    if (loops := _LOOPS.get()) is not None:
        shapes = _shapes(weights[0], carry, others, mesh, sharded)
        loops.append(Loop(len(weights), alone, shapes[0], trained, *shapes[1:]))
    # Outside a loop, XLA would merge the recomputation with the forward pass.
    looped = jax.checkpoint(block, policy=policy, prevent_cse=not mesh.has_loops)
    last, _ = jax.lax.scan(
        lambda carry, own: (looped(*own, carry, others), None),
        carry,
        (stacked, keys),
        unroll=not mesh.has_loops,
    )
    return last


def _shapes(
    weights: Weights, carry: Carry, others: list[Array], mesh: Mesh, sharded: frozenset[str]
) -> tuple[dict[str, ShapeDtypeStruct], tuple[ShapeDtypeStruct, ...], list[ShapeDtypeStruct]]:
    """Shapes of a block's arguments, with the shardings that they have in the step."""
    rows = carry[0].shape[0]

    def weight(name: str, array: Array) -> ShapeDtypeStruct:
        spread = mesh.array_sharding(array.shape) if name in sharded else mesh.replicated
        return ShapeDtypeStruct(array.shape, array.dtype, sharding=spread)

    def argument(array: Array) -> ShapeDtypeStruct:
        batched = array.ndim > 0 and array.shape[0] == rows
        spread = mesh.row_sharding(0) if batched else mesh.replicated
        return ShapeDtypeStruct(array.shape, array.dtype, sharding=spread)

    named = {name: weight(name, array) for name, array in weights.items()}
    return named, tuple(map(argument, carry)), list(map(argument, others))


def _gather(mesh: Mesh, weight: Array) -> Array:
    """The whole weight on every device, from shards; its gradient is summed into shards."""
    shards = jax.lax.with_sharding_constraint(weight, mesh.array_sharding(weight.shape))
    return jax.lax.with_sharding_constraint(shards, mesh.replicated)
