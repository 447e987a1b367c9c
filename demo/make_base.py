"""Train the VAE and the CLIP of a base like `demo/base`, from random weights.

    python -m demo.make_base build/base

The new folder has the configs and tokenizers of `demo/base`. Its UNet stays random: the recipe
`digits-base` trains it. Seeds are fixed, but rounding differs between machines.
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from demo import captions, dataset
from demo.captions import STYLES

BASE = Path(__file__).parent / "base"
CLIP_STEPS = 1000
CLIP_BATCH = 128
VAE_STEPS = 3000
VAE_BATCH = 8
EMBEDDING_STD = 0.5  # with the usual 0.02, so narrow a CLIP stays at chance
INITIAL_LOGVAR = -6.0  # the VAE starts almost without noise
KL_WEIGHT = 1e-4


def make_base(out: Path, clip_steps: int = CLIP_STEPS, vae_steps: int = VAE_STEPS) -> None:
    """Write a base to the new folder `out`, as fp16 safetensors.

    Raises:
        FileExistsError: `out` exists.
    """
    torch.manual_seed(0)
    shutil.copytree(BASE, out, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    _train_clip(out, clip_steps)
    _train_vae(out / "vae", vae_steps)
    unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(out / "unet"))
    unet.half().save_pretrained(out / "unet")


def _train_clip(out: Path, steps: int) -> None:
    """Train the evaluator to find a picture's caption among all styles and digits.

    Its text tower also becomes both text encoders of the pipeline.
    """
    rng = np.random.default_rng(0)
    x8, labels = dataset.load("train")
    clip = CLIPModel(CLIPConfig.from_pretrained(out / "evaluator"))
    for name, weight in clip.named_parameters():
        if name.endswith(("position_embedding.weight", "token_embedding.weight")):
            nn.init.normal_(weight, std=EMBEDDING_STD)
    tokenizer = CLIPTokenizer.from_pretrained(out / "evaluator")
    styles = len(STYLES)

    def loss() -> Tensor:
        rows = rng.integers(len(x8), size=CLIP_BATCH)
        style = rng.integers(styles, size=CLIP_BATCH)
        images = _pixels(dataset.render(x8[rows], style, rng))
        texts = [captions.caption(digit, s, rng) for digit in range(10) for s in range(styles)]
        ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
        logits = clip(input_ids=ids, pixel_values=images).logits_per_image  # [B, 10 * styles]
        return nn.functional.cross_entropy(logits, torch.from_numpy(labels[rows] * styles + style))

    train(clip, loss, steps)
    weights = clip.half().state_dict()
    for part, prefixes in (
        ("evaluator", ""),
        ("text_encoder", "text_model."),
        ("text_encoder_2", ("text_model.", "text_projection.")),
    ):
        chosen = {name: weight for name, weight in weights.items() if name.startswith(prefixes)}
        save_file(chosen, out / part / "model.safetensors", metadata={"format": "pt"})


def _train_vae(folder: Path, steps: int) -> None:
    """Train the VAE, and set its scaling_factor to 1 / standard deviation of the latents."""
    rng = np.random.default_rng(0)
    vae = AutoencoderKL.from_config(AutoencoderKL.load_config(folder))
    logvar = slice(vae.config.latent_channels, None)
    nn.init.zeros_(vae.quant_conv.weight[logvar])
    nn.init.constant_(vae.quant_conv.bias[logvar], INITIAL_LOGVAR)

    def loss() -> Tensor:
        images = _vae_batch(VAE_BATCH, rng)
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        error = nn.functional.l1_loss(decoded, images) + 2 * nn.functional.mse_loss(decoded, images)
        return error + KL_WEIGHT * kl

    train(vae, loss, steps)
    with torch.no_grad():
        latents = vae.encode(_vae_batch(512, rng)).latent_dist.sample()
    vae.register_to_config(scaling_factor=1 / latents.std().item())
    vae.half().save_pretrained(folder)


def _vae_batch(count: int, rng: np.random.Generator) -> Tensor:
    """Pictures of the training split; a quarter has any colours, not the palette's."""
    x8, _ = dataset.load("train")
    chosen = x8[rng.integers(len(x8), size=count)]
    odd = count // 4
    cover = dataset.strokes(chosen[:odd], rng)[..., None]
    ink, paper = rng.uniform(0, 255, (2, odd, 1, 1, 3))
    any_colours = (ink * cover + paper * (1 - cover)).astype(np.uint8)
    known = dataset.render(chosen[odd:], rng.integers(len(STYLES), size=count - odd), rng)
    return _pixels(np.concatenate([any_colours, known]))


def _pixels(images: NDArray[np.uint8]) -> Tensor:
    """Pictures u8 [N, H, W, 3] as f32 [N, 3, H, W] in -1..1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def train(model: nn.Module, loss_of_batch: Callable[[], Tensor], steps: int) -> None:
    """Minimise the loss by AdamW on a one-cycle schedule of the learning rate, peak 0.002."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    for step in range(steps):
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{type(model).__name__} step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the VAE and CLIP of a demo base.")
    parser.add_argument("out", type=Path, help="new model folder")
    parser.add_argument("--clip-steps", type=int, default=CLIP_STEPS)
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS)
    make_base(**vars(parser.parse_args()))
