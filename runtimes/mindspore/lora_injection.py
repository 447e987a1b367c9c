"""Low-rank adapters on mindone's models, through mindone's PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindone.peft import LoraConfig, inject_adapter_in_model
from mindone.peft.tuners.lora import LoraLayer
from mindspore import mint, nn

from configs.settings.train_parts import Lora
from runtimes.adapters.initialise_lora import alpha, initial_down
from runtimes.adapters.lora_target_layers import Layer, check_unambiguous, choose_layers
from runtimes.adapters.merge_lora import Adapter, merged_weights
from runtimes.adapters.weight_names import ADAPTER, state_name
from runtimes.mindspore.load_diffusers_weights import named_weights, set_parameter

A, B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def add_adapters(
    part: str, model: nn.Cell, lora: Lora, seed: int, attention: Sequence[str] = ()
) -> None:
    """Freeze a component and add float32 LoRA adapters (arXiv 2106.09685) to its layers.

    The adapted model initially computes the same as the base: `up` is zero.

    Args:
        part: component name, such as `unet`.
        model: the component, changed in place.
        lora: rank, alpha, dropout and targets.
        seed: initializes `down`.
        attention: name suffixes of attention layers (families/family.py).

    Raises:
        WrongInput: the targets match no layer, or one target's name is a suffix of another's.
    """
    chosen = choose_layers(part, _layers(model), lora, attention)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha(lora),
        lora_dropout=lora.dropout,
        target_modules=chosen,
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    adapted = {name for name, cell in model.cells_and_names() if isinstance(cell, LoraLayer)}
    check_unambiguous(part, chosen, adapted)
    for name, parameter in model.parameters_and_names():
        parameter.requires_grad = name.endswith((A, B))
        if name.endswith(A):
            stored = state_name(part, name.removesuffix(A))
            set_parameter(parameter, initial_down(seed, stored, parameter.shape))
        elif name.endswith(B):
            set_parameter(parameter, parameter.asnumpy() * 0)


def merge_adapters(part: str, model: nn.Cell, adapters: Mapping[str, Adapter]) -> None:
    """Merge adapters into the float32 weights of a component.

    Args:
        part: component name, such as `unet`.
        model: the component, changed in place.
        adapters: stored layer name to adapter.

    Raises:
        WrongInput: the component lacks an adapted layer, or the layer has another shape.
    """
    parameters = named_weights(model)
    weights = {name: parameters[f"{name}.weight"] for name in _layers(model)}
    for name, merged in merged_weights(part, adapters, weights, lambda w: w.asnumpy()):
        set_parameter(weights[name], merged)


def _layers(model: nn.Cell) -> dict[str, Layer]:
    kinds = ((name, _kind(cell)) for name, cell in model.cells_and_names())
    return {name: kind for name, kind in kinds if kind is not None}


def _kind(cell: nn.Cell) -> Layer | None:
    if isinstance(cell, (mint.nn.Linear, nn.Dense)):
        return "linear"
    return "conv" if isinstance(cell, (mint.nn.Conv2d, nn.Conv2d)) else None
