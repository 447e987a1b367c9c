"""Latent shards: VAE moments and encoded captions in one safetensors file, read by mmap.

Equal content is written as equal bytes. The split in a tensor's name is `train`, `holdout` or
`flipped`: sample i of `flipped/8x8` is the mirror image of sample i of `train/8x8`.

    text/prompt_embeds         [K, T, D] bf16   row 0: the empty caption; then the distinct captions
                                                (absent if only token ids are stored)
    text/prompt_offsets        [K + 1]   i32    only where lengths vary: prompt_embeds is [M, D],
                                                and caption k has rows offsets[k]:offsets[k + 1]
    text/pooled_prompt_embeds  [K, P]    bf16   absent for SD 1 and 2, and beside no prompt_embeds
    text/input_ids             [K, n, T] i32    padded tokens from each of n CLIP tokenizers
    text/captions              [M]       u8     the captions in UTF-8, one after another, if their
                                                embeddings are of references, too, and elsewhere
    text/caption_ends          [K]       i32    where each ends
    <split>/<h>x<w>/mean, logvar  [N, C, h, w] bf16   the VAE's raw moments: unscaled, not sampled
    .../id                     [N, 32]   u8     sha256 of the downloaded picture
    .../original_size, target_size  [N, 2] i32  (height, width) in pixels
    .../crop_top_left          [N, 2]    i32    (top, left) in pixels
    .../flip                   [N]       u8
    .../aesthetic_score        [N]       f32    only if the source has scores
    .../masks                  [N, K, h, w] u8  only for inpainting: 1 = hidden
    .../masked_means           [N, K, C, h, w] bf16  the VAE's mean of each masked picture
    .../loss_mask              [N, h, w] u8     only if pictures have masks: 255 = full weight
    .../control                [N, 3, H, W] u8  only if pictures have control pictures: pixels
                               [N, C, h, w] bf16  of some families: the VAE's mean of them
    .../caption_offsets        [N + 1]   i32    sample i has caption_rows[offsets[i]:offsets[i + 1]]
    .../caption_rows           [M]       i32

`LatentScale` converts between the VAE's latents and the denoiser's, by scale and shift.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from numpy.typing import NDArray

from artifacts import references
from artifacts.records import FileEntry, parse_json, read_checked, read_record
from artifacts.references import NO_REFERENCES, References, Targets, by_references, shifted
from artifacts.tensor_header import DTYPES, TensorPlace, header_bytes, read_header

Float32 = NDArray[np.float32]

INFO = "latents.json"
#: Names the sources of a mixture, and the key of the latents artifact of each.
MIXTURE = "mixture.json"
LEFT_OUT = "left_out.json"
HELD_OUT = "held_out.json"
#: Content of left_out.json: shard's key -> group -> row -> sha256 (hex) of a near-duplicate of a
#: held-out picture, NOT_SELECTED or BAD_REFERENCE. Training and measurements leave them out. The
#: file is absent without any.
LeftOut = dict[str, dict[str, dict[int, str]]]
NOT_SELECTED = ""
BAD_REFERENCE = "bad reference"  # one of its references cannot be fetched or decoded
#: Content of held_out.json: shard's key, group and row of each held-out sample that is measured, by
#: the sha256 of its picture. Other captions and earlier selections move samples to other shards,
#: but not in this order. The file is absent for the source's captions without a selection.
HeldOut = list[tuple[str, str, int]]
#: Tensors with two numbers for each sample.
PAIRS = ("original_size", "crop_top_left", "target_size")


def flipped_group(group: str) -> str:
    """The group of the mirrored samples of a `train/` group."""
    return group.replace("train/", "flipped/", 1)


@dataclass(frozen=True)
class Masked:
    """K inpainting masks of a picture, and the latents of the masked pictures."""

    masks: NDArray[np.uint8]  # [K, h, w], 1 = hidden
    means: NDArray[Any]  # [K, C, h, w], the VAE's mean of each masked picture; f32 or bf16 bits


@dataclass(frozen=True)
class LatentSample:
    """One encoded picture. Moments are f32, or bf16 bits (u16) when read from a shard."""

    mean: NDArray[Any]  # [C, h, w]
    logvar: NDArray[Any]  # [C, h, w]
    id: bytes  # sha256 of the downloaded picture
    original_size: tuple[int, int]  # (height, width), pixels
    crop_top_left: tuple[int, int]  # (top, left), pixels
    target_size: tuple[int, int]  # (height, width), pixels
    flip: bool  # mirrored left to right
    caption_rows: tuple[int, ...]  # rows of the shard's text tensors; (0,) is the empty caption
    aesthetic_score: float | None = None
    masked: Masked | None = None
    loss_mask: NDArray[np.uint8] | None = None  # [h, w], 255 = full weight; None: all have it
    #: What a ControlNet reads: pixels u8 [3, H, W], or the VAE's mean [C, h, w], f32 or bf16 bits.
    control: NDArray[Any] | None = None


@dataclass(frozen=True)
class Texts:
    """The encoded captions of a shard, by row; embeddings are f32, or bf16 bits (u16)."""

    prompt_embeds: Sequence[NDArray[Any]] | None  # K of [T, D]; None: token ids alone
    pooled_prompt_embeds: Sequence[NDArray[Any]] | None  # K of [P]
    input_ids: NDArray[Any]  # [K, n, T], of each of n CLIP tokenizers
    varying_lengths: bool = False  # whether T differs between captions
    #: The captions themselves, where embeddings are of references, too, and not in this shard.
    captions: Sequence[str] | None = None


def to_bfloat16(array: NDArray[Any]) -> NDArray[np.uint16]:
    """Bits (u16) of an f32 array rounded to bfloat16, ties to even. NaN is not supported."""
    if array.dtype == np.uint16:
        return array
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The f32 values of bfloat16 bits (u16), exactly."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def stack_rows(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Stack arrays of one shape; bf16 bits (u16) become f32 values."""
    stacked = np.stack(rows)
    return from_bfloat16(stacked) if stacked.dtype == np.uint16 else stacked


