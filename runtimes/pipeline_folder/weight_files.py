"""Which files hold the weights of a part of a pipeline, and whether they are those of its config.

For runtimes that read them with a framework of their own; nothing here needs one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from runtimes.contract import WrongInput
from runtimes.pipeline_folder.describe import read_config

DENOISER_WEIGHTS = "diffusion_pytorch_model"  # diffusers' name
TEXT_WEIGHTS = "model"  # transformers'
_PIECE = r"(?:-\d+-of-\d+)?"
VARIANT = re.compile(rf"[^.]+?{_PIECE}(?:\.(?P<variant>[^.]+?){_PIECE})?\.safetensors")
Shapes = Mapping[str, tuple[int, ...]]  # by the weight's name


def weight_variant(folder: Path) -> str | None:
    """The variant that must be asked for to load a part of a pipeline from `folder`.

    None, unless there are weights of variants only: `model.fp16.safetensors`, or in pieces
    `model.fp16-00001-of-00002.safetensors` (older: `model-00001-of-00002.fp16.safetensors`).
    """
    found = [VARIANT.fullmatch(path.name) for path in folder.glob("*.safetensors")]
    variants = {match["variant"] for match in found if match}
    return None if None in variants else min(variants, default=None)


def weight_files(folder: Path, stem: str = DENOISER_WEIGHTS) -> list[Path]:
    """The files that hold a part's weights, in full precision if there are such.

    Raises:
        WrongInput: there are none.
    """
    for variant in ("", ".fp16"):
        whole = folder / f"{stem}{variant}.safetensors"
        index = folder / f"{stem}.safetensors.index{variant}.json"
        if whole.exists():
            return [whole]
        if index.exists():
            names = sorted(set(read_config(index)["weight_map"].values()))
            return [folder / name for name in names]
    raise WrongInput(f"{folder / stem}.safetensors is missing: the weights of the part are needed")


def check_fit(path: Path, wanted: Shapes, given: Shapes) -> None:
    """Raise WrongInput if the weights in a file are not those that a config asks for."""
    for what, names in (
        ("lacks", wanted.keys() - given.keys()),
        ("has, and its config knows nothing of,", given.keys() - wanted.keys()),
    ):
        if names:
            raise WrongInput(f"{path} {what} {len(names)} weights, such as {min(names)}")
    for name, there in wanted.items():
        if given[name] != there:
            raise WrongInput(f"{path}: {name} has shape {given[name]}, its config says {there}")
