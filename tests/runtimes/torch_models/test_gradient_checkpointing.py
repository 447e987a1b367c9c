"""Recomputation is turned on and off without warnings, which errors of a killed job would quote."""

import warnings
from collections.abc import Callable

import pytest
from tiny_models import make_text_config, make_unet
from torch import nn
from transformers import CLIPTextModel

from runtimes.torch_models.activation_memory import recompute, without_recomputation


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


class Older:
    """A model of an older transformers, which has only the former names."""

    is_gradient_checkpointing = False

    def gradient_checkpointing_enable(self, options: dict[str, object]) -> None:
        assert options["use_reentrant"] is False
        self.is_gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.is_gradient_checkpointing = False


def test_an_older_transformers_has_the_former_methods() -> None:
    part = Older()
    without_recomputation(part)
    recompute(part, "selective")
    assert part.is_gradient_checkpointing
    without_recomputation(part)
    assert not part.is_gradient_checkpointing
