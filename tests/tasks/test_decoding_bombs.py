"""A picture whose header hides its size is refused before a decoder takes memory for it."""

from __future__ import annotations

import random
import resource
import struct
import time
import zlib
from collections.abc import Callable
from io import BytesIO
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
from fuzz.pictures import tiled_tiff
from kiln_command import python
from picture_bytes import encode_picture, plain_picture
from PIL import Image
from waiting import wait_until

from configs.settings.data import Download
from tasks.download.decode import (
    DECODING,
    Header,
    PictureResizer,
    PixelBudget,
    Resized,
    bounded_metadata,
    read_header,
)
from tasks.download.http import FetchFailed

REAL, SHOWN = 8000, 64  # pixels a side: decoded, and as Pillow reads the header
#: More than the other memory of a refusal; the decoded picture has REAL**2 bytes or more.
MOST_BYTES = 40 * 2**20


def saved(kind: str, side: int = SHOWN) -> bytes:
    return encode_picture(Image.new("L", (side, side), 90), kind)


def tiff_with_two_sizes() -> bytes:
    """A TIFF with each size twice: libtiff takes the first, Pillow the last."""
    tags = ((256, REAL), (256, SHOWN), (257, REAL), (257, SHOWN), (258, 8), (259, 8), (262, 1))
    data, at = zlib.compress(bytes(REAL * REAL), 9), 8 + 2 + 12 * 12 + 4
    strips = ((273, at), (277, 1), (278, REAL), (279, len(data)), (284, 1))
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in (*tags, *strips)]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + directory + data


