"""Convert PyTorch modules to functions of JAX arrays by torchax. Only this file imports torchax.

JAX traces a call of the module, and torchax maps each PyTorch operation to JAX. Weights are array
arguments, so JAX differentiates, compiles and shards the function. Scaled dot-product attention
(arXiv 1706.03762) is written in JAX here, with its softmax in float32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from torch.nn import functional

from configs.settings.train import Train
from runtimes.jax import scan_blocks
from runtimes.jax.mesh import Mesh
from runtimes.jax.scan_blocks import EqualBlocks, Policy
from runtimes.spmd import splash_attention
from runtimes.spmd.splash_attention import SplashAttention
from runtimes.torch_models.network import Network


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    *,
    causal: bool = False,
    scale: float,
    dropping: tuple[Array, float] | None = None,
) -> Array:
    """Attention output [B, H, T, D] in the dtype of `value`.

    Args:
        query: [B, H, T, D].
        key: [B, H, S, D].
        value: [B, H, S, D].
        mask: broadcastable to the logits [B, H, T, S]; added to them or, if boolean, False
            excludes a key. A query without a key gets zeros, as in PyTorch.
        causal: whether a query attends only to keys up to its own position.
        scale: factor of the logits.
        dropping: PRNG key and dropout probability of the attention weights.
    """
    if dropping is None and not causal:
        splash = splash_attention.current()
        if splash is not None and splash.suits(query, key, mask):
            return splash(query, key, value, scale, mask)
    if dropping is None and mask is None and _has_fused_kernel(query):
        return fused(query, key, value, causal=causal, scale=scale)
    logits = jnp.einsum("bhtd,bhsd->bhts", query, key, preferred_element_type=jnp.float32) * scale
    if causal:
        mask = jnp.tri(query.shape[2], key.shape[2], dtype=bool)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf) if mask.dtype == bool else logits + mask
    weights = jax.nn.softmax(logits, axis=-1)
    if mask is not None and mask.dtype == bool:
        # Padding before a caption, of a causal language model, sees no key: softmax gives NaN.
        weights = jnp.where(mask.any(axis=-1, keepdims=True), weights, 0)
    if dropping is not None:
        random, share = dropping
        weights = weights * jax.random.bernoulli(random, 1 - share, weights.shape) / (1 - share)
    return jnp.einsum("bhts,bhsd->bhtd", weights.astype(value.dtype), value)


def _has_fused_kernel(query: Array) -> bool:
    """Whether cuDNN's fused attention supports the dtype and the head size, on a GPU."""
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    return jax.default_backend() == "gpu" and half and query.shape[-1] in range(8, 129, 8)


def fused(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """`attend` without a mask by a fused kernel, which does not store the logits.

    With masks, cuDNN refuses odd lengths in training, such as CLIP's 77 tokens.
    """
    query, key, value = (jnp.swapaxes(array, 1, 2) for array in (query, key, value))
    output = jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=causal, implementation=implementation
    )
    return jnp.swapaxes(output, 1, 2)


Arrays = Mapping[str, Any]
#: Name, for jax.checkpoint's policies, of the outputs of linear layers.
_LINEAR = "linear"
#: Policy that keeps the outputs of linear layers and of the attention kernel.
_KEEP_NAMED = jax.checkpoint_policies.save_only_these_names(_LINEAR, splash_attention.KEPT)
#: Parts of overload names that torchax 0.0.13 references and PyTorch 2.13 has removed.
_GONE = ("dimname", "names")


def as_function(
    module: torch.nn.Module, *, training: bool, splash: SplashAttention | None = None
) -> Callable[..., Any]:
    """The module's forward pass as a pure function `call(arrays, seed, *arguments)`.

    Args:
        module: its own weights are not used by the function.
        training: whether the module is in training mode, with dropout.
        splash: attention kernel of TPUs; None: XLA's own operations.

    Returns:
        A function of `arrays` (parameters and buffers by their names in the module), `seed` (u32,
        determines the dropout masks) and the arguments of the module's forward method.
    """

    def call(arrays: Arrays, seed: Any, *arguments: Any) -> Any:
        environment = _environment()
        module.train(training)
        weights, inputs = environment.j2t_iso((dict(arrays), arguments))
        key = jax.random.key(seed)
        with (
            environment,
            environment.override_property(prng=key),
            splash_attention.using(splash),
            scan_blocks.scanning() if training else nullcontext(),
            torch.set_grad_enabled(training),  # diffusers checkpoints only with gradients enabled
        ):
            outputs = torch.func.functional_call(module, weights, inputs)
        return environment.t2j_iso(outputs)

    return call


