"""Learning rates: diffusers' shapes, but for a warm-up that wastes no step on a rate of 0."""

import pytest
import torch
from diffusers.optimization import get_scheduler

from configs.training import Train
from runtimes.schedule import learning_rate


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_after_warm_up_it_is_diffusers_schedule(shape: str) -> None:
    settings = Train(steps=50, warmup_steps=10, learning_rate=0.5, lr_schedule=shape)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    name = "constant_with_warmup" if shape == "constant" else shape
    theirs = get_scheduler(name, optimizer, num_warmup_steps=10, num_training_steps=50)
    for step in range(50):
        if step >= 10:
            assert learning_rate(step, settings) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_warm_up_rises_evenly_to_the_peak() -> None:
    settings = Train(steps=50, warmup_steps=4, learning_rate=1.0)
    assert [learning_rate(step, settings) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_it_falls_to_the_final_share_of_the_peak(shape: str) -> None:
    settings = Train(steps=10, learning_rate=2.0, lr_schedule=shape, lr_final=0.1)
    rates = [learning_rate(step, settings) for step in range(11)]
    assert rates[0] == 2.0 and rates[10] == pytest.approx(0.2)
    assert rates == sorted(rates, reverse=True)


def test_a_run_of_warm_up_alone() -> None:
    settings = Train(steps=3, warmup_steps=3, lr_schedule="cosine", learning_rate=1.0)
    assert learning_rate(2, settings) == 1.0
