"""JPEGs much larger than wanted are decoded at a reduced scale, with the same result to the eye."""

import struct
from dataclasses import astuple
from io import BytesIO
from typing import Any
from zlib import compress, crc32

import cv2
import numpy as np
import pytest
from picture_bytes import encode_picture
from PIL import Image, ImageCms

from configs.settings.data import Download
from tasks.download.decode import Header, PictureResizer, Resized, reduction, rotate_and_reduce
from tasks.download.http import FetchFailed

pytestmark = pytest.mark.usefixtures("own_cache")


def photo(width: int, height: int, mode: str = "RGB", orientation: int = 1) -> bytes:
    """A JPEG with detail at several scales."""
    draw = np.random.default_rng(0)
    levels = np.zeros((height, width, 3))
    for cells in (3, 12, 48):
        grain = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), np.uint8))
        levels += np.asarray(grain.resize((width, height), Image.Resampling.BICUBIC)) / 3
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.fromarray(levels.astype(np.uint8)).convert(mode)
    return encode_picture(picture, "JPEG", quality=92, exif=exif)


def resized(body: bytes, **settings: Any) -> tuple[tuple[int, ...], Any]:
    """Sizes and pixels of a body, decoded as the settings say."""
    chosen = {"image_size": 64, "encode_format": "png", "encode_quality": 1, **settings}
    found = PictureResizer(Download(**chosen)).resize(body)
    assert isinstance(found, Resized)
    with Image.open(BytesIO(found.picture)) as picture:
        return astuple(found)[1:], np.asarray(picture)


def whole(body: bytes, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """The same, from the whole picture as img2dataset does."""
    with monkeypatch.context() as patch:
        target = "tasks.download.decode.reduction"
        patch.setattr(target, lambda *_: 1)
        return resized(body, **settings)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("size", [(600, 528), (388, 516)])
@pytest.mark.parametrize("resize_mode", ["keep_ratio", "keep_ratio_largest", "center_crop"])
def test_a_reduced_picture_looks_like_one_resized_from_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    orientation: int,
    size: tuple[int, int],
    resize_mode: str,
) -> None:
    body = photo(*size, mode, orientation)
    outcome, pixels = resized(body, resize_mode=resize_mode)
    expected, reference = whole(body, monkeypatch, resize_mode=resize_mode)
    assert outcome == expected and pixels.shape == reference.shape
    difference = pixels.astype(float) - reference
    assert difference.any()  # it was reduced
    assert 10 * np.log10(255**2 / np.mean(difference**2)) > 35  # dB
    assert (resized(body, resize_mode=resize_mode)[1] == pixels).all()


@pytest.mark.parametrize(
    ("size", "mode", "expected"),
    [
        ((1024, 1024), "keep_ratio", 8),
        ((1023, 1024), "keep_ratio", 4),
        ((255, 900), "keep_ratio", 1),
        ((256, 256), "center_crop", 2),
        ((512, 1024), "keep_ratio_largest", 8),
        ((100, 512), "border", 4),
        ((900, 900), "no", 1),
        ((1025, 4096), "keep_ratio", 2),  # by 4 or 8, the longer side would be 255 instead of 256
    ],
)
def test_a_reduced_picture_has_twice_the_sides_of_the_stored_one(
    size: tuple[int, int], mode: Any, expected: int
) -> None:
    settings = Download(image_size=64, resize_mode=mode)
    assert reduction(Header(*size, True), settings) == expected
    assert reduction(Header(*size, False), settings) == 1


@pytest.mark.parametrize(
    ("size", "settings", "reason"),
    [
        ((2400, 590), {}, "too thin"),
        ((2400, 610), {}, None),
        ((600, 600), {"min_image_size": 601}, "too small"),
        ((600, 600), {"min_image_size": 600}, None),
    ],
)
def test_the_limits_of_a_reduced_picture_are_those_of_the_whole(
    size: tuple[int, int], settings: dict[str, Any], reason: str | None
) -> None:
    settings = {"image_size": 64, **settings}
    resizer = PictureResizer(Download(**settings))
    found = resizer.resize(photo(*size))
    assert (found if isinstance(found, str) else None) == reason


