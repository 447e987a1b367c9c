"""Stable Diffusion 3 by rectified flow: trained by the loop as by a plain one, and drawn with."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from jobs import HOLDOUT, SAMPLER
from PIL import Image
from training import history

from artifacts.latent_shards import LatentShard, from_bfloat16, open_latents
from runtimes.data.bucketed_sample_order import Order
from runtimes.families import FAMILIES
from runtimes.objective.counter_based_random import Stream, generator
from runtimes.pipeline_folder.describe_encoders import describe_encoders, text_length
from runtimes.process.events import SilentEvents
from runtimes.process.job import Drawing, GenerateJob, TrainJob
from runtimes.process.signals import Stop
from runtimes.sample.generate_job import generate
from runtimes.train.training_loop import train
from tasks.publish.assemble_pipeline import assemble

pytestmark = pytest.mark.slow

STEPS, BATCH = 4, 4
PROMPTS = ("one", "two")


@pytest.fixture
def latents(tiny_sd3: Path, write_latents: Callable[..., str], tmp_path: Path) -> str:
    groups = {"train/8x8": 9, "train/4x12": 3, "holdout/8x8": 3}
    return write_latents(str(tmp_path / "store"), [groups], **describe_encoders(tiny_sd3))


@pytest.fixture
def job(tiny_sd3: Path, latents: str, make_job: Callable[..., TrainJob]) -> TrainJob:
    return make_job(
        model=str(tiny_sd3),
        latents=latents,
        steps=STEPS,
        caption_dropout_rate=0.3,
        max_grad_norm=None,
    )


def test_the_loop_trains_as_a_plain_one_does(job: TrainJob, tiny_sd3: Path) -> None:
    assert train(job, SilentEvents(), Stop())
    ours = SD3Transformer2DModel.from_pretrained(Path(job.out) / "transformer")
    plain, losses = plain_training(tiny_sd3, job)
    assert ours.state_dict().keys() == plain.state_dict().keys(), "the table of positions too"
    start = SD3Transformer2DModel.from_pretrained(tiny_sd3 / "transformer").state_dict()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, atol=1e-5, rtol=1e-4)
        assert name == "pos_embed.pos_embed" or not torch.equal(weight, start[name]), name
    assert [line["loss"] for line in history(job)] == pytest.approx(losses, rel=1e-4)


def plain_training(folder: Path, job: TrainJob) -> tuple[SD3Transformer2DModel, list[float]]:
    """The same draws with diffusers' scheduler and PyTorch's AdamW."""
    model = SD3Transformer2DModel.from_pretrained(folder / "transformer").train()
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    refs = open_latents(job.latents).shards
    order = Order([ref.groups for ref in refs], batch_size=BATCH, seed=0, window=4)
    shards = [LatentShard(ref.url) for ref in refs]
    losses = []
    for step in range(STEPS):
        loss = torch.zeros(())
        for row, place in enumerate(order.batch(step)):
            counter, shard = step * BATCH + row, shards[place.shard]
            sample = shard.sample(place.group, place.row)
            u, caption, dropout, _ = generator(0, Stream.CHOICES, counter).random(4)
            eps, noise = (
                torch.from_numpy(drawn[None])
                for stream in (Stream.POSTERIOR, Stream.NOISE)
                for drawn in [
                    generator(0, stream, counter).standard_normal(sample.mean.shape, np.float32)
                ]
            )
            mean, logvar = (
                torch.from_numpy(from_bfloat16(x)) for x in (sample.mean, sample.logvar)
            )
            posterior = mean + eps * torch.exp(0.5 * logvar)
            z = (posterior - 0.06) * 0.5
            timestep = scheduler.timesteps[[999 - int(u * 1000)]]
            noisy = scheduler.scale_noise(z, timestep, noise)
            rows = sample.caption_rows
            text = 0 if dropout < 0.3 else rows[int(caption * len(rows))]
            prompt, pooled = shard.prompt_embeds(text), shard.pooled_prompt_embeds(text)
            assert pooled is not None
            embeds = (torch.from_numpy(from_bfloat16(bits)[None]) for bits in (prompt, pooled))
            prediction = model(noisy, *embeds, timestep).sample
            loss = loss + (prediction - (noise - z)).square().mean() / BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def test_stopped_and_resumed_it_ends_alike(job: TrainJob, tmp_path: Path) -> None:
    settings = {**job.train, "checkpointing_steps": 1}
    parts = replace(job, train=settings, work=str(tmp_path / "w"), out=str(tmp_path / "o"))
    stop = Stop()
    stop.requested = True
    assert not train(parts, SilentEvents(), stop)
    assert train(parts, SilentEvents(), Stop()) and train(job, SilentEvents(), Stop())
    name = "transformer/diffusion_pytorch_model.safetensors"
    assert Path(parts.out, name).read_bytes() == Path(job.out, name).read_bytes()


def test_a_trained_transformer_is_drawn_with_measured_and_published(
    job: TrainJob, tiny_sd3: Path, tmp_path: Path
) -> None:
    assert train(job, SilentEvents(), Stop())
    trained = Path(job.out) / "transformer"
    drawings = (
        Drawing(str(tmp_path / "base")),
        Drawing(str(tmp_path / "tuned"), {"transformer": str(trained)}),
    )
    given = ("torch", str(tiny_sd3), drawings, PROMPTS, SAMPLER, "cpu")
    drawn = GenerateJob(*given, latents=job.latents, holdout=HOLDOUT)
    generate(drawn, SilentEvents())
    losses = [json.loads(Path(d.out, "losses.json").read_text())["losses"] for d in drawings]
    assert len(losses[0]) == 3 and np.mean(losses[1]) < np.mean(losses[0])

    assemble(tiny_sd3, {"transformer": trained}, tmp_path / "published", dtype="float32")
    for folder, drawing in ((tiny_sd3, drawings[0]), (tmp_path / "published", drawings[1])):
        assert_same_pictures(StableDiffusion3Pipeline.from_pretrained(folder), folder, drawing)


def test_without_t5_it_draws_as_its_pipeline_does(
    tiny_sd3_without_t5: Path, tmp_path: Path
) -> None:
    drawing = Drawing(str(tmp_path / "base"))
    job = GenerateJob("torch", str(tiny_sd3_without_t5), (drawing,), PROMPTS, SAMPLER, "cpu")
    generate(job, SilentEvents())
    pipe = StableDiffusion3Pipeline.from_pretrained(
        tiny_sd3_without_t5, text_encoder_3=None, tokenizer_3=None
    )
    assert_same_pictures(pipe, tiny_sd3_without_t5, drawing)


def assert_same_pictures(pipe: StableDiffusion3Pipeline, folder: Path, drawing: Drawing) -> None:
    rngs = [generator(7, Stream.PICTURE, number) for number in range(2)]
    noise = np.stack([rng.standard_normal((8, 8, 8), dtype=np.float32) for rng in rngs])
    expected = pipe(
        list(PROMPTS),
        num_inference_steps=2,
        guidance_scale=3.0,
        latents=torch.from_numpy(noise),
        max_sequence_length=text_length(folder),
    ).images
    for number, picture in enumerate(expected):
        ours = np.asarray(Image.open(Path(drawing.out) / f"{number:05d}.png")).astype(int)
        assert abs(ours - np.asarray(picture)).max() <= 1


def test_adapters_of_transformer_and_clip_load_in_diffusers(
    job: TrainJob, tiny_sd3: Path, tmp_path: Path
) -> None:
    settings = {**job.train, "method": "lora", "train_text_encoder": True}
    assert train(replace(job, train=settings), SilentEvents(), Stop())
    drawing = Drawing(str(tmp_path / "d"), lora=f"{job.out}/pytorch_lora_weights.safetensors")
    drawn = GenerateJob("torch", str(tiny_sd3), (drawing,), PROMPTS, SAMPLER, "cpu")
    generate(drawn, SilentEvents())
    pipe = StableDiffusion3Pipeline.from_pretrained(tiny_sd3)
    pipe.load_lora_weights(job.out)
    adapted = {part: ["default_0"] for part in ("transformer", "text_encoder", "text_encoder_2")}
    assert pipe.get_list_adapters() == adapted
    assert_same_pictures(pipe, tiny_sd3, drawing)


def test_its_clip_encoders_are_trained_while_its_t5_is_not(job: TrainJob, tiny_sd3: Path) -> None:
    settings = {**job.train, "train_text_encoder": True, "steps": 2}
    assert train(replace(job, train=settings), SilentEvents(), Stop())
    parts = {path.name for path in Path(job.out).iterdir() if path.is_dir()}
    assert parts == {FAMILIES["sd3"].denoiser, *FAMILIES["sd3"].clip_encoders}