class LatentShard:
    """A shard on local disk, memory-mapped: opening it reads the header only.

    Raises:
        ValueError: the file is not a latent shard, or is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as stream:
            if self.path.stat().st_size == 0:
                raise ValueError(f"{self.path} is not a readable latent shard: it is empty")
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._tensors: dict[str, NDArray[Any]] = {}
        try:
            self._tensors = self._read_header()
        except ValueError as error:
            self.close()
            raise ValueError(f"{self.path} is not a readable latent shard: {error}") from None
        #: `<split>/<h>x<w>` -> number of samples, mirrored ones included.
        self.groups: dict[str, int] = {
            name.removesuffix("/mean"): len(tensor)
            for name, tensor in sorted(self._tensors.items())
            if name.endswith("/mean")
        }

    def _read_header(self) -> dict[str, NDArray[Any]]:
        """Views of the file's tensors, whose pages are read on access."""
        _, places = read_header(self._map, DTYPES)  # before a view prevents closing the map
        if scalars := [name for name, place in places.items() if not place.shape]:
            raise ValueError(f"{scalars[0]} has no rows")

        def view(place: TensorPlace) -> NDArray[Any]:
            count = math.prod(place.shape)
            flat = np.frombuffer(self._map, DTYPES[place.dtype], count, place.start)
            return flat.reshape(place.shape)

        return {name: view(place) for name, place in places.items()}

    def _row(self, name: str, row: int) -> Any:
        tensor = self._tensors[name]
        if not 0 <= row < len(tensor):
            raise IndexError(f"{self.path}: {name} has {len(tensor)} rows, asked for {row}")
        return tensor[row]

    def _copy(self, name: str, row: int) -> NDArray[Any]:
        """A copy of a row, independent of the memory map."""
        return np.array(self._row(name, row))

    def sample(self, group: str, index: int) -> LatentSample:
        """Sample `index` of group `<split>/<h>x<w>`, with moments [C, h, w] as bf16 bits (u16).

        Raises:
            IndexError: the group has no such sample.
        """

        def row(name: str) -> Any:
            return self._row(f"{group}/{name}", index)

        def copy(name: str) -> NDArray[Any]:
            return np.array(row(name))

        mean = copy("mean")  # first: the error of an index that is too large names it
        start = row("caption_offsets")
        end = self._row(f"{group}/caption_offsets", index + 1)
        captions = self._tensors[f"{group}/caption_rows"]
        scored = f"{group}/aesthetic_score" in self._tensors
        has_mask = f"{group}/loss_mask" in self._tensors
        has_control = f"{group}/control" in self._tensors
        masked = None
        if f"{group}/masks" in self._tensors:
            masked = Masked(copy("masks"), copy("masked_means"))
        if not 0 <= start <= end <= len(captions):
            raise IndexError(f"{self.path}: {group} has no captions {start} to {end}")
        return LatentSample(
            mean=mean,
            logvar=copy("logvar"),
            id=row("id").tobytes(),
            flip=bool(row("flip")),
            caption_rows=tuple(captions[start:end].tolist()),
            aesthetic_score=float(row("aesthetic_score")) if scored else None,
            masked=masked,
            loss_mask=copy("loss_mask") if has_mask else None,
            control=copy("control") if has_control else None,
            **{name: tuple(row(name).tolist()) for name in PAIRS},
        )

    def mean(self, group: str, row: int) -> NDArray[np.uint16]:
        """The VAE's mean [C, h, w] of a sample, or of a reference, as bf16 bits."""
        return self._copy(f"{group}/mean", row)

    def prompt_embeds(self, row: int) -> NDArray[np.uint16]:
        """Embeddings [T, D] of caption `row`, as bf16 bits; row 0 is the empty caption's."""
        if "text/prompt_offsets" not in self._tensors:
            return self._copy("text/prompt_embeds", row)
        start, end = (int(self._row("text/prompt_offsets", at)) for at in (row, row + 1))
        embeds = self._tensors["text/prompt_embeds"]
        if not 0 <= start < end <= len(embeds):
            raise IndexError(f"{self.path}: caption {row} has no rows {start} to {end}")
        return np.array(embeds[start:end])

    def pooled_prompt_embeds(self, row: int) -> NDArray[np.uint16] | None:
        """Pooled embedding [P] of caption `row`, as bf16 bits; None for SD 1 and 2."""
        name = "text/pooled_prompt_embeds"
        return self._copy(name, row) if name in self._tensors else None

    def input_ids(self, row: int) -> NDArray[np.int32]:
        """Token ids [n, T] of caption `row`, by each of n CLIP tokenizers."""
        return self._copy("text/input_ids", row)

    def close(self) -> None:
        """Unmap the file; returned samples and embeddings stay valid."""
        self._tensors.clear()
        self._map.close()


