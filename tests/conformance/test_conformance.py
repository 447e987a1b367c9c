"""What every runtime must do alike: the same losses, resumes, pictures and complaints.

Each job runs as a stage runs it: in a process of the runtime's own environment. A new runtime is
a name in `runtimes.registry.RUNTIMES`, another kind of device of one a name in `chips.VARIANTS`;
one that is not installed here is skipped, and says so.
"""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from conformance.conftest import MakeJob
from conformance.plain import Plain, Weights, read_weights
from diffusers import DiffusionPipeline
from numpy.typing import NDArray
from peft import LoraConfig
from PIL import Image

from configs.training import Train
from runtimes.adapters.lora import LORA_WEIGHTS, initial_down
from runtimes.base import WrongInput
from runtimes.encoders import read_config
from runtimes.extras import job_config, trained_config
from runtimes.families import detect_family
from runtimes.job import Drawing, GenerateJob, Job, TrainJob
from runtimes.objective.draws import Stream, generator
from runtimes.registry import check_family, probe_runtime
from runtimes.torch.models import load_denoiser
from tasks import process

pytestmark = pytest.mark.slow
LOSS = 1e-4  # relative, over 20 steps
WEIGHTS = 1e-3  # relative to the largest weight of a tensor
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sd": {
        "micro_batch_size": 4,
        **{"prediction_type": "v_prediction", "zero_terminal_snr": True, "snr_gamma": 5.0},
        **{"inpainting": True, "aesthetic_score": True},
    },
    "sdxl": {"noise_offset": 0.05, "snr_gamma": 5.0, "gradient_checkpointing": True},
    "sd3": {"timesteps": {"distribution": "logit_normal"}},
}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models this small gain nothing from more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run_job(runtime: str, job: Job) -> None:
    """As a stage does it, on what stands in for the chips of a runtime (or a variant of one)."""
    with chips.standing_in(runtime):
        process.run_job(job)


@cache
def reason_to_skip(name: str) -> str:
    found = probe_runtime(chips.VARIANTS[name].runtime)
    return chips.why_not(name) if found.available else found.reason


@pytest.fixture(params=chips.VARIANTS)
def runtime(request: pytest.FixtureRequest) -> str:
    if reason := reason_to_skip(request.param):
        pytest.skip(reason)
    return str(request.param)


def skip_unless_known(runtime: str, family: str) -> None:
    if family not in chips.VARIANTS[runtime].families:
        pytest.skip(f"{family} is not run on {runtime}")
    try:
        check_family(chips.VARIANTS[runtime].runtime, family)
    except WrongInput as error:
        pytest.skip(str(error))


def history(job: TrainJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(job.out) / "history.jsonl").read_text().splitlines()]


def result(job: TrainJob) -> dict[str, Weights]:
    """What a run has left: file -> arrays."""
    out = Path(job.out)
    files = sorted([*out.glob("*.safetensors"), *out.glob("*/*.safetensors")])
    return {str(path.relative_to(job.out)): read_weights(path) for path in files}


def reference(job: TrainJob) -> Plain:
    folder, settings = Path(job.model), Train(**job.train)
    config, denoiser = job_config(job, settings), detect_family(folder).denoiser
    denoiser = load_denoiser(folder / denoiser, config=config, seed=settings.seed)
    return Plain(job, denoiser.requires_grad_(True))


def assert_close(found: Weights, expected: Weights, tolerance: float) -> None:
    """What was trained is the same; what else a part needs (SD3's positions) is there beside it."""
    assert found.keys() >= expected.keys()
    for name, array in expected.items():
        furthest = np.abs(found[name] - array).max()
        assert furthest <= tolerance * max(np.abs(array).max(), 1e-3), name


def forget_after(job: TrainJob, step: int) -> None:
    """Leave a work folder as it was when the process was killed after the checkpoint of `step`."""
    for path in sorted((Path(job.work) / "checkpoints").iterdir()):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (Path(job.out) / "history.jsonl").unlink()
    for name in result(job):
        (Path(job.out) / name).unlink()


