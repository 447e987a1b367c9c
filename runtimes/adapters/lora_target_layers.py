"""The layers that have a LoRA adapter, by `train.lora.target_modules`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from configs.settings.train_parts import Lora
from runtimes.contract import WrongInput

Layer = Literal["linear", "conv"]
KINDS: dict[int, Layer] = {2: "linear", 4: "conv"}  # by the rank of the weight

TEXT_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
TEXT_LINEAR = (*TEXT_ATTENTION, "fc1", "fc2")


def layers_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Layer]:
    """The linear and convolution layers of a component, given the shapes of its weights."""
    return {
        name.removesuffix(".weight"): KINDS[len(shape)]
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) in KINDS
    }


def choose_layers(
    part: str, layers: Mapping[str, Layer], lora: Lora, attention: Sequence[str] = ()
) -> list[str]:
    """Names of the layers of a component that have an adapter.

    Args:
        part: the component: unet, transformer, text_encoder, ...
        layers: all linear and convolution layers of the component, by name.
        attention: name suffixes of the attention layers in the family's denoiser.

    Raises:
        WrongInput: no layer matches the targets; the message lists available names.
    """
    if part.startswith("text_encoder"):
        all_linear = lora.target_modules in ("linear", "all")
        return _with_suffix(layers, TEXT_LINEAR if all_linear else TEXT_ATTENTION)
    if lora.target_modules == "all":
        return list(layers)
    if lora.target_modules == "linear":
        return [name for name, kind in layers.items() if kind == "linear"]
    wanted = attention if lora.target_modules == "attention" else lora.target_modules
    chosen = _with_suffix(layers, wanted)
    if not chosen:
        suffixes = sorted({suffix_of(name) for name in layers})
        raise WrongInput(
            f"train.lora.target_modules: no layer of the {part} ends in "
            f"{', '.join(wanted)} (there are: {', '.join(suffixes[:12])}, ...)"
        )
    return chosen


def check_unambiguous(part: str, chosen: Sequence[str], adapted: Collection[str]) -> None:
    """Raise WrongInput if PEFT, which matches a target as the suffix of names, adapted others."""
    if odd := set(adapted) ^ set(chosen):
        raise WrongInput(
            f"train.lora.target_modules: {min(odd)} of the {part} is ambiguous: the name of one "
            "layer ends with the name of another"
        )


def _with_suffix(layers: Mapping[str, Layer], suffixes: Sequence[str]) -> list[str]:
    return [n for n in layers if any(n == s or n.endswith(f".{s}") for s in suffixes)]


def suffix_of(layer: str) -> str:
    """The last component of a layer's name, with an index: to_q, to_out.0, net.2."""
    words = layer.split(".")
    return ".".join(words[-2:] if words[-1].isdigit() else words[-1:])
