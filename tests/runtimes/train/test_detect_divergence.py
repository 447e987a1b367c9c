"""Losses that have gone wrong are noticed, at the step that they went wrong at."""

from typing import Any

import pytest

from configs.settings.train_parts import OnDivergence
from runtimes.train.divergence import DivergenceDetector

NAN, INF = float("nan"), float("inf")


def event_step(losses: list[float], **settings: Any) -> int | None:
    """The step of the first divergence event, or None."""
    divergence = DivergenceDetector(OnDivergence(**settings))
    for step, loss in enumerate(losses, start=1):
        divergence.observe(step, loss, 1.0)
        if divergence.event is not None:
            return divergence.event.step
    return None


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (0.5, NAN), (0.5, INF)])
def test_a_loss_that_is_not_finite_is_an_event_at_once(loss: float, norm: float) -> None:
    divergence = DivergenceDetector(OnDivergence(patience=9))
    divergence.observe(1, 0.5, 1.0)
    assert divergence.event is None
    divergence.observe(2, loss, norm)
    assert divergence.event is not None and divergence.event.step == 2
    assert "at step 2" in divergence.event.words


def test_high_losses_in_a_row_are_blamed_on_the_first() -> None:
    calm = [1.0, 1.2, 0.8] * 5
    assert event_step([*calm, 9.0, 9.0, 9.0], factor=3.0, patience=3) == 16
    assert event_step([*calm, 9.0, 9.0, 1.0, 9.0, 9.0], factor=3.0, patience=3) is None
    assert event_step([*calm, 9.0, NAN], factor=3.0, patience=3) == 16
    assert event_step([*calm, 2.9], factor=3.0) is None
    assert event_step([*calm, 3.1], factor=3.0) == 16
    assert event_step([*calm, 1e9]) is None, "without a factor, only NaN counts"


def test_the_mean_is_of_the_recent_past_and_needs_some() -> None:
    assert event_step([1.0, 1.0, 9.0], factor=3.0) is None, "too early to judge"
    assert event_step([9.0] * 20 + [1.0] * 100 + [4.0], factor=3.0) == 121
    assert event_step([9.0] * 20 + [1.0] * 40 + [4.0], factor=3.0) is None


def test_it_resumes_as_if_it_had_seen_all() -> None:
    losses = [1.0] * 12 + [5.0] * 2
    resumed = DivergenceDetector(OnDivergence(factor=3.0, patience=3))
    resumed.reset(losses)
    assert resumed.is_suspicious and resumed.event is None
    resumed.observe(15, 5.0, 1.0)
    assert resumed.event is not None and resumed.event.step == 13
    resumed.reset(losses[:12])
    assert not resumed.is_suspicious and resumed.event is None
