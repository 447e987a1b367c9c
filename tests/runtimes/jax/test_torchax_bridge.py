"""What we say in place of torchax is what PyTorch says."""

from collections.abc import Callable
from typing import Any

import chips
import numpy as np
import pytest
import torch
from torch.nn import functional

jax = chips.importorskip("jax")
from runtimes.jax.torchax_bridge import as_function, recompute  # noqa: E402

pytestmark = pytest.mark.slow


class Calls(torch.nn.Module):
    """One operation on its inputs."""

    def __init__(self, operation: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.operation(*inputs)


def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


MASK = np.tri(6, 6, dtype=bool)
OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = {
    "group_norm": (
        lambda x, w, b: functional.group_norm(x, 4, w, b, 1e-6),
        (normal(2, 8, 3, 5) + 3, normal(8), normal(8)),
    ),
    "layer_norm": (
        lambda x, w: functional.layer_norm(x, (7,), w),
        (normal(2, 3, 7) * 9, normal(7)),
    ),
    "twice as large": (
        lambda x: functional.interpolate(x, scale_factor=2.0, mode="nearest"),
        (normal(2, 3, 4, 5),),
    ),
    "another size": (
        lambda x: functional.interpolate(x, size=(7, 6), mode="nearest"),
        (normal(2, 3, 4, 5),),
    ),
    "attention": (
        functional.scaled_dot_product_attention,
        (normal(2, 3, 6, 4), normal(2, 3, 6, 4), normal(2, 3, 6, 5)),
    ),
    "masked attention": (
        lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3),
        (normal(2, 3, 6, 4), normal(2, 3, 6, 4), normal(2, 3, 6, 5), MASK),
    ),
    "causal attention": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        (normal(2, 3, 6, 4), normal(2, 3, 6, 4), normal(2, 3, 6, 5)),
    ),
}


@pytest.fixture(scope="module")
def by_jax() -> dict[str, Any]:
    """Of each operation, the gradient of its squares by its first input, and what it gives."""

    def taken(name: str, first: Any) -> Any:
        operation, inputs = OPERATIONS[name]
        call = as_function(Calls(operation), training=True)

        def loss(first: Any) -> Any:
            found = call({}, np.uint32(0), first, *map(jax.numpy.asarray, inputs[1:]))
            return (found**2).sum(), found

        return jax.grad(loss, has_aux=True)(first)

    firsts = {name: inputs[0] for name, (_, inputs) in OPERATIONS.items()}
    # One program: each that is compiled takes its time.
    together = jax.jit(lambda given: {name: taken(name, first) for name, first in given.items()})
    return dict(together(firsts))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_and_its_gradient_are_torch_s(name: str, by_jax: dict[str, Any]) -> None:
    operation, inputs = OPERATIONS[name]
    tensors = [torch.from_numpy(array) for array in inputs]
    tensors[0].requires_grad_(True)
    expected = operation(*tensors)
    expected.square().sum().backward()
    gradient, found = by_jax[name]
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, tensors[0].grad, rtol=1e-4, atol=2e-4)


def test_what_is_dropped_depends_on_the_seed_alone() -> None:
    call = jax.jit(as_function(torch.nn.Dropout(0.5), training=True))
    inputs = np.ones((64,), np.float32)
    first, again, other = (np.asarray(call({}, np.uint32(seed), inputs)) for seed in (1, 1, 2))
    np.testing.assert_equal(first, again)
    assert (first != other).any()
    assert set(first.tolist()) == {0.0, 2.0}


class Block(torch.nn.Module):
    """Two layers with weights, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(self.into(inputs))[:, None]
        return inputs + self.out(functional.scaled_dot_product_attention(inner, inner, inner)[:, 0])


class Blocks(torch.nn.Module):
    """Blocks that are called as diffusers' models call theirs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self._call = lambda block, *given: block(*given)

    def _set_gradient_checkpointing(
        self, *, enable: bool, gradient_checkpointing_func: Any
    ) -> None:
        self._call = gradient_checkpointing_func

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = self._call(block, inputs)
        return inputs


@pytest.mark.extended
def test_selective_recomputation_computes_attention_again_but_no_product_with_weights() -> None:
    products: dict[str, int] = {}
    gradients: dict[str, Any] = {}
    inputs = jax.numpy.asarray(normal(2, 6, 4))
    for what in ("none", "selective", "blocks"):
        module = Blocks()
        if what != "none":
            recompute(module, what)
        call = as_function(module, training=True)
        arrays = {name: weight.detach().numpy() for name, weight in module.named_parameters()}
        gradient = jax.grad(lambda given, call=call: (call(given, 0, inputs) ** 2).sum())
        products[what] = str(jax.make_jaxpr(gradient)(arrays)).count("dot_general")
        gradients[what] = gradient(arrays)
    assert products["none"] == 2 * 3 * 4 - 1, "the first product's input requires no gradient"
    assert products["selective"] == products["none"] + 2 * 2
    assert products["blocks"] == products["none"] + 2 * 3, "the last product's output is not used"
    for name, expected in gradients["none"].items():
        np.testing.assert_allclose(gradients["selective"][name], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradients["blocks"][name], expected, rtol=1e-5, atol=1e-6)
