"""Decode fetched pictures: check, rotate and resize them in bounded memory.

A budget bounds the pixels that all threads of a process decode at once. Bytes are checked before
they are decoded: format, pixels, JPEG scans, PNG metadata. A picture is rotated upright by its EXIF
orientation, and a large JPEG is decoded at a reduced scale.

img2dataset's resizer resizes the picture. Its modules are imported singly: the package itself
imports its writers and with them PyTorch, 1.4 seconds and 220 MiB per process.
"""

from __future__ import annotations

import math
import os
import re
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

from configs.settings.data import Download
from runtimes.detect_hardware import check_memory
from runtimes.sample.reference_pictures import to_rgb
from tasks.download.http import FetchFailed

#: Memory that img2dataset needs at most, for alpha in float64; and of pictures without alpha.
BYTES_PER_PIXEL = 79
OPAQUE_BYTES_PER_PIXEL = 24
#: Formats that OpenCV reads with alpha only where Pillow does, too.
SURE_OF_ALPHA = ("JPEG", "PNG", "WEBP")


class PixelBudget:
    """Pixels of the pictures that are being decoded, in all threads."""

    def __init__(self) -> None:
        self.pixels = 0
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, pixels: int, limit: int) -> Iterator[None]:
        """Reserve `pixels`, at most `limit`, once the sum of all threads is within `limit`."""
        with self._turn, self._changed:  # one turn after another: small pictures do not overtake
            self._changed.wait_for(lambda: self.pixels + pixels <= limit)
            self.pixels += pixels
        try:
            yield
        finally:
            with self._changed:
                self.pixels -= pixels
                self._changed.notify_all()


#: The budget of this process.
DECODING = PixelBudget()

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
#: TIFF tags of the width and the length of a picture, and of a tile.
PICTURE_TAGS = (256, 257)
TILE_TAGS = (322, 323)
#: TIFF types of a number of pixels -> where it is in the entry's four bytes.
SIZE_TYPES = {3: "H2x", 4: "I"}


PNG = b"\x89PNG\r\n\x1a\n"
#: A PNG's chunks of metadata, and what precedes a zlib stream in a chunk (PNG 1.2, section 4.2).
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
    is_opaque: bool = False  # surely without alpha
    tile: int = 0  # pixels of a TIFF's tile, which is decoded whole

    @property
    def pixels(self) -> int:
        return self.width * self.height + self.tile


def read_header(body: bytes, max_pixels: int) -> Header:
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
            is_opaque = image.format in SURE_OF_ALPHA and not image.has_transparency_data
            header = Header(*image.size, is_reducible, is_opaque, tile)
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
    kept = list[bytes]()
    start = 0
    at = len(PNG)
    room = MAX_METADATA
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
    """Bytes of a chunk of metadata, from its kind to its checksum; if packed, up to `limit`."""
    packed = PACKED.match(body, start, end)
    if packed is None:
        return end - start
    try:
        return len(zlib.decompressobj().decompress(body[packed.end() : end], limit))
    except zlib.error:  # Pillow and OpenCV leave it out
        return 0


def _tile_of_tiff(body: bytes) -> int:
    """Pixels of a tile, 0 without tiles.

    A size has one meaning only if its tag comes once: if twice, Pillow takes the last, libtiff the
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
    sizes: dict[int, int] = {}
    for tag, kind, number, value in entries:
        if tag in PICTURE_TAGS + TILE_TAGS:
            if number != 1:
                raise ValueError("a size of several numbers")
            (sizes[tag],) = struct.unpack(order + SIZE_TYPES[kind], value)
    return math.prod(sizes.get(tag, 0) for tag in TILE_TAGS)


@cache
def known_formats() -> tuple[str, ...]:
    """The FORMATS that this build of Pillow supports."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


