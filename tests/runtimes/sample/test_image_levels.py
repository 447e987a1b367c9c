"""Pixels become bytes, and pixels without a value an error."""

import numpy as np
import pytest

from configs.errors import Refused
from runtimes.sample.sampling_inputs import image_levels


def test_levels_are_the_nearest_of_256() -> None:
    given = np.array([0.0, 0.4999 / 255, 0.5001 / 255, 1.0], np.float32).reshape(1, 2, 2, 1)
    assert image_levels(given).ravel().tolist() == [0, 0, 1, 255]
    assert image_levels(given).dtype == np.uint8


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_pixel_without_a_value_is_an_error(value: float) -> None:
    given = np.zeros((2, 4, 4, 3), np.float32)
    given[1, 2, 3, 0] = value
    with pytest.raises(Refused, match=r"pictures are not finite: .*evaluate\.dtype"):
        image_levels(given)
