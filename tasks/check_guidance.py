"""Settings of guidance that a model ignores: whether it does, and their refusal."""

from __future__ import annotations

from pathlib import Path

from configs.settings.evaluate import Evaluate
from configs.settings.generate import Generate
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.families.family import Family
from runtimes.pipeline_folder.folder import read_index, read_part_config


def check_guidance(settings: Evaluate | Generate, model: Path, prefix: str = "") -> None:
    """Raise WrongInput if the model ignores `guidance_scale` or `true_cfg_scale`.

    Args:
        model: pipeline folder.
        prefix: of the names of settings, such as `evaluate.`.
    """
    family = detect_family(model)
    if settings.true_cfg_scale != 1 and not family.guidance_input:
        raise WrongInput(
            f"{prefix}true_cfg_scale: it is for flux, not {family.name}: set guidance_scale"
        )
    given = settings.guidance_scale
    if given is None or given <= 1 or not ignores_guidance(family, model):
        return
    if not family.guidance_input:
        raise WrongInput(f"{prefix}guidance_scale: this model is distilled and ignores it: set 1")
    raise WrongInput(
        f"{prefix}guidance_scale: this model takes no guidance scale: set 1 "
        "(true_cfg_scale is that of classifier-free guidance)"
    )


def ignores_guidance(family: Family, model: Path) -> bool:
    """Whether the pipeline in a folder draws the same with every `guidance_scale`."""
    if family.is_distilled(read_index(model)):
        return True
    config = read_part_config(model, family.denoiser)
    return family.guidance_input and not family.takes_guidance(config)