ORIENTATION = 0x0112  # EXIF tag; 1 is upright
TRANSPOSED = range(5, 9)
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
#: Part of Pillow's names of layouts with 16 bits per channel, such as RGB;16B.
DEEP = ";16"
#: Scales at which JPEG decoders compute fewer pixels per block (1/2, 1/4 and 1/8).
REDUCTIONS = (8, 4, 2)
#: Photographs with this margin differ from those resized from the whole as much as two good filters
#: (area, Lanczos) differ: by 35 to 43 dB.
MARGIN = 2


def reduction(header: Header, settings: Download) -> int:
    """How many times smaller a JPEG is decoded, per side: 1, 2, 4 or 8.

    The reduced picture has at least MARGIN times the sides of the stored picture, whose size is
    that of a picture resized from the whole.
    """
    if settings.resize_mode == "no" or not header.is_reducible:
        return 1
    fixed = max if settings.resize_mode in ("border", "keep_ratio_largest") else min

    def stored(scale: int) -> list[int]:
        sides = [math.ceil(side / scale) for side in (header.width, header.height)]
        return [round(side * settings.image_size / fixed(sides)) for side in sides]

    least = MARGIN * settings.image_size
    side = fixed(header.width, header.height)
    return next((n for n in REDUCTIONS if side >= n * least and stored(n) == stored(1)), 1)


class Upright(NamedTuple):
    """An upright picture and its size in pixels before it was reduced."""

    body: bytes
    width: int
    height: int


def rotate_and_reduce(body: bytes, reduction: int = 1) -> Upright:
    """The upright picture: `body` itself if nothing changes, else PNM or uncompressed PNG.

    img2dataset drops the EXIF tag, clips channels of 16 bits at 255, and shows a transparent grey.

    Args:
        reduction: how many times smaller a JPEG is decoded, per side: 1, 2, 4 or 8.

    Raises:
        FetchFailed: the picture cannot be decoded, perhaps for want of memory.
        MemoryError: this process lacks memory.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(body), formats=known_formats()) as image:
            is_misread = _is_misread(image)
            orientation = _orientation(image)  # loads a PNG
            width, height = image.size
            size = (height, width) if orientation in TRANSPOSED else (width, height)
            if orientation == 1 and reduction == 1 and not is_misread:
                return Upright(body, *size)
            if reduction > 1:
                image.draft(None, (width // reduction, height // reduction))
            upright = ImageOps.exif_transpose(image) if orientation > 1 else image
            if is_misread:
                upright = to_rgb(upright)
            elif upright.mode not in PNG_MODES:
                upright = upright.convert("RGB")
            buffer = BytesIO()  # decoded again at once
            kind = "PPM" if upright.mode in ("L", "RGB") else "PNG"
            upright.save(buffer, kind, compress_level=0)
            return Upright(buffer.getvalue(), *size)
    except MemoryError:
        raise
    except Exception:  # any type, as in `read_header`
        raise FetchFailed("not an image") from None


def _is_misread(image: Any) -> bool:
    """Whether img2dataset would change the colours of a picture that is not loaded yet.

    Raises:
        ValueError: the values of its pixels have no known range.
    """
    is_deep = DEEP in image.mode or any(DEEP in repr(tile) for tile in image.tile)
    if image.mode in ("F", "I") and not is_deep:
        raise ValueError(f"pixels of mode {image.mode}")  # of no known range
    if image.format == "TIFF":  # OpenCV gives colours that are multiplied by their opacity
        return is_deep or image.mode == "LAB" or bool(image.has_transparency_data)
    return is_deep or (image.mode in ("1", "L") and "transparency" in image.info)


def _orientation(image: Any) -> int:
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # a damaged tag does not make the picture unusable
        return 1
    return orientation if orientation in range(2, 9) else 1


#: Name of a package with img2dataset's modules and an empty `__init__`.
PACKAGE = "img2dataset_modules"


def img2dataset_module(name: str) -> Any:
    """A module of img2dataset, such as `resizer`; whoever imports the package has another copy.

    Raises:
        ModuleNotFoundError: img2dataset is not installed, or has no such module.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no version check over the network
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")  # lines in C++ for each broken picture
    if PACKAGE not in sys.modules:
        spec = find_spec("img2dataset")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("No module named 'img2dataset'", name="img2dataset")
        package = ModuleType(PACKAGE)
        package.__path__ = spec.submodule_search_locations
        sys.modules.setdefault(PACKAGE, package)
    return import_module(f"{PACKAGE}.{name}")


