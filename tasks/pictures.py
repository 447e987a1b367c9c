"""The pictures of a run: the rows of image shards that a selection keeps, with their captions.

Encoding, the references of an evaluation and the search for copies of held-out pictures read image
shards through `Pictures` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.image_shards import Sample, read_tar
from artifacts.records import digest_json
from artifacts.store import Artifact
from configs.errors import Failed
from tasks.encode.crop_to_bucket import is_holdout


def hex_of_rows(mask: NDArray[np.bool_]) -> str:
    """The true rows of a mask [N], as the bits of a number in hex, from the lowest."""
    return f"{int.from_bytes(np.packbits(mask, bitorder='little').tobytes(), 'little'):x}"


def rows_of_hex(rows: str | None, count: int) -> NDArray[np.bool_]:
    """The mask [count] of `hex_of_rows`; None: all rows."""
    if rows is None:
        return np.ones(count, bool)
    data = int(rows, 16).to_bytes(-(-count // 8), "little")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little").astype(bool)


@dataclass(frozen=True)
class PictureShard:
    """Pictures of an image shard, in the order of its tar; its fields are JSON."""

    path: str  # of the tar, in the images artifact
    tar: str  # URL of the tar
    sha256: str  # of the tar
    samples: int  # of the tar
    rows: str | None = None  # those of these pictures, as `hex_of_rows`; None: all
    captions: dict[str, Any] | None = None  # url, sha256 and prompts of their table; None: none

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Whether each sample of the tar is one of these pictures: bool [samples]."""
        return rows_of_hex(self.rows, self.samples)

    def with_rows(self, mask: NDArray[np.bool_]) -> PictureShard:
        """Other pictures of the same tar."""
        return replace(self, rows=None if mask.all() else hex_of_rows(mask))

    def read(self, rule: Mapping[str, Any] | None = None, holdout: float = 0.0) -> Iterator[Sample]:
        """The pictures, with the source's captions or, by a rule, those that are trained on.

        A held-out picture keeps the source's captions, if it has some: captioners then compare by
        one measure.

        Args:
            rule: fields of tasks.caption.tables.Rule.
            holdout: fraction of the pictures in the held-out split.

        Raises:
            Damaged: tar or table has another sha256.
        """
        mask = self.mask
        samples = enumerate(read_tar(self.tar, self.sha256))
        chosen = ((row, sample) for row, sample in samples if self.rows is None or mask[row])
        if rule is None or self.captions is None:
            yield from (sample for _, sample in chosen)
            return
        # Workers in other environments may lack Arrow.
        from tasks.caption.tables import CaptionedSample, Rule, captions_to_train, read_captions

        table = read_captions(self.captions["url"], self.captions["sha256"])
        of_model = Rule(**rule)
        of_source = replace(of_model, on_bad="source")
        for row, sample in chosen:
            final = captions_to_train(table[row], sample.captions, of_model)
            if is_holdout(table[row].id, holdout) and any(sample.captions):
                final = captions_to_train(CaptionedSample(b"", {}), sample.captions, of_source)
            if final is not None:
                yield replace(sample, captions=final)


@dataclass(frozen=True)
class _Entries:
    """Entries of a selection, sorted by tar."""

    rows: NDArray[np.int32]  # [N], in the tar
    kept: NDArray[np.bool_]  # [N]
    ids: Any  # [N] of binary(32), Arrow's
    bounds: Mapping[str, tuple[int, int]]  # sha256 of a tar -> its first entry, and the end

    @classmethod
    def read(cls, artifact: Artifact) -> _Entries:
        import pyarrow.parquet as pq

        data = BytesIO(artifact.read("selection.parquet"))
        names = ["tar", "row", "kept", "id"]
        table = pq.read_table(data, columns=names, read_dictionary=["tar"], pre_buffer=False)
        bounds = {}
        start = 0
        for tar in table["tar"].value_counts().to_pylist():  # in the order of the entries
            bounds[tar["values"]] = (start, start + tar["counts"])
            start += tar["counts"]
        return cls(table["row"].to_numpy(), table["kept"].to_numpy(), table["id"], bounds)

    def of(self, tar: str) -> _Entries:
        start, stop = self.bounds[tar]
        ids = self.ids.slice(start, stop - start)
        return _Entries(self.rows[start:stop], self.kept[start:stop], ids, {})


