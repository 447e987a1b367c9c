"""FLUX.2 klein: encoded, trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' train_dreambooth_lora_flux2_klein.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
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
    assert_latents_of_vae,
    assert_pictures,
    assert_pictures_with_and_without_negative_prompt,
    cases,
    job_maker,
    tiered,
)
from jobs import MakeJob

from runtimes.families import FAMILIES
from runtimes.objective.resolution_shift import ResolutionShift
from runtimes.process.job import TrainJob
from runtimes.torch_models.encode_images_and_captions import Encoder

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "two dogs")
LENGTH = 40
#: The layers of the text stream, and the fused ones of single blocks, beside the script's.
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "to_qkv_mlp_proj"]


@pytest.fixture
def flux2_job(make_job: MakeJob, write_latents: WriteLatents, tmp_path: Path) -> MakeJob:
    """`flux2_job(model, **settings)`: a job on pictures of two shapes."""
    return job_maker(make_job, write_latents, tmp_path)


def script_of(job: TrainJob) -> Script:
    pipe = Flux2KleinPipeline.from_pretrained(job.model)
    normal = pipe.vae.bn

    def scale(latents: torch.Tensor) -> torch.Tensor:
        patches = pipe._patchify_latents(latents[None])
        std = torch.sqrt(normal.running_var + pipe.vae.config.batch_norm_eps)
        scaled = (patches - normal.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
        return pipe._unpatchify_latents(scaled)[0]

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        embeds, patches = torch.stack(prompts), pipe._patchify_latents(noisy)
        ids = pipe._prepare_latent_ids(patches)
        output = model(
            hidden_states=pipe._pack_latents(patches),
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=embeds,
            txt_ids=pipe._prepare_text_ids(embeds),
            img_ids=ids,
            return_dict=False,
        )[0]
        return pipe._unpatchify_latents(pipe._unpack_latents_with_ids(output, ids))

    model = Flux2Transformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scale, draws=False)


CASES = cases(TARGETS)
#: Z-Image and Qwen-Image prove it, with captions of varying lengths.
IN_SOAK = ("accumulated",)


@pytest.mark.parametrize("case", tiered(CASES, IN_SOAK))
def test_twenty_steps_have_the_figures_of_diffusers_script(
    flux2_job: MakeJob, tiny_flux2: Path, case: str
) -> None:
    job = flux2_job(tiny_flux2, **CASES[case])
    assert_figures_of_case(job, script_of(job), case, TARGETS)


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(tiny_flux2: Path) -> None:
    encoder, pipe = Encoder(tiny_flux2), Flux2KleinPipeline.from_pretrained(tiny_flux2)
    long = "x" * 60  # truncated
    ours, pooled = encoder.texts([*PROMPTS, "", long])
    with torch.no_grad():
        theirs, _ = pipe.encode_prompt([*PROMPTS, "", long], max_sequence_length=LENGTH)
    assert pooled is None
    assert torch.equal(torch.from_numpy(np.asarray(ours)), theirs)
    assert encoder.token_counts(["", long]) == [11, 71]
    assert_latents_of_vae(encoder, pipe.vae)


def of_diffusers(pipe: Flux2KleinPipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    latents = pipe._patchify_latents(noise)
    found = pipe(prompt=list(prompts), latents=latents, max_sequence_length=LENGTH, **given)
    return levels(found.images)


FAMILY = FlowFamily("flux2", Flux2KleinPipeline, PROMPTS, of_diffusers)


def test_pictures_are_those_of_diffusers(tiny_flux2: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, with and without a negative prompt."""
    pipe = Flux2KleinPipeline.from_pretrained(tiny_flux2)
    embeds, _ = pipe.encode_prompt(["grey"] * 2, max_sequence_length=LENGTH)
    negative = {"negative_prompt_embeds": embeds}
    assert_pictures_with_and_without_negative_prompt(
        FAMILY, tiny_flux2, tmp_path, {"guidance_scale": 1.0}, negative
    )


def test_the_distilled_model_ignores_guidance(tiny_flux2_distilled: Path, tmp_path: Path) -> None:
    plain = {"guidance_scale": 1.0}
    assert_pictures(FAMILY, tiny_flux2_distilled, tmp_path, theirs=plain)


@pytest.mark.parametrize("tokens", [6, 256, 1024, 4096, 4300, 4301, 9000])
@pytest.mark.parametrize("steps", [1, 4, 28, 50, 200])
def test_the_shift_of_sampling_is_the_pipeline_s(tokens: int, steps: int) -> None:
    shift = ResolutionShift.from_config({"use_dynamic_shifting": True}, 2)
    assert shift is not None
    found = FAMILIES["flux2"].sampling_shift(shift, tokens, steps)
    assert found == pytest.approx(compute_empirical_mu(tokens, steps), abs=1e-12)
    if steps == 200:  # that of training
        assert found == pytest.approx(shift.mu_of(tokens), abs=1e-4)


@pytest.mark.extended
def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    flux2_job: MakeJob, tiny_flux2: Path
) -> None:
    assert_a_run_moves_to_jax_and_back(flux2_job, tiny_flux2, ema_decay=0.9)


def test_a_trained_transformer_is_drawn_measured_and_published(
    flux2_job: MakeJob, tiny_flux2: Path, tmp_path: Path
) -> None:
    assert_drawn_measured_and_published(FAMILY, flux2_job(tiny_flux2), tmp_path)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_load_in_diffusers_in_both_layouts(
    flux2_job: MakeJob, tiny_flux2: Path, tmp_path: Path, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "dora": dora}
    job = flux2_job(tiny_flux2, method="lora", lora=adapters, learning_rate=1e-2)
    count = 8 + 2 * 2  # double and single blocks
    assert_adapters_load(FAMILY, job, tmp_path, kohya=not dora, count=count)
