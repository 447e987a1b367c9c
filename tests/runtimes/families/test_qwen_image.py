"""Qwen-Image: encoded, trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' train_dreambooth_lora_qwen_image.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers_script import Script, levels, start_noise
from flow_families import (
    GUIDANCE,
    SIZE,
    FlowFamily,
    WriteLatents,
    assert_a_run_moves_to_jax_and_back,
    assert_adapters_load,
    assert_drawn_measured_and_published,
    assert_figures_of_case,
    assert_jax_encodes_as_torch,
    assert_latents_of_vae,
    assert_pictures_with_and_without_negative_prompt,
    cases,
    job_maker,
    tiered,
)
from jobs import MakeJob

from runtimes.pipeline_folder.describe_encoders import unusual_text_length
from runtimes.process.job import TrainJob
from runtimes.torch_models.encode_images_and_captions import Encoder

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "two dogs in a wide forest")
LENGTH = 288
#: The layers that the script adapts without --lora_layers.
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]


@pytest.fixture
def qwen_image_job(make_job: MakeJob, write_latents: WriteLatents, tmp_path: Path) -> MakeJob:
    """`qwen_image_job(model, **settings)`: a job on pictures of two shapes."""
    return job_maker(make_job, write_latents, tmp_path, tokens=64)


def script_of(job: TrainJob) -> Script:
    pipe = QwenImagePipeline.from_pretrained(job.model)
    config = pipe.vae.config

    def scale(latents: torch.Tensor) -> torch.Tensor:
        mean, std = (
            torch.tensor(x)[:, None, None] for x in (config.latents_mean, config.latents_std)
        )
        return (latents - mean) * (1.0 / std)

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        count, _, height, width = noisy.shape
        longest = max(map(len, prompts))
        mask = torch.stack([torch.arange(longest) < len(one) for one in prompts])
        output = model(
            hidden_states=pipe._pack_latents(noisy, *noisy.shape),
            encoder_hidden_states=torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
            encoder_hidden_states_mask=mask,
            timestep=timesteps / 1000,
            img_shapes=[[(1, height // 2, width // 2)]] * count,
            return_dict=False,
        )[0]
        return pipe._unpack_latents(output, 4 * height, 4 * width, 4).squeeze(2)

    model = QwenImageTransformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scale)


CASES = cases(TARGETS)
IN_SOAK = ("weighted",)  # FLUX.2 proves it


@pytest.mark.parametrize("case", tiered(CASES, IN_SOAK))
def test_twenty_steps_have_the_figures_of_diffusers_script(
    qwen_image_job: MakeJob, tiny_qwen_image: Path, case: str
) -> None:
    job = qwen_image_job(tiny_qwen_image, **CASES[case])
    assert_figures_of_case(job, script_of(job), case, TARGETS)


def test_the_plain_call_cuts_captions_that_the_training_reads(
    tiny_qwen_image: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_qwen_image, tmp_path / "model"))
    config = model / "tokenizer/tokenizer_config.json"
    found = json.loads(config.read_text(encoding="utf-8"))
    for longest, shown in ((131072, 1024), (512, None)):
        config.write_text(json.dumps(found | {"model_max_length": longest}), encoding="utf-8")
        assert unusual_text_length(model) == shown


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(
    tiny_qwen_image: Path,
) -> None:
    """Without the template's first 34 tokens; the pipeline pads them to the longest caption."""
    encoder, pipe = Encoder(tiny_qwen_image), QwenImagePipeline.from_pretrained(tiny_qwen_image)
    captions = [*PROMPTS, "", "x" * 200]  # the last one is truncated
    ours, pooled = encoder.texts(captions)
    with torch.no_grad():
        theirs, mask = pipe.encode_prompt(captions, max_sequence_length=LENGTH)
    assert pooled is None
    assert len({len(one) for one in ours}) == 4
    for one, other, kept in zip(ours, theirs, mask.bool(), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other[kept], atol=1e-6, rtol=1e-5)
    assert encoder.token_counts(captions)[:3] == [len(one) for one in ours[:3]]
    assert_latents_of_vae(encoder, pipe.vae, frames=True)


def test_jax_encodes_as_torch_does(tiny_qwen_image: Path) -> None:
    assert_jax_encodes_as_torch(tiny_qwen_image, PROMPTS)


def of_diffusers(pipe: QwenImagePipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "true_cfg_scale": GUIDANCE, **SIZE}
    given |= {"negative_prompt": [""] * len(prompts), **changes}
    latents = pipe._pack_latents(noise, *noise.shape)
    found = pipe(prompt=list(prompts), latents=latents, max_sequence_length=LENGTH, **given)
    return levels(found.images)


FAMILY = FlowFamily("qwen_image", QwenImagePipeline, PROMPTS, of_diffusers)


def test_pictures_are_those_of_diffusers(tiny_qwen_image: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, with and without a negative prompt."""
    negative = {"negative_prompt": ["grey"] * 2}
    assert_pictures_with_and_without_negative_prompt(
        FAMILY, tiny_qwen_image, tmp_path, {"true_cfg_scale": 1.0}, negative
    )


@pytest.mark.extended
def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    qwen_image_job: MakeJob, tiny_qwen_image: Path
) -> None:
    assert_a_run_moves_to_jax_and_back(qwen_image_job, tiny_qwen_image, ema_decay=0.9)


def test_a_trained_transformer_is_drawn_measured_and_published(
    qwen_image_job: MakeJob, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    assert_drawn_measured_and_published(FAMILY, qwen_image_job(tiny_qwen_image), tmp_path)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_load_in_diffusers_in_both_layouts(
    qwen_image_job: MakeJob, tiny_qwen_image: Path, tmp_path: Path, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "dora": dora}
    job = qwen_image_job(tiny_qwen_image, method="lora", lora=adapters, learning_rate=1e-2)
    count = 2 * 8  # both streams
    assert_adapters_load(FAMILY, job, tmp_path, kohya=not dora, count=count)
