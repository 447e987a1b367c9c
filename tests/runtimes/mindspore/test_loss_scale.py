"""The loss scale halves at an overflow, doubles after a while, and survives a resume."""

import math

from configs.settings.train_parts import LossScale
from runtimes.mindspore.loss_scale import DynamicLossScale


def test_an_overflow_halves_it_and_is_no_update() -> None:
    scale = DynamicLossScale(LossScale(initial=8, growth_every=2))
    assert scale.update(math.inf) and scale.update(math.nan)
    assert (scale.value, scale.updates) == (2, 0)
    assert not scale.update(1.0)
    assert (scale.value, scale.updates) == (2, 1)


def test_steps_without_overflow_double_it() -> None:
    scale = DynamicLossScale(LossScale(initial=8, growth_every=2))
    for expected in (8, 16, 16, 32):
        scale.update(1.0)
        assert scale.value == expected


def test_at_the_least_scale_a_run_is_left_to_diverge() -> None:
    """Such a step is carried out, and bias corrections count it."""
    scale = DynamicLossScale(LossScale(initial=1, growth_every=1))
    assert not scale.update(math.nan)
    assert (scale.value, scale.updates) == (1, 1)


def test_it_goes_on_where_it_was() -> None:
    settings = LossScale(initial=64, growth_every=3)
    whole, resumed = DynamicLossScale(settings), DynamicLossScale(settings)
    norms = [1.0, math.inf, 1.0, 1.0, 1.0, math.inf, 1.0]
    for norm in norms[:4]:
        whole.update(norm)
    resumed.restore(whole.state(), step=4)
    for norm in norms[4:]:
        assert whole.update(norm) == resumed.update(norm)
    assert whole.state() == resumed.state()


def test_float32_is_not_scaled_and_leaves_nothing() -> None:
    scale = DynamicLossScale(None)
    scale.restore({}, step=7)
    assert not scale.update(math.nan)
    assert scale.state() == {} and scale.value == 1


def test_a_run_of_another_precision_starts_with_a_scale_of_its_own() -> None:
    scale = DynamicLossScale(LossScale(initial=32))
    scale.restore({}, step=7)
    assert (scale.value, scale.updates) == (32, 7)
