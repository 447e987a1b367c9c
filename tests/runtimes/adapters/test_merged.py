"""Adapters start apart, and merged into a weight they do what they did beside it."""

from typing import Any

import numpy as np
import pytest
import torch

from configs.settings.train_parts import Lora
from runtimes.adapters.lora import Adapter, initial_down
from runtimes.torch_models.network import add_adapters

LAYERS = {"linear": ((7, 5), (3, 5)), "conv": ((7, 5, 3, 3), (2, 5, 8, 8))}


def adapted(kind: str, dora: bool) -> Any:
    """A layer without bias and an adapter of rank 4 and alpha 6, trained a little."""
    torch.manual_seed(0)
    out, inner = LAYERS[kind][0][:2]
    layer: Any = (
        torch.nn.Linear(inner, out, bias=False)
        if kind == "linear"
        else torch.nn.Conv2d(inner, out, 3, bias=False)
    )
    model = torch.nn.Sequential(layer)
    add_adapters("unet", model, Lora(rank=4, alpha=6.0, dora=dora, target_modules=["0"]), 0)
    torch.nn.init.normal_(model[0].lora_B["default"].weight)
    if dora:
        torch.nn.init.uniform_(model[0].lora_magnitude_vector["default"].weight, 0.5, 2.0)
    return model[0]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_merged_weight_does_what_peft_does_beside_it(kind: str, dora: bool) -> None:
    layer = adapted(kind, dora)
    magnitude = layer.lora_magnitude_vector["default"].weight.detach().numpy() if dora else None
    down, up = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    adapter = Adapter(down.detach().numpy(), up.detach().numpy(), magnitude, 6 / 4)
    inputs = torch.randn(LAYERS[kind][1])
    expected = layer(inputs).detach()
    merged = adapter.merged(layer.base_layer.weight.detach().numpy())
    assert merged.shape == LAYERS[kind][0]
    layer.base_layer.weight.data = torch.from_numpy(merged)
    torch.testing.assert_close(layer.base_layer(inputs).detach(), expected)


def test_layers_of_one_shape_start_apart() -> None:
    names = [f"unet.{n}.lora_A.weight" for n in ("to_q", "to_k", "to_v")]
    started = [initial_down(0, name, (4, 32)) for name in names]
    assert len({array.tobytes() for array in started}) == 3
    np.testing.assert_array_equal(started[0], initial_down(0, names[0], (4, 32)))
