"""Transforms that img2dataset's resizer uses again give the pictures of fresh ones."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
from picture_bytes import encode_picture
from PIL import Image

from configs.settings.data import Download
from tasks.download.decode import PictureResizer, img2dataset_module, img2dataset_resizer

MODES = ("keep_ratio", "keep_ratio_largest", "center_crop", "border")


def photo(number: int) -> bytes:
    size = (40 + 7 * number % 50, 40 + 11 * number % 60)
    noise = [Image.effect_noise(size, 20 + 10 * (number + n)) for n in range(3)]
    return encode_picture(Image.merge("RGB", noise))


def test_reused_transforms_give_the_pictures_of_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads, and with resizers of several settings side by side."""
    import albumentations

    img2dataset_resizer()
    module = img2dataset_module("resizer")
    settings = [Download(resize_mode=m, image_size=s) for m, s in product(MODES, (24, 36, 64))]
    resizers = [PictureResizer(each) for each in settings]
    bodies = [photo(number) for number in range(24)]

    def resize(body: bytes) -> list[Any]:
        return [resizer.resize(body) for resizer in resizers]

    with monkeypatch.context() as patch:
        patch.setattr(module, "A", albumentations)
        expected = list(map(resize, bodies))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(resize, bodies))
    assert found == expected
    assert not any(isinstance(each, str) for picture in found for each in picture)


def test_a_thread_makes_each_transform_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import albumentations

    img2dataset_resizer()
    made: list[type] = []
    for name in ("LongestMaxSize", "PadIfNeeded"):
        kind = getattr(albumentations, name)

        def make(kind: type = kind, **settings: Any) -> Any:
            made.append(kind)
            return kind(**settings)

        monkeypatch.setattr(albumentations, name, make)
    resizer = PictureResizer(Download(resize_mode="border", image_size=17))
    for number in range(5):
        resizer.resize(photo(number))
    assert len(made) == 2