def avif_with_another_size() -> bytes:
    """An AVIF whose box `ispe` has another size than its frame."""
    shown = Image.new("RGB", (4 * SHOWN, 4 * SHOWN))
    body = bytearray(encode_picture(shown, "AVIF", speed=10))
    at = body.index(b"ispe") + 8
    body[at : at + 8] = struct.pack(">II", SHOWN, SHOWN)
    return bytes(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (tiff_with_two_sizes(), "not an image"),
        (tiled_tiff((SHOWN, SHOWN), REAL), "too many pixels"),
    ],
    ids=["two sizes", "a large tile"],
)
def test_a_tiff_decodes_to_no_more_than_its_header_says(body: bytes, reason: str) -> None:
    resizer = PictureResizer(Download(max_pixels=10**6))
    resizer.resize(saved("TIFF"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Image.open(BytesIO(body)) as picture:
        assert picture.size == (SHOWN, SHOWN)
    with pytest.raises(FetchFailed, match=reason):
        resizer.resize(body)
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert taken < MOST_BYTES


def test_a_tiff_as_programs_write_them_is_accepted() -> None:
    assert read_header(saved("TIFF"), 10**6).pixels == SHOWN**2
    assert read_header(tiled_tiff((SHOWN, SHOWN), 256), 10**6).pixels == SHOWN**2 + 256**2
    big_endian = encode_picture(Image.new("I;16B", (SHOWN, SHOWN)), "TIFF")
    assert big_endian.startswith(b"MM")
    assert read_header(big_endian, 10**6).pixels == SHOWN**2


@pytest.mark.parametrize(
    "change",
    [
        lambda body: b"II+\0" + body[4:],  # BigTIFF
        lambda body: body[:4] + b"\xff\xff\xff\xff" + body[8:],  # no directory
        lambda body: body.replace(struct.pack("<HHI", 256, 4, 1), struct.pack("<HHI", 256, 4, 2)),
        lambda body: body.replace(struct.pack("<HHI", 256, 4, 1), struct.pack("<HHI", 256, 9, 1)),
    ],
)
def test_a_tiff_with_another_directory_is_no_image(change: Callable[[bytes], bytes]) -> None:
    valid = tiled_tiff((SHOWN, SHOWN), 64)
    changed = change(valid)
    assert changed != valid
    with pytest.raises(FetchFailed, match="not an image"):
        read_header(changed, 10**6)


def test_an_avif_is_refused_by_its_first_bytes() -> None:
    body = avif_with_another_size()
    with Image.open(BytesIO(body)) as picture:
        assert picture.size == (SHOWN, SHOWN)
    with pytest.raises(FetchFailed, match="avif is not accepted"):
        PictureResizer(Download(max_pixels=10**6)).resize(body)


def test_a_picture_that_decodes_to_another_size_is_no_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lie = Header(SHOWN, SHOWN, is_reducible=False)
    monkeypatch.setattr("tasks.download.decode.read_header", lambda body, most: lie)
    resizer = PictureResizer(Download())
    assert resizer.resize(saved("PNG", 2 * SHOWN)) == "not an image"
    assert resizer.resize(saved("PNG")) != "not an image"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>gone</html>", "not an image"),
        (b"", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image"),
        (plain_picture(101, 101), "too many pixels"),
    ],
)
def test_only_known_formats_within_the_pixel_limit_are_decoded(body: bytes, reason: str) -> None:
    with pytest.raises(FetchFailed, match=reason):
        read_header(body, max_pixels=100 * 100)
    read_header(plain_picture(100, 100), max_pixels=100 * 100)


def test_a_pixel_bomb_is_refused_by_its_header() -> None:
    bomb = bytearray(plain_picture(8, 8))
    bomb[16:24] = (60000).to_bytes(4, "big") * 2
    with pytest.raises(FetchFailed, match=r"too many pixels|not an image"):
        read_header(bytes(bomb), max_pixels=178_956_970)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(*chunks: bytes, orientation: int = 1) -> bytes:
    """A PNG of 64 x 32 pixels with these chunks in front of all others but its header."""
    exif = Image.Exif()
    exif[274] = orientation
    body = encode_picture(Image.new("RGB", (64, 32), (9, 99, 200)), exif=exif)
    return body[:33] + b"".join(chunks) + body[33:]


PACKED = zlib.compress(b"a" * (2**20 + 1))
LARGE = {
    "packed text": chunk(b"zTXt", b"workflow\0\0" + PACKED),
    "text of Pillow's limit": chunk(b"zTXt", b"workflow\0\0" + zlib.compress(b"a" * 2**20)),
    "international text": chunk(b"iTXt", b"prompt\0\1\0en\0Wort\0" + PACKED),
    "colour profile": chunk(b"iCCP", b"profile\0\0" + PACKED),
    "many texts": b"".join(
        chunk(b"zTXt", b"%d\0\0" % n + zlib.compress(bytes(2**20 - 9))) for n in range(70)
    ),
}


@pytest.mark.parametrize("metadata", LARGE.values(), ids=LARGE.keys())
def test_a_picture_with_large_metadata_is_a_picture(metadata: bytes) -> None:
    resizer = PictureResizer(Download(encode_format="png", encode_quality=1, min_image_size=1))
    plain = resizer.resize(png_with(orientation=6))
    assert not isinstance(plain, str)
    assert (plain.original_width, plain.original_height) == (32, 64)
    assert resizer.resize(png_with(metadata, orientation=6)) == plain


def test_metadata_within_the_limit_is_kept() -> None:
    text = chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(2**20 - 100)))
    for body in (png_with(text), png_with(chunk(b"zTXt", b"damaged\0\0no zlib")), saved("JPEG")):
        assert bounded_metadata(body) is body
    assert bounded_metadata(png_with(text, text)) == png_with(text)


