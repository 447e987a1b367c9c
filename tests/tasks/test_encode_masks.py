"""Masks of the loss follow their pictures: through resize, crop, mirror and bucket to latents."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encode_stage import encode_images, encode_recipe
from encoder_inputs import BUCKETS, SQUARE
from numpy.typing import NDArray
from picture_bytes import encode_picture
from PIL import Image

from artifacts.image_shards import Sample, write_tar
from artifacts.latent_shards import LatentSample, LatentShard, open_latents
from artifacts.records import digest_bytes
from artifacts.store import Artifact, KeyParts, Store
from tasks.encode.crop_to_bucket import (
    Transformed,
    TransformSettings,
    area_mean,
    bucket_sizes,
    transform,
)

FACTOR = 4  # pixels per latent


def smooth(width: int, height: int) -> NDArray[np.uint8]:
    """A mask [H, W] u8 that no two crops have alike."""
    y, x = np.mgrid[:height, :width]
    waves = np.sin(5 * x / width) + np.cos(3 * y / height + x / width)
    return np.rint(255 * (waves + 2) / 4).astype(np.uint8)


def variants_of(mask: NDArray[np.uint8], settings: TransformSettings) -> list[Transformed]:
    """The variants of a picture whose red is its mask."""
    image = Image.merge("RGB", [Image.fromarray(mask), *(Image.new("L", mask.shape[::-1]),) * 2])
    sha256 = bytes([200] * 32)  # no held-out picture
    buckets = bucket_sizes(settings, FACTOR)
    return transform(image, sha256, {}, settings, buckets, Image.fromarray(mask))


@pytest.mark.parametrize("crop", ["center", "random"])
def test_a_mask_of_latents_is_the_area_mean_of_the_cropped_mask(crop: str) -> None:
    mask = np.zeros((128, 192), np.uint8)
    mask[20:101, 37:150] = 255
    half = mask.reshape(64, 2, 96, 2).mean((1, 3))  # the square has half of the shorter side
    plain, mirrored = variants_of(mask, replace(SQUARE, crop=crop, flip=True, seed=3))
    for variant, whole in (plain, half), (mirrored, half[:, ::-1]):
        assert variant.mask is not None
        top, left = variant.crop_top_left
        cropped = whole[top : top + 64, left : left + 64]
        mean = cropped.reshape(16, FACTOR, 16, FACTOR).mean((1, 3))
        assert np.abs(area_mean(variant.mask, (16, 16)) - mean).max() <= 1


@pytest.mark.parametrize("settings", [SQUARE, BUCKETS], ids=["square", "buckets"])
@pytest.mark.parametrize("crop", ["center", "random"])
@pytest.mark.parametrize("size", [(191, 128), (77, 140), (50, 33)])
def test_a_mask_shows_what_it_showed_of_its_picture(
    settings: TransformSettings, crop: str, size: tuple[int, int]
) -> None:
    variants = variants_of(smooth(*size), replace(settings, crop=crop, flip=True, seed=1))
    assert [variant.flip for variant in variants] == [False, True]
    for variant in variants:
        assert variant.mask is not None
        red = (variant.pixels[0] + 1) * 127.5
        assert variant.mask.shape == red.shape == variant.target_size
        small = tuple(side // FACTOR for side in variant.target_size)
        seen = red.reshape(small[0], FACTOR, small[1], FACTOR).mean((1, 3))
        assert np.abs(area_mean(variant.mask, small) - seen).max() < 4


def samples_with_masks(count: int, *, masked: bool = True) -> list[Sample]:
    """Pictures whose red is their mask; every third has none."""
    samples = []
    for number in range(count):
        mask = np.roll(smooth(40, 32), 3 * number, axis=1)
        levels = np.stack([mask, 0 * mask + number, 0 * mask], -1)
        data = encode_picture(Image.fromarray(levels))
        own = encode_picture(Image.fromarray(mask)) if masked and number % 3 else None
        meta = {"sha256": digest_bytes(data)}
        samples.append(Sample(f"{number:03}", data, "png", (f"{number}",), meta, own))
    return samples


def images_of(store: Store, samples: list[Sample], tmp_path: Path) -> Artifact:
    write_tar(tmp_path / "shard.tar", samples)
    key = digest_bytes((tmp_path / "shard.tar").read_bytes())
    draft = store.draft(KeyParts("download", 1, {}, {"pictures": key}))
    local = {".tar": str(tmp_path / "shard.tar")}
    draft.add_shard(store.commit_shard("download", key, local, {"samples": len(samples)}))
    return draft.commit({}, {})


def latents_of(artifact: Artifact) -> dict[tuple[str, bool], LatentSample]:
    (ref,) = open_latents(artifact.uri).shards
    shard = LatentShard(ref.url)
    rows = [shard.sample(group, n) for group, count in shard.groups.items() for n in range(count)]
    return {(sample.id.hex(), sample.flip): sample for sample in rows}


@pytest.mark.slow
def test_latent_shards_have_the_masks_of_both_variants(tiny_sdxl: Path, tmp_path: Path) -> None:
    recipe = encode_recipe(tmp_path / "store", tiny_sdxl, flip=True, holdout=0.2)
    store = Store(recipe.store)
    samples = samples_with_masks(12)
    artifact = encode_images(recipe, images_of(store, samples, tmp_path))
    assert artifact.summary["masked"] == 8
    settings = TransformSettings.of(recipe)
    latents = latents_of(artifact)
    assert len(latents) > 12
    for number, sample in enumerate(samples):
        image, mask = (
            None if data is None else Image.open(io.BytesIO(data))
            for data in (sample.image, sample.mask)
        )
        assert image is not None
        for variant in transform(image, sample.source_sha256, {}, settings, [(32, 32)], mask):
            stored = latents[sample.meta["sha256"], variant.flip].loss_mask
            assert stored is not None and stored.shape == (8, 8)
            red = (variant.pixels[0] + 1) * 127.5
            expected = red.reshape(8, 4, 8, 4).mean((1, 3)) if number % 3 else 255
            assert np.abs(stored.astype(int) - expected).max() <= 1


@pytest.mark.slow
def test_pictures_without_masks_have_the_bytes_that_they_had(
    tiny_sdxl: Path, tmp_path: Path
) -> None:
    recipe = encode_recipe(tmp_path / "store", tiny_sdxl)
    images = images_of(Store(recipe.store), samples_with_masks(6, masked=False), tmp_path)
    artifact = encode_images(recipe, images)
    assert "masked" not in artifact.summary
    (ref,) = open_latents(artifact.uri).shards
    assert not [name for name in LatentShard(ref.url)._tensors if "loss_mask" in name]
