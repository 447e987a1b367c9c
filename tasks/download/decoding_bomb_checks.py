"""Checks of downloaded bytes before they are decoded: format, pixels, JPEG scans, PNG metadata."""

from __future__ import annotations

import re
import struct
import zlib
from functools import cache
from io import BytesIO
from itertools import pairwise
from typing import NamedTuple

from runtimes.process.memory import check_memory
from tasks.download.decoding_memory import BYTES_PER_PIXEL
from tasks.download.retryable_and_final_failures import FetchFailed

#: Accepted formats. The list keeps hostile bytes away from Pillow's rarer decoders. An AVIF's
#: decoder takes the memory of the coded frames, whatever size the file's boxes declare.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
AVIF = (b"ftypavif", b"ftypavis")
#: A JPEG scan header (ITU-T T.81, B.2.3). Each scan can cost a pass over all pixels.
SCAN = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e][\x01-\x04]")
MAX_SCANS = 100  # encoders write about 10
#: Opening takes this many times less memory than decoding: two canvases of a WebP.
OPENED = 8
#: A TIFF's byte order -> its code in `struct`. BigTIFF, for files over 4 GB, is not accepted.
BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
WIDTH, LENGTH, TILE_WIDTH, TILE_LENGTH = 256, 257, 322, 323  # TIFF tags
#: TIFF types of a number of pixels -> where it is in the entry's four bytes.
SIZE_TYPES = {3: "H2x", 4: "I"}


PNG = b"\x89PNG\r\n\x1a\n"
#: A PNG's chunks of metadata, and what is in front of a zlib stream in one (PNG 1.2, section 4.2).
METADATA = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
PACKED = re.compile(rb"(?:zTXt|iCCP)[^\0]*\0.|iTXt[^\0]*\0[^\0].[^\0]*\0[^\0]*\0", re.DOTALL)
#: Bytes of the unpacked metadata of a picture. Pillow refuses a picture with a larger chunk, and
#: OpenCV unpacks a thousand of 8 MB each.
MAX_METADATA = 2**20


class Header(NamedTuple):
    """What the header of a picture declares."""

    width: int  # pixels, before the rotation by EXIF
    height: int
    is_reducible: bool  # a JPEG that can be decoded at a reduced scale: grey or YCbCr
    tile: int = 0  # pixels of a TIFF's tile, which is decoded whole

    @property
    def pixels(self) -> int:
        return self.width * self.height + self.tile


def check_picture(body: bytes, max_pixels: int) -> Header:
    """The header of a picture.

    Raises:
        FetchFailed: not a picture, more than `max_pixels` pixels or too slow to decode.
        MemoryError: this process lacks the memory to open it.
    """
    from PIL import Image, UnidentifiedImageError

    if body[4:12] in AVIF:
        raise FetchFailed("avif is not accepted")
    try:
        with Image.open(BytesIO(body), formats=known_formats()) as image:
            is_reducible = image.format == "JPEG" and image.mode in ("L", "RGB")
            tile = _tile_of_tiff(body) if image.format == "TIFF" else 0
            header = Header(*image.size, is_reducible, tile)
    except Image.DecompressionBombError:
        raise FetchFailed("too many pixels") from None
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise FetchFailed("not an image") from None
    except Exception:  # a parser of hostile bytes may raise any type
        check_memory(BYTES_PER_PIXEL * max_pixels // OPENED)
        raise FetchFailed("not an image") from None
    if header.pixels > max_pixels:
        raise FetchFailed("too many pixels")
    if body.startswith(b"\xff\xd8") and len(SCAN.findall(body)) > MAX_SCANS:
        raise FetchFailed("too many scans")
    return header


def bounded_metadata(body: bytes) -> bytes:
    """A PNG without what it has of metadata beyond MAX_METADATA; else `body` itself.

    Such are workflows of ComfyUI, which nothing reads here.
    """
    if not body.startswith(PNG):
        return body
    kept, start, at, room = list[bytes](), 0, len(PNG), MAX_METADATA
    while at + 8 <= len(body):
        size, kind = struct.unpack_from(">I4s", body, at)
        end = at + size + 12  # with length, kind and checksum
        if kind in METADATA:
            room -= _unpacked_size(body, at + 4, end - 4, max(room, 1))
            if room <= 0:
                kept.append(body[start:at])
                start = end
        at = end
    return b"".join([*kept, body[start:]]) if kept else body


def _unpacked_size(body: bytes, start: int, end: int, limit: int) -> int:
    """Bytes of a chunk of metadata, from its kind to its checksum; unpacked ones up to `limit`."""
    packed = PACKED.match(body, start, end)
    if packed is None:
        return end - start
    try:
        return len(zlib.decompressobj().decompress(body[packed.end() : end], limit))
    except zlib.error:  # Pillow and OpenCV leave it out
        return 0


def _tile_of_tiff(body: bytes) -> int:
    """Pixels of a tile, 0 without tiles.

    A size has one meaning only if its tag comes once: of two, Pillow takes the last, libtiff the
    first. TIFF 6.0 (section 2) demands ascending tags.

    Raises:
        ValueError, KeyError, struct.error: the file's first directory is not as TIFF 6.0 demands.
    """
    order = BYTE_ORDERS[body[:4]]
    (start,) = struct.unpack_from(f"{order}I", body, 4)
    (count,) = struct.unpack_from(f"{order}H", body, start)
    entries = [struct.unpack_from(f"{order}HHI4s", body, start + 2 + 12 * n) for n in range(count)]
    tags = [tag for tag, *_ in entries]
    if any(after <= before for before, after in pairwise(tags)):
        raise ValueError("its tags do not ascend")
    sizes = {
        tag: _pixels(order, kind, number, value)
        for tag, kind, number, value in entries
        if tag in (WIDTH, LENGTH, TILE_WIDTH, TILE_LENGTH)
    }
    return sizes.get(TILE_WIDTH, 0) * sizes.get(TILE_LENGTH, 0)


def _pixels(order: str, kind: int, number: int, value: bytes) -> int:
    if number != 1:
        raise ValueError("a size of several numbers")
    return int(struct.unpack(order + SIZE_TYPES[kind], value)[0])


@cache
def known_formats() -> tuple[str, ...]:
    """The FORMATS that this build of Pillow supports."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)
