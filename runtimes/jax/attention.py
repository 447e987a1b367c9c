"""Scaled dot-product attention (arXiv 1706.03762), its softmax in float32."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from runtimes.spmd import splash_attention


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
    wide = jnp.float32
    logits = jnp.einsum("bhtd,bhsd->bhts", query, key, preferred_element_type=wide) * scale
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
