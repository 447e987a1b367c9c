"""What only runtime jax has: one compilation, state in parts on the devices, programs kept."""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import chips
import pytest
import torch
from driver_process import DriverProcess
from tolerances import LOSS, NORM
from training import losses, norms, train

from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob

jax = chips.importorskip("jax")
from runtimes.jax import runtime as jax_runtime  # noqa: E402
from runtimes.jax.abstract_step import AbstractStep  # noqa: E402
from runtimes.jax.mesh import Mesh  # noqa: E402
from runtimes.jax.runtime import load_network  # noqa: E402
from runtimes.jax.step import frozen_arrays  # noqa: E402
from runtimes.process.questions import TpuStepRequest  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("jax")]  # they share a process
MakeJob = Callable[..., TrainJob]
COMMON: dict[str, Any] = {
    "runtime": "jax",
    "global_batch_size": 8,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 5,
    "ema_decay": 0.9,
    "logging_steps": 5,
}


@pytest.fixture
def make_job(make_job: MakeJob) -> MakeJob:
    """The programs are kept from one session of tests to the next."""
    kept = f"{os.environ['JAX_COMPILATION_CACHE_DIR']}-of-jobs"
    return lambda **settings: replace(make_job(**{**COMMON, **settings}), compiled=kept)


def test_a_step_is_compiled_once_a_shape_and_a_resume_reads_the_programs(
    driver: DriverProcess, make_job: MakeJob
) -> None:
    """With a learning rate that changes, an average, checkpoints and metrics; the state lies in
    parts, a quarter of nearly all of it on each device."""
    job = make_job(steps=20, checkpointing_steps=5, checkpoints_total_limit=9, fsdp=4)
    found = driver.call("train", asdict(job), 10)
    assert found["began"] == [0, 10]
    for counted, shapes, steps in zip(found["by_step"], found["shapes"], (20, 10), strict=True):
        assert len(counted) == steps
        # A resumed run asks for a program once more, and finds it.
        assert counted == [int(shape not in shapes[:n]) for n, shape in enumerate(shapes)]
    assert len(set(found["shapes"][0])) == 2
    assert found["hits"][1] >= len(set(found["shapes"][1]))
    assert found["kept in"] == f"{job.compiled}/jax-{version('jaxlib')}"
    assert list(Path(found["kept in"]).iterdir())
    assert found["left"][1] == found["left"][0]
    assert len(found["bytes"]) == 4
    assert max(found["bytes"].values()) <= 1.05 * found["whole"] / 4


def test_micro_batches_that_devices_cannot_share_are_filled_up(
    driver: DriverProcess, make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    """Five pictures in threes, on four devices: one program, the last micro-batch included. Each
    picture has the weight that it has in torch's one batch."""
    latents = write_latents(tmp_path / "one", [{"train/8x8": 9}])
    settings = {"steps": 3, "global_batch_size": 5, "logging_steps": 1, "latents": latents}
    job = make_job(**settings, micro_batch_size=3, fsdp=2)
    expected = make_job(**settings, name="torch", runtime="torch")
    train(expected)
    found = driver.call("train", asdict(job))
    assert losses(job) == pytest.approx(losses(expected), rel=LOSS)
    assert norms(job) == pytest.approx(norms(expected), rel=NORM)
    assert found["by_step"] == [[1, 0, 0]]
    assert max(found["bytes"].values()) <= 1.05 * found["whole"] / 2


@pytest.mark.extended
def test_frozen_text_encoders_in_the_step_replace_stored_embeddings(
    driver: DriverProcess, make_job: MakeJob, both_forms: Callable[..., Any]
) -> None:
    settings = {"steps": 3, "caption_dropout_rate": 0.3}
    embeds, ids = both_forms(Path(make_job().model))
    stored = make_job(name="embeddings", latents=embeds, **settings)
    encoded = make_job(name="token_ids", latents=ids, text_dtype="float32", **settings)
    shapes = [driver.call("train", asdict(job))["bytes"] for job in (stored, encoded)]
    assert shapes[0] == shapes[1]  # of the training state
    assert losses(encoded) == pytest.approx(losses(stored), rel=LOSS)


def test_frozen_text_encoders_keep_their_dtype_beside_weights_in_half_precision(
    make_job: MakeJob,
) -> None:
    """So they do in a plan."""
    job = make_job(method="lora", mixed_precision="bf16", text_dtype="float32")
    settings, devices = Train(**job.train), jax.devices()[:1]
    network = load_network(job, Base.of(job), settings, Mesh(1, devices))
    arrays = frozen_arrays(network, Mesh(1, devices), torch.bfloat16)
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for name, array in arrays.items():
        kinds[name.startswith("frozen_clip.")].add(str(array.dtype))
    assert kinds == {True: {"float32", "int32"}, False: {"bfloat16"}}
    asked = TpuStepRequest(job.model, job.train, 32, "v5p-8", text_dtype=job.text_dtype)
    planned = AbstractStep(asked, settings, devices, hosts=1)._frozen()
    assert {n: (a.shape, a.dtype) for n, a in planned.items()} == {
        n: (a.shape, a.dtype) for n, a in arrays.items()
    }


def test_a_validation_gathers_the_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, seen = jax_runtime.TheRuntime.__new__(jax_runtime.TheRuntime), list[Any]()
    gathered = iter(range(9))
    runtime._settings, runtime._rows, runtime._mesh, runtime._errors = Train(), 1, None, None
    runtime._state, runtime._frozen, runtime._names = {"weights": {}}, {}, {"w": "unet.w"}
    runtime._working = lambda weights: {"w": next(gathered)}
    monkeypatch.setattr(
        jax_runtime.steps, "held_out_errors", lambda call, arrays, *_: seen.append(arrays)
    )
    for _ in range(2):
        with runtime.evaluating():
            runtime.errors(None)
            runtime.errors(None)
    assert [arrays["unet.w"] for arrays in seen] == [0, 0, 1, 1]
    assert runtime._evaluated is None, "the memory is free for training"