@pytest.mark.parametrize("family", OBJECTIVES)
def test_twenty_steps_follow_the_reference_and_resume(
    runtime: str, family: str, make_job: MakeJob
) -> None:
    skip_unless_known(runtime, family)
    job = make_job(runtime, family, **OBJECTIVES[family])
    plain = reference(job)
    expected = plain.losses()
    run_job(runtime, job)
    assert [line["loss"] for line in history(job)] == pytest.approx(expected, rel=LOSS)
    whole, lines = result(job), history(job)
    assert_close(next(iter(whole.values())), plain.weights(), WEIGHTS)

    if family != chips.VARIANTS[runtime].families[0]:
        return  # what others resume by is no different
    forget_after(job, 8)
    run_job(runtime, job)
    assert history(job) == lines
    resumed = result(job)
    for name, weights in whole.items():
        np.testing.assert_equal(resumed[name], weights)


def lora_reference(job: TrainJob) -> Plain:
    """PEFT's adapters on the attention layers, started as every runtime starts them."""
    lora = Train(**job.train).lora
    denoiser = load_denoiser(Path(job.model) / "unet").requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    denoiser.add_adapter(config)
    for name, parameter in denoiser.named_parameters():
        if name.endswith(".lora_A.default.weight"):
            layer = f"unet.{name.removesuffix('.lora_A.default.weight')}"
            start = initial_down(job.train["seed"], layer, parameter.shape)
            parameter.data = torch.from_numpy(start)
    return Plain(job, denoiser)


def test_adapters_follow_the_reference_and_resume(runtime: str, make_job: MakeJob) -> None:
    lora = {"method": "lora", "lora": {"rank": 4, "alpha": 8.0}, "learning_rate": 1e-2}
    job = make_job(runtime, gradient_checkpointing=True, **lora)
    plain = lora_reference(job)
    expected = plain.losses()
    run_job(runtime, job)
    assert [line["loss"] for line in history(job)] == pytest.approx(expected, rel=LOSS)
    weights = {f"unet.{n.replace('.default.', '.')}": a for n, a in plain.weights().items()}
    whole = result(job)[LORA_WEIGHTS]
    assert len(whole) == len(weights) > 0
    assert_close(whole, weights, WEIGHTS)

    if runtime != "torch":
        return  # by the same files as above
    forget_after(job, 8)
    run_job(runtime, job)
    np.testing.assert_equal(result(job)[LORA_WEIGHTS], whole)


def test_text_encoders_with_adapters_are_trained_as_torch_does(
    runtime: str, make_job: MakeJob
) -> None:
    if runtime == "torch":
        pytest.skip("this is what the others are held to")
    settings: dict[str, Any] = {"steps": 6, "method": "lora", "text_encoders": True}
    settings |= {"lora": {"rank": 4}, "learning_rate": 1e-2, "text_encoder_learning_rate": 5e-3}
    jobs = {name: make_job(name, name=name, **settings) for name in ("torch", runtime)}
    for name, job in jobs.items():
        run_job(name, job)
    expected, found = (result(job)[LORA_WEIGHTS] for job in jobs.values())
    assert any(name.startswith("text_encoder_2.") for name in expected)
    assert_close(found, expected, WEIGHTS)


def test_several_devices_follow_the_reference(runtime: str, make_job: MakeJob) -> None:
    job = make_job(runtime, **chips.SEVERAL[runtime])
    expected = reference(job).losses()
    run_job(runtime, job)
    assert [line["loss"] for line in history(job)] == pytest.approx(expected, rel=LOSS)


def test_a_run_goes_to_another_runtime_and_back(runtime: str, make_job: MakeJob) -> None:
    if runtime == "torch":
        pytest.skip("resuming on itself is held to the bit above")
    job = make_job("torch", snr_gamma=5.0)
    plain = reference(job)
    expected = plain.losses()
    run_job("torch", job)
    for name, step in ((runtime, 8), ("torch", 16)):
        forget_after(job, step)
        run_job(name, make_job(name, snr_gamma=5.0))
    assert [line["loss"] for line in history(job)] == pytest.approx(expected, rel=LOSS)
    assert_close(next(iter(result(job).values())), plain.weights(), WEIGHTS)


