"""Read and write named f32 arrays as safetensors, one array at a time to save memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from artifacts.commit import FileEntry
from artifacts.latents import from_bfloat16

Arrays = dict[str, NDArray[np.float32]]


class _Hashing:
    """An output stream that computes the sha256 and the size of its data."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.digest, self.size = stream, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self.digest.update(data)
        self.size += len(data)


@contextmanager
def writing(
    fs: AbstractFileSystem, root: str, path: str, files: list[FileEntry]
) -> Iterator[_Hashing]:
    """A stream to `root/path`; on success the file's entry is appended to `files`."""
    fs.makedirs(f"{root}/{path}".rpartition("/")[0], exist_ok=True)
    with fs.open(f"{root}/{path}", "wb") as stream:
        sink = _Hashing(stream)
        yield sink
    files.append(FileEntry(path, sink.size, sink.digest.hexdigest()))


def write_arrays(
    sink: _Hashing | IO[bytes],
    arrays: Mapping[str, NDArray[np.float32]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write f32 arrays as a safetensors file, deterministically."""
    described = {"format": "pt", **(metadata or {})}  # diffusers requires the format
    header: dict[str, object] = {"__metadata__": described}
    offset = 0
    for name in sorted(arrays):
        end = offset + arrays[name].nbytes
        shape = list(arrays[name].shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for name in sorted(arrays):
        flat = np.ascontiguousarray(arrays[name], "<f4").reshape(-1)
        sink.write(flat.view(np.uint8).data)


def read_arrays(fs: AbstractFileSystem, path: str) -> Arrays:
    """Read the arrays of a file from `write_arrays`.

    A local file is memory-mapped: bytes are read on access, and processes share the memory.

    Raises:
        ValueError: the file has other dtypes or is cut short.
    """
    with fs.open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        mapped = _map(path) if isinstance(fs, LocalFileSystem) else None
        arrays: Arrays = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] != "F32":
                raise ValueError(f"{path}: {name} is {entry['dtype']}, not F32")
            size = 4 * math.prod(entry["shape"])
            if mapped is None:
                data = np.frombuffer(bytearray(stream.read(size)), np.uint8)
            else:
                start = 8 + length + entry["data_offsets"][0]
                data = mapped[start : start + size]
            if data.nbytes != size:
                raise ValueError(f"{path} is cut short at {name}")
            arrays[name] = data.view("<f4").reshape(entry["shape"])
    return arrays


def read_floats(path: Path) -> tuple[dict[str, str], Arrays]:
    """The metadata and the arrays of a safetensors file in f32, f16 or bf16; arrays as f32.

    Raises:
        OSError, ValueError, KeyError: the file is damaged or has other dtypes.
    """
    mapped = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    described = header.pop("__metadata__", {})
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = mapped[start + begin : start + end]
        if len(raw) != end - begin:
            raise ValueError(f"it is cut short at {name}")
        arrays[name] = _floats(raw.tobytes(), entry["dtype"]).reshape(entry["shape"])
    return described, arrays


def _floats(raw: bytes, dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return from_bfloat16(np.frombuffer(raw, "<u2"))
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def _map(path: str) -> NDArray[np.uint8]:
    """The file's bytes, mapped copy-on-write: changes never reach the file."""
    return np.asarray(np.memmap(path, np.uint8, mode="c"))
