"""Z-Image: encoded and padded as diffusers does it, and trained by several processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from flow_families import WriteLatents, assert_latents_of_vae, assert_pictures, job_maker
from flow_families_of_diffusers import PROMPTS, Z_IMAGE
from jobs import MakeJob
from training import history, train

from artifacts.latent_shards import LatentShard, Texts, to_bfloat16, write_latent_shard
from runtimes.families import FAMILIES
from runtimes.families.family import token_mask
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.vae_text_encoders import Encoder
from tasks import child_process

pytestmark = pytest.mark.slow


@pytest.fixture
def z_image_job(make_job: MakeJob, write_latents: WriteLatents, tmp_path: Path) -> MakeJob:
    """`z_image_job(model, **settings)`: a job on pictures of two shapes."""
    return job_maker(make_job, write_latents, tmp_path)


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(
    tiny_z_image: Path, tmp_path: Path
) -> None:
    """They are stored without padding."""
    encoder, pipe = Encoder(Base.open(tiny_z_image)), ZImagePipeline.from_pretrained(tiny_z_image)
    captions = [*PROMPTS, "", "x" * 80]  # the last one is truncated
    ours, pooled = encoder.texts(captions)
    with torch.no_grad():
        theirs, _ = pipe.encode_prompt(list(captions), max_sequence_length=64)
    assert pooled is None
    assert len({len(one) for one in ours}) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.from_numpy(one), other)
    assert encoder.token_counts(captions)["text_encoder"][:3] == [len(one) for one in theirs[:3]]
    write_latent_shard(tmp_path / "shard", {}, Texts(ours, None, encoder.input_ids(captions), True))
    shard = LatentShard(tmp_path / "shard")
    for row, one in enumerate(ours):
        assert np.array_equal(shard.prompt_embeds(row), to_bfloat16(one))
    assert_latents_of_vae(encoder, pipe.vae)


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


def test_no_guidance_is_the_scale_zero(tiny_z_image: Path, tmp_path: Path) -> None:
    asked = {"guidance_scale": 0.0}
    assert_pictures(Z_IMAGE, tiny_z_image, tmp_path, ours=asked, theirs=asked)


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
