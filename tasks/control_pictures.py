"""Control pictures that samples and evaluations follow: those of held-out pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from artifacts.image_shards import Sample
from artifacts.models import cache_folder
from artifacts.records import digest_bytes, write_atomic
from artifacts.store import Artifact
from configs.errors import Failed
from configs.settings.recipe import Recipe
from tasks.encode import crop_to_bucket
from tasks.encode.crop_to_bucket import TransformSettings, bucket_sizes, is_holdout
from tasks.panels import to_png
from tasks.pictures import Pictures, images_of, sources_of

#: Pictures among which a prompt finds the control picture of its caption.
MOST = 256
#: Tars of a source in which they are searched: the whole set would be read for a split of less than
#: MOST. By the default 1,000 rows, 16 hold 800 out at 5% and 160 at 1%, more than most prompts.
MOST_TARS = 16


@dataclass(frozen=True)
class ControlPictures:
    """Control pictures (PNG, as encoded), by the captions of their pictures."""

    pictures: Sequence[bytes]  # all, in their order
    by_caption: Mapping[str, Sequence[bytes]]

    @classmethod
    def read(
        cls, by_source: Mapping[str, Pictures], recipe: Recipe, factor: int
    ) -> ControlPictures:
        """Of the first held-out pictures, or without any of the first training pictures.

        No more tars are read than they need, and the first `MOST_TARS` of a source at most.

        Args:
            by_source: source of the mixture -> its pictures, `Pictures.by_source`.
            factor: sides are multiples of this many pixels.

        Raises:
            Failed: no picture has a control picture.
        """
        found: dict[bool, list[tuple[Sample, bytes]]] = {True: [], False: []}
        for name, pictures in by_source.items():
            if name and name not in recipe.learnt:
                continue
            settings = TransformSettings.of(recipe.by_source[name])
            buckets = bucket_sizes(settings, factor)
            wanted = found[settings.holdout > 0]
            for shard in pictures.shards[:MOST_TARS]:
                if len(wanted) == MOST:
                    break
                for sample in shard.read():
                    split = found[is_holdout(sample.source_sha256, settings.holdout)]
                    if sample.control is not None and len(split) < MOST:
                        control = _as_encoded(sample, settings, buckets)
                        split += [] if control is None else [(sample, control)]
        chosen = found[True] or found[False]
        if not chosen:
            raise Failed("no picture of the first tars has a control picture: see source.control")
        by_caption = defaultdict[str, list[bytes]](list)
        for sample, control in chosen:
            for caption in sample.captions:
                by_caption[caption].append(control)
        return cls([control for _, control in chosen], by_caption)

    def of(self, prompts: Sequence[str]) -> list[bytes]:
        """One for each prompt: in turn, those with this caption, or without any all of them."""
        turns = defaultdict[str, int](int)
        chosen = []
        for prompt in prompts:
            key = prompt if prompt in self.by_caption else ""
            among = self.by_caption[prompt] if key else self.pictures
            chosen.append(among[turns[key] % len(among)])
            turns[key] += 1
        return chosen


def sources_with_pictures(latents: Artifact) -> dict[str, Pictures]:
    """Source of the mixture -> the pictures of its latents. Raises Failed if they were deleted."""
    return {n: Pictures.of(part, images_of(part)) for n, part in sources_of(latents).items()}


def local_files(pictures: Sequence[bytes]) -> tuple[str, ...]:
    """Paths of pictures in the cache, where they have their sha256 as names."""
    folder = cache_folder() / "control"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for data in pictures:
        path = folder / f"{digest_bytes(data)}.png"
        if not path.exists():
            write_atomic(LocalFileSystem(), str(path), data)
        paths.append(str(path))
    return tuple(paths)


def digests(paths: Sequence[str]) -> list[str]:
    """sha256 of local files."""
    by_path = {path: digest_bytes(Path(path).read_bytes()) for path in dict.fromkeys(paths)}
    return [by_path[path] for path in paths]


def _as_encoded(
    sample: Sample, settings: TransformSettings, buckets: list[crop_to_bucket.Size]
) -> bytes | None:
    """The control picture as the encode stage crops it; None for a bad sample."""
    assert sample.control is not None
    try:
        image = crop_to_bucket.decode(sample.image, settings.max_pixels)
        control = Image.open(BytesIO(sample.control))
        about = (image, sample.source_sha256, sample.meta, settings, buckets)
        seen = crop_to_bucket.transform(*about, control=control)[0]
    except crop_to_bucket.BadSample:
        return None
    assert seen.control is not None
    return to_png(Image.fromarray(seen.control.transpose(1, 2, 0)))
