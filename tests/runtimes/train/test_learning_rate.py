"""Learning rates: diffusers' shapes, but for a warm-up that wastes no step on a rate of 0."""

import pytest
import torch
from diffusers.optimization import (
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_scheduler,
)
from torch.optim.lr_scheduler import LRScheduler

from configs.settings.train import Train
from runtimes.learning_rate import learning_rate

FALLING = ["linear", "cosine", "cosine_with_restarts", "polynomial"]
SHAPE = {"steps": 50, "lr_warmup_steps": 10, "learning_rate": 0.5}
STEPS = {"num_warmup_steps": 10, "num_training_steps": 50}


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)


def check_after_warm_up(settings: Train, theirs: LRScheduler) -> None:
    for step in range(50):
        if step >= 10:
            assert learning_rate(step, settings) == pytest.approx(theirs.get_last_lr()[0])
        theirs.optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("shape", "ours", "theirs"),
    [
        ("constant", {}, {}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", {}, {}),
        ("cosine_with_restarts", {"lr_num_cycles": 3}, {"num_cycles": 3}),
        # diffusers' default polynomial ends at a rate of 1e-7
        ("polynomial", {"lr_min_ratio": 2e-7}, {}),
        ("polynomial", {"lr_min_ratio": 2e-7, "lr_power": 2.5}, {"power": 2.5}),
    ],
)
def test_after_warm_up_it_is_diffusers_schedule(shape: str, ours: dict, theirs: dict) -> None:
    name = "constant_with_warmup" if shape == "constant" else shape
    scheduler = get_scheduler(name, optimizer(), **STEPS, **theirs)
    check_after_warm_up(Train(**SHAPE, lr_scheduler=shape, **ours), scheduler)


def test_the_final_rate_is_diffusers_where_it_has_one() -> None:
    linear = get_linear_schedule_with_warmup(optimizer(), **STEPS, f_min=0.1)
    check_after_warm_up(Train(**SHAPE, lr_scheduler="linear", lr_min_ratio=0.1), linear)
    polynomial = get_polynomial_decay_schedule_with_warmup(
        optimizer(), **STEPS, lr_end=0.05, power=0.5
    )
    settings = Train(**SHAPE, lr_scheduler="polynomial", lr_min_ratio=0.1, lr_power=0.5)
    check_after_warm_up(settings, polynomial)


@pytest.mark.parametrize("shape", ["constant", *FALLING])
def test_warm_up_rises_evenly_to_the_peak(shape: str) -> None:
    settings = Train(steps=50, lr_warmup_steps=4, learning_rate=1.0, lr_scheduler=shape)  # type: ignore[arg-type]
    rates = [learning_rate(step, settings) for step in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("shape", FALLING)
def test_it_falls_to_the_final_share_of_the_peak(shape: str) -> None:
    settings = Train(steps=10, learning_rate=2.0, lr_scheduler=shape, lr_min_ratio=0.1)  # type: ignore[arg-type]
    rates = [learning_rate(step, settings) for step in range(11)]
    assert rates[0] == 2.0 and rates[10] == pytest.approx(0.2)
    assert rates == sorted(rates, reverse=True)


def test_restarts_go_back_to_the_peak_at_once() -> None:
    settings = Train(
        steps=12,
        learning_rate=1.0,
        lr_scheduler="cosine_with_restarts",
        lr_num_cycles=3,
        lr_min_ratio=0.5,
    )
    rates = [learning_rate(step, settings) for step in range(12)]
    assert rates == pytest.approx(rates[:4] * 3)
    assert rates[0] == 1.0 and min(rates) > 0.5


@pytest.mark.parametrize("shape", FALLING)
def test_a_run_of_warm_up_alone(shape: str) -> None:
    settings = Train(steps=3, lr_warmup_steps=3, lr_scheduler=shape, learning_rate=1.0)  # type: ignore[arg-type]
    assert learning_rate(2, settings) == 1.0
