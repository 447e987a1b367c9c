"""Scaled dot-product attention (arXiv 1706.03762), its softmax in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


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
    """What queries [B, H, T, D] take from values [B, H, S, D].

    Args:
        mask: added to the logits [B, H, T, S], or false where nothing is to be taken.
        causal: each query sees keys up to its own place.
        dropping: a random key, and the share of the weights that is dropped.
    """
    wide = jnp.float32
    logits = jnp.einsum("bhtd,bhsd->bhts", query, key, preferred_element_type=wide) * scale
    if causal:
        mask = jnp.tri(query.shape[2], key.shape[2], dtype=bool)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf) if mask.dtype == bool else logits + mask
    weights = jax.nn.softmax(logits, axis=-1)
    if dropping is not None:
        random, share = dropping
        weights = weights * jax.random.bernoulli(random, 1 - share, weights.shape) / (1 - share)
    return jnp.einsum("bhts,bhsd->bhtd", weights.astype(value.dtype), value)
