"""References keep their shape, are as small as they must be, and are whole but for a few pixels."""

from pathlib import Path

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from configs.errors import Refused
from runtimes.sample.reference_pictures import ReferenceLimits


def picture(height: int, width: int) -> Image.Image:
    levels = np.random.default_rng(3).integers(256, size=(height, width, 3))
    return Image.fromarray(levels.astype(np.uint8))


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (1024, 1024, (1024, 1024)),  # at the limit
        (512, 640, (512, 640)),  # not enlarged
        (1000, 700, (960, 640)),
        (2048, 2048, (1024, 1024)),
        (2000, 3000, (832, 1216)),
        (10, 3000, (64, 2944)),  # one step at least
    ],
)
def test_sizes_are_within_the_limit_and_multiples_of_the_step(
    height: int, width: int, expected: tuple[int, int]
) -> None:
    assert ReferenceLimits().size_of(height, width) == expected


def test_a_prepared_picture_is_what_the_pipelines_give_their_vae() -> None:
    image = picture(32, 48)
    expected = VaeImageProcessor(vae_scale_factor=16).preprocess(image)[0].numpy()
    assert np.array_equal(ReferenceLimits(step=16).prepare(image), expected)


def test_the_whole_picture_is_seen() -> None:
    """It is resized to cover its size, not cut to it: only what exceeds the shape is lost."""
    image = Image.new("RGB", (100, 100))
    image.paste((255, 255, 255), (0, 0, 100, 6))  # a bar along the upper border
    pixels = ReferenceLimits(step=64).prepare(image)
    assert pixels.shape == (3, 64, 64)
    assert pixels[:, 0].min() > 0.9
    assert pixels[:, 8:].max() < -0.9


def test_a_file_is_read_upright_and_a_bad_one_refused(tmp_path: Path) -> None:
    limits = ReferenceLimits(step=16)
    image = picture(32, 48)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    expected = limits.prepare(image.transpose(Image.Transpose.ROTATE_270))
    assert np.array_equal(limits.read(tmp_path / "turned.png"), expected)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(Refused, match=r"text\.png cannot be read as a picture"):
        limits.read(tmp_path / "text.png")
    with pytest.raises(Refused, match=r"none\.png does not exist"):
        limits.read(tmp_path / "none.png")
