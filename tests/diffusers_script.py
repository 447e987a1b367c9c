"""diffusers' dreambooth scripts of flow models, on the samples, noise and timesteps of our jobs.

A script's arithmetic is written with the functions of diffusers that it calls. What differs between
families, the model's call and the scale of latents, is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_loss_weighting_for_sd3
from PIL import Image
from training import history, train

from artifacts.latent_shards import LatentShard, from_bfloat16, open_latents
from artifacts.references import stored_group
from configs.settings.train import Train
from runtimes.adapters.lora import initial_down
from runtimes.data.sample_order import Order
from runtimes.objective.random_draws import Stream, generator
from runtimes.process.job import Drawing, Events, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate

#: Relative; the script sums a batch at once, the runtime sample by sample.
LOSS_TOLERANCE = 1e-5
#: Processors round differently, and norms after some steps amplify it: 1.9e-5 was seen.
NORM_TOLERANCE = 1e-4
#: (model, noisy latents [B, C, h, w], timesteps [B] to 1000, B embeddings) -> prediction.
Predict = Callable[[Any, torch.Tensor, torch.Tensor, list[Any]], torch.Tensor]
#: The VAE's latents [C, h, w] f32 -> the model's.
Scale = Callable[[torch.Tensor], torch.Tensor]
#: (shard, row of the caption) -> its embeddings.
Embeddings = Callable[[LatentShard, int], Any]


def prompt_embeds(shard: LatentShard, row: int) -> torch.Tensor:
    """[T, D] f32"""
    return torch.from_numpy(from_bfloat16(shard.prompt_embeds(row)))


def prompt_and_pooled_embeds(shard: LatentShard, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, D] f32 and [P] f32"""
    pooled = shard.pooled_prompt_embeds(row)
    assert pooled is not None
    return prompt_embeds(shard, row), torch.from_numpy(from_bfloat16(pooled))


