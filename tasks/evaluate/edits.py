"""Prompts of an edit model: the pictures that they are about, and the targets of held-out ones.

A reference has a place until it is read, and a local file and its sha256 from then on. Files of
remote and held-out pictures lie in the cache by content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from artifacts.errors import reading
from artifacts.models import cache_folder
from artifacts.records import digest_bytes
from configs.errors import Refused
from configs.settings.evaluate import Edit
from tasks.encode.crop_to_bucket import BadSample, decode

MAX_PIXELS = 2**26  # as `download.max_pixels` is by default
Picture = NDArray[np.uint8]  # [H, W, 3]


@dataclass(frozen=True)
class Prompt:
    """The prompt of a picture. Prompts of equal text and other references are other prompts."""

    text: str
    references: tuple[str, ...] = ()  # local paths or fsspec URLs
    target: str | None = None  # local path of a held-out picture, as the VAE received it
    mask: str | None = None  # local path or fsspec URL; its white pixels may change

    @classmethod
    def of(cls, listed: str | Edit) -> Prompt:
        """A prompt of `evaluate.prompts`."""
        if isinstance(listed, str):
            return cls(listed)
        return cls(listed.prompt, listed.references, mask=listed.mask)

    @property
    def places(self) -> tuple[str, ...]:
        """The places of all its pictures."""
        return (*self.references, *filter(None, (self.target, self.mask)))


def placeholder(number: int) -> Prompt:
    """Stands for the prompt of a held-out sample until the pictures are there."""
    return Prompt(f"caption of held-out sample {number}")


@dataclass(frozen=True)
class PictureFile:
    """A local picture file."""

    path: str
    sha256: str

    def read(self) -> Picture:
        """The picture u8 [H, W, 3]."""
        return np.asarray(decode(Path(self.path).read_bytes(), MAX_PIXELS))


Files = Mapping[str, PictureFile]  # by place


def read_files(prompts: Iterable[Prompt]) -> Files:
    """The pictures of prompts as local files, each place read once.

    Raises:
        Refused: a file cannot be read or decoded.
        Away: its store does not respond.
    """
    places = dict.fromkeys(place for prompt in prompts for place in prompt.places)
    return {place: _read_picture(place) for place in places}


def _read_picture(place: str) -> PictureFile:
    file = local_file(place, "evaluate.prompts")
    try:
        file.read()
    except BadSample as error:
        raise Refused(
            f"evaluate.prompts: {place} is no picture ({error}): name a picture file"
        ) from None
    return file


def local_file(place: str, setting: str) -> PictureFile:
    """A picture file of a setting; one at an fsspec URL is copied to the cache.

    Raises:
        Refused: it cannot be read.
        Away: its store does not respond.
    """
    with reading(f"{setting}: {place}", place), fsspec.open(place, "rb") as stream:
        data = stream.read()
    if os.path.isfile(place):
        return PictureFile(os.path.abspath(place), digest_bytes(data))
    return keep(data)


def keep(data: bytes) -> PictureFile:
    """A picture file in the cache, named by its content."""
    sha256 = digest_bytes(data)
    path = cache_folder() / "pictures" / sha256
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{sha256}.{os.getpid()}.part")
        partial.write_bytes(data)
        partial.replace(path)
    return PictureFile(str(path), sha256)


def keep_picture(picture: Picture) -> PictureFile:
    """As `keep`, of pixels."""
    Image.fromarray(picture).save(stream := BytesIO(), "png")
    return keep(stream.getvalue())


def key_facts(prompts: Sequence[Prompt], files: Files) -> dict[str, Any]:
    """The sha256 of each prompt's pictures, by kind; nothing if no prompt has any."""
    kinds: dict[str, list[Any]] = {
        "references": [[files[place].sha256 for place in p.references] for p in prompts],
        "targets": [p.target and files[p.target].sha256 for p in prompts],
        "masks": [p.mask and files[p.mask].sha256 for p in prompts],
    }
    return {name: digests for name, digests in kinds.items() if any(digests)}


def beside(prompt: Prompt, files: Files) -> dict[str, Picture]:
    """What is shown beside a prompt's pictures: its references in a row, and its target."""
    shown = {}
    if prompt.references:
        shown["reference"] = in_a_row([files[place].read() for place in prompt.references])
    if prompt.target is not None:
        shown["target"] = files[prompt.target].read()
    return shown


def kept_similarity(picture: Picture, reference: Picture, mask: Picture) -> float:
    """1 - the mean absolute difference of pixels outside of a mask, relative to the range.

    Args:
        reference: resized to the size of the picture, as the mask is. Its dark pixels count.
    """
    size = (picture.shape[1], picture.shape[0])
    kept = np.asarray(Image.fromarray(mask).convert("L").resize(size, Image.Resampling.BOX)) < 128
    if not kept.any():
        return 1.0
    before = np.asarray(Image.fromarray(reference).resize(size, Image.Resampling.LANCZOS))
    difference = np.abs(picture[kept].astype(float) - before[kept].astype(float))
    return float(1.0 - difference.mean() / 255.0)


def in_a_row(pictures: Sequence[Picture]) -> Picture:
    """Pictures side by side, at the height of the first."""
    height = len(pictures[0])
    resized = (
        Image.fromarray(p).resize((max(1, round(p.shape[1] * height / len(p))), height))
        if len(p) != height
        else Image.fromarray(p)
        for p in pictures
    )
    return np.concatenate([np.asarray(picture) for picture in resized], axis=1)