#: The resizer's error message -> the failure reason in our records.
REASONS = {
    "Image decoding error": "not an image",
    "image too small": "too small",
    "image area too large": "too many pixels",
    "aspect ratio too large": "too thin",
}
#: Why a picture was not resized, if it is not for its size.
UNDECODED = ("not an image", "cannot be resized")
#: Largest relative difference between the aspect ratios of a picture and of its mask.
SAME_ASPECT = 0.02
#: Pixels that a decoder skips need this many times less memory than those that are resized.
SKIPPED = 8


@cache
def img2dataset_resizer() -> Any:
    """img2dataset's class Resizer, imported on demand: the import takes a second."""
    module = img2dataset_module("resizer")
    # It redirects the stdout and stderr of the whole process during decoding. Two threads that do
    # so at once lose the original streams, and other threads lose their output.
    module.SuppressStdoutStderr = nullcontext
    # It makes transforms for each picture, 0.2 to 0.6 ms of Python beside 3 ms of OpenCV.
    module.A = _ReusedTransforms(module.A)
    return module.Resizer


class _ReusedTransforms(threading.local):
    """albumentations, whose transforms are made once per thread and settings."""

    def __init__(self, albumentations: Any) -> None:
        self._albumentations = albumentations
        self._transforms: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def transform(**settings: Any) -> Any:
            key = f"{name} {settings}"
            if key not in self._transforms:
                self._transforms[key] = getattr(self._albumentations, name)(**settings)
            return self._transforms[key]

        return transform


@dataclass(frozen=True)
class Resized:
    """A resized picture, encoded as `download.encode_format`; its sizes in pixels."""

    picture: bytes
    width: int
    height: int
    original_width: int
    original_height: int