class Script:
    """The script's training loop: AdamW, clipped gradients, the loss of flow matching.

    Args:
        job: whose settings, samples and random numbers the script uses.
        model: the transformer.
        predict: calls the model as the script does.
        scale: scales latents as the script does.
        embeddings: of a caption, as `predict` takes them.
        draws: whether the script draws latents from the VAE's posterior; else it takes the mean.
        references: filled with a batch's scaled references [B, C, h, w], before `predict`.
    """

    def __init__(
        self,
        job: TrainJob,
        model: Any,
        predict: Predict,
        scale: Scale,
        embeddings: Embeddings = prompt_embeds,
        *,
        draws: bool = True,
        references: list[torch.Tensor] | None = None,
    ) -> None:
        self.model, self._predict, self._scale = model.train(), predict, scale
        self._embeddings, self._draws = embeddings, draws
        self._settings = Train(**job.train)
        folder = Path(job.model) / "scheduler"
        self._scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder)
        self._references = references
        latents = open_latents(job.latents)
        refs = self._refs = latents.shards
        self._table = latents.references.table
        self._means = [LatentShard(ref.url) for ref in latents.references.shards]
        size = self._settings.global_batch_size
        self._order = Order([ref.groups for ref in refs], batch_size=size, seed=0, window=4)
        self._shards = [LatentShard(ref.url) for ref in refs]

    def add_adapters(self, rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Adapt the layers of these names, from the start that Kilnworks draws."""
        from peft import LoraConfig

        self.model.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))
        self.model.add_adapter(config)
        for name, parameter in self.model.named_parameters():
            if ".lora_A." in name:
                layer = f"transformer.{name.removesuffix('.lora_A.default.weight')}"
                parameter.data = torch.from_numpy(initial_down(0, layer, parameter.shape))

    def train(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of all steps."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        lr, decay = self._settings.learning_rate, self._settings.weight_decay
        optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, foreach=False)
        losses, norms = [], []
        for step in range(self._settings.steps):
            loss = self._loss(step)
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms

    def _loss(self, step: int) -> torch.Tensor:
        z, noise, levels, prompts = self._injected(step)
        timesteps = self._scheduler.timesteps[levels]
        at = [(self._scheduler.timesteps == t).nonzero().item() for t in timesteps]
        sigmas = self._scheduler.sigmas[at].view(-1, 1, 1, 1)
        if self._settings.timesteps.resolution_shift:  # not in the script: as FluxPipeline samples
            sigmas = self._scheduler.time_shift(self._mu(z), 1.0, sigmas)
            timesteps = sigmas.flatten() * 1000
        noisy = (1.0 - sigmas) * z + sigmas * noise
        output = self._predict(self.model, noisy, timesteps, prompts)
        weighting = compute_loss_weighting_for_sd3(self._settings.weighting_scheme, sigmas)
        errors = weighting.float() * (output.float() - (noise - z).float()) ** 2
        return errors.reshape(len(z), -1).mean(1).mean()

    def _mu(self, z: torch.Tensor) -> float:
        config = self._scheduler.config
        found: float = calculate_shift(
            *(z.shape[2] * z.shape[3] // 4, config.base_image_seq_len, config.max_image_seq_len),
            *(config.base_shift, config.max_shift),
        )
        return found

    def _injected(self, step: int) -> tuple[torch.Tensor, torch.Tensor, list[int], Any]:
        """Latents, noise, indices into the scheduler's timesteps, and embeddings of a batch."""
        rows: list[Any] = []
        references: list[list[torch.Tensor]] = []
        size = self._settings.global_batch_size
        for row, place in enumerate(self._order.batch(step)):
            counter, shard = step * size + row, self._shards[place.shard]
            ref = self._refs[place.shard]
            group, stored = stored_group(place.group), ref.stored_row(place.group, place.row)
            sample = shard.sample(group, stored)
            own = ref.references[group].of(stored) if ref.references else []
            references.append([self._reference(number) for number in own])
            u, caption, dropout = generator(0, Stream.CHOICES, counter).random(4)[:3]
            eps, noise = (
                generator(0, stream, counter).standard_normal(sample.mean.shape, np.float32)
                for stream in (Stream.POSTERIOR, Stream.NOISE)
            )
            mean, logvar = from_bfloat16(sample.mean), from_bfloat16(sample.logvar)
            drawn = mean + np.exp(logvar / 2) * eps if self._draws else mean
            z = self._scale(torch.from_numpy(drawn))
            text = sample.caption_rows[int(caption * len(sample.caption_rows))]
            text = 0 if dropout < self._settings.caption_dropout_rate else text  # the empty prompt
            embeds = self._embeddings(shard, text)
            rows.append((z, torch.from_numpy(noise), 999 - int(u * 1000), embeds))
        if self._references is not None:
            self._references[:] = [torch.stack(each) for each in zip(*references, strict=True)]
        z, noise, levels, prompts = zip(*rows, strict=True)
        return torch.stack(z), torch.stack(noise), list(levels), list(prompts)

    def _reference(self, number: int) -> torch.Tensor:
        place = self._table[number]
        mean = from_bfloat16(self._means[place.shard].mean(place.group, place.row))
        return self._scale(torch.from_numpy(mean))


def assert_figures(job: TrainJob, script: Script) -> None:
    """A job's losses and gradient norms must be the script's."""
    assert train(job) == 0
    losses, norms = script.train()
    assert [line["loss"] for line in history(job)] == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert [line["grad_norm"] for line in history(job)] == pytest.approx(norms, rel=NORM_TOLERANCE)


def pictures(
    runtime: str, drawing: Drawing, folder: Path, prompts: Sequence[str], sampler: dict[str, Any]
) -> Any:
    """Levels [N, H, W, 3] of a job's pictures."""
    job = GenerateJob(runtime, str(folder), (drawing,), tuple(prompts), sampler, "cpu")
    generate(job, Events())
    return read_pictures(Path(drawing.out))


def read_pictures(folder: Path) -> Any:
    paths = sorted(folder.glob("*.png"))
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in paths])


def start_noise(count: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The initial noise [N, C, h, w] of pictures from number 0."""
    rngs = [generator(seed, Stream.PICTURE, number) for number in range(count)]
    return torch.from_numpy(np.stack([r.standard_normal(shape, dtype=np.float32) for r in rngs]))


def levels(images: Sequence[Image.Image]) -> Any:
    return np.stack([np.asarray(picture).astype(int) for picture in images])
