"""Names of weights: a library's, those of hub files, and those in State."""

from __future__ import annotations

#: PEFT's name of the adapter; names in State omit it.
ADAPTER = "default"


def stored_name(part: str, name: str) -> str:
    """The name of a weight or layer of a component, as in hub files and in State.

    transformers 5 drops the prefix `text_model.` of CLIP's weights; files keep it.
    """
    if not part.startswith("text_encoder") or name.startswith(("text_model.", "text_projection")):
        return name
    return f"text_model.{name}"


def state_name(part: str, name: str) -> str:
    """A parameter's name in State: component and stored name, without PEFT's adapter name."""
    name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
    return f"{part}.{stored_name(part, name.replace(f'.{ADAPTER}.', '.'))}"