def deep_png(pixels: Any) -> bytes:
    """A PNG of 16-bit pixels (height, width, channels); Pillow writes none with colours."""
    height, width, channels = pixels.shape
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in pixels)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("encode_format", ["png", "jpg", "webp"])
@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "TIFF"])
def test_a_picture_with_16_bits_per_channel_keeps_its_colours(
    mode: str, encode_format: str
) -> None:
    rgb, grey, opaque = (30, 90, 160), (90,), (255,)
    levels = {"L": grey, "LA": grey + opaque, "RGB": rgb, "RGBA": rgb + opaque, "TIFF": rgb}[mode]
    pixels = np.full((96, 96, len(levels)), np.array(levels, np.uint16) * 257)
    if mode == "TIFF":
        body = cv2.imencode(".tiff", pixels[..., ::-1])[1].tobytes()
    else:
        body = deep_png(pixels)
    quality = 1 if encode_format == "png" else 100
    outcome, stored = resized(body, encode_format=encode_format, encode_quality=quality)
    assert isinstance(outcome, tuple) and outcome[2:] == (96, 96)
    expected = rgb if len(levels) > 2 else grey * 3
    assert np.abs(stored.reshape(64, 64, -1).astype(int) - expected).max() <= 4


def grey_png(level: int) -> bytes:
    """A grey PNG whose only level is transparent."""
    return encode_picture(Image.new("L", (96, 96), level), transparency=level)


@pytest.mark.parametrize("body", [grey_png(5), deep_png(np.zeros((96, 96, 4), np.uint16))])
def test_transparent_parts_are_white(body: bytes) -> None:
    assert (resized(body)[1] == 255).all()


def tiff(picture: Image.Image) -> bytes:
    return encode_picture(picture, "TIFF")


def test_a_half_transparent_tiff_is_blended_with_white_once() -> None:
    body = tiff(Image.new("RGBA", (96, 96), (200, 100, 50, 128)))
    stored = resized(body, encode_format="png", encode_quality=1)[1]
    assert np.abs(stored.reshape(64, 64, -1).astype(int) - (227, 177, 152)).max() <= 1


def test_a_tiff_of_lab_has_the_colours_that_pillow_sees() -> None:
    lab = ImageCms.profileToProfile(
        Image.new("RGB", (96, 96), (200, 40, 40)),
        ImageCms.createProfile("sRGB"),
        ImageCms.createProfile("LAB"),
        outputMode="LAB",
    )
    expected = np.array(lab.convert("RGB"))[0, 0].astype(int)
    stored = resized(tiff(lab), encode_format="png", encode_quality=1)[1]
    assert np.abs(stored.reshape(64, 64, -1).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_known_range_are_no_picture(mode: str) -> None:
    with pytest.raises(FetchFailed, match="not an image"):
        resized(tiff(Image.new(mode, (96, 96), 1)))


def _with_exif(exif: bytes, mode: str = "RGB", kind: str = "JPEG") -> bytes:
    return encode_picture(Image.new(mode, (8, 6), 90), kind, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_only_pictures_with_an_orientation_are_rotated(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for mode, kind in (("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG")):
        body = _with_exif(exif.tobytes(), mode, kind)
        turned = rotate_and_reduce(body)
        assert (turned.body == body) == (orientation == 1)
        with Image.open(BytesIO(turned.body)) as image:
            assert image.size == ((8, 6) if orientation < 5 else (6, 8))
            assert image.getexif().get(0x0112, 1) == 1
            assert image.size == turned[1:]


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b""])
def test_a_picture_with_damaged_or_no_exif_is_unchanged(exif: bytes) -> None:
    body = _with_exif(exif)
    assert rotate_and_reduce(body) == (body, 8, 6)
