"""Updates are those of the libraries and resume to the bit; what cannot be had is refused."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from came_pytorch import CAME
from lion_pytorch import Lion
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree
from transformers.optimization import Adafactor

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.optimizer_state import shapes_of
from runtimes.torch.gpu_step_memory import _bytes_8bit
from runtimes.torch.make_optimizer import Optimizer
from runtimes.torch.step import Update
from runtimes.train.checkpoints import Checkpoints

SHAPES = {
    "unet.conv": (6, 4, 3, 3),
    "unet.linear": (5, 7),
    "unet.wide": (80, 90),  # bitsandbytes keeps smaller arrays in float32
    "text_encoder_2.bias": (5,),
}
BITSANDBYTES = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-bitsandbytes")
EIGHT_BIT = ("adamw_8bit", "lion_8bit")
EIGHT_BIT_TESTS = (Path(__file__), Path(__file__).parents[1] / "train/test_training_loop.py")
without_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="runs in the process of the test below"
)
NAMES = ("adamw", "adafactor", "adamw_schedule_free", "came", "lion", "muon", "prodigy")
OPTIMIZERS = (*NAMES, *(pytest.param(name, marks=without_bitsandbytes) for name in EIGHT_BIT))
#: Optimizers that update each weight by itself.
SEPARATE = tuple(n for n in OPTIMIZERS if n not in ("adamw_schedule_free", "prodigy"))


class Muon:
    """torch.optim.Muon for matrices, and AdamW for the rest."""

    def __init__(self, parameters: list[torch.nn.Parameter], **given: Any) -> None:
        matrices = [p for p in parameters if p.ndim == 2]
        others = [p for p in parameters if p.ndim != 2]
        self.muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **given)
        self.adamw = torch.optim.AdamW(others, fused=True, **given)

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()


def library(name: str, parameters: list[torch.nn.Parameter]) -> Any:
    """The library's optimizer as its users make it."""
    given: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    match name:
        case "adamw":
            return torch.optim.AdamW(parameters, fused=True, **given)
        case "adafactor":  # kohya's documented arguments, which make its rate absolute
            absolute = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
            return Adafactor(parameters, **absolute, **given)
        case "prodigy":  # as diffusers' scripts
            given |= {"decouple": True, "use_bias_correction": True, "safeguard_warmup": True}
            return Prodigy(parameters, **given)
        case "adamw_schedule_free":
            made = AdamWScheduleFree(parameters, **given)
            made.train()
            return made
        case "adamw_8bit" | "lion_8bit":
            import bitsandbytes

            kind = {"adamw_8bit": "AdamW8bit", "lion_8bit": "Lion8bit"}[name]
            return getattr(bitsandbytes.optim, kind)(parameters, **given)
    return {"came": CAME, "lion": Lion, "muon": Muon}[name](parameters, **given)


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    drawn = torch.Generator().manual_seed(seed)
    return {n: torch.nn.Parameter(torch.randn(s, generator=drawn)) for n, s in SHAPES.items()}


def give_gradients(given: dict[str, torch.nn.Parameter], step: int) -> None:
    """Gradients towards 3, with noise: Prodigy's estimate grows."""
    drawn = torch.Generator().manual_seed(100 + step)
    for parameter in given.values():
        parameter.grad = parameter.detach() - 3 + torch.randn(parameter.shape, generator=drawn)


