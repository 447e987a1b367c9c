"""Downloaded pictures: the size that the header declares is the size that the decoder writes."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path
from random import Random

import cv2
import numpy as np
from fuzz.mutations import mutate
from fuzz.reader import Reader
from PIL import Image

from configs.settings.data import Download
from tasks.download.decode import FORMATS, PictureResizer, read_header
from tasks.download.http import FetchFailed

SIZE = (48, 40)
MOST = 2**20  # pixels
SIDES = (0, 1, 40, 48, 49, 64, 255, 256, 1000, 4000, 2**15, 2**16 - 1, 2**31, 2**32 - 1)


def readers(folder: Path) -> list[Reader]:
    settings = Download(
        max_pixels=MOST, image_size=16, min_image_size=1, max_aspect_ratio=1e6, resize_mode="no"
    )
    resizer = PictureResizer(settings)
    return [_pictures(kind, resizer) for kind in FORMATS]


def _pictures(kind: str, resizer: PictureResizer) -> Reader:
    valid = [_picture(kind)]
    if kind == "TIFF":
        valid += [_picture(kind, compression="tiff_deflate"), tiled_tiff(SIZE, 64)]

    def read(rng: Random) -> bool:
        body = _changed(rng.choice(valid), kind, rng)
        try:
            header = read_header(body, MOST)
            found = resizer.resize(body)
        except FetchFailed:
            return False
        decoded = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_UNCHANGED)
        if decoded is not None:
            height, width = decoded.shape[:2]
            assert width * height <= header.pixels, f"{header}, but {width} x {height} decoded"
        if isinstance(found, str):
            return False
        # A tag of EXIF may have turned it.
        sides = sorted((found.original_width, found.original_height))
        assert sides == sorted((header.width, header.height)), f"{header}: {sides}"
        with Image.open(BytesIO(found.picture)) as resized:
            assert resized.size == (found.width, found.height)
        return True

    return Reader(f"picture, {kind}", 2, read)


def _picture(kind: str, **options: str) -> bytes:
    buffer, (width, height) = BytesIO(), SIZE
    ramp = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) % 251
    Image.fromarray(ramp.astype(np.uint8)).save(buffer, kind, **options)
    return buffer.getvalue()


def _changed(valid: bytes, kind: str, rng: Random) -> bytes:
    if kind == "TIFF" and rng.randrange(3):
        return _other_tags(valid, rng)
    if rng.randrange(3) == 0:
        return _other_size(valid, rng)
    return mutate(valid, rng)


def _other_size(body: bytes, rng: Random) -> bytes:
    """One of the places of a side has another number."""
    sides = [
        (at, form)
        for form in ("<H", ">H", "<I", ">I")
        for side in SIZE
        for at in range(min(len(body), 600))
        if body[at : at + struct.calcsize(form)] == struct.pack(form, side)
    ]
    if not sides:
        return body
    at, form = rng.choice(sides)
    length = struct.calcsize(form)
    side = struct.pack(form, rng.choice(SIDES) % 2 ** (8 * length))
    return body[:at] + side + body[at + length :]


def _other_tags(body: bytes, rng: Random) -> bytes:
    """A directory with a repeated, a changed or a moved tag, at the end of the file."""
    (start,) = struct.unpack_from("<I", body, 4)
    (count,) = struct.unpack_from("<H", body, start)
    entries = [body[start + 2 + 12 * n : start + 14 + 12 * n] for n in range(count)]
    for _ in range(rng.randrange(1, 3)):
        tag, kind, number = struct.unpack("<HHI", rng.choice(entries)[:8])
        tag = rng.choice((256, 257, 322, 323, tag, tag))
        side = struct.pack("<I", rng.choice(SIDES))
        entry = struct.pack("<HHI", tag, rng.choice((kind, 3, 4)), number) + side
        entries.insert(rng.randrange(len(entries) + 1), entry)
    if rng.randrange(2):  # as a directory must be: ascending
        entries.sort(key=lambda entry: struct.unpack("<H", entry[:2]))
    if rng.randrange(2):  # and each tag once
        entries = list({entry[:2]: entry for entry in entries}.values())
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return body[:4] + struct.pack("<I", len(body)) + body[8:] + directory


def tiled_tiff(size: tuple[int, int], tile: int) -> bytes:
    """A grey TIFF of one tile, which has `tile` pixels a side."""
    data, at = zlib.compress(bytes(tile * tile), 9), 8 + 2 + 11 * 12 + 4
    sides = ((256, size[0]), (257, size[1]))
    rest = ((258, 8), (259, 8), (262, 1), (277, 1), (284, 1))
    tiles = ((322, tile), (323, tile), (324, at), (325, len(data)))
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in (*sides, *rest, *tiles)]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + directory + data
