"""The trained components of a GenerateJob: denoiser, text encoders and scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtimes.adapters.lora_file_format import read_adapters
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.objective.scheduler_config import read_scheduler_config
from runtimes.process.job import Drawing

#: Loads one component: (name, folder, adapters to merge by layer name) -> model.
Load = Callable[[str, Path, Mapping[str, Any]], Any]


def load_trained_components(drawing: Drawing, model: Path, load: Load) -> dict[str, Any]:
    """Load the denoiser of a drawing and the text encoders that were trained with it.

    Args:
        drawing: folders of trained components, and the LoRA file if there is one.
        model: folder of the base pipeline, which supplies every untrained component.
        load: loads one component and merges its adapters.

    Returns:
        Component name, such as `unet` or `text_encoder`, to model.

    Raises:
        WrongInput: the adapters were trained for another architecture.
    """
    family = detect_family(model)
    adapters = {} if drawing.lora is None else read_adapters(Path(drawing.lora))
    known = (family.denoiser, *family.clip_encoders)
    if strange := adapters.keys() - set(known):
        raise WrongInput(f"{drawing.lora} is for another model: it has adapters of {min(strange)}")
    return {
        name: load(name, Path(drawing.parts.get(name, model / name)), adapters.get(name, {}))
        for name in known
        if name == family.denoiser or name in adapters.keys() | drawing.parts.keys()
    }


def load_trained_scheduler(drawing: Drawing, make: Callable[[dict[str, Any]], Any]) -> Any:
    """The scheduler that a drawing replaces, or None where it keeps the pipeline's scheduler.

    A drawing has its own scheduler when training changed the noise schedule or prediction type.

    Args:
        make: constructs a scheduler from its diffusers config.
    """
    if "scheduler" not in drawing.parts:
        return None
    return make(read_scheduler_config(Path(drawing.parts["scheduler"])))
