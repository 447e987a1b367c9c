"""What only runtime mindspore has: graphs, a loss scale, msrun, mindone's schedulers."""

import json
import math
import os
import shutil
import socket
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import chips
import diffusers
import numpy as np
import pytest
import torch
from jobs import SAMPLER, MakeJob, lora
from safetensors.numpy import load_file

from runtimes.base import WrongInput
from runtimes.job import Drawing, EncodeJob, GenerateJob, TrainJob, write_job
from runtimes.objective.draws import Stream, generator
from runtimes.registry import interpreter
from tasks.encode.served import ServedEncoder
from tasks.process import run_job

pytestmark = pytest.mark.slow
DRAW = Path(__file__).with_name("draw_driver.py")
INSIDE = Path(__file__).with_name("inside_driver.py")
LOSS = 1e-4
DETERMINISTIC = (
    "EulerDiscreteScheduler",
    "LMSDiscreteScheduler",
    "DDIMScheduler",
    "DDIMParallelScheduler",
)
NOISY = ("EulerAncestralDiscreteScheduler", "DDPMScheduler")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    chips.require("mindspore")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def history(job: TrainJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(job.out) / "history.jsonl").read_text().splitlines()]


def losses(job: TrainJob) -> list[float]:
    run_job(job)
    return [line["loss"] for line in history(job)]


def elsewhere(job: TrainJob, folder: Path, **settings: Any) -> TrainJob:
    """The same job with other settings, in a folder of its own."""
    train = {**job.train, **settings}
    return replace(job, train=train, work=str(folder / "work"), out=str(folder / "out"))