class Wrapped(torch.nn.Module):
    """A module whose forward pass is a function of another module and the arguments."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, *arguments: Any) -> Any:
        return self._call(self.module, *arguments)


def recompute_blocks(network: Network, settings: Train, mesh: Mesh) -> None:
    """Enable gradient checkpointing of a network as `train.gradient_checkpointing` says."""
    if settings.gradient_checkpointing == "none":
        return
    # With adapters, stacks of the base's weights would be in memory beside the base's weights.
    scanned = network.family.chained_blocks if settings.method == "full" else ()
    for part in network.parts.values():
        recompute(part, settings.gradient_checkpointing, mesh, scanned)


def recompute(part: Any, what: str, mesh: Mesh | None = None, scanned: Sequence[str] = ()) -> None:
    """Enable gradient checkpointing of each block of a component by jax.checkpoint.

    Args:
        what: `train.gradient_checkpointing`, blocks or selective.
        mesh: mesh of the devices; required by `scanned`.
        scanned: classes of blocks; equal blocks of a class run as a loop.
    """
    function = partial(_recomputed, _is_kept if what == "selective" else None, mesh)
    part._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    scan_blocks.use_block_lists(part, scanned)


def _is_kept(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Whether selective recomputation keeps an operation's outputs.

    Attention without TPUs' kernel is computed again; XLA's logits are larger than all else.
    """
    return primitive is jax.lax.conv_general_dilated_p or _KEEP_NAMED(primitive, **parameters)


def _recomputed(
    policy: Policy, mesh: Mesh | None, block: Callable[..., Any] | EqualBlocks, *arguments: Any
) -> Any:
    if isinstance(block, EqualBlocks):
        assert mesh is not None, "`recompute` was called without a mesh"
        return _scanned(policy, mesh, block, *arguments)
    environment = _environment()
    function = block

    @partial(jax.checkpoint, policy=policy)
    def call(key: Array, inputs: tuple[Any, ...]) -> Any:
        # A separate key: a key that is split inside the checkpoint would leak a tracer.
        with environment.override_property(prng=key):
            return environment.t2j_iso(function(*environment.j2t_iso(inputs)))

    key = environment.get_and_rotate_prng_key()
    return environment.j2t_iso(call(key, environment.t2j_iso(arguments)))


def _scanned(policy: Policy, mesh: Mesh, equal: EqualBlocks, *arguments: Any) -> Any:
    """Call equal blocks one after another by scan_blocks.py.

    In diffusers, a block's first argument is hidden_states. A block with two outputs has
    encoder_hidden_states as its second argument and first output.
    """
    environment = _environment()
    (first, *_) = equal.blocks
    count = len(equal.blocks)
    splash = splash_attention.current()
    leaves, tree = jax.tree.flatten(environment.t2j_iso(arguments), is_leaf=lambda x: x is None)
    traced = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Array)]

    def call(weights: Arrays, key: Array, carry: Sequence[Array], others: Sequence[Array]) -> Any:
        inner = leaves.copy()
        for n, array in zip(traced, (*carry, *others), strict=True):
            inner[n] = array
        own, inputs = environment.j2t_iso((dict(weights), jax.tree.unflatten(tree, inner)))
        with (
            environment,
            environment.override_property(prng=key),
            splash_attention.using(splash),
            torch.set_grad_enabled(True),
        ):
            result = torch.func.functional_call(first, own, inputs)
        result = environment.t2j_iso(result)
        return (result[1], result[0]) if isinstance(result, tuple) else (result,)

    weights = [environment.t2j_iso(_tensors(block)) for block in equal.blocks]
    keys = jax.random.split(environment.get_and_rotate_prng_key(), count)
    arrays = [leaves[n] for n in traced]
    with splash_attention.counted(0):
        shapes = jax.eval_shape(call, weights[0], keys[0], arrays[:1], arrays[1:])
    outputs = len(shapes)
    carry = tuple(arrays[:outputs])
    others = arrays[outputs:]
    if [(a.shape, a.dtype) for a in shapes] != [(a.shape, a.dtype) for a in carry]:
        name = type(first).__name__
        raise TypeError(f"{name}: no output fits the next block's input: see Family.chained_blocks")
    with splash_attention.counted(count):
        last = scan_blocks.scan_blocks(
            call, weights, keys, carry, others, mesh=mesh, trained=equal.trained, policy=policy
        )
    tensors = environment.j2t_iso(last)
    return (tensors[1], tensors[0]) if outputs == 2 else tensors[0]


