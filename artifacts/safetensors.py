"""Read and write named f32 arrays as safetensors, one array at a time to save memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from artifacts.filesystems import replacing
from artifacts.latent_shards import from_bfloat16
from artifacts.records import FileEntry
from artifacts.tensor_header import TensorPlace, header_bytes, read_header

Arrays = dict[str, NDArray[np.float32]]
HEADER_BLOCK = 2**18  # bytes: a header is read in one request
#: Element types as safetensors names them; bf16 is read as its bits.
FLOATS = {name: np.dtype(kind) for name, kind in (("F32", "<f4"), ("F16", "<f2"), ("BF16", "<u2"))}


class Sink:
    """An output stream that computes the sha256 and the size of its data."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self.digest.update(data)
        self.size += len(data)


@contextmanager
def writing(
    fs: AbstractFileSystem,
    root: str,
    path: str,
    files: list[FileEntry],
    check: Callable[[], None] | None = None,
) -> Iterator[Sink]:
    """A stream to `root/path`; on success the file's entry is appended to `files`.

    A local file is replaced whole: another builder may have committed it already. It is synced
    with its folders, so a record written later never names a lost file.

    Args:
        check: what it raises prevents the change; called last before it, on a remote store first.
    """
    place = f"{root}/{path}"
    if isinstance(fs, LocalFileSystem):
        with replacing(place, check) as beside, open(beside, "wb") as stream:
            sink = Sink(stream)
            yield sink
    else:
        if check is not None:
            check()
        fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        with fs.open(place, "wb") as stream:
            sink = Sink(stream)
            yield sink
    files.append(FileEntry(path, sink.size, sink.digest.hexdigest()))


def write_arrays(
    sink: Sink | IO[bytes],
    arrays: Mapping[str, NDArray[np.float32]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write f32 arrays as a safetensors file, deterministically."""
    described = {"format": "pt", **(metadata or {})}  # diffusers requires the format
    ordered = sorted(arrays.items())
    tensors = ((name, "F32", array.shape, array.nbytes) for name, array in ordered)
    sink.write(header_bytes(tensors, described))
    for _, array in ordered:
        flat = np.ascontiguousarray(array, "<f4").reshape(-1)
        sink.write(flat.view(np.uint8).data)


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An f32 array in a safetensors file. Indexing reads the rows that the index selects."""

    fs: AbstractFileSystem
    path: str
    place: TensorPlace

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def __getitem__(self, index: Any) -> NDArray[np.float32]:
        """Read rows.

        Args:
            index: a slice of the first dimension, or a tuple that begins with one: only these rows
                are read. Any other index reads the whole array.

        Raises:
            ValueError: the file is cut short.
        """
        first, *rest = index if isinstance(index, tuple) else (index,)
        if not isinstance(first, slice) or not self.shape or first.step not in (None, 1):
            return self._rows(0, self.shape[0] if self.shape else 1)[index]
        start, stop, _ = first.indices(self.shape[0])
        return self._rows(start, max(start, stop))[(slice(None), *rest)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[...], dtype)

    def _rows(self, start: int, stop: int) -> NDArray[np.float32]:
        count, *row = self.shape or (1,)
        size = self.place.size // max(1, count)  # bytes of a row
        begin = self.place.start + start * size
        end = self.place.start + stop * size
        if isinstance(self.fs, LocalFileSystem):
            flat = np.fromfile(self.path, "<f4", (end - begin) // 4, offset=begin)
        else:
            data = self.fs.cat_file(self.path, start=begin, end=end) if end > begin else b""
            flat = np.frombuffer(data, "<f4", len(data) // 4).copy()
        if flat.nbytes != end - begin:
            raise ValueError(f"{self.path} is cut short")
        return flat.reshape((stop - start, *row) if self.shape else ())


def read_arrays(fs: AbstractFileSystem, path: str) -> dict[str, StoredArray]:
    """The arrays of a file from `write_arrays`; only its header is read.

    Raises:
        ValueError: the file has other dtypes or is cut short.
    """
    with fs.open(path, "rb", block_size=HEADER_BLOCK, cache_type="first") as stream:
        try:
            _, places = read_header(stream, {"F32": FLOATS["F32"]})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return {name: StoredArray(fs, path, place) for name, place in places.items()}


def read_floats(path: Path) -> tuple[dict[str, Any], Arrays]:
    """The metadata and the arrays of a safetensors file in f32, f16 or bf16; arrays as f32.

    Raises:
        OSError, ValueError: the file is damaged or has other dtypes.
    """
    with path.open("rb") as stream:
        metadata, places = read_header(stream, FLOATS)
        arrays = {
            name: _floats(stream.read(place.size), place.dtype).reshape(place.shape)
            for name, place in places.items()
        }
    return metadata, arrays


def read_named_floats(path: Path, names: Collection[str]) -> Arrays:
    """The arrays of these names that a safetensors file has, as f32; others are not read.

    Raises:
        OSError, ValueError: the file is damaged, or has dtypes other than f32, f16, bf16 and i64.
    """
    with path.open("rb") as stream:
        _, places = read_header(stream, FLOATS | {"I64": np.dtype("<i8")})
        arrays: Arrays = {}
        for name in places.keys() & set(names):
            place = places[name]
            stream.seek(place.start)
            arrays[name] = _floats(stream.read(place.size), place.dtype).reshape(place.shape)
    return arrays


def _floats(raw: bytes, dtype: str) -> NDArray[np.float32]:
    stored = np.frombuffer(raw, FLOATS[dtype])
    return from_bfloat16(stored) if dtype == "BF16" else stored.astype(np.float32)
