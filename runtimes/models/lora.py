"""Low-rank adapters on diffusers and transformers models, through PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from configs.training import Lora
from runtimes.adapters.lora import (
    ADAPTER,
    Adapter,
    Layer,
    alpha,
    choose_layers,
    initial_down,
    stored_name,
)
from runtimes.contract import WrongInput


def add_adapters(
    part: str, model: torch.nn.Module, lora: Lora, seed: int, attention: Sequence[str] = ()
) -> None:
    """Freeze a part of the pipeline and put fresh float32 adapters beside its layers.

    They change nothing yet: `up` is zero, and DoRA's magnitudes are the lengths that there are.

    Args:
        attention: ends of the names of attention's layers (families/family.py).

    Raises:
        WrongInput: the targets name no layer.
    """
    from peft import LoraConfig, inject_adapter_in_model  # seconds to import

    chosen = choose_layers(part, _layers(model), lora, attention)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha(lora),  # type: ignore[arg-type]  # takes any number
        lora_dropout=lora.dropout,
        target_modules=chosen,
        use_dora=lora.dora,
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # what PEFT draws is drawn again below
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    adapted = dict(_adapted(model))
    if adapted.keys() != set(chosen):  # a name that is the end of another's
        odd = min(adapted.keys() ^ set(chosen))
        raise WrongInput(
            f"train.lora.target_modules: {odd} of the {part} cannot be told from others"
        )
    for name, layer in adapted.items():
        _start(f"{part}.{stored_name(part, name)}", layer, seed)


@torch.no_grad()
def lay_over(part: str, model: torch.nn.Module, adapters: Mapping[str, Adapter]) -> None:
    """Merge adapters into the weights of a part, in float32.

    Raises:
        WrongInput: they are for layers that it does not have, or of another size.
    """
    layers = {stored_name(part, n): m for n, m in model.named_modules() if _kind(m)}
    for name, adapter in adapters.items():
        if name not in layers:
            raise WrongInput(f"the adapters are for another model: the {part} here has no {name}")
        weight: torch.Tensor = layers[name].weight
        try:
            merged = adapter.merged(weight.float().numpy())
        except ValueError:
            raise WrongInput(f"the adapters are for another model: {name} differs") from None
        weight.copy_(torch.from_numpy(merged))


def _layers(model: torch.nn.Module) -> dict[str, Layer]:
    kinds = ((name, _kind(module)) for name, module in model.named_modules())
    return {name: kind for name, kind in kinds if kind is not None}


def _kind(module: torch.nn.Module) -> Layer | None:
    if isinstance(module, torch.nn.Linear):
        return "linear"
    return "conv" if isinstance(module, torch.nn.Conv2d) else None


def _adapted(model: torch.nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]


@torch.no_grad()
def _start(name: str, layer: Any, seed: int) -> None:
    """Give one layer's adapter its first values, in float32 whatever the base is kept in."""
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    down.weight.data = torch.from_numpy(initial_down(seed, name, down.weight.shape))
    up.weight.data = torch.zeros_like(up.weight, dtype=torch.float32)
    if ADAPTER in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight
        lengths = torch.linalg.vector_norm(layer.weight.float().flatten(1), dim=1)
        magnitude.data = lengths.view(magnitude.shape)
