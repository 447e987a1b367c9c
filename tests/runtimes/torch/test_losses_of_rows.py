"""Masks, pseudo-Huber and prior targets of single rows, in the torch runtime's step."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from altered_rows import of_rows
from conformance.reference_training import Plain
from conformance.runs import plain_adapters, plain_denoiser
from jobs import MakeJob, start_with_base
from tolerances import assert_close

from runtimes.contract import OPTIONAL
from runtimes.process.job import TrainJob
from runtimes.torch.kernels import DeviceHooks
from runtimes.torch.runtime import TheRuntime

pytestmark = pytest.mark.slow
LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 8.0}, "learning_rate": 1e-2}


def run(
    job: TrainJob, steps: int = 4, which: Collection[str] = OPTIONAL
) -> tuple[list[float], TheRuntime]:
    """Losses and norms of a job's steps, and its runtime."""
    runtime, batch = start_with_base(job)
    figures = []
    for step in range(steps):
        output = runtime.step(of_rows(batch, which)(step), job.train["learning_rate"])
        figures += [float(output.loss), float(output.grad_norm)]
    return figures, runtime


def expected(plain: Plain, steps: int = 4, which: Collection[str] = OPTIONAL) -> list[float]:
    plain.batch = of_rows(plain.batch, which)
    return [number for step in range(steps) for number in plain.step(step).values()]


@pytest.mark.parametrize("which", [*((name,) for name in OPTIONAL), OPTIONAL], ids="-".join)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_rows_follow_a_reference_that_keeps_two_models(
    make_job: MakeJob, method: str, which: tuple[str, ...]
) -> None:
    settings: dict[str, Any] = LORA if method == "lora" else {"learning_rate": 1e-3}
    job = make_job(max_grad_norm=None, lr_scheduler="constant", **settings)
    plain = (plain_adapters if method == "lora" else plain_denoiser)(job)
    wanted = expected(plain, which=which)
    found, _ = run(job, which=which)
    assert_close(found, wanted)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 3},
        {"compile": "blocks", "gradient_checkpointing": "blocks", "ema_decay": 0.9},
    ],
    ids=str,
)
def test_prior_rows_of_compiled_checkpointed_or_accumulated_steps_do_too(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(DeviceHooks, "compile_backend", "aot_eager")
    # After a test of runtime jax in this process, torchax's device counts as an accelerator.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    job = make_job(max_grad_norm=None, **LORA, **settings)
    found, runtime = run(job)
    assert_close(found, expected(plain_adapters(job)))
    assert all(p.requires_grad for p in runtime._network.trained().values())


def test_a_batch_without_prior_rows_pays_for_no_second_pass(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, batch = start_with_base(make_job(**LORA))
    passes: list[bool] = []
    runtime._network.denoiser.register_forward_hook(
        lambda *_: passes.append(torch.is_grad_enabled())
    )
    for step in (0, 1):
        runtime.step(of_rows(batch)(step), 1e-3)
    assert passes == [False, True, True]


def test_frozen_text_encoders_of_prior_targets_stay_as_they_were(make_job: MakeJob) -> None:
    """In full training the encoders of the captions train, too, and the base has its own."""
    job = make_job(train_text_encoder=True, learning_rate=1e-2, global_batch_size=2)
    runtime, batch = start_with_base(job)
    targets = []
    for _ in range(2):
        given = runtime.put(of_rows(batch, ["is_prior"])(0))
        runtime.step(given, 1e-2)
        targets.append(given.on_device[0].target)
    assert torch.equal(*targets)


def test_the_loss_of_the_settings_is_that_of_the_steps(make_job: MakeJob) -> None:
    huber = {"schedule": "exponential", "delta": 0.2}
    job = make_job(max_grad_norm=None, loss="smooth_l1", huber=huber, **LORA)
    found, _ = run(job, which=[])
    assert_close(found, expected(plain_adapters(job), which=[]))
    assert found[0] != run(make_job(max_grad_norm=None, **LORA), 1, which=[])[0][0]