@dataclass(frozen=True)
class ShardRef:
    """A shard of an artifact, as its manifest describes it."""

    url: str  # a plain path if local
    size: int  # bytes
    sha256: str
    groups: dict[str, int]  # `<split>/<h>x<w>` -> samples
    #: `<split>/<h>x<w>` -> row -> value of LeftOut, of samples that are left out.
    left_out: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    source: str = ""  # name in the mixture; "" without one
    #: With references: group `<split>/<h>x<w>+<h>x<w>...` -> its samples' rows in the stored group.
    rows: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    #: Stored group -> the references of its samples, in the table of `Latents.references`.
    references: Mapping[str, Targets] = field(default_factory=dict)
    #: Stored group -> the prompts of its samples, in the table of `Latents.prompts`.
    prompts: Mapping[str, Targets] = field(default_factory=dict)

    def stored_row(self, group: str, row: int) -> int:
        """The row in the stored group."""
        return int(self.rows[group][row]) if group in self.rows else row


@dataclass(frozen=True)
class Latents:
    """A latents artifact: `info` is its latents.json, `shards` are sorted by path."""

    info: dict[str, Any]
    shards: list[ShardRef]
    #: Shard's number, group and row of HeldOut's samples; None: those of the shards, in order.
    held_out_order: Sequence[tuple[int, str, int]] | None = None
    references: References = NO_REFERENCES
    prompts: References = NO_REFERENCES  # of captions and references

    @property
    def text_dtype(self) -> str | None:
        """Dtype of the text encoders that a step runs; None: the shards have embeddings."""
        return self.info.get("text_dtype")

    def groups(self) -> dict[str, int]:
        """`<split>/<h>x<w>` -> number of samples in all shards."""
        total = Counter[str]()
        for shard in self.shards:
            total.update(shard.groups)
        return dict(sorted(total.items()))

    @property
    def training(self) -> int:
        """Number of training samples; mirrored ones and those left out do not count."""
        return self._count("train/")

    @property
    def training_by_source(self) -> dict[str, int]:
        """Source -> its training samples, as `training`; "" without a mixture."""
        names = dict.fromkeys(shard.source for shard in self.shards)
        return {name: self.of_source(name).training for name in names}

    def of_source(self, name: str) -> Latents:
        """The shards of one source of a mixture, in no held-out order."""
        own = [shard for shard in self.shards if shard.source == name]
        return replace(self, shards=own, held_out_order=None)

    @property
    def left_out(self) -> set[str]:
        """Sha256 (hex) of the near-duplicates that training leaves out."""
        groups = (rows.values() for shard in self.shards for rows in shard.left_out.values())
        return {sha256 for rows in groups for sha256 in rows} - {NOT_SELECTED, BAD_REFERENCE}

    @property
    def held_out(self) -> int:
        """Number of held-out samples, without those left out."""
        return self._count("holdout/")

    def _count(self, split: str) -> int:
        stored = sum(n for group, n in self.groups().items() if group.startswith(split))
        left_out = (groups for shard in self.shards for groups in shard.left_out.items())
        return stored - sum(len(rows) for group, rows in left_out if group.startswith(split))


