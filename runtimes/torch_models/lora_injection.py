"""Low-rank adapters on diffusers and transformers models, through PEFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from configs.settings.train_parts import Lora
from runtimes.adapters.initialise_lora import alpha, initial_down
from runtimes.adapters.lora_target_layers import Layer, check_unambiguous, choose_layers
from runtimes.adapters.merge_lora import Adapter, merged_weights
from runtimes.adapters.weight_names import ADAPTER, stored_name


def add_adapters(
    part: str,
    model: torch.nn.Module,
    lora: Lora,
    seed: int,
    attention: Sequence[str] = (),
    read: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
) -> None:
    """Freeze a component and add float32 LoRA adapters (arXiv 2106.09685) to its layers.

    The adapted model initially computes the same as the base: `up` is zero, and DoRA's magnitudes
    (arXiv 2402.09353) are the norms of the base weights.

    Args:
        part: component name, such as `unet`.
        model: the component, changed in place.
        lora: rank, alpha, dropout, targets and DoRA.
        seed: initializes `down`.
        attention: name suffixes of attention layers (families/family.py).
        read: values of a base weight, which may be on `meta`.

    Raises:
        WrongInput: the targets match no layer, or one target's name is a suffix of another's.
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
    with torch.random.fork_rng(devices=[]):  # PEFT's initialization is replaced below
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    adapted = dict(_adapted(model))
    check_unambiguous(part, chosen, adapted)
    for name, layer in adapted.items():
        # PEFT would cast activations to float32, which autocast casts back to the compute dtype.
        layer.cast_input_dtype_enabled = False
        _initialize(f"{part}.{stored_name(part, name)}", layer, seed, read)


@torch.no_grad()
def merge_adapters(part: str, model: torch.nn.Module, adapters: Mapping[str, Adapter]) -> None:
    """Merge adapters into the weights of a component; the sum is computed in float32.

    Args:
        part: component name, such as `unet`.
        model: the component, changed in place.
        adapters: stored layer name to adapter.

    Raises:
        WrongInput: the component lacks an adapted layer, or the layer has another shape.
    """
    modules = ((stored_name(part, n), m) for n, m in model.named_modules() if _kind(m))
    weights: dict[str, Any] = {name: module.weight for name, module in modules}
    for name, merged in merged_weights(part, adapters, weights, lambda w: w.float().numpy()):
        weights[name].copy_(torch.from_numpy(merged))


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
def _initialize(
    name: str, layer: Any, seed: int, read: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Initialize one layer's adapter in float32, whatever the dtype of the base weights is."""
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    initial = torch.from_numpy(initial_down(seed, name, down.weight.shape))
    down.weight = torch.nn.Parameter(initial)
    up.weight = torch.nn.Parameter(torch.zeros(up.weight.shape))
    if ADAPTER in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[ADAPTER]
        lengths = torch.linalg.vector_norm(read(layer.weight).float().flatten(1), dim=1)
        magnitude.weight = torch.nn.Parameter(lengths.view(magnitude.weight.shape))