@pytest.mark.parametrize(
    ("level", "tolerance", "settings"),
    [
        ("O0", 1e-5, {"micro_batch_size": 2}),
        ("O1", 1e-5, {**lora(), "gradient_checkpointing": True}),
        ("O0", 1e-3, {"compute_dtype": "float16", "loss_scale": {"initial": 1024.0}}),
    ],
    ids=["full", "lora", "float16"],
)
def test_a_graph_gives_what_operators_give_one_by_one(
    level: str, tolerance: float, settings: dict[str, Any], make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(runtime="mindspore", steps=3, ema_decay=0.9, **settings)
    graph = elsewhere(job, tmp_path / "graph", mindspore={"mode": "graph", "jit_level": level})
    assert losses(graph) == pytest.approx(losses(job), rel=tolerance)


def test_an_overflow_is_skipped_and_half_precision_resumes_to_the_bit(make_job: MakeJob) -> None:
    job = make_job(
        runtime="mindspore",
        steps=8,
        checkpoint_every=4,
        ema_decay=0.9,
        device="cpu",
        compute_dtype="float16",
        loss_scale={"initial": 2.0**24, "growth_every": 3},
    )
    whole = losses(job)
    lines = history(job)
    overflowed = [line["step"] for line in lines if line.get("overflowed")]
    assert overflowed and overflowed[0] == 1 and len(overflowed) < 8
    assert all(line["grad_norm"] is None for line in lines if line.get("overflowed"))
    scale = load_file(Path(job.work) / "checkpoints/step-00000004/loss_scale.safetensors")
    assert scale["updates"] == 4 - sum(step <= 4 for step in overflowed)
    path = Path(job.out) / "unet/diffusion_pytorch_model.safetensors"
    weights = path.read_bytes()

    for later in (Path(job.work) / "checkpoints").glob("step-*[5-8]"):
        shutil.rmtree(later)
    (Path(job.out) / "history.jsonl").unlink()
    path.unlink()
    assert losses(job) == whole and history(job) == lines
    assert path.read_bytes() == weights


def test_text_encoders_follow_torch(make_job: MakeJob, tmp_path: Path) -> None:
    """Their adapters do so in the conformance suite."""
    job = make_job(steps=4, text_encoders=True, text_encoder_learning_rate=5e-4)
    expected = losses(job)
    there = elsewhere(job, tmp_path / "mindspore")
    assert losses(replace(there, runtime="mindspore")) == pytest.approx(expected, rel=LOSS)


def test_msrun_starts_two_processes_that_write_one_checkpoint(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(runtime="mindspore", steps=4, checkpoint_every=2, device="cpu")
    expected = losses(job)
    job = elsewhere(job, tmp_path / "msrun")
    path = tmp_path / "job.json"
    write_job(job, path)
    python = Path(interpreter("mindspore"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert [line["loss"] for line in history(job)] == pytest.approx(expected, rel=1e-5)
    kept = sorted(path.name for path in (Path(job.work) / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004"]


def test_schedulers_draw_what_diffusers_draws(tiny_sdxl: Path, tmp_path: Path) -> None:
    prompts = ["a red cat", "a blue dog"]
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_sdxl)
    pipe.set_progress_bar_config(disable=True)
    config = dict(pipe.scheduler.config)
    settings = {
        "schedulers": [*DETERMINISTIC, *NOISY],
        "config": config,
        "prompts": prompts,
        "sampler": SAMPLER | {"num_inference_steps": 6},
    }
    command = [interpreter("mindspore"), DRAW, tiny_sdxl, tmp_path, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    noise = [
        generator(SAMPLER["seed"], Stream.PICTURE, number).standard_normal(
            (4, 8, 8), dtype=np.float32
        )
        for number in range(len(prompts))
    ]
    for name in DETERMINISTIC:
        pipe.scheduler = getattr(diffusers, name).from_config(config)
        expected = pipe(
            prompts,
            height=32,
            width=32,
            num_inference_steps=6,
            guidance_scale=SAMPLER["guidance_scale"],
            latents=torch.from_numpy(np.stack(noise)),
            output_type="np",
        ).images
        assert np.abs(np.load(tmp_path / f"{name}.npy") - expected).max() < 1e-3, name
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert set(wrong) <= {"DDPMScheduler"}  # whose step may have no kernel
    for name in set(NOISY) - set(wrong):
        drawn = np.load(tmp_path / f"{name}.npy")
        assert np.isfinite(drawn).all() and drawn.std() > 0.01


WRONG: dict[str, dict[str, Any]] = {
    "train.compute_dtype: MindSpore has bfloat16 on Ascend": {"compute_dtype": "bfloat16"},
    "adafactor is not for runtime mindspore": {"optimizer": "adafactor"},
    "dora and dropout are not": {"method": "lora", "lora": {"dropout": 0.1}},
    "parallel: fsdp is not": {"parallel": "fsdp", "processes": 2},
    "O2 is CANN's": {"mindspore": {"mode": "graph", "jit_level": "O2"}},
    "MindSpore finds 0 here": {"device": "ascend"},
    "'cuda' is not for runtime mindspore": {"device": "cuda"},
}


def test_what_encodes_and_draws_does_not_have_is_said_too(tiny_sdxl: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"encode\.dtype: .* on Ascend"):
        ServedEncoder(EncodeJob("mindspore", str(tiny_sdxl), device="cpu", dtype="bfloat16"))
    drawing = (Drawing(str(tmp_path / "drawn")),)
    job = GenerateJob("mindspore", str(tiny_sdxl), drawing, ("a",), SAMPLER, "cpu", "bfloat16")
    with pytest.raises(WrongInput, match=r"evaluate\.dtype: .* on Ascend"):
        run_job(job)


def test_what_can_only_be_seen_from_within(make_job: MakeJob) -> None:
    """In one process: what it imports takes longer than all of this."""

    def job(**settings: Any) -> dict[str, Any]:
        return asdict(make_job(runtime="mindspore", **{"device": "cpu", "steps": 2, **settings}))

    given = {
        "wrong": [job(**settings) for settings in WRONG.values()],
        "counted": [job(), job(gradient_checkpointing=True)],
        "without_numbers": [job(compute_dtype="float16", loss_scale={"initial": 1.0})],
        "attention_casts": [job()],
        "fresh": [job(init="random", seed=seed) for seed in (1, 1, 2)],
    }
    command = [interpreter("mindspore"), INSIDE, json.dumps(given)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])

    for said, words in zip(found["wrong"], WRONG, strict=True):
        assert words in said
    (plain, expected), (again, losses) = found["counted"]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert again == 2 * plain > 0
    ((skipped, norm),) = found["without_numbers"]  # a divergence, and not a traceback
    assert not skipped and math.isnan(norm)
    assert found["attention_casts"] == [[None]]  # not float16, in a float32 VAE
    first, same, other = found["fresh"]
    assert first == same != other