def shard_key(path: str) -> str:
    """The key of a shard, by the path or URL of its file."""
    return path.rpartition("/")[2].partition(".")[0]


def encode_left_out(left_out: LeftOut) -> bytes:
    """The bytes of left_out.json."""
    return json.dumps(left_out, sort_keys=True).encode()


def read_left_out(fs: AbstractFileSystem, root: str, files: Iterable[FileEntry]) -> LeftOut:
    """The content of a latents artifact's left_out.json; nothing without the file.

    Args:
        root: path of the artifact's folder.
        files: those of its manifest.

    Raises:
        Damaged: it has another sha256.
    """
    entry = next((file for file in files if file.path == LEFT_OUT), None)
    if entry is None:
        return {}
    stored = parse_json(read_checked(fs, root, LEFT_OUT, entry.sha256))
    return {
        key: {group: {int(row): i for row, i in rows.items()} for group, rows in groups.items()}
        for key, groups in stored.items()
    }


def read_ids(fs: AbstractFileSystem, path: str, split: str = "") -> dict[str, list[bytes]]:
    """`<split>/<h>x<w>` -> sha256 of each sample of a shard; no other tensor is read.

    Mirrored samples are left out.

    Args:
        split: the only one to read; "": each.

    Raises:
        ValueError: the file is not a latent shard, or is cut short.
    """
    ids = {}
    with fs.open(path, "rb") as stream:
        _, places = read_header(stream, DTYPES)
        for name, place in places.items():
            is_mirrored = name.startswith("flipped/")
            if name.startswith(split) and name.endswith("/id") and not is_mirrored:
                stream.seek(place.start)
                data = stream.read(place.size)
                rows = (data[start : start + 32] for start in range(0, place.size, 32))
                ids[name.removesuffix("/id")] = [*rows]
    return ids


def read_captions(
    fs: AbstractFileSystem, path: str
) -> tuple[list[str], dict[str, list[tuple[int, ...]]]]:
    """The captions that a shard stores, and `<split>/<h>x<w>` -> rows of each sample's captions.

    Mirrored samples are left out.

    Raises:
        ValueError: the file is not a latent shard with captions, or is cut short.
    """
    with fs.open(path, "rb") as stream:
        _, places = read_header(stream, DTYPES)

        def read(name: str) -> NDArray[Any]:
            place = places.get(name)
            if place is None:
                raise ValueError(f"{path} has no {name}")
            stream.seek(place.start)
            return np.frombuffer(stream.read(place.size), DTYPES[place.dtype])

        text = read("text/captions").tobytes()
        ends = read("text/caption_ends").tolist()
        captions = [text[start:end].decode() for start, end in pairwise([0, *ends])]
        rows = {}
        for name in places:
            group, _, tensor = name.rpartition("/")
            if tensor == "caption_offsets" and not name.startswith("flipped/"):
                own = read(f"{group}/caption_rows").tolist()
                offsets = pairwise(read(name).tolist())
                rows[group] = [tuple(own[start:end]) for start, end in offsets]
    return captions, rows


