"""JAX's splash attention in runtime jax, by Pallas' interpreter on a CPU."""

from typing import Any

import chips
import pytest
import torch
from torch.nn import functional

jax = chips.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from runtimes.jax.mesh import Mesh  # noqa: E402
from runtimes.jax.torchax_bridge import as_function, attend, recompute  # noqa: E402
from runtimes.spmd import splash_attention  # noqa: E402
from runtimes.spmd.splash_attention import SplashAttention, using  # noqa: E402

pytestmark = pytest.mark.slow


def normal(count: int, *shape: int, seed: int = 0) -> list[Any]:
    keys = jax.random.split(jax.random.key(seed), count)
    return [jax.random.normal(key, shape) for key in keys]


def interpreted() -> SplashAttention:
    return SplashAttention(Mesh(1, jax.devices()[:1]).mesh, interpret=True)


def kernels(program: Any) -> int:
    """Number of kernels whose outputs the program uses; XLA removes equations without outputs."""
    count = 0
    for equation in program.eqns:
        count += equation.primitive.name == "pallas_call"
        inner = equation.params.get("jaxpr")
        if inner is not None and equation.outvars and equation.primitive.name != "pallas_call":
            count += kernels(getattr(inner, "jaxpr", inner))
    return count


@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(256, 77, 40), (300, 300, 64), (128, 256, 160)]
)
def test_the_kernel_and_its_gradients_equal_the_plain_formula(
    queries: int, keys: int, size: int
) -> None:
    """Also with lengths that need padding, and with head sizes of each family."""
    query, gradient = normal(2, 1, 2, queries, size)
    key, value = normal(2, 1, 2, keys, size, seed=1)  # equal to the queries, logits would be large
    kernel = interpreted()

    def loss(attention: Any) -> Any:
        def call(*given: Any) -> Any:
            return jnp.sum(attention(*given, scale=size**-0.5) * gradient)

        return jax.jit(jax.value_and_grad(call, argnums=(0, 1, 2)))

    found, gradients = loss(kernel)(query, key, value)
    expected, plain = loss(attend)(query, key, value)
    assert found == pytest.approx(expected, rel=1e-5)
    for one, other in zip(gradients, plain, strict=True):
        assert jnp.allclose(one, other, atol=5e-6)
    assert kernel.forward_flops == [4 * 2 * queries * keys * size]


@pytest.mark.parametrize("keys", [256, 300])
def test_the_kernel_excludes_padding_of_captions(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has its own; excluded keys and values have no gradient."""
    monkeypatch.setattr(splash_attention, "SHORTEST", 256)
    query, gradient = normal(2, 3, 2, 256, 8)
    key, value = normal(2, 3, 2, keys, 8, seed=1)
    lengths = jnp.asarray([keys, 1, keys // 2])
    kept = (jnp.arange(keys) < lengths[:, None])[:, None, None]

    def gradients(splash: SplashAttention | None) -> Any:
        def call(*given: Any) -> Any:
            with using(splash):
                return jnp.sum(attend(*given, kept, scale=0.3) * gradient)

        return jax.jit(jax.value_and_grad(call, argnums=(0, 1, 2)))(query, key, value)

    kernel = interpreted()
    found, expected = gradients(kernel), gradients(None)
    assert kernel.forward_flops, "the mask is one that the kernel supports"
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(one, other, rtol=1e-5, atol=1e-5)
    assert not found[1][1][1, :, 1:].any() and not found[1][2][1, :, 1:].any()


@pytest.mark.parametrize(("keys", "blocks"), [(640, 1), (640, 5), (512, 2), (500, 2)])
def test_gradients_of_several_blocks_of_keys_are_summed(
    keys: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward kernel takes `blocks` blocks of logits at a time, also with padded keys."""
    monkeypatch.setattr(splash_attention, "LARGEST_BLOCK", 128)
    monkeypatch.setattr(splash_attention, "BLOCKS_OF_KEYS", blocks)
    query, gradient = normal(2, 1, 2, 256, 8)
    key, value = normal(2, 1, 2, keys, 8, seed=1)

    def gradients(attention: Any) -> Any:
        def call(*given: Any) -> Any:
            return jnp.sum(attention(*given, scale=0.3) * gradient)

        return jax.jit(jax.grad(call, argnums=(0, 1, 2)))(query, key, value)

    for one, other in zip(gradients(interpreted()), gradients(attend), strict=True):
        assert jnp.allclose(one, other, atol=1e-5)


def test_selective_recomputation_keeps_the_output_of_the_kernel() -> None:
    """The backward pass of `blocks` runs the forward kernel again."""

    class Block(torch.nn.Module):
        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, query, query)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def _set_gradient_checkpointing(
            self, *, enable: bool, gradient_checkpointing_func: Any
        ) -> None:
            self.call = gradient_checkpointing_func

        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.call(self.block, query))

    (query,) = normal(1, 1, 1, 512, 8)
    calls: dict[str, int] = {}
    for what in ("selective", "blocks"):
        recompute(network := Network(), what)
        call = as_function(network, training=True, splash=interpreted())
        gradient = jax.make_jaxpr(jax.grad(lambda given, call=call: call({}, 0, given).sum()))
        calls[what] = kernels(gradient(query).jaxpr)
    assert calls == {"selective": 2, "blocks": 3}


def test_a_network_uses_the_kernel_for_long_sequences() -> None:
    """Below 512 queries or keys, and with a mask, XLA's own operations are used."""

    class Attention(torch.nn.Module):
        def forward(self, query: Any, other: Any, mask: Any) -> Any:
            return (
                functional.scaled_dot_product_attention(query, query, query),
                functional.scaled_dot_product_attention(query, other, other),
                functional.scaled_dot_product_attention(query, query, query, attn_mask=mask),
            )

    (query,), (other,) = normal(1, 1, 1, 512, 8), normal(1, 1, 1, 77, 8)
    mask = jnp.tri(512, dtype=bool)
    kernel = interpreted()
    call = as_function(Attention(), training=True, splash=kernel)
    found = jax.jit(call)({}, 0, query, other, mask)
    assert kernel.forward_flops == [4 * 512 * 512 * 8]
    tensors = [torch.tensor(jax.device_get(one)) for one in (query, other, mask)]
    for one, expected in zip(found, Attention()(*tensors), strict=True):
        assert jnp.allclose(one, jnp.asarray(expected.numpy()), atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "keys", "dtype", "suits"),
    [
        (4, 512, jnp.bfloat16, True),
        (4, 77, jnp.bfloat16, False),
        (4, 512, jnp.float32, False),
        (3, 512, jnp.bfloat16, False),  # the mesh's devices cannot share three rows
    ],
)
def test_the_kernel_serves_long_half_precision_rows_that_devices_share(
    rows: int, keys: int, dtype: Any, suits: bool
) -> None:
    class TwoChips:
        size = 2

    kernel = SplashAttention(TwoChips())  # type: ignore[arg-type]
    query = jax.ShapeDtypeStruct((rows, 2, 1024, 64), dtype)
    key = jax.ShapeDtypeStruct((rows, 2, keys, 64), dtype)
    assert kernel.suits(query, key) == suits  # type: ignore[arg-type]


def test_a_cpu_uses_no_kernel() -> None:
    mesh = Mesh(1, jax.devices("cpu")[:1])
    assert mesh.splash_attention() is None
    (query,) = normal(1, 1, 1, 512, 8)
    with using(mesh.splash_attention()):
        assert attend(query, query, query, scale=0.3).shape == query.shape
