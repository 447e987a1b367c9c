"""The base's autoencoder: 32 x 32 pictures to 8 x 8 latents, f = 4."""

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from torch import nn

from demo import world
from demo.base_config import VaeConfig
from demo.tensors import pixels


def new_vae(config: VaeConfig, scaling_factor: float = 1.0) -> AutoencoderKL:
    """An untrained autoencoder with a small initial posterior variance (`initial_logvar`)."""
    blocks = len(config.block_out_channels)
    vae = AutoencoderKL(
        block_out_channels=tuple(config.block_out_channels),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=config.latent_channels,
        norm_num_groups=config.norm_num_groups,
        sample_size=world.SIZE,
        scaling_factor=scaling_factor,
    )
    logvar = slice(config.latent_channels, None)
    nn.init.zeros_(vae.quant_conv.weight[logvar])
    nn.init.constant_(vae.quant_conv.bias[logvar], config.initial_logvar)
    return vae


def _any_colours(x8: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Digits in arbitrary colours, so that the autoencoder is not tied to the palette."""
    cover = world.strokes(x8, rng)[..., None]
    ink, paper = rng.uniform(0, 255, (2, len(x8), 1, 1, 3))
    return (ink * cover + paper * (1 - cover)).astype(np.uint8)


def _batch(count: int, rng: np.random.Generator) -> torch.Tensor:
    """Pictures [count, 3, 32, 32] of the training split, a quarter of them off the palette."""
    x8, _ = world.digits("train")
    chosen = x8[rng.integers(len(x8), size=count)]
    odd = count // 4
    style = rng.integers(len(world.STYLES), size=count - odd)
    images = [_any_colours(chosen[:odd], rng), world.render(chosen[odd:], style, rng)]
    return pixels(np.concatenate(images))


@torch.no_grad()
def _latent_std(vae: AutoencoderKL, rng: np.random.Generator) -> float:
    return vae.encode(_batch(512, rng)).latent_dist.sample().std().item()


def train_vae(config: VaeConfig, seed: int) -> AutoencoderKL:
    """An autoencoder whose scaling_factor brings the latents to a standard deviation of 1."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vae = new_vae(config).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        vae.parameters(), config.learning_rate, (0.9, 0.99), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, config.steps, pct_start=0.1
    )
    for step in range(config.steps):
        images = _batch(config.batch_size, rng)
        posterior = vae.encode(images.contiguous(memory_format=torch.channels_last)).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        error = nn.functional.l1_loss(decoded, images) + 2 * nn.functional.mse_loss(decoded, images)
        loss = error + config.kl_weight * kl
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"vae step {step}: loss {loss.item():.4f}", flush=True)
    vae = vae.to(memory_format=torch.contiguous_format).eval()
    vae.register_to_config(scaling_factor=1 / _latent_std(vae, rng))
    return vae


@torch.no_grad()
def psnr(vae: AutoencoderKL, styles: tuple[str, ...]) -> float:
    """Mean peak signal-to-noise ratio (dB) of reconstructed held-out pictures."""
    x8, _ = world.digits("held_out")
    style = np.resize([world.style_index(name) for name in styles], len(x8))
    images = pixels(world.render(x8, style, np.random.default_rng(99)))
    decoded = vae.decode(vae.encode(images).latent_dist.mode()).sample.clamp(-1, 1)
    error = ((decoded - images) / 2).square().mean((1, 2, 3))
    return (-10 * error.log10()).mean().item()
