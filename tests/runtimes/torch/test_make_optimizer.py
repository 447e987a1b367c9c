"""Updates are those of the libraries and resume to the bit; what cannot be had is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.optimization import Adafactor

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.torch.make_optimizer import _KINDS, Optimizer
from runtimes.torch.step import Update

SHAPES = {"unet.conv": (6, 4, 3, 3), "unet.linear": (5, 7), "text_encoder_2.bias": (5,)}


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    drawn = torch.Generator().manual_seed(seed)
    return {n: torch.nn.Parameter(torch.randn(s, generator=drawn)) for n, s in SHAPES.items()}


def give_gradients(given: dict[str, torch.nn.Parameter], step: int) -> None:
    drawn = torch.Generator().manual_seed(100 + step)
    for parameter in given.values():
        parameter.grad = torch.randn(parameter.shape, generator=drawn)


def settings(optimizer: str, **more: object) -> Train:
    return Train(optimizer=optimizer, weight_decay=0.1, max_grad_norm=None, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_updates_are_the_library_s(name: str) -> None:
    """Adafactor's are those of kohya's documented arguments, which make its rate absolute."""
    ours, theirs = parameters(), parameters()
    update = Update(ours, settings(name, ema_decay=0.5))
    given: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if name == "adamw":
        plain: Any = torch.optim.AdamW(theirs.values(), **given)
    else:
        given |= {"scale_parameter": False, "relative_step": False, "warmup_init": False}
        plain = Adafactor(theirs.values(), **given)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        update.apply(1e-2)
        plain.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("adamw", {"exp_avg", "exp_avg_sq"}),
        ("adafactor", {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"}),
    ],
)
def test_state_goes_out_and_in_to_the_bit(name: str, memory: set[str]) -> None:
    one, other = parameters(), parameters(1)
    first = Update(one, settings(name, ema_decay=0.5))
    empty = {group: set(arrays) for group, arrays in first.state().items()}
    for step in range(3):
        give_gradients(one, step)
        first.apply(1e-2)
    state = first.state()
    assert {group: set(arrays) for group, arrays in state.items()} == empty
    assert state.keys() == {"weights", "ema", *memory}
    second = Update(other, settings(name, ema_decay=0.5))
    second.restore(state, 3)
    for step in range(3, 6):
        for update, given in ((first, one), (second, other)):
            give_gradients(given, step)
            update.apply(1e-2)
    for group, arrays in first.state().items():
        np.testing.assert_equal(arrays, second.state()[group])


def test_adafactor_remembers_rows_and_columns() -> None:
    state = Update(parameters(), settings("adafactor")).state()
    shapes = {group: {n: a.shape for n, a in arrays.items()} for group, arrays in state.items()}
    assert shapes["exp_avg_sq_row"] == {"unet.conv": (6, 4, 3), "unet.linear": (5,)}
    assert shapes["exp_avg_sq_col"] == {"unet.conv": (6, 4, 3), "unet.linear": (7,)}
    assert shapes["exp_avg_sq"] == {"text_encoder_2.bias": (5,)}


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_weights_of_zero_move_by_the_learning_rate(name: str) -> None:
    """As `up` of an adapter, which starts at 0: a rate relative to its size would train nothing."""
    up = torch.nn.Parameter(torch.zeros(64, 4))
    optimizer = Optimizer({"unet.up": up}, settings(name), frees_gradients=True)
    for step in range(10):
        up.grad = torch.randn(up.shape, generator=torch.Generator().manual_seed(step)) + 5
        optimizer.step(1e-3)
    assert up.detach().mean() == pytest.approx(-1e-2, rel=0.1)


def test_state_of_another_optimizer_is_refused() -> None:
    state = Update(parameters(), settings("adamw")).state()
    with pytest.raises(Refused, match="exp_avg_sq_row"):
        Update(parameters(), settings("adafactor")).restore(state, 1)


def test_each_part_has_its_learning_rate() -> None:
    given = parameters()
    ratio = {"learning_rate": 1e-2, "text_encoder_lr": 1e-3}
    optimizer = Optimizer(
        given, Train(**ratio, train_text_encoder=True, weight_decay=0.0), frees_gradients=True
    )
    before = {name: p.detach().clone() for name, p in given.items()}
    give_gradients(given, 0)
    optimizer.step(5e-3)
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in given.items()}
    assert moved["unet.linear"] == pytest.approx(5e-3, rel=1e-3)
    assert moved["text_encoder_2.bias"] == pytest.approx(5e-4, rel=1e-3)


def test_what_has_no_gradient_is_left_alone() -> None:
    """The last layer of SDXL's first text encoder, whose output nothing reads."""
    for name in ("adamw", "adafactor"):
        given = parameters()
        update = Update(given, settings(name))
        before = given["unet.linear"].detach().clone()
        give_gradients(given, 0)
        given["unet.linear"].grad = None
        assert torch.isfinite(update.apply(1e-2))
        assert torch.equal(given["unet.linear"], before)


def test_codes_of_eight_bits_go_out_and_in_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip of our own: bytes become float32 arrays and are the same bytes again.

    Names and types of the memory are bitsandbytes', the optimizer is not: its kernels, blocks and
    tables need a GPU, and nothing here shows that they are as we take them to be.
    """

    class Codes(torch.optim.SGD):
        def __init__(self, groups: list[dict], settings: Train) -> None:
            super().__init__(groups, lr=1.0)

    def fill(optimizer: Codes, parameter: torch.nn.Parameter, at: int, index: int) -> None:
        if parameter.numel() > 100:
            codes = torch.arange(parameter.numel()) % 256
            optimizer.state[parameter] |= {
                "state1": codes.to(torch.uint8).view(parameter.shape),
                "absmax1": torch.full((1,), 0.3),
            }
        else:
            optimizer.state[parameter] |= {"state1": torch.full_like(parameter, 0.25)}

    from dataclasses import replace

    codes = replace(_KINDS["adamw_8bit"], make=Codes, start=fill)
    monkeypatch.setitem(_KINDS, "adamw_8bit", codes)
    given = parameters()
    update = Update(given, settings("adamw_8bit"))
    state = update.state()
    assert all(a.dtype == np.float32 for arrays in state.values() for a in arrays.values())
    assert state["state1"]["unet.conv"].max() == 215 and state["absmax1"].keys() == {"unet.conv"}
    held = update._optimizer.state_tensors()
    for tensors in held.values():
        for tensor in tensors.values():
            tensor.zero_()
    update.restore(state, 2)
    assert held["state1"]["unet.conv"].dtype == torch.uint8
    for group, arrays in state.items():
        np.testing.assert_equal(update.state()[group], arrays)