def open_latents(url: str) -> Latents:
    """The shards of a latents artifact, from its manifest; no shard is opened.

    Those of a mixture are the shards of each source, one after another by name.

    Args:
        url: the artifact's folder, a local path or an fsspec URL.

    Raises:
        ValueError: `url` has no latents artifact, or its latents.json is damaged.
    """
    fs, root = url_to_fs(url.rstrip("/"))
    record = read_record(fs, f"{root}/manifest.json")
    info = next((file for file in record["files"] if file.path == INFO), None) if record else None
    if record is None or info is None:
        raise ValueError(f"{url}: no latents artifact is there")
    facts = parse_json(read_checked(fs, root, INFO, info.sha256))
    stage_url = url.rstrip("/").rpartition("/")[0]
    mixture = next((file for file in record["files"] if file.path == MIXTURE), None)
    if mixture is not None:
        keys = parse_json(read_checked(fs, root, MIXTURE, mixture.sha256))
        return _mixed(facts, {name: open_latents(f"{stage_url}/{keys[name]}") for name in keys})
    left_out = read_left_out(fs, root, record["files"])
    shards = []
    for entry in sorted(record["files"], key=lambda entry: entry.path):
        if entry.path.endswith(".safetensors"):
            place = f"{stage_url}/{entry.path.removeprefix('../')}"
            rows = left_out.get(shard_key(entry.path), {})
            groups = dict(entry.meta["groups"])
            shards.append(ShardRef(place, entry.size, entry.sha256, groups, rows))
    order = next((file for file in record["files"] if file.path == HELD_OUT), None)
    held_out = None
    if order is not None:
        numbers = {shard_key(shard.url): number for number, shard in enumerate(shards)}
        stored = parse_json(read_checked(fs, root, HELD_OUT, order.sha256))
        held_out = [(numbers[key], group, row) for key, group, row in stored]

    def indexed(name: str, suffix: str) -> tuple[References, dict[str, dict[str, Targets]]]:
        index = next((file for file in record["files"] if file.path == name), None)
        if index is None:
            return NO_REFERENCES, {}
        places, targets = references.decode_index(read_checked(fs, root, name, index.sha256))
        arrays = [
            ShardRef(f"{stage_url}/{f.path.removeprefix('../')}", f.size, f.sha256, {})
            for f in sorted(record["files"], key=lambda entry: entry.path)
            if f.path.endswith(suffix)
        ]
        return References(arrays, places), targets

    prompts, of_prompts = indexed(references.PROMPT_INDEX, references.PROMPT_SUFFIX)
    shards = [replace(s, prompts=of_prompts.get(shard_key(s.url), {})) for s in shards]
    table, targets = indexed(references.INDEX, references.SUFFIX)
    grouped = [by_references(s, targets.get(shard_key(s.url), {}), table) for s in shards]
    if held_out is not None:
        held_out = _regrouped(held_out, grouped)
    return Latents(facts, grouped, held_out, table, prompts)


def _regrouped(
    order: Sequence[tuple[int, str, int]], shards: Sequence[ShardRef]
) -> list[tuple[int, str, int]]:
    """Samples of stored groups, as those of groups by references; the order is kept."""
    places = {
        (number, references.stored_group(group), int(stored)): (number, group, row)
        for number, shard in enumerate(shards)
        for group, rows in shard.rows.items()
        for row, stored in enumerate(rows)
    }
    return [places.get(place, place) for place in order]


