"""The header of a safetensors file: its tensors' dtypes, shapes and places; read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from artifacts.records import parse_json

#: The element types of shards, as safetensors names them; bf16 is read as its bits.
DTYPES = {
    name: np.dtype(kind)
    for name, kind in {"BF16": "<u2", "F32": "<f4", "I32": "<i4", "U8": "u1"}.items()
}


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's bytes are, and what they are."""

    dtype: str  # as the format names it
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    size: int  # bytes


def header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The start of a safetensors file; the tensors' bytes follow in this order.

    Args:
        tensors: name, dtype as the format names it, shape, and bytes of each.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape, size in tensors:
        places = [offset, offset + size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": places}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(
    stream: IO[bytes] | Any, dtypes: Mapping[str, np.dtype[Any]]
) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """The metadata of a safetensors file, and its tensors in the order of their bytes.

    The stream is left at the first tensor's bytes.

    Raises:
        ValueError: it is no safetensors file of these dtypes, or its tensors do not fill it.
    """
    stream.seek(0, 2)
    room = stream.tell()  # a memory map's seek returns None
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if not 0 < length <= room - 8:
        raise ValueError("its header is cut short")
    header = parse_json(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    base = 8 + length
    places = [(name, _place(name, entry, base, dtypes)) for name, entry in header.items()]
    places.sort(key=lambda item: (item[1].start, item[1].size))
    end = base
    for name, place in places:
        if place.start != end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        end += place.size
    if end != room:
        raise ValueError("its length differs from the length in its header")
    return metadata if isinstance(metadata, dict) else {}, dict(places)


def _place(name: str, entry: Any, base: int, dtypes: Mapping[str, np.dtype[Any]]) -> TensorPlace:
    try:
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        (start, end) = entry["data_offsets"]
        itemsize = dtypes[dtype].itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} has an invalid header, or another dtype: {error}") from None
    valid = all(type(n) is int and n >= 0 for n in (*shape, start, end)) and len(shape) <= 8
    if not valid or math.prod(max(side, 1) for side in shape) >= 2**48:
        raise ValueError(f"{name} has an invalid shape {shape} or offset {start}")
    size = math.prod(shape) * itemsize
    if end - start != size:
        raise ValueError(
            f"{name} of shape {shape} needs {size} bytes, its header states {end - start}"
        )
    return TensorPlace(dtype, shape, base + start, size)
