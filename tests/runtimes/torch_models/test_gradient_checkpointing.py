"""Recomputation is turned on and off without warnings, which errors of a killed job would quote."""

import warnings
from collections.abc import Callable

import pytest
from tiny_models import make_text_config, make_unet
from torch import nn
from transformers import CLIPTextModel

from runtimes.torch_models.gradient_checkpointing import recompute, without_recomputation


@pytest.mark.parametrize("make", [lambda: CLIPTextModel(make_text_config()), make_unet])
@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_recomputation_is_turned_on_and_off_without_warnings(
    make: Callable[[], nn.Module], what: str
) -> None:
    part = make()

    def recomputed() -> bool:
        return any(getattr(one, "gradient_checkpointing", False) for one in part.modules())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without_recomputation(part)
        assert not recomputed()
        recompute(part, what)
        assert recomputed()
        without_recomputation(part)
        assert not recomputed()


def test_a_part_of_no_library_has_no_recomputation_to_turn_off() -> None:
    without_recomputation(nn.Linear(1, 1))
