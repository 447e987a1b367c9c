"""The transform of pictures: buckets, crops, flips and their records."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from encoder_inputs import BUCKETS, SQUARE, gradient
from picture_bytes import encode_picture
from PIL import Image

from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.data import Download
from tasks.download.decode import PictureResizer, Resized
from tasks.encode.crop_to_bucket import (
    BadSample,
    TransformSettings,
    bucket_sizes,
    decode,
    is_holdout,
    nearest_bucket,
    settings_for_key,
    transform,
)


def _apply(data: bytes, settings: TransformSettings, meta: dict | None = None):
    sha256 = hashlib.sha256(data).digest()
    image = decode(data, settings.max_pixels)
    return transform(image, sha256, meta or {}, settings, bucket_sizes(settings, 4))[0]


def _mirrored(data: bytes, settings: TransformSettings):
    sha256 = hashlib.sha256(data).digest()
    image = decode(data, settings.max_pixels)
    return transform(image, sha256, {}, settings, bucket_sizes(settings, 4))[1]


def test_sdxl_buckets_are_those_of_its_paper() -> None:
    settings = replace(BUCKETS, resolution=1024, bucket_step=64, max_aspect=2.0)
    buckets = bucket_sizes(settings, 8)
    for size in [(1024, 1024), (1152, 896), (1216, 832), (1344, 768), (768, 1344), (1472, 704)]:
        assert (size in buckets) == (max(size) / min(size) <= 2.0)
    assert all(h % 64 == 0 and w % 64 == 0 for h, w in buckets)
    assert all(0.9 * 1024**2 <= h * w <= 1024**2 for h, w in buckets)
    assert set(buckets) == {(w, h) for h, w in buckets}


def test_bucket_sides_are_multiples_of_the_vaes_factor() -> None:
    assert all(h % 48 == 0 for h, _ in bucket_sizes(replace(BUCKETS, resolution=96), 12))
    with pytest.raises(Refused, match=r"no multiple of the model's 12"):
        bucket_sizes(SQUARE, 12)
    with pytest.raises(Refused, match=r"encode\.bucket_step"):
        bucket_sizes(replace(BUCKETS, bucket_step=128), 8)


def test_a_picture_is_in_the_bucket_of_its_aspect_ratio() -> None:
    buckets = bucket_sizes(BUCKETS, 4)
    assert nearest_bucket((300, 300), buckets) == (64, 64)
    assert nearest_bucket((100, 190), buckets) == (48, 80)
    assert nearest_bucket((5000, 100), buckets)[0] > nearest_bucket((5000, 100), buckets)[1]


def test_the_recorded_crop_is_the_real_one_and_covers_the_target() -> None:
    wide = _apply(gradient(200, 100), SQUARE)
    assert wide.pixels.shape == (3, 64, 64) and wide.pixels.dtype == np.float32
    assert wide.original_size == (100, 200)
    assert wide.crop_top_left == (0, 32) and wide.target_size == (64, 64)
    # column 32 of 128: a quarter of the way from -1 to 1
    np.testing.assert_allclose(wide.pixels[0, :, 0], -0.5, atol=0.03)
    np.testing.assert_allclose(wide.pixels[1, [0, -1], 0], [-1, 1], atol=0.03)


def test_random_crops_depend_on_bytes_and_seed_only() -> None:
    settings = replace(SQUARE, crop="random", flip=True, holdout=0.0)
    pictures = [gradient(200 + i, 100) for i in range(40)]
    first = [_apply(data, settings) for data in pictures]
    again = [_apply(data, settings) for data in reversed(pictures)][::-1]
    assert [p.crop_top_left for p in first] == [p.crop_top_left for p in again]
    assert len({p.crop_top_left for p in first}) > 20
    other = [_apply(data, replace(settings, seed=1)) for data in pictures]
    assert [p.crop_top_left for p in first] != [p.crop_top_left for p in other]
    mirrored = [_mirrored(data, settings) for data in pictures]
    for picture in first + mirrored:
        left = picture.crop_top_left[1]
        rising = picture.pixels[0, 0, -1] > picture.pixels[0, 0, 0]
        assert rising != picture.flip and left >= 0
        width = round(picture.original_size[1] * 0.64)
        expected = left / width * 2 - 1
        expected = -expected if picture.flip else expected
        assert abs(picture.pixels[0, 0, 0] - expected) < 0.05
    assert [p.flip for p in first + mirrored] == [False] * 40 + [True] * 40


def test_training_pictures_are_mirrored_and_held_out_ones_are_not() -> None:
    settings = replace(SQUARE, flip=True, holdout=0.3)
    for width in range(100, 140):
        data = gradient(width, 90)
        sha256 = hashlib.sha256(data).digest()
        variants = transform(decode(data, 2**26), sha256, {}, settings, bucket_sizes(settings, 4))
        assert [v.flip for v in variants] == ([False] if is_holdout(sha256, 0.3) else [False, True])
        if len(variants) == 2:  # cut in the middle, one is the mirror image of the other
            apart = abs(variants[0].pixels[:, :, ::-1] - variants[1].pixels)
            assert apart.max() < 0.05
    without = transform(decode(data, 2**26), sha256, {}, SQUARE, bucket_sizes(SQUARE, 4))
    assert [v.flip for v in without] == [False]


def test_original_size_is_the_one_before_the_download_resized() -> None:
    meta = {"original_width": 4000, "original_height": 3000}
    assert _apply(gradient(80, 60), SQUARE, meta).original_size == (3000, 4000)
    assert _apply(gradient(80, 60), SQUARE, {"original_width": None}).original_size == (60, 80)


@pytest.mark.parametrize("size", [(200, 100), (90, 210), (100, 100), (48, 36)])
@pytest.mark.parametrize("only_if_bigger", [True, False])
def test_a_crop_by_the_download_counts_as_one_by_the_encoding(
    size: tuple[int, int], only_if_bigger: bool
) -> None:
    seen = {}
    for mode in ("no", "center_crop"):
        settings = Download(
            image_size=80,
            resize_mode=mode,
            only_if_bigger=only_if_bigger,
            encode_format="png",
            encode_quality=3,
        )
        stored, meta = downloaded(gradient(*size), settings)
        reshapes = None if mode == "no" else mode
        seen[mode] = _apply(stored, replace(SQUARE, download_reshapes=reshapes), meta)
    whole, cut = seen["no"], seen["center_crop"]
    assert cut.original_size == whole.original_size == size[::-1]
    np.testing.assert_allclose(cut.crop_top_left, whole.crop_top_left, atol=1)
    np.testing.assert_allclose(cut.pixels, whole.pixels, atol=0.1)


@pytest.mark.parametrize(
    ("size", "only_if_bigger", "seen"),
    [((200, 100), True, (200, 200)), ((48, 36), True, (36, 48)), ((48, 36), False, (48, 48))],
)
def test_padding_by_the_download_is_part_of_the_picture(
    size: tuple[int, int], only_if_bigger: bool, seen: tuple[int, int]
) -> None:
    settings = Download(image_size=80, resize_mode="border", only_if_bigger=only_if_bigger)
    stored, meta = downloaded(gradient(*size), settings)
    found = _apply(stored, replace(SQUARE, download_reshapes="border"), meta)
    assert found.original_size == seen


def downloaded(data: bytes, settings: Download) -> tuple[bytes, dict[str, int]]:
    """A picture as the download stores it, and its metadata."""
    found = PictureResizer(settings).resize(data)
    assert isinstance(found, Resized)
    return found.picture, {
        "original_width": found.original_width,
        "original_height": found.original_height,
    }


@pytest.mark.parametrize(
    ("mode", "reshapes"), [("center_crop", "center_crop"), ("border", "border"), ("no", None)]
)
def test_the_key_of_latents_has_a_download_mode_that_crops_or_pads(
    mode: str, reshapes: str | None
) -> None:
    recipe = load_recipe("digits", {"download.resize_mode": mode})
    assert TransformSettings.of(recipe).download_reshapes == reshapes
    assert settings_for_key(recipe).get("download_reshapes") == reshapes


def test_pictures_are_upright_in_rgb_over_white() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned: shown a quarter turn clockwise
    turned = decode(encode_picture(Image.new("RGB", (40, 20), "red"), "jpeg", exif=exif), 10_000)
    assert turned.size == (20, 40)
    clear = decode(encode_picture(Image.new("RGBA", (4, 4), (255, 0, 0, 0))), 10_000)
    assert clear.mode == "RGB" and clear.getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30])
    assert decode(encode_picture(palette, transparency=0), 10_000).getpixel((0, 0)) == (
        255,
        255,
        255,
    )
    deep = Image.fromarray(np.full((4, 4), 0x8000, np.uint16))
    assert decode(encode_picture(deep), 10_000).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<html>", "undecodable"),
        (gradient(50, 50)[:-40], "undecodable"),
        (gradient(120, 100), "too many pixels"),
        (gradient(1500, 5), "too many pixels"),  # after it is resized to the bucket's height
    ],
)
def test_a_bad_picture_has_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadSample) as caught:
        _apply(data, replace(SQUARE, max_pixels=11_999))
    assert str(caught.value) == reason


def test_a_picture_that_cannot_be_decoded_for_want_of_memory_is_no_bad_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pillow's codecs call it broken."""

    def lack(size: int) -> None:
        raise MemoryError(size)

    monkeypatch.setattr("tasks.encode.crop_to_bucket.check_memory", lack)
    with pytest.raises(MemoryError):
        _apply(gradient(50, 50)[:-40], SQUARE)


def test_the_holdout_is_a_fraction_selected_by_bytes() -> None:
    ids = [hashlib.sha256(bytes([i, j])).digest() for i in range(100) for j in range(100)]
    kept = [i for i in ids if is_holdout(i, 0.1)]
    assert 0.08 < len(kept) / len(ids) < 0.12
    assert all(is_holdout(i, 0.2) for i in kept)
    assert not any(is_holdout(i, 0.0) for i in ids) and all(is_holdout(i, 1.0) for i in ids)