class PictureResizer:
    """Resizes pictures in threads, within the memory of all decoders of the process."""

    def __init__(self, settings: Download) -> None:
        self.settings = settings
        make = partial(
            img2dataset_resizer(),
            *(settings.image_size, settings.resize_mode, settings.only_if_bigger),
            encode_quality=settings.encode_quality,
            encode_format=settings.encode_format,
        )
        self._resize = make(
            min_image_size=settings.min_image_size,
            max_image_area=settings.max_pixels,
            max_aspect_ratio=settings.max_aspect_ratio,
        )
        #: For reduced pictures, whose own size was checked before.
        self._resize_reduced = make()
        sizes = (settings.image_size, settings.resize_mode, settings.only_if_bigger)
        #: For masks and control pictures, whose own picture's size was checked before.
        self._resize_beside = img2dataset_resizer()(*sizes, encode_format="png", encode_quality=1)

    def resize(self, body: bytes) -> Resized | str:
        """The resized picture, or a failure reason.

        Raises:
            FetchFailed: the body is no picture, or a picture that would take too much memory.
            MemoryError: this process lacks memory, even if it decodes nothing else.
        """
        body = bounded_metadata(body)
        most = self.settings.max_pixels
        try:
            return self._resized(body, is_alone=False)
        except MemoryError:
            with DECODING.reserve(most, most):
                return self._resized(body, is_alone=True)

    def _resized(self, body: bytes, *, is_alone: bool) -> Resized | str:
        most = self.settings.max_pixels
        header = read_header(body, most)
        scale = reduction(header, self.settings)
        if scale > 1 and (reason := self._refused(header)):
            return reason
        pixels = header.pixels // min(scale**2, SKIPPED)
        with nullcontext() if is_alone else DECODING.reserve(pixels, most):
            resized: Resized | str = UNDECODED[0]
            try:
                resized = self._decoded(body, header, scale)
                return resized
            finally:
                if resized in UNDECODED:  # others may since have freed what all may have
                    is_small = is_alone and header.is_opaque and scale == 1
                    each = OPAQUE_BYTES_PER_PIXEL if is_small else BYTES_PER_PIXEL
                    check_memory(each * (pixels if is_alone else most))

    def _decoded(self, body: bytes, header: Header, scale: int) -> Resized | str:
        upright = rotate_and_reduce(body, scale)
        resize = self._resize if scale == 1 else self._resize_reduced
        picture, *sizes, message = resize(BytesIO(upright.body))
        if message is not None:
            return REASONS.get(message, "cannot be resized")
        if upright.body is body and sizes[2:] != [header.width, header.height]:
            return "not an image"  # one of its two sizes is a lie
        if scale > 1:
            sizes[2:] = upright.width, upright.height
        return Resized(picture, *map(int, sizes))

    def _refused(self, header: Header) -> str | None:
        """Why img2dataset's resizer would refuse the size of the whole picture."""
        shorter, longer = sorted((header.width, header.height))
        if shorter < self.settings.min_image_size:
            return "too small"
        return "too thin" if longer / shorter > self.settings.max_aspect_ratio else None

    def resize_mask(self, body: bytes, width: int, height: int) -> bytes:
        """A picture's mask, resized, cropped or padded as the picture: grey PNG, 255 = trained on.

        Args:
            body: an encoded mask, of any size of the picture's aspect ratio.
            width, height: pixels of the picture before it was resized.

        Raises:
            FetchFailed: it cannot be decoded, or has another aspect ratio.
        """
        grey = self._channel(body, lambda image: to_rgb(image).convert("L"))
        return self._resized_beside(grey, width, height)

    def resize_control(self, body: bytes, width: int, height: int) -> bytes:
        """A picture's control picture, as `resize_mask`: RGB PNG, padded with black."""
        return self._resized_beside(self._channel(body, to_rgb), width, height)

    def resize_alpha(self, body: bytes, width: int, height: int) -> bytes | None:
        """The alpha channel of a picture as `resize_mask`; None if it has none."""
        body = bounded_metadata(body)
        if read_header(body, self.settings.max_pixels).is_opaque:
            return None
        alpha = self._channel(body, lambda image: image.convert("RGBA").getchannel("A"))
        return self._resized_beside(alpha, width, height)

    def _channel(self, body: bytes, channel: Callable[[Any], Any]) -> Any:
        """A grey picture made from an upright one. Raises FetchFailed."""
        from PIL import Image, ImageOps

        most = self.settings.max_pixels
        body = bounded_metadata(body)
        header = read_header(body, most)
        try:
            with (
                DECODING.reserve(header.pixels, most),
                Image.open(BytesIO(body), formats=known_formats()) as image,
            ):
                return channel(ImageOps.exif_transpose(image))
        except MemoryError:
            raise
        except Exception:  # any type, as in `read_header`
            raise FetchFailed("not an image") from None

    def _resized_beside(self, image: Any, width: int, height: int) -> bytes:
        from PIL import Image, ImageOps

        if abs(image.width * height / (image.height * width) - 1) > SAME_ASPECT:
            raise FetchFailed("other aspect ratio than the picture's")
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BOX)
        # The resizer pads with white; no padding is trained on, and none controls.
        ImageOps.invert(image).save(buffer := BytesIO(), "PPM")
        resized, *_, message = self._resize_beside(buffer)
        if message is not None:
            raise FetchFailed("cannot be resized")
        with Image.open(BytesIO(resized)) as inverted:
            ImageOps.invert(inverted).save(buffer := BytesIO(), "PNG")
        return buffer.getvalue()