def _mixed(info: dict[str, Any], sources: Mapping[str, Latents]) -> Latents:
    """The latents of a mixture; a source without a held-out order has that of its shards."""
    shards: list[ShardRef] = []
    order: list[tuple[int, str, int]] = []
    table = prompts = NO_REFERENCES
    for name, latents in sources.items():
        own = latents.held_out_order
        order += [
            (len(shards) + number, group, row)
            for number, group, row in (_in_order(latents) if own is None else own)
        ]
        first, first_prompt = len(table.table), len(prompts.table)
        table = table.joined(latents.references)
        prompts = prompts.joined(latents.prompts)
        shards += [
            replace(
                shard,
                source=name,
                references=shifted(shard.references, first),
                prompts=shifted(shard.prompts, first_prompt),
            )
            for shard in latents.shards
        ]
    is_ordered = any(latents.held_out_order is not None for latents in sources.values())
    return Latents(info, shards, order if is_ordered else None, table, prompts)


def _in_order(latents: Latents) -> Iterator[tuple[int, str, int]]:
    """Shard's number, group and row of the held-out samples, in the order of the shards."""
    for number, shard in enumerate(latents.shards):
        for group, count in shard.groups.items():
            out = shard.left_out.get(group, {})
            rows = range(count) if group.startswith("holdout/") else ()
            yield from ((number, group, row) for row in rows if row not in out)


def write_latent_shard(
    path: Path, groups: Mapping[str, Sequence[LatentSample]], texts: Texts
) -> None:
    """Write a shard as a safetensors file, deterministically and tensor by tensor.

    Args:
        groups: `<split>/<h>x<w>` -> samples, in reading order.
        texts: the captions that the samples' `caption_rows` refer to.

    Raises:
        ValueError: samples of one group differ in shape.
    """
    tensors = _text_tensors(texts)
    for group, samples in groups.items():
        tensors |= {f"{group}/{name}": tensor for name, tensor in _group_tensors(samples).items()}
    # Wide types first: this aligns every tensor, since the format allows no padding.
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPES[item[1].dtype].itemsize, item[0]))
    described = ((name, array.dtype, array.shape, array.nbytes) for name, array in ordered)
    with path.open("wb") as stream:
        stream.write(header_bytes(described))
        for _, tensor in ordered:
            for chunk in tensor.chunks:
                stream.write(np.ascontiguousarray(chunk).data)


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def _bf16_rows(rows: Sequence[NDArray[Any]]) -> _Tensor:
    shape = rows[0].shape
    if any(row.shape != shape for row in rows):
        raise ValueError(f"rows of one tensor differ in shape: {sorted({r.shape for r in rows})}")
    return _Tensor("BF16", (len(rows), *shape), (to_bfloat16(row) for row in rows))


def _pixel_rows(rows: Sequence[NDArray[np.uint8]]) -> _Tensor:
    return _Tensor("U8", (len(rows), *rows[0].shape), rows)  # at full size: not copied at once


def _whole(dtype: str, array: NDArray[Any]) -> _Tensor:
    return _Tensor(dtype, array.shape, [array.astype(DTYPES[dtype])])


def _text_tensors(texts: Texts) -> dict[str, _Tensor]:
    rows = texts.prompt_embeds
    tensors = {"text/input_ids": _whole("I32", texts.input_ids)}
    if texts.captions is not None:
        data = [caption.encode() for caption in texts.captions]
        tensors["text/captions"] = _whole("U8", np.frombuffer(b"".join(data), np.uint8))
        tensors["text/caption_ends"] = _whole("I32", np.cumsum([len(part) for part in data]))
    if rows is None:
        return tensors
    if texts.varying_lengths:
        offsets = np.cumsum([0, *(len(row) for row in rows)])
        shape = (int(offsets[-1]), rows[0].shape[1])
        tensors["text/prompt_embeds"] = _Tensor("BF16", shape, (to_bfloat16(row) for row in rows))
        tensors["text/prompt_offsets"] = _whole("I32", offsets)
    else:
        tensors["text/prompt_embeds"] = _bf16_rows(rows)
    if texts.pooled_prompt_embeds is not None:
        tensors["text/pooled_prompt_embeds"] = _bf16_rows(texts.pooled_prompt_embeds)
    return tensors