SAMPLER = {
    "seed": 5,
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "height": None,
    "width": None,
    "batch_size": 2,
}


def drawn_plainly(model: Path, prompts: tuple[str, ...]) -> list[NDArray[np.uint8]]:
    """The pipeline called as its users call it, on the start noise that every runtime draws."""
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    # SD3: as many T5 tokens as were trained on, which is all that so small a T5 takes.
    longest = getattr(getattr(pipe, "tokenizer_3", None), "model_max_length", None)
    channels = pipe.components[detect_family(model).denoiser].config.in_channels
    noise = [
        generator(SAMPLER["seed"], Stream.PICTURE, number).standard_normal(
            (channels, 8, 8), dtype=np.float32
        )
        for number in range(len(prompts))
    ]
    pictures = pipe(
        list(prompts),
        height=32,
        width=32,
        num_inference_steps=SAMPLER["num_inference_steps"],
        guidance_scale=SAMPLER["guidance_scale"],
        latents=torch.from_numpy(np.stack(noise)),
        **({} if longest is None else {"max_sequence_length": longest}),
    ).images
    return [np.asarray(picture) for picture in pictures]


@pytest.mark.parametrize("family", OBJECTIVES)
def test_the_same_noise_gives_the_same_pictures(
    runtime: str, family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    skip_unless_known(runtime, family)
    prompts = ("a red cat", "a blue dog")
    drawings = (Drawing(str(tmp_path / "drawn")),)
    on = chips.VARIANTS[runtime]
    model = str(models[family])
    run_job(runtime, GenerateJob(on.runtime, model, drawings, prompts, SAMPLER, device=on.device))
    for number, expected in enumerate(drawn_plainly(models[family], prompts)):
        data = (tmp_path / "drawn" / f"{number:05d}.png").read_bytes()
        found = np.asarray(Image.open(io.BytesIO(data)))
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1  # of 255 levels
        assert expected.std() > 1


def test_what_sees_a_mask_and_a_score_draws_alike(
    runtime: str, models: dict[str, Path], tmp_path: Path
) -> None:
    if runtime == "torch":
        pytest.skip("held to diffusers' own inpainting pipeline by tests/runtimes/test_extras.py")
    folder = models["sd"] / "unet"
    settings = Train(inpainting=True, aesthetic_score=True)
    config = trained_config(read_config(folder / "config.json"), settings)
    unet = load_denoiser(folder, config=config)
    torch.manual_seed(0)
    for layer in (unet.conv_in, unet.class_embedding.linear_2):
        torch.nn.init.normal_(layer.weight.data, std=0.2)
    unet.save_pretrained(tmp_path / "unet")
    asked = {**SAMPLER, "aesthetic_score": 6.5, "negative_aesthetic_score": 2.0}
    prompts, drawn = ("a red cat", "a blue dog"), []
    for name in ("torch", runtime):
        drawings = (Drawing(str(tmp_path / name), {"unet": str(tmp_path / "unet")}),)
        on, model = chips.VARIANTS[name], str(models["sd"])
        run_job(name, GenerateJob(on.runtime, model, drawings, prompts, asked, device=on.device))
        drawn.append([np.asarray(Image.open(p)) for p in sorted((tmp_path / name).glob("*.png"))])
    expected, found = np.stack(drawn).astype(int)
    assert np.abs(found - expected).max() <= 1  # of 255 levels
    assert expected.std() > 1


def test_wrong_weights_are_named_before_anything_is_written(
    runtime: str, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(runtime)
    broken = Path(shutil.copytree(job.model, tmp_path / "broken"))
    (broken / "unet/diffusion_pytorch_model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(WrongInput, match="diffusion_pytorch_model"):
        run_job(runtime, replace(job, model=str(broken)))
    assert not (Path(job.work) / "checkpoints").exists()
