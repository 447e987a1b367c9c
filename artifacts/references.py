"""References of edit models: the pictures that targets have beside their captions.

A reference is encoded once by its content, into a reference shard `<key>.references`, in groups of
one size in latent pixels:

    <h>x<w>/mean             [N, C, h, w] bf16  the VAE's mean, unscaled
    <h>x<w>/id               [N, 32]      u8    sha256 of the downloaded picture

`references.index` of a latents artifact says which references its targets have. Latent shards are
the same without it:

    reference/shard          [R]     i32  number of the reference shard, in the order of the keys
    reference/size           [R, 2]  i32  (h, w): its group there
    reference/row            [R]     i32  in its group
    <key>/<group>/offsets    [N + 1] i32  row i of a group of the latent shard <key> has the
    <key>/<group>/references [M]     i32  references offsets[i]:offsets[i + 1], in order

Where a text encoder sees references beside captions, prompts are stored in the same way, in shards
`<key>.prompts`: an embedding [T, D] is a mean [1, T, D] of the group `<T>x<D>`; its id is of the
caption and the references. `prompts.index` names those of each sample: its captions', then that of
the empty caption with the same references, for a dropped caption.

All are safetensors files. Groups without references are absent. A batch has targets of one size,
and references of the same sizes: it is from a group `<split>/<h>x<w>+<h>x<w>...`, which has some
rows of the stored group `<split>/<h>x<w>`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from fsspec import AbstractFileSystem
from numpy.typing import NDArray

from artifacts.tensor_header import DTYPES, header_bytes, read_header

if TYPE_CHECKING:
    from artifacts.latent_shards import ShardRef

SUFFIX = ".references"
INDEX = "references.index"
PROMPT_SUFFIX = ".prompts"
PROMPT_INDEX = "prompts.index"
Int32 = NDArray[np.int32]


class Targets(NamedTuple):
    """The references of a stored group's samples, as rows of the index's table."""

    offsets: Int32  # [N + 1]
    rows: Int32  # [M]

    def of(self, row: int) -> list[int]:
        """Those of one sample, in order."""
        start, end = self.offsets[row : row + 2]
        return [int(number) for number in self.rows[start:end]]

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> Targets:
        """From the references of each sample."""
        rows = [*lists]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        return cls(offsets, np.array([number for row in rows for number in row], np.int32))


class ReferencePlace(NamedTuple):
    """Where an encoded reference is."""

    shard: int  # number of the reference shard
    group: str  # <h>x<w>
    row: int


@dataclass(frozen=True)
class References:
    """The encoded references of latents, as their index names them."""

    shards: Sequence[ShardRef]
    table: Sequence[ReferencePlace]

    def joined(self, other: References) -> References:
        """These, then those of another index: its shards and rows follow."""
        first = len(self.shards)
        moved = [place._replace(shard=first + place.shard) for place in other.table]
        return References([*self.shards, *other.shards], [*self.table, *moved])


NO_REFERENCES = References((), ())


def stored_group(group: str) -> str:
    """The group of a latent shard that has the samples of `<split>/<h>x<w>+<h>x<w>...`."""
    return group.partition("+")[0]


def by_references(ref: ShardRef, index: Mapping[str, Targets], references: References) -> ShardRef:
    """A latent shard whose groups have one number and size of references each.

    Args:
        index: stored group -> the references of its samples, in the table of `references`.
    """
    if not index:
        return ref
    groups: dict[str, int] = {}
    rows: dict[str, Int32] = {}
    left_out: dict[str, dict[int, str]] = defaultdict(dict)
    for group, count in ref.groups.items():
        members = defaultdict[str, list[int]](list)
        targets = index.get(group)
        for row in range(count):
            own = () if targets is None else targets.of(row)
            members["+".join([group, *(references.table[n].group for n in own)])].append(row)
        out = ref.left_out.get(group, {})
        for name, stored in sorted(members.items()):
            groups[name] = len(stored)
            rows[name] = np.array(stored, np.int32)
            for position, row in enumerate(stored if out else ()):
                if row in out:
                    left_out[name][position] = out[row]
    return replace(ref, groups=groups, left_out=left_out, rows=rows, references=index)


def shifted(index: Mapping[str, Targets], first: int) -> dict[str, Targets]:
    """The same, of a table that follows `first` rows of another."""
    return {g: targets._replace(rows=targets.rows + first) for g, targets in index.items()}


def write_reference_shard(
    path: Path, references: Iterable[tuple[bytes, NDArray[np.uint16]]]
) -> dict[str, int]:
    """Write a reference shard, deterministically.

    Args:
        references: sha256, and mean [C, h, w] as bf16 bits, in order.

    Returns `<h>x<w>` -> number of references.
    """
    groups = defaultdict[str, list[tuple[bytes, NDArray[np.uint16]]]](list)
    for sha256, mean in references:
        groups["{1}x{2}".format(*mean.shape)].append((sha256, mean))
    tensors: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, members in groups.items():
        ids = np.frombuffer(b"".join(sha256 for sha256, _ in members), np.uint8)
        tensors[f"{name}/mean"] = ("BF16", np.stack([mean for _, mean in members]))
        tensors[f"{name}/id"] = ("U8", ids.reshape(-1, 32))
    path.write_bytes(_tensor_file(tensors))
    return {name: len(groups[name]) for name in sorted(groups)}


def read_reference_ids(fs: AbstractFileSystem, path: str) -> dict[bytes, tuple[str, int]]:
    """Sha256 of each reference of a shard -> its group and row; no other tensor is read.

    Raises:
        ValueError: the file is no reference shard, or is cut short.
    """
    ids: dict[bytes, tuple[str, int]] = {}
    with fs.open(path, "rb") as stream:
        for name, tensor in _read(stream, "/id").items():
            group = name.removesuffix("/id")
            ids |= {row.tobytes(): (group, number) for number, row in enumerate(tensor)}
    return ids


def encode_index(
    places: Sequence[ReferencePlace], targets: Mapping[str, Mapping[str, Targets]]
) -> bytes:
    """The bytes of an index.

    Args:
        targets: key of a latent shard -> stored group -> the references of its samples.
    """
    sizes = [[int(side) for side in place.group.split("x")] for place in places]
    arrays = {
        "reference/shard": np.array([place.shard for place in places], np.int32),
        "reference/row": np.array([place.row for place in places], np.int32),
        "reference/size": np.array(sizes, np.int32).reshape(-1, 2),
    }
    for key, groups in sorted(targets.items()):
        for group, (offsets, rows) in sorted(groups.items()):
            arrays[f"{key}/{group}/offsets"] = offsets
            arrays[f"{key}/{group}/references"] = rows
    return _tensor_file({name: ("I32", array) for name, array in arrays.items()})


def decode_index(data: bytes) -> tuple[list[ReferencePlace], dict[str, dict[str, Targets]]]:
    """The arguments of `encode_index`. Raises ValueError if the bytes are no index."""
    arrays = _read(BytesIO(data), "")
    columns = (arrays[f"reference/{name}"].tolist() for name in ("shard", "size", "row"))
    places = [
        ReferencePlace(shard, f"{height}x{width}", row)
        for shard, (height, width), row in zip(*columns, strict=True)
    ]
    targets = defaultdict[str, dict[str, Targets]](dict)
    for name in arrays:
        key, _, group = name.removesuffix("/offsets").partition("/")
        if name.endswith("/offsets"):
            targets[key][group] = Targets(arrays[name], arrays[f"{key}/{group}/references"])
    return places, dict(targets)


def _read(stream: IO[bytes], suffix: str) -> dict[str, NDArray[Any]]:
    """The tensors whose names end so."""
    _, places = read_header(stream, DTYPES)
    tensors = {}
    for name, place in places.items():
        if name.endswith(suffix):
            stream.seek(place.start)
            flat = np.frombuffer(stream.read(place.size), DTYPES[place.dtype])
            tensors[name] = flat[: math.prod(place.shape)].reshape(place.shape)
    return tensors


def _tensor_file(tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> bytes:
    # Wide types first: this aligns every tensor, since the format allows no padding.
    ordered = sorted(tensors.items(), key=lambda t: (-DTYPES[t[1][0]].itemsize, t[0]))
    arrays = [np.ascontiguousarray(array, DTYPES[dtype]) for _, (dtype, array) in ordered]
    described = [
        (name, dtype, array.shape, array.nbytes)
        for (name, (dtype, _)), array in zip(ordered, arrays, strict=True)
    ]
    return b"".join([header_bytes(described), *(array.tobytes() for array in arrays)])
