"""The base's UNet: a small SDXL layout, trained on every style of the demo but the new one."""

import copy
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    DDPMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor, nn

from demo import world
from demo.base_config import BaseConfig, UnetConfig
from demo.tensors import encode_prompts, pixels

NOISE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}
SAVE_EVERY = 100  # steps


def new_scheduler() -> EulerDiscreteScheduler:
    """The sampler that goes with the training: zero-terminal SNR (arXiv 2305.08891) and Euler."""
    return EulerDiscreteScheduler(**NOISE)


@cache
def _alphas_cumprod() -> Tensor:
    """alphas_cumprod f32 [1000]; 0 at the last timestep."""
    return DDPMScheduler(**NOISE).alphas_cumprod


def new_unet(config: BaseConfig) -> UNet2DConditionModel:
    """An untrained UNet with SDXL's `text_time` conditioning."""
    unet, clip = config.unet, config.clip
    return UNet2DConditionModel(
        sample_size=world.SIZE // 2 ** (len(config.vae.block_out_channels) - 1),
        in_channels=config.vae.latent_channels,
        out_channels=config.vae.latent_channels,
        block_out_channels=tuple(unet.block_out_channels),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=1,
        attention_head_dim=tuple(unet.attention_head_dim),
        cross_attention_dim=2 * clip.width,  # the two text encoders side by side
        use_linear_projection=True,
        norm_num_groups=unet.norm_num_groups,
        addition_embed_type="text_time",
        addition_time_embed_dim=unet.addition_time_embed_dim,
        projection_class_embeddings_input_dim=(
            6 * unet.addition_time_embed_dim + clip.projection_dim
        ),
    )


@dataclass(frozen=True)
class Pictures:
    """The training pictures, encoded: caption k of picture n is `caption[n]`."""

    mean: Tensor  # [N, 4, 8, 8], scaled
    std: Tensor  # [N, 4, 8, 8], scaled
    caption: Tensor  # [N]
    prompt_embeds: Tensor  # [K, 77, 128]
    pooled_prompt_embeds: Tensor  # [K, 64]


@torch.no_grad()
def encode_pictures(pipe: StableDiffusionXLPipeline, count: int, seed: int) -> Pictures:
    """Draw and encode `count` pictures of the training split in the base's styles."""
    rng = np.random.default_rng(seed)
    x8, labels = world.digits("train")
    rows = rng.integers(len(x8), size=count)
    known = np.array([world.style_index(name) for name in world.BASE_STYLES])
    style = rng.permutation(np.resize(known, count))
    images = pixels(world.render(x8[rows], style, rng))
    moments = [pipe.vae.encode(part).latent_dist for part in images.split(250)]
    drawn = zip(labels[rows].tolist(), style.tolist(), strict=True)
    texts = [world.caption(digit, look, rng, None) for digit, look in drawn]
    number = {text: index for index, text in enumerate(sorted(set(texts)))}
    embeds, pooled = encode_prompts(pipe, list(number))
    factor = pipe.vae.config.scaling_factor
    return Pictures(
        mean=torch.cat([m.mean for m in moments]) * factor,
        std=torch.cat([m.std for m in moments]) * factor,
        caption=torch.tensor([number[text] for text in texts]),
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
    )


def _time_ids(count: int, generator: torch.Generator) -> Tensor:
    """SDXL's size conditioning [count, 6]; a fifth of the rows have a larger original size."""
    time_ids = torch.tensor([[world.SIZE, world.SIZE, 0, 0, world.SIZE, world.SIZE]])
    time_ids = time_ids.float().repeat(count, 1)
    larger = torch.rand(count, generator=generator) < 0.2
    factor = 2.0 ** torch.randint(1, 5, (count,), generator=generator)
    time_ids[:, :2] *= torch.where(larger, factor, 1.0)[:, None]
    return time_ids


def _loss(
    unet: UNet2DConditionModel, pictures: Pictures, config: UnetConfig, generator: torch.Generator
) -> Tensor:
    """v-prediction loss with min-SNR weights (arXiv 2303.09556) of one random batch."""
    size = config.batch_size
    rows = torch.randint(len(pictures.mean), (size,), generator=generator)
    mean, std = pictures.mean[rows], pictures.std[rows]
    latents = mean + std * torch.randn(mean.shape, generator=generator)
    kept = (torch.rand(size, generator=generator) >= config.caption_dropout_rate).float()
    prompt_embeds = pictures.prompt_embeds[pictures.caption[rows]] * kept[:, None, None]
    pooled_prompt_embeds = pictures.pooled_prompt_embeds[pictures.caption[rows]] * kept[:, None]

    timesteps = torch.randint(1000, (size,), generator=generator)
    noise = torch.randn(mean.shape, generator=generator)
    alphas_cumprod = _alphas_cumprod()[timesteps]
    alpha, sigma = (x.sqrt()[:, None, None, None] for x in (alphas_cumprod, 1 - alphas_cumprod))
    added = {
        "text_embeds": pooled_prompt_embeds,
        "time_ids": _time_ids(size, generator),
    }
    noisy = alpha * latents + sigma * noise
    v = unet(noisy, timesteps, prompt_embeds, added_cond_kwargs=added).sample
    snr = alphas_cumprod / (1 - alphas_cumprod)
    weight = snr.clamp(max=config.snr_gamma) / (snr + 1)  # the v form, finite where the SNR is 0
    return (weight * (v - (alpha * noise - sigma * latents)).square().mean((1, 2, 3))).mean()


class _Training:
    """The state of a training run, which can be saved and restored."""

    def __init__(self, unet: UNet2DConditionModel, config: UnetConfig, seed: int) -> None:
        self.config = config
        self.unet, self.average = unet, copy.deepcopy(unet).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            unet.parameters(),
            config.learning_rate,
            (0.9, 0.99),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0

    def _rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a fiftieth."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1, step / self.config.steps)))
        return min(1, (step + 1) / self.config.lr_warmup_steps) * (0.02 + 0.98 * cosine)

    def advance(self, pictures: Pictures) -> float:
        """Take one optimizer step and return its loss."""
        loss = _loss(self.unet, pictures, self.config, self.generator)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(
            list(self.average.parameters()), list(self.unet.parameters()), 1 - decay
        )
        self.step += 1
        return loss.item()

    def save(self, file: Path) -> None:
        scratch = file.with_suffix(".partial")
        state = {name: getattr(self, name).state_dict() for name in self._PARTS}
        state |= {"generator": self.generator.get_state(), "step": self.step}
        torch.save(state, scratch)
        scratch.replace(file)

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        for name in self._PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.step = state["step"]

    _PARTS = ("unet", "average", "optimizer", "schedule")


def train_unet(
    pipe: StableDiffusionXLPipeline, config: BaseConfig, progress: Path
) -> UNet2DConditionModel:
    """The EMA of the trained UNet; an interrupted run resumes from the file `progress`."""
    torch.manual_seed(config.seed)
    pictures = encode_pictures(pipe, config.unet.pictures, config.seed)
    unet = pipe.unet.to(memory_format=torch.channels_last).train()
    training = _Training(unet, config.unet, config.seed)
    if progress.exists():
        training.load(progress)
        print(f"unet: resuming at step {training.step}", flush=True)
    while training.step < config.unet.steps:
        loss = training.advance(pictures)
        if training.step % SAVE_EVERY == 0:
            training.save(progress)
            print(f"unet step {training.step}: loss {loss:.4f}", flush=True)
    return training.average.to(memory_format=torch.contiguous_format).eval()
