"""Weight files of a pipeline component, and a check of their shapes against its config.

For runtimes without PyTorch: this module imports no framework.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from runtimes.contract import WrongInput
from runtimes.pipeline_folder.read_configs import read_config

DENOISER_WEIGHTS = "diffusion_pytorch_model"  # diffusers' name
TEXT_WEIGHTS = "model"  # transformers'
#: Variants that are read where a part has no plain weights, the preferred one first.
HALF_PRECISION = ("bf16", "fp16")
_PIECE = r"(?:-\d+-of-\d+)?"
VARIANT = re.compile(rf"[^.]+?{_PIECE}(?:\.(?P<variant>[^.]+?){_PIECE})?\.safetensors")
_SHARD_OF = re.compile(r"-\d+-of-(\d+)")
_POINTER = b"version https://git-lfs."
FILE_NAME = re.compile(r"(?!\.{1,2}$)[^/\\\0]+")
WeightShapes = Mapping[str, tuple[int, ...]]  # weight name -> shape


def weight_variant(folder: Path) -> str | None:
    """The `variant` argument of from_pretrained for a component's folder.

    None if there are weights without a variant. Names with a variant: `model.fp16.safetensors`;
    with shards `model.fp16-00001-of-00002.safetensors`, or the older form
    `model-00001-of-00002.fp16.safetensors`.
    """
    found = [VARIANT.fullmatch(path.name) for path in folder.glob("*.safetensors")]
    variants = {match["variant"] for match in found if match}
    return None if None in variants else min(variants, default=None)


def pipeline_variant(folder: Path) -> str | None:
    """The `variant` argument of from_pretrained for a pipeline's folder."""
    parts = [part for part in sorted(folder.iterdir()) if part.is_dir()]
    return next((found for part in parts if (found := weight_variant(part)) is not None), None)


def weight_files(folder: Path, stem: str = DENOISER_WEIGHTS) -> list[Path]:
    """The weight files of a component, in full precision if available, else in half.

    Args:
        folder: the component's folder.
        stem: file name without extension and variant.

    Raises:
        WrongInput: there are no weight files.
    """
    for variant in ("", *(f".{name}" for name in HALF_PRECISION)):
        whole = folder / f"{stem}{variant}.safetensors"
        index = folder / f"{stem}.safetensors.index{variant}.json"
        if whole.exists():
            return [whole]
        if index.exists():
            names = _shard_names(index)
            return [folder / name for name in names]
    raise WrongInput(
        f"{folder / stem}.safetensors is missing: the weights of the part are required"
    )


def stored_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a part's weights: the plain ones, else those in half precision.

    Only the standard names of diffusers and transformers count; other files are other copies.
    """
    for variant in ("", *(rf"\.{name}" for name in HALF_PRECISION)):
        name = re.compile(
            rf"(diffusion_pytorch_model|model)(-\d+-of-\d+)?{variant}(-\d+-of-\d+)?\.safetensors"
        )
        found = [p for p in sorted(folder.glob("*.safetensors")) if name.fullmatch(p.name)]
        if found:
            return found
    return []


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a part's weights, of `stored_weight_files`; only headers are read.

    Raises:
        WrongInput: a file is damaged, or a shard is missing.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    for path in _without_gaps(stored_weight_files(folder)):
        try:
            with safe_open(path, framework="np") as stream:
                for name in stream.keys():  # noqa: SIM118 (not a dict)
                    found[name] = tuple(stream.get_slice(name).get_shape())
        except SafetensorError as error:
            if _is_pointer(path):
                raise WrongInput(
                    f"{path} is a pointer of Git LFS, no weights: run `git lfs pull` in its folder"
                ) from None
            raise WrongInput(f"{path} is no valid safetensors file: {error}") from None
    return found


def _without_gaps(paths: list[Path]) -> list[Path]:
    """The same files. Raises WrongInput if one of the shards that their names count is missing."""
    counts = [match for path in paths if (match := _SHARD_OF.search(path.name))]
    if counts and len(counts) == len(paths) < (total := int(counts[0][1])):
        raise WrongInput(
            f"{paths[0].parent}: only {len(paths)} of {total} files of weights are there: fetch "
            "the model again"
        )
    return paths


def _is_pointer(path: Path) -> bool:
    """Whether a file is what `git clone` leaves in place of a large file without Git LFS."""
    with path.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


def _shard_names(index: Path) -> list[str]:
    """The files that an index of weights names. Raises WrongInput if one is not beside it."""
    named = read_config(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise WrongInput(f"{index}: weight_map is no object of file names: the model is damaged")
    for name in named.values():
        if not (isinstance(name, str) and FILE_NAME.fullmatch(name)):
            raise WrongInput(f"{index}: {name!r} is no file beside it: the model may be hostile")
    return sorted(set(named.values()))


def check_fit(path: Path, wanted: WeightShapes, given: WeightShapes) -> None:
    """Raise WrongInput if names or shapes in a file differ from those of the config.

    Args:
        path: for the message.
        wanted: shapes by the config.
        given: shapes in the file.
    """
    for what, names in (
        ("lacks", wanted.keys() - given.keys()),
        ("has, and its config knows nothing of,", given.keys() - wanted.keys()),
    ):
        if names:
            raise WrongInput(f"{path} {what} {len(names)} weights, such as {min(names)}")
    for name, shape in wanted.items():
        if given[name] != shape:
            raise WrongInput(f"{path}: {name} has shape {given[name]}, its config requires {shape}")