def test_a_bomb_of_metadata_takes_no_memory() -> None:
    """OpenCV would unpack 700 MB of it."""
    resizer = PictureResizer(Download(min_image_size=1))
    resizer.resize(png_with())
    bomb = chunk(b"iTXt", b"prompt\0\1\0\0\0" + zlib.compress(bytes(7 * 10**6)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert isinstance(resizer.resize(png_with(*[bomb] * 100)), Resized)
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert taken < MOST_BYTES


def test_a_jpeg_of_many_scans_is_refused_and_a_progressive_one_is_not() -> None:
    progressive = encode_picture(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    assert read_header(progressive, max_pixels=10_000).pixels == 64 * 64
    last_scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    bomb = progressive[:-2] + 100 * last_scan + progressive[-2:]
    with pytest.raises(FetchFailed, match="too many scans"):
        read_header(bomb, max_pixels=10_000)


def test_all_threads_together_decode_no_more_pixels_than_the_limit() -> None:
    budget, most, pixels = PixelBudget(), [0], [30, 100, 70, 40, 60, 10, 100, 50]

    def decode(size: int) -> None:
        with budget.reserve(size, 100):
            most.append(budget.pixels)
            time.sleep(0.01)

    with ThreadPool(len(pixels)) as pool:
        pool.map(decode, pixels)
    assert 0 < max(most) <= 100
    assert budget.pixels == 0


#: Prints what a process without memory for a picture of 8000 x 8000 pixels makes of it.
WITHOUT_MEMORY = """if True:
    import io, resource, sys
    from PIL import Image
    from configs.settings.data import Download
    from tasks.download.decode import PictureResizer
    from tasks.download.http import FetchFailed

    def body(side, kind, **more):
        buffer = io.BytesIO()
        Image.new("RGB", (side, side), (9, 99, 200)).save(buffer, kind, **more)
        return buffer.getvalue()

    def outcome(data):
        try:
            resized = resizer.resize(data)
            return resized if isinstance(resized, str) else "stored"
        except FetchFailed as failure:
            return failure.reason
        except MemoryError:
            return "no memory"

    exif = Image.Exif()
    exif[0x0112] = 6
    large = [body(8000, kind) for kind in ("PNG", "JPEG", "WEBP", "TIFF")]
    large += [body(8000, "JPEG", exif=exif), body(8000, "PNG", exif=exif)]
    resizer = PictureResizer(Download(image_size=4096))
    small, broken = body(300, "PNG"), body(300, "GIF")[:-700]
    assert outcome(small) == "stored"
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 60 * 2**20,) * 2)
    print(*map(outcome, [*large, small, broken, b"<html>"]), sep="|")
"""


def test_a_picture_that_this_process_has_no_memory_for_is_no_broken_one() -> None:
    done = python("-c", WITHOUT_MEMORY)
    expected = ["no memory"] * 6 + ["stored", "not an image", "not an image"]
    assert done.stdout.strip().split("|") == expected, done.stderr


def test_a_picture_that_others_leave_no_memory_for_is_decoded_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, decoded = Download().max_pixels, PictureResizer._decoded
    tried = []

    def decode(*arguments: Any) -> Any:
        tried.append(DECODING.pixels)
        if DECODING.pixels < limit:
            raise MemoryError
        return decoded(*arguments)

    monkeypatch.setattr(PictureResizer, "_decoded", decode)
    with ThreadPool(1) as pool:
        with DECODING.reserve(limit // 2, limit):
            resized = pool.apply_async(PictureResizer(Download()).resize, (plain_picture(60, 50),))
            wait_until(lambda: tried)
        assert (resized.get(60).width, resized.get().height) == (60, 50)
    assert tried == [limit // 2 + 60 * 50, limit]
    assert DECODING.pixels == 0


@pytest.mark.parametrize(
    ("kind", "mode", "expected"),
    [
        ("PNG", "RGB", "not an image"),
        ("JPEG", "CMYK", "not an image"),
        ("PNG", "RGBA", "no memory"),
        ("TIFF", "CMYK", "no memory"),  # OpenCV takes the fourth channel for alpha
    ],
)
def test_a_broken_picture_ends_nothing_where_there_is_memory_for_a_whole_one(
    kind: str, mode: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(size: int) -> None:
        if size > 25 * 300 * 200:
            raise MemoryError

    monkeypatch.setattr("tasks.download.decode.check_memory", check)
    noise = Image.frombytes(mode, (300, 200), random.Random(0).randbytes(300 * 200 * len(mode)))
    body = encode_picture(noise, kind)
    try:
        outcome: Any = PictureResizer(Download()).resize(body[: len(body) // 2])
    except FetchFailed as failure:
        outcome = failure.reason
    except MemoryError:
        outcome = "no memory"
    assert outcome == expected
