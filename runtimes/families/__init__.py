"""The table of model families. A family is one file, and a row here or a plug-in's entry point.

A plug-in is an installed package with an entry point in the group `kilnworks.families`, which must
load to an instance of `family.Family`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from artifacts.records import parse_json
from configs.errors import Refused
from runtimes.families.family import Captioned as Captioned
from runtimes.families.family import Conditioning as Conditioning
from runtimes.families.family import Family as Family
from runtimes.families.family import TextEncoder as TextEncoder
from runtimes.families.flux import Flux
from runtimes.families.flux2 import Flux2
from runtimes.families.flux_kontext import FluxKontext
from runtimes.families.qwen_image import QwenImage
from runtimes.families.qwen_image_edit import QwenImageEdit
from runtimes.families.sd import SD
from runtimes.families.sd3 import SD3
from runtimes.families.sdxl import SDXL
from runtimes.families.z_image import ZImage

_EDIT = (FluxKontext(), QwenImageEdit())
_OWN = (SD(), SDXL(), SD3(), Flux(), Flux2(), ZImage(), QwenImage(), *_EDIT)
FAMILIES: dict[str, Family] = {family.name: family for family in _OWN}
#: Entry-point group of plug-ins.
PLUG_INS = "kilnworks.families"


def all_families() -> dict[str, Family]:
    """All families, of this project and of plug-ins, by name."""
    return FAMILIES | _plugged_in()


def family_named(name: str) -> Family:
    """The family of that name. Raises Refused if it is unknown."""
    family = FAMILIES.get(name) or _plugged_in().get(name)  # the search for plug-ins is slow
    if family is None:
        raise Refused(f"model family {name!r} is unknown (known: {', '.join(all_families())})")
    return family


def detect_family(folder: Path) -> tuple[Family, dict[str, Any]]:
    """The family of the pipeline in `folder`, by its model_index.json, and that file's content.

    Raises:
        Refused: model_index.json is missing or invalid, a part leads out of the folder, or the
            class is of no known family.
    """
    index = folder / "model_index.json"
    try:
        fields = parse_json(index.read_text(encoding="utf-8"))
        pipeline = fields["_class_name"]
    except FileNotFoundError:
        raise Refused(f"{index} is missing: a diffusers pipeline folder is needed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{index} cannot be read: {error}") from None
    for name, spec in fields.items():  # a part is a folder beside; diffusers' are identifiers
        if isinstance(spec, list) and not name.isidentifier():
            raise Refused(f"{index}: {name!r} is no name of a part: the model may be hostile")
    for families in (FAMILIES, all_families()):
        for family in families.values():
            if pipeline in family.pipelines:
                return family, fields
    known = ", ".join(name for family in all_families().values() for name in family.pipelines)
    raise Refused(f"{index}: {pipeline} is not of a family known here (known: {known})")


def families_with_references() -> str:
    """The families that read references, in words."""
    named = {name: family.max_references for name, family in all_families().items()}
    having = [f"{name} (up to {most})" for name, most in named.items() if most]
    return f"those that read some: {', '.join(having)}" if having else "no family here reads any"


def denoiser_classes() -> tuple[str, ...]:
    """diffusers' denoiser classes of all families."""
    return tuple(dict.fromkeys(family.denoiser_class for family in all_families().values()))


def repeated_blocks() -> tuple[str, ...]:
    """Classes of the models' repeated blocks: the units of FSDP, compilation and checkpointing."""
    blocks = [block for family in all_families().values() for block in family.blocks]
    return tuple(dict.fromkeys([*blocks, "CLIPEncoderLayer"]))


@cache
def _plugged_in() -> dict[str, Family]:
    families = [point.load() for point in entry_points(group=PLUG_INS)]
    return {family.name: family for family in families}
