"""Z-Image: encoded, trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' train_dreambooth_lora_z_image.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
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
    assert_pictures,
    assert_pictures_with_and_without_negative_prompt,
    cases,
    job_maker,
    tiered,
)
from jobs import MakeJob
from training import history, train

from artifacts.latent_shard_writer import write_latent_shard
from artifacts.latent_shards import LatentShard, Texts, to_bfloat16
from runtimes.families import FAMILIES
from runtimes.families.family import token_mask
from runtimes.process.job import TrainJob
from runtimes.torch_models.encode_images_and_captions import Encoder
from tasks import child_process

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "two dogs in a wide forest")
LENGTH = 64
#: The layers that the script adapts without --lora_layers.
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]


@pytest.fixture
def z_image_job(make_job: MakeJob, write_latents: WriteLatents, tmp_path: Path) -> MakeJob:
    """`z_image_job(model, **settings)`: a job on pictures of two shapes."""
    return job_maker(make_job, write_latents, tmp_path)


def script_of(job: TrainJob) -> Script:
    vae = ZImagePipeline.from_pretrained(job.model).vae.config

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        samples = list(noisy.unsqueeze(2).unbind(0))
        output = model(samples, (1000 - timesteps) / 1000, prompts, return_dict=False)[0]
        return -torch.stack(output).squeeze(2)

    model = ZImageTransformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(
        job, model, predict, lambda z: (z - vae.shift_factor) * vae.scaling_factor, draws=False
    )


CASES = cases(TARGETS)
IN_SOAK = ("weighted",)  # FLUX.2 proves it


@pytest.mark.parametrize("case", tiered(CASES, IN_SOAK))
def test_twenty_steps_have_the_figures_of_diffusers_script(
    z_image_job: MakeJob, tiny_z_image: Path, case: str
) -> None:
    job = z_image_job(tiny_z_image, **CASES[case])
    assert_figures_of_case(job, script_of(job), case, TARGETS)


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(
    tiny_z_image: Path, tmp_path: Path
) -> None:
    """They are stored without padding."""
    encoder, pipe = Encoder(tiny_z_image), ZImagePipeline.from_pretrained(tiny_z_image)
    captions = [*PROMPTS, "", "x" * 80]  # the last one is truncated
    ours, pooled = encoder.texts(captions)
    with torch.no_grad():
        theirs, _ = pipe.encode_prompt(list(captions), max_sequence_length=LENGTH)
    assert pooled is None
    assert len({len(one) for one in ours}) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.from_numpy(one), other)
    assert encoder.token_counts(captions)[:3] == [len(one) for one in theirs[:3]]
    write_latent_shard(tmp_path / "shard", {}, Texts(ours, None, encoder.input_ids(captions), True))
    shard = LatentShard(tmp_path / "shard")
    for row, one in enumerate(ours):
        assert np.array_equal(shard.prompt_embeds(row), to_bfloat16(one))
    assert_latents_of_vae(encoder, pipe.vae)


def test_jax_encodes_as_torch_does(tiny_z_image: Path) -> None:
    assert_jax_encodes_as_torch(tiny_z_image, PROMPTS)


@pytest.mark.parametrize("length", [64, 96])
def test_the_padding_of_a_batch_changes_no_prediction(tiny_z_image: Path, length: int) -> None:
    model = ZImageTransformer2DModel.from_pretrained(tiny_z_image / "transformer").eval()
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randn(count, 16, generator=rng) for count in (5, 33, 32, 64)]
    latents = torch.randn(4, 4, 8, 12, generator=rng)
    timesteps = torch.tensor([1.0, 300.0, 700.0, 999.0])
    mask = token_mask([len(one) for one in prompts], length)
    embeds = torch.stack([torch.nn.functional.pad(p, (0, 0, 0, length - len(p))) for p in prompts])
    given = {"prompt_embeds": embeds, "prompt_embeds_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        ours = FAMILIES["z_image"].predict(model, latents, timesteps, given)
        samples = list(latents.unsqueeze(2).unbind(0))
        theirs = model(samples, (1000 - timesteps) / 1000, prompts, return_dict=False)[0]
    torch.testing.assert_close(ours, -torch.stack(theirs).squeeze(2), atol=1e-5, rtol=1e-5)


def of_diffusers(pipe: ZImagePipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    found = pipe(prompt=list(prompts), latents=noise, max_sequence_length=LENGTH, **given)
    return levels(found.images)


FAMILY = FlowFamily("z_image", ZImagePipeline, PROMPTS, of_diffusers)


def test_pictures_are_those_of_diffusers(tiny_z_image: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, with and without a negative prompt."""
    negative = {"negative_prompt": ["grey"] * 2}
    assert_pictures_with_and_without_negative_prompt(
        FAMILY, tiny_z_image, tmp_path, {"guidance_scale": 0.0}, negative
    )


def test_no_guidance_is_the_scale_zero(tiny_z_image: Path, tmp_path: Path) -> None:
    asked = {"guidance_scale": 0.0}
    assert_pictures(FAMILY, tiny_z_image, tmp_path, ours=asked, theirs=asked)


@pytest.mark.extended
def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    z_image_job: MakeJob, tiny_z_image: Path
) -> None:
    assert_a_run_moves_to_jax_and_back(z_image_job, tiny_z_image, ema_decay=0.9)


def test_a_trained_transformer_is_drawn_measured_and_published(
    z_image_job: MakeJob, tiny_z_image: Path, tmp_path: Path
) -> None:
    assert_drawn_measured_and_published(FAMILY, z_image_job(tiny_z_image), tmp_path)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_load_in_diffusers_in_both_layouts(
    z_image_job: MakeJob, tiny_z_image: Path, tmp_path: Path, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "dora": dora}
    job = z_image_job(tiny_z_image, method="lora", lora=adapters, learning_rate=1e-2)
    count = (2 + 2) * 4  # layers and refiners
    assert_adapters_load(FAMILY, job, tmp_path, kohya=not dora, count=count)


@pytest.mark.extended
@pytest.mark.parametrize("fsdp", ["all", pytest.param(1, marks=pytest.mark.soak)])
def test_two_processes_train_as_one(z_image_job: MakeJob, tiny_z_image: Path, fsdp: Any) -> None:
    """FSDP gathers also the parameters that no block has, such as the tokens of padding.

    With Adam's default epsilon, the first update of a weight may be the sign of a rounding error.
    """
    settings = {"steps": 4, "adam_epsilon": 1e-6}
    one = z_image_job(tiny_z_image, "one", **settings)
    train(one)
    two = z_image_job(tiny_z_image, "two", **settings, processes=2, fsdp=fsdp)
    child_process.run_job(two, lambda event: None)
    for name in ("loss", "grad_norm"):
        found, expected = ([line[name] for line in history(job)] for job in (two, one))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.extended
def test_shards_gathered_in_bfloat16_train_as_whole_weights(
    z_image_job: MakeJob, tiny_z_image: Path
) -> None:
    """To the bit: autocast rounds whole weights likewise, and those of norms are not rounded."""
    settings = {"steps": 4, "micro_batch_size": 4, "mixed_precision": "bf16", "processes": 2}
    settings |= {"max_grad_norm": None, "learning_rate": 1e-2}
    jobs = [z_image_job(tiny_z_image, f"{n}", **settings, fsdp=n) for n in (1, "all")]
    for job in jobs:
        child_process.run_job(job, lambda event: None)
    whole, shards = map(history, jobs)
    assert [line["loss"] for line in shards] == [line["loss"] for line in whole]
    for line, expected in zip(shards, whole, strict=True):
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