def _tensors(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a block by their names in it."""
    return dict((*block.named_parameters(), *block.named_buffers()))


@cache
def _environment() -> Any:
    """torchax's environment, with faster definitions of some operations.

    Constructing it initializes JAX's devices.
    """
    os.environ.setdefault("ENABLE_RUNTIME_UPTIME_TELEMETRY", "0")  # torchax's default is 1
    with _tolerant():
        import torchax

        environment = torchax.default_env()
    ours = {
        functional.group_norm: _group_norm,
        functional.layer_norm: _layer_norm,
        functional.linear: _linear,
        functional.interpolate: _interpolate,
        functional.scaled_dot_product_attention: _attention,
    }
    for operation, definition in ours.items():
        environment.override_op_definition(operation, definition)
    return environment


@contextmanager
def _tolerant() -> Iterator[None]:
    """Within the context, a removed operator overload resolves to a placeholder, not an error."""
    packet: Any = torch._ops.OpOverloadPacket
    original = packet.__getattr__

    def tolerant(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if any(part in name.lower() for part in _GONE):
                return ("gone", str(self), name)
            raise

    packet.__getattr__ = tolerant
    try:
        yield
    finally:
        packet.__getattr__ = original


def _on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a function of JAX arrays to a function of torchax tensors."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        environment = _environment()
        arrays, named = environment.t2j_iso((arguments, keywords))
        return environment.j2t_iso(function(*arrays, **named))

    return call


@_on_arrays
def _group_norm(
    inputs: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    """Group norm of [B, C, ...] with float32 statistics, without torchax's loop over groups."""
    batch, channels, *rest = inputs.shape
    groups = inputs.reshape(batch, num_groups, channels // num_groups, *rest)
    normal = _normalized(groups, tuple(range(2, groups.ndim)), eps).reshape(inputs.shape)
    return _affine(normal, weight, bias, (channels, *(1 for _ in rest))).astype(inputs.dtype)


@_on_arrays
def _layer_norm(
    inputs: Array,
    normalized_shape: tuple[int, ...],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    """Layer norm over the last axes with float32 statistics."""
    axes = tuple(range(inputs.ndim - len(normalized_shape), inputs.ndim))
    normal = _normalized(inputs, axes, eps)
    return _affine(normal, weight, bias, tuple(normalized_shape)).astype(inputs.dtype)


@_on_arrays
def _linear(inputs: Array, weight: Array, bias: Array | None = None) -> Array:
    """Linear layer whose output, with its bias, selective recomputation keeps."""
    output = jnp.einsum("...a,ba->...b", inputs, weight)
    return checkpoint_name(output if bias is None else output + bias, _LINEAR)


def _normalized(inputs: Array, axes: tuple[int, ...], eps: float) -> Array:
    inputs = inputs.astype(jnp.float32)
    centred = inputs - inputs.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)


def _affine(
    normal: Array, weight: Array | None, bias: Array | None, shape: tuple[int, ...]
) -> Array:
    if weight is not None:
        normal = normal * weight.astype(jnp.float32).reshape(shape)
    return normal if bias is None else normal + bias.astype(jnp.float32).reshape(shape)


def _interpolate(
    inputs: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    **keywords: Any,
) -> torch.Tensor:
    """Nearest upsampling by integer factors repeats rows and columns; torchax gathers each."""
    height, width = inputs.shape[-2:]
    factor = scale_factor if isinstance(scale_factor, tuple | list) else (scale_factor,) * 2
    wanted = size if size is not None else (int(height * factor[0]), int(width * factor[1]))
    wanted = wanted if isinstance(wanted, tuple | list) else (wanted, wanted)
    whole = inputs.ndim == 4 and wanted[0] % height == 0 and wanted[1] % width == 0
    if mode != "nearest" or not whole:
        return functional.interpolate(inputs, size, scale_factor, mode, **keywords)
    return _enlarged(inputs, wanted[0] // height, wanted[1] // width)


@_on_arrays
def _enlarged(inputs: Array, rows: int, columns: int) -> Array:
    return jnp.repeat(jnp.repeat(inputs, rows, axis=2), columns, axis=3)


@_on_arrays
def _attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """scaled_dot_product_attention of [B, H, T, D] by `attend`."""
    if enable_gqa:
        raise NotImplementedError("runtime jax does not support grouped-query attention")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    dropping = (_environment().get_and_rotate_prng_key(), dropout_p) if dropout_p > 0 else None
    return attend(query, key, value, attn_mask, causal=is_causal, scale=scale, dropping=dropping)
