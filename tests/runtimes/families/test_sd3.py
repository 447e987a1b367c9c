"""Stable Diffusion 3 by rectified flow: trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' script train_dreambooth_sd3.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers_script import Script, assert_figures, levels, prompt_and_pooled_embeds, start_noise
from flow_families import (
    GUIDANCE,
    SIZE,
    FlowFamily,
    WriteLatents,
    assert_drawn_measured_and_published,
    job_maker,
)
from jobs import MakeJob
from training import roll_back, train, weights

from runtimes.families import FAMILIES
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob

pytestmark = pytest.mark.slow


def of_diffusers(
    pipe: StableDiffusion3Pipeline, prompts: tuple[str, ...], **changes: Any
) -> np.ndarray:
    noise = start_noise(len(prompts), (8, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    length = Base.open(Path(pipe.name_or_path)).text_length
    found = pipe(list(prompts), latents=noise, max_sequence_length=length, **given)
    return levels(found.images)  # type: ignore[no-any-return]


FAMILY = FlowFamily("sd3", StableDiffusion3Pipeline, ("one", "two"), of_diffusers)


@pytest.fixture
def sd3_job(
    make_job: MakeJob, write_latents: WriteLatents, tiny_sd3: Path, tmp_path: Path
) -> MakeJob:
    """`sd3_job(**settings)`: a job on pictures of two shapes."""
    make = job_maker(make_job, write_latents, tmp_path)
    return lambda **settings: make(
        tiny_sd3, **{"steps": 4, "caption_dropout_rate": 0.3, **settings}
    )


def script_of(job: TrainJob) -> Script:
    vae = StableDiffusion3Pipeline.from_pretrained(job.model).vae.config

    def predict(model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: Any) -> Any:
        prompt, pooled = (torch.stack(part) for part in zip(*prompts, strict=True))
        return model(noisy, prompt, pooled, timesteps).sample

    def scaled(latents: torch.Tensor) -> torch.Tensor:
        return (latents - vae.shift_factor) * vae.scaling_factor

    model = SD3Transformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scaled, prompt_and_pooled_embeds)


def test_the_loop_trains_as_diffusers_script_does(sd3_job: MakeJob) -> None:
    job = sd3_job()
    script = script_of(job)
    start = {name: weight.clone() for name, weight in script.model.state_dict().items()}
    assert_figures(job, script)
    ours = SD3Transformer2DModel.from_pretrained(Path(job.out) / "transformer").state_dict()
    assert ours.keys() == start.keys(), "the table of positions too"
    for name, weight in script.model.state_dict().items():
        torch.testing.assert_close(ours[name], weight, atol=1e-5, rtol=1e-4)
        assert name == "pos_embed.pos_embed" or not torch.equal(weight, start[name]), name


def test_stopped_and_resumed_it_ends_alike(sd3_job: MakeJob) -> None:
    job = sd3_job(checkpointing_steps=1, checkpoints_total_limit=9)
    assert train(job) == 0
    whole = weights(job)
    roll_back(job, 1)
    assert train(job) == 1
    assert weights(job) == whole


def test_a_trained_transformer_is_drawn_measured_and_published(
    sd3_job: MakeJob, tmp_path: Path
) -> None:
    assert_drawn_measured_and_published(FAMILY, sd3_job(), tmp_path)


def test_without_t5_it_draws_as_its_pipeline_does(
    tiny_sd3_without_t5: Path, tmp_path: Path
) -> None:
    pipe = StableDiffusion3Pipeline.from_pretrained(
        tiny_sd3_without_t5, text_encoder_3=None, tokenizer_3=None
    )
    drawn = FAMILY.pictures("torch", tmp_path, tiny_sd3_without_t5)
    assert np.array_equal(drawn, of_diffusers(pipe, FAMILY.prompts))


def test_its_clip_encoders_are_trained_while_its_t5_is_not(sd3_job: MakeJob) -> None:
    job = sd3_job(train_text_encoder=True, steps=2)
    assert train(job) == 0
    parts = {path.name for path in Path(job.out).iterdir() if path.is_dir()}
    assert parts == {FAMILIES["sd3"].denoiser, *FAMILIES["sd3"].clip_encoders}