def _group_tensors(samples: Sequence[LatentSample]) -> dict[str, _Tensor]:
    rows = [sample.caption_rows for sample in samples]
    offsets = np.cumsum([0, *(len(r) for r in rows)])
    ids = np.frombuffer(b"".join(sample.id for sample in samples), np.uint8)
    extra = {}
    if samples[0].aesthetic_score is not None:
        extra["aesthetic_score"] = _whole("F32", np.array([s.aesthetic_score for s in samples]))
    if masked := [s.masked for s in samples if s.masked is not None]:
        extra["masks"] = _whole("U8", np.stack([m.masks for m in masked]))
        extra["masked_means"] = _bf16_rows([m.means for m in masked])
    if any(sample.loss_mask is not None for sample in samples):
        whole = np.full(samples[0].mean.shape[1:], 255, np.uint8)
        loss_masks = [whole if s.loss_mask is None else s.loss_mask for s in samples]
        extra["loss_mask"] = _whole("U8", np.stack(loss_masks))
    if controls := [s.control for s in samples if s.control is not None]:
        is_pixels = controls[0].dtype == np.uint8
        extra["control"] = _pixel_rows(controls) if is_pixels else _bf16_rows(controls)
    return {
        "mean": _bf16_rows([sample.mean for sample in samples]),
        "logvar": _bf16_rows([sample.logvar for sample in samples]),
        "id": _whole("U8", ids.reshape(len(samples), 32)),
        "flip": _whole("U8", np.array([sample.flip for sample in samples])),
        "caption_offsets": _whole("I32", offsets),
        "caption_rows": _whole("I32", np.array([row for r in rows for row in r])),
        **{name: _whole("I32", np.array([getattr(s, name) for s in samples])) for name in PAIRS},
        **extra,
    }


@dataclass(frozen=True)
class LatentScale:
    """Scale and shift from the VAE's latents to the denoiser's latents."""

    scaling_factor: float
    shift_factor: float = 0.0
    #: latents_mean and latents_std: [C], or [C p p], one for each latent pixel of a p x p patch.
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    draws: bool = True  # whether `sample` draws from the posterior; else it takes the mean

    @classmethod
    def from_info(cls, info: Mapping[str, Any], *, draws: bool = True) -> LatentScale:
        """From the content of an encode artifact's latents.json, or a VAE's config."""
        return cls(
            info["scaling_factor"],
            info.get("shift_factor") or 0.0,
            info.get("latents_mean"),
            info.get("latents_std"),
            draws,
        )

    def sample(self, mean: Float32, logvar: Float32, eps: Float32) -> Float32:
        """Scaled posterior sample z = (mean + exp(logvar / 2) eps - shift) * scale [B, C, h, w].

        The log-variance is clipped to [-30, 20], as in diffusers' DiagonalGaussianDistribution.
        Without draws, eps counts as 0.
        """
        if not self.draws:
            return self.scaled(mean)
        return self.scaled(mean + np.exp(np.float32(0.5) * np.clip(logvar, -30, 20)) * eps)

    def scaled(self, z: Float32) -> Float32:
        """The denoiser's latents [B, C, h, w] f32 from the VAE's latents `z`."""
        if self.mean is not None and self.std is not None:
            center, spread = (tiled(x, z.shape[-3:]) for x in (self.mean, self.std))
            return (z - center) / spread * np.float32(self.scaling_factor)
        return (z - np.float32(self.shift_factor)) * np.float32(self.scaling_factor)

    def unscaled(self, shape: tuple[int, ...]) -> tuple[Float32, Float32]:
        """(scale, shift) f32 of the inverse: the VAE's latents are `latents * scale + shift`.

        Args:
            shape: (C, h, w) of the latents; the results broadcast to it.
        """
        spread = np.ones((1, 1, 1), np.float32)
        center = np.zeros((1, 1, 1), np.float32)
        if self.mean is not None and self.std is not None:
            spread = tiled(self.std, shape)
            center = tiled(self.mean, shape)
        return spread / np.float32(self.scaling_factor), center + np.float32(self.shift_factor)


def tiled(values: Sequence[float], shape: tuple[int, ...]) -> Float32:
    """Values [C] as f32 [C, 1, 1], or values [C p p] of a patch, repeated to `shape` (C, h, w)."""
    channels, height, width = shape
    side = math.isqrt(len(values) // channels)
    patch = np.array(values, np.float32).reshape(channels, side, side)
    return patch if side == 1 else np.tile(patch, (1, height // side, width // side))