@dataclass(frozen=True)
class Pictures:
    """The pictures of an images artifact, those of a selection, or with captions of a model."""

    images: Artifact
    selected: Artifact | None = None
    captions: Artifact | None = None
    #: Name -> those of each source of a mixture, whose `images` names their images.
    sources: Mapping[str, Pictures] = field(default_factory=dict)

    @property
    def by_source(self) -> Mapping[str, Pictures]:
        """Name -> pictures of each source; without a mixture, "" -> these."""
        return self.sources or {"": self}

    @classmethod
    def of(cls, latents: Artifact, images: Artifact) -> Pictures:
        """The pictures of an images artifact that latents are of. Raises Failed.

        Of a mixture, those of the sources that the images are of.
        """
        if "sources" in images.summary:
            encoded = sources_of(latents)
            of_source = {n: cls.of(encoded[n], some) for n, some in sources_of(images).items()}
            return cls(images, sources=of_source)
        at = latents.manifest["run"].get("parents", {}).get("selected")
        if at is None:
            return cls(images)
        selected = latents.store.load(at["stage"], at["key"])
        if selected is None:
            raise Failed(f"{at['stage']} {at['key'][:12]}: it was deleted: run again")
        return cls(images, selected)

    @cached_property
    def shards(self) -> list[PictureShard]:
        """Those of each tar, in the order of their paths; tars without any are left out."""
        if self.sources:
            return [shard for pictures in self.sources.values() for shard in pictures.shards]
        shards = []
        tables = self._tables
        for entry in sorted(self.images.files, key=lambda entry: entry.path):
            if not entry.path.endswith(".tar"):
                continue
            shard = PictureShard(
                entry.path,
                self.images.url(entry.path),
                entry.sha256,
                entry.meta["samples"],
                captions=tables.get(entry.sha256),
            )
            mask = self.kept(shard)
            if mask.any() or self.selected is None:
                shards.append(shard.with_rows(mask))
        return shards

    @cached_property
    def digest(self) -> str | None:
        """Digest of the choice of pictures; None without a selection."""
        if self.selected is None and not self.sources:
            return None
        return digest_json([[shard.sha256, shard.rows] for shard in self.shards])

    def kept(self, shard: PictureShard) -> NDArray[np.bool_]:
        """Whether each sample of a shard's tar is selected: bool [samples]."""
        if self.selected is None:
            return np.ones(shard.samples, bool)
        mask = np.zeros(shard.samples, bool)
        some = self._selection.of(shard.sha256)
        np.logical_or.at(mask, some.rows, some.kept)  # image shards may have equal bytes
        return mask

    def kept_ids(self, shard: PictureShard) -> set[bytes] | None:
        """Sha256 of a shard's pictures that are selected; None: all."""
        if self.selected is None:
            return None
        chosen = zip(self.ids(shard), self.kept(shard) & shard.mask, strict=True)
        return {sha256 for sha256, is_kept in chosen if is_kept}

    def ids(self, shard: PictureShard) -> list[bytes]:
        """Sha256 of each sample of a shard's tar, by the selection."""
        some = self._selection.of(shard.sha256)
        by_row = dict(zip(some.rows.tolist(), some.ids.to_pylist(), strict=True))
        return [by_row[row] for row in range(shard.samples)]

    @cached_property
    def _selection(self) -> _Entries:
        assert self.selected is not None
        return _Entries.read(self.selected)

    @cached_property
    def _tables(self) -> dict[str, dict[str, Any]]:
        from tasks.caption.tables import tables_of

        return {} if self.captions is None else tables_of(self.captions)


def sources_of(artifact: Artifact) -> dict[str, Artifact]:
    """Name -> artifact of each source; "" -> the artifact itself if it is no mixture.

    Raises Failed if one was deleted.
    """
    if "sources" not in artifact.summary:
        return {"": artifact}
    found = {}
    for name, parent in artifact.manifest["run"]["parents"].items():
        loaded = artifact.store.load(parent["stage"], parent["key"])
        if loaded is None:
            raise Failed(f"{parent['stage']} {parent['key'][:12]}: it was deleted: run again")
        found[name] = loaded
    return found


def images_of(latents: Artifact) -> Artifact:
    """The pictures that latents are from. Raises Failed if they were deleted."""
    at = latents.manifest["run"]["parents"]["images"]
    images = latents.store.load(at["stage"], at["key"])
    if images is None:
        raise Failed(f"{at['stage']} {at['key'][:12]}: it was deleted: run again")
    return images
