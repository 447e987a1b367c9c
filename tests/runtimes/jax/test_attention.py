"""Attention of runtime jax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from runtimes.jax import torchax_bridge

pytestmark = pytest.mark.slow


def arrays(dtype: Any, length: int = 6) -> list[jax.Array]:
    """Query [2, 3, length, 8], key and value [2, 3, 5, 8]."""
    keys = jax.random.split(jax.random.key(0), 3)
    lengths = (length, 5, 5)
    return [
        jax.random.normal(key, (2, 3, n, 8)).astype(dtype)
        for key, n in zip(keys, lengths, strict=True)
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_equals_attend(causal: bool) -> None:
    """By XLA's implementation of the same function; cuDNN's needs a GPU."""
    given = arrays(jnp.float32, length=5)
    expected = torchax_bridge.attend(*given, causal=causal, scale=0.3)
    found = torchax_bridge.fused(*given, causal=causal, scale=0.3, implementation="xla")
    assert jnp.allclose(found, expected, atol=1e-5)


def test_a_query_without_a_key_gets_zeros_as_in_pytorch() -> None:
    given = arrays(jnp.float32)
    mask = jnp.tri(6, 5, -1, dtype=bool)  # the first query sees no key
    found = torchax_bridge.attend(*given, mask, scale=0.3)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(np.array(array)) for array in (*given, mask)), scale=0.3
    )
    assert not found[:, :, 0].any()
    assert np.allclose(found, theirs.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "dtype", "masked", "fused"),
    [
        ("gpu", jnp.bfloat16, False, True),
        ("gpu", jnp.bfloat16, True, False),
        ("gpu", jnp.float32, False, False),
        ("cpu", jnp.bfloat16, False, False),
    ],
)
def test_fused_attention_serves_half_precision_without_masks_on_gpus(
    backend: str, dtype: Any, masked: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def recorded(query: jax.Array, *given: jax.Array, **options: Any) -> jax.Array:
        calls.append(options)
        return query

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(torchax_bridge, "fused", recorded)
    mask = jnp.ones((6, 5), bool) if masked else None
    torchax_bridge.attend(*arrays(dtype), mask, scale=0.3)
    assert bool(calls) == fused
