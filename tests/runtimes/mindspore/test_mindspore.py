"""What only runtime mindspore has: graphs, a loss scale, msrun, mindone's schedulers."""

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import chips
import diffusers
import numpy as np
import pytest
import torch
from driver_process import DriverProcess
from jobs import SAMPLER, MakeJob, lora
from loopback_server import free_port
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tolerances import LOSS, NORM
from training import history, losses, norms, roll_back, train, weights

from runtimes.objective.random_draws import Stream, generator
from runtimes.process.job import TrainJob, write_job
from runtimes.registry import interpreter

pytestmark = pytest.mark.slow
DETERMINISTIC = (
    "EulerDiscreteScheduler",
    "LMSDiscreteScheduler",
    "DDIMScheduler",
    "DDIMParallelScheduler",
)
NOISY = ("EulerAncestralDiscreteScheduler", "DDPMScheduler")


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    chips.require("mindspore")
    with chips.standing_in("mindspore"):
        yield Path(interpreter("mindspore"))


@pytest.fixture(scope="module")
def driver(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    driver, folder = Path(__file__).with_name("driver.py"), tmp_path_factory.mktemp("mindspore")
    with closing(DriverProcess(driver, str(python), folder, {"OMP_NUM_THREADS": "1"})) as process:
        yield process


@pytest.fixture
def least_sdxl(tiny_model: Callable[[str], Path]) -> Path:
    """A larger model takes MindSpore longer, and is in the conformance suite."""
    return tiny_model("least-sdxl")


@pytest.fixture
def make_job(
    make_job: MakeJob, write_latents: Callable[..., str], least_sdxl: Path, tmp_path: Path
) -> MakeJob:
    """On pictures of one size: each is a graph of its own."""
    url = write_latents(tmp_path / "store", [{"train/8x8": 9}])
    return partial(make_job, runtime="mindspore", latents=url, model=str(least_sdxl))


def elsewhere(job: TrainJob, folder: Path, **settings: Any) -> TrainJob:
    """The same job with other settings, in a folder of its own."""
    changed = {**job.train, **settings}
    return replace(job, train=changed, work=str(folder / "work"), out=str(folder / "out"))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("level", "tolerance", "settings"),
    [
        pytest.param("O0", 1e-5, {"micro_batch_size": 2}, id="full"),
        pytest.param(
            *("O1", 1e-5, {**lora(), "gradient_checkpointing": "blocks"}),
            id="lora",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("O0", 1e-3, {"mixed_precision": "fp16", "loss_scale": {"initial": 1024.0}}),
            id="float16",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_graph_gives_what_operators_give_one_by_one(
    level: str,
    tolerance: float,
    settings: dict[str, Any],
    driver: DriverProcess,
    make_job: MakeJob,
    tmp_path: Path,
) -> None:
    job = make_job(steps=2, ema_decay=0.9, **settings)
    graph = elsewhere(job, tmp_path / "graph", mindspore={"mode": "graph", "jit_level": level})
    for one in (job, graph):
        driver.call("train", asdict(one))
    assert losses(graph) == pytest.approx(losses(job), rel=tolerance)
    assert len(set(losses(job))) == 2


@pytest.mark.extended
def test_an_overflow_is_skipped_and_half_precision_resumes_to_the_bit(
    driver: DriverProcess, make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    """On the smallest pictures: on a CPU products in half precision are slow."""
    job = make_job(
        steps=4,
        checkpointing_steps=3,
        global_batch_size=2,
        ema_decay=0.9,
        mixed_precision="fp16",
        loss_scale={"initial": 2.0**19, "growth_every": 3},
        latents=write_latents(tmp_path / "small", [{"train/4x4": 9}]),
    )
    assert driver.call("train", asdict(job)) == 0
    lines, whole = history(job), weights(job)
    overflowed = [line["step"] for line in lines if line.get("overflowed")]
    assert overflowed[0] == 1 and len(overflowed) < 3
    assert all(line["grad_norm"] is None for line in lines if line.get("overflowed"))
    scale = load_file(Path(job.work) / "checkpoints/step-00000003/loss_scale.safetensors")
    assert scale["updates"] == 3 - len(overflowed)

    roll_back(job, 3)
    assert driver.call("train", asdict(job)) == 3
    assert history(job) == lines
    assert weights(job) == whole


@pytest.mark.parametrize(
    "model", ["least-sdxl", pytest.param("least-sdxl-projecting", marks=pytest.mark.extended)]
)
def test_text_encoders_follow_torch(
    driver: DriverProcess,
    make_job: MakeJob,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    model: str,
) -> None:
    """Their adapters do so in the conformance suite."""
    job = make_job(steps=4, train_text_encoder=True, text_encoder_lr=5e-4)
    job = replace(job, model=str(tiny_model(model)))
    expected = elsewhere(replace(job, runtime="torch"), tmp_path / "torch")
    train(expected)
    driver.call("train", asdict(job))
    assert losses(job) == pytest.approx(losses(expected), rel=LOSS)


def test_unequal_micro_batches_train_as_one_batch_of_torch(
    driver: DriverProcess, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(steps=2, global_batch_size=5, micro_batch_size=3)
    whole = replace(job, runtime="torch")
    expected = elsewhere(whole, tmp_path / "torch", micro_batch_size=None)
    train(expected)
    driver.call("train", asdict(job))
    assert losses(job) == pytest.approx(losses(expected), rel=LOSS)
    assert norms(job) == pytest.approx(norms(expected), rel=NORM)


@pytest.mark.extended
def test_frozen_text_encoders_in_the_step_replace_stored_embeddings(
    driver: DriverProcess, make_job: MakeJob, both_forms: Callable[..., tuple[str, str]]
) -> None:
    embeds, ids = both_forms(Path(make_job().model))
    stored = make_job("embeddings", latents=embeds, steps=3, caption_dropout_rate=0.3)
    encoded = replace(make_job("token_ids", steps=3, caption_dropout_rate=0.3), latents=ids)
    for job in (stored, replace(encoded, text_dtype="float32")):
        driver.call("train", asdict(job))
    assert losses(encoded) == pytest.approx(losses(stored), rel=LOSS)


@pytest.mark.soak
def test_msrun_starts_two_processes_that_write_one_checkpoint(
    python: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(steps=2, checkpointing_steps=1, device="cpu")
    expected = elsewhere(replace(job, runtime="torch"), tmp_path / "torch")
    train(expected)
    path = tmp_path / "job.json"
    write_job(job, path)
    port = free_port()
    subprocess.run(
        [
            python.with_name("msrun"),
            "--worker_num=2",
            "--local_worker_num=2",
            f"--master_port={port}",
            "--join=True",
            f"--log_dir={tmp_path / 'log'}",
            "python",
            "-P",
            "-m",
            "runtimes",
            str(path),
        ],
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert losses(job) == pytest.approx(losses(expected), rel=LOSS)
    for name in ("step-00000001", "step-00000002"):
        facts = json.loads((Path(job.work) / "checkpoints" / name / "state.json").read_text())
        assert facts["processes"] == 2


@pytest.mark.extended
def test_schedulers_draw_what_diffusers_draws(
    driver: DriverProcess, least_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same noise, that of steps included; two prompts from one noise are far apart."""
    prompts, count = ["a red cat", "a blue dog"], 2
    pipe = diffusers.DiffusionPipeline.from_pretrained(least_sdxl)
    pipe.set_progress_bar_config(disable=True)
    config = dict(pipe.scheduler.config)
    sampler = SAMPLER | {"num_inference_steps": 6}
    given = {"schedulers": [*DETERMINISTIC, *NOISY], "config": config, "sampler": sampler}
    wrong = driver.call("draw", str(least_sdxl), str(tmp_path), {**given, "prompts": prompts})
    assert wrong.keys() == {"DDPMScheduler"}  # whose step has no kernel
    assert "choose another scheduler" in wrong["DDPMScheduler"]

    monkeypatch.setattr(
        diffusers.schedulers.scheduling_euler_ancestral_discrete, "randn_tensor", as_mindone_draws
    )
    for name in (*DETERMINISTIC, NOISY[0]):
        pipe.scheduler = getattr(diffusers, name).from_config(config)

        def drawn(words: list[str]) -> NDArray[np.float32]:
            rngs = [generator(SAMPLER["seed"], Stream.PICTURE, number) for number in range(count)]
            return pipe(
                words,
                height=32,
                width=32,
                num_inference_steps=6,
                guidance_scale=SAMPLER["guidance_scale"],
                latents=torch.from_numpy(
                    np.stack([rng.standard_normal((4, 8, 8), dtype=np.float32) for rng in rngs])
                ),
                generator=rngs,
                output_type="np",
            ).images

        expected, others = drawn(prompts), drawn(prompts[::-1])
        furthest = np.abs(np.load(tmp_path / f"{name}.npy") - expected).max()
        assert furthest <= 1e-4 < 1e-2 < np.abs(others - expected).max(), name


def as_mindone_draws(
    shape: Sequence[int], generator: Sequence[np.random.Generator], **_: Any
) -> torch.Tensor:
    """Noise of a step, by each picture's own generator."""
    drawn = [rng.standard_normal(tuple(shape[1:])) for rng in generator]
    return torch.from_numpy(np.stack(drawn)).float()


def test_sampling_models_leave_the_device(driver: DriverProcess, make_job: MakeJob) -> None:
    assert driver.call("left_after_sampling", asdict(make_job())) == [True, False]


WRONG: dict[str, dict[str, Any]] = {
    "train.mixed_precision: MindSpore has bfloat16 on Ascend": {"mixed_precision": "bf16"},
    "adafactor is not for runtime mindspore": {"optimizer": "adafactor"},
    "selective is not for runtime mindspore": {"gradient_checkpointing": "selective"},
    "dora and dropout are not": {"method": "lora", "lora": {"dropout": 0.1}},
    "fsdp: all is not": {"fsdp": "all", "processes": 2},
    "O2 needs CANN": {"mindspore": {"mode": "graph", "jit_level": "O2"}},
    "MindSpore finds 0 here": {"device": "ascend"},
    "'cuda' is not for runtime mindspore": {"device": "cuda"},
}


def test_settings_that_it_does_not_have_are_named(driver: DriverProcess, make_job: MakeJob) -> None:
    said = driver.call("wrong", [asdict(make_job(**settings)) for settings in WRONG.values()])
    for found, words in zip(said, WRONG, strict=True):
        assert words in found


def test_unsupported_dtypes_of_encoding_and_sampling_are_refused(
    driver: DriverProcess, tiny_sdxl: Path
) -> None:
    said = driver.call("refused", str(tiny_sdxl))
    assert said["encode"].startswith("encode.dtype: ") and "on Ascend" in said["encode"]
    assert said["generate"].startswith("evaluate.dtype: ") and "on Ascend" in said["generate"]


def test_gradient_checkpointing_computes_activations_twice(
    driver: DriverProcess, make_job: MakeJob
) -> None:
    plain, expected = driver.call("counted", asdict(make_job(steps=2)))
    again, found = driver.call(
        "counted", asdict(make_job(steps=2, gradient_checkpointing="blocks"))
    )
    assert found == pytest.approx(expected, rel=1e-6)
    assert again == 2 * plain > 0


def test_gradients_that_are_no_numbers_at_the_least_scale_are_a_divergence(
    driver: DriverProcess, make_job: MakeJob
) -> None:
    job = make_job(mixed_precision="fp16", loss_scale={"initial": 1.0})
    skipped, norm = driver.call("without_numbers", asdict(job))
    assert not skipped and math.isnan(norm)


def test_attention_of_a_float32_vae_is_not_cast(driver: DriverProcess, tiny_sdxl: Path) -> None:
    assert driver.call("attention_casts", str(tiny_sdxl)) == [None]  # not float16


def test_a_fresh_denoiser_depends_on_the_seed_alone(
    driver: DriverProcess, make_job: MakeJob
) -> None:
    first, same, other = (
        driver.call("fresh", asdict(make_job(init="random", seed=seed))) for seed in (1, 1, 2)
    )
    assert first == same != other


@pytest.mark.extended
def test_a_cpu_whose_operators_mindspore_lacks_is_refused(python: Path) -> None:
    paths = os.environ["PYTHONPATH"].replace(str(chips.MINDSPORE_HOST), "").strip(":")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *words],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )

    started = run("-c", "from runtimes.mindspore.device import start; start('cpu')")
    assert "Refused: device cpu: MindSpore has no CPU kernels" in started.stderr
    probed = json.loads(run("-m", "runtimes", "--probe", "mindspore").stdout.splitlines()[-1])
    assert not probed["available"] and "MindSpore has no CPU kernels" in probed["reason"]
    assert len(probed["reason"]) < 120  # a line of `kiln doctor`