def settings(optimizer: str, **more: object) -> Train:
    return Train(optimizer=optimizer, weight_decay=0.1, max_grad_norm=None, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_the_library_s_over_a_resume_from_files(name: str, tmp_path: Path) -> None:
    ours, uninterrupted, theirs = parameters(), parameters(), parameters()
    plain = library(name, list(theirs.values()))
    chosen = settings(name, ema_decay=None if name == "adamw_schedule_free" else 0.5)
    update, whole = Update(ours, chosen), Update(uninterrupted, chosen)
    checkpoints = Checkpoints(str(tmp_path), 1)
    for step in range(20):
        if step == 10:
            facts = {"scalars": update.scalars()}
            checkpoints.save(step, update.state(), [], facts, shapes=update.shapes())
            saved = checkpoints.read(step)
            ours = parameters(1)
            update = Update(ours, chosen)
            update.restore(saved.state, step)
            update.restore_scalars(saved.facts["scalars"])
        give_gradients(ours, step)
        give_gradients(uninterrupted, step)
        give_gradients(theirs, step)
        update.apply(1e-2)
        whole.apply(1e-2)
        plain.step()
    for key, parameter in ours.items():
        assert torch.equal(parameter, theirs[key]), key
    assert "ema" in whole.shapes()
    for group, arrays in whole.state().items():
        np.testing.assert_equal(update.state()[group], arrays)
    assert shapes_of(update.state()) == update.shapes()
    if name == "adamw_schedule_free":  # it publishes the average
        plain.eval()
        for key, average in update.state()["ema"].items():
            assert np.array_equal(average, theirs[key].numpy(force=True))


@pytest.mark.extended
def test_optimizers_of_eight_bits_run_on_a_cpu() -> None:
    """The tests that need bitsandbytes, in a process that can import it."""
    path = os.pathsep.join([*sys.path, str(BITSANDBYTES)])
    run = [sys.executable, "-m", "pytest", "-q", "-rs", "-k", "_8bit", *map(str, EIGHT_BIT_TESTS)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize("name", SEPARATE)
def test_a_step_within_the_backward_pass_is_the_plain_one(name: str) -> None:
    """Weights, average and norms are equal to the bit, and no gradient is left."""

    def train(*, fused: bool) -> tuple[list[float], dict[str, Any]]:
        given = parameters()
        update = Update(given, settings(name, ema_decay=0.5, fused_backward=fused))
        norms = []
        for step in range(4):
            give_gradients(given, step)
            slopes = {n: p.grad for n, p in given.items()}
            for parameter in given.values():
                parameter.grad = None
            update.begin(1e-2)
            torch.stack([(p * slopes[n]).sum() for n, p in given.items()]).sum().backward()
            assert all((p.grad is None) is fused for p in given.values())
            norms.append(float(update.apply(1e-2)))
        return norms, update.state()

    (plain_norms, plain), (fused_norms, fused) = train(fused=False), train(fused=True)
    assert plain_norms == fused_norms
    for group, arrays in plain.items():
        np.testing.assert_equal(arrays, fused[group])


@without_bitsandbytes
@pytest.mark.parametrize(("name", "parts"), [("adamw_8bit", 1), ("lion_8bit", 2)])
def test_the_plan_has_the_bytes_of_eight_bit_states(name: str, parts: int) -> None:
    given = parameters()
    tensors = Optimizer(given, settings(name), frees_gradients=True).state_tensors()
    real = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    assert real == sum(_bytes_8bit(p.numel()) for p in given.values()) // parts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_0_starts_from_the_weights_that_are_restored(name: str) -> None:
    """As adapters that a run continues: Prodigy and schedule-free keep the first weights."""
    one, other = parameters(), parameters(1)
    first, second = (Update(given, settings(name)) for given in (one, other))
    state = first.state()
    new = {
        group: {n: np.zeros_like(a) for n, a in arrays.items()} for group, arrays in state.items()
    }
    new |= {group: state["weights"] for group in ("weights", "ema") if group in state}
    second.restore(new, 0)
    for step in range(2):
        for update, given in ((first, one), (second, other)):
            give_gradients(given, step)
            update.apply(1e-2)
    for group, arrays in first.state().items():
        np.testing.assert_equal(arrays, second.state()[group])


def test_matrices_alone_are_muon_s() -> None:
    """Token embeddings are AdamW's, too: only hidden weights are orthogonalized."""
    shapes = {**SHAPES, "text_encoder.embeddings.token_embedding.weight": (9, 4)}
    given = {n: torch.nn.Parameter(torch.ones(s)) for n, s in shapes.items()}
    state = Update(given, settings("muon")).state()
    assert state["momentum_buffer"].keys() == {"unet.linear", "unet.wide"}
    assert state["exp_avg_sq"].keys() == shapes.keys() - {"unet.linear", "unet.wide"}


def test_adafactor_remembers_rows_and_columns() -> None:
    shapes = shapes_of(Update(parameters(), settings("adafactor")).state())
    assert shapes["exp_avg_sq_row"]["unet.conv"] == (6, 4, 3)
    assert shapes["exp_avg_sq_col"]["unet.linear"] == (7,)
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_has_no_gradient_is_left_alone(name: str) -> None:
    """The last layer of SDXL's first text encoder, whose output nothing reads."""
    given = parameters()
    update = Update(given, settings(name))
    before = given["unet.linear"].detach().clone()
    give_gradients(given, 0)
    given["unet.linear"].grad = None
    assert torch.isfinite(update.apply(1e-2))
    assert torch.equal(given["unet.linear"], before)
