"""The base's figures, measured on the folder as written, and the model card that reports them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from transformers import CLIPModel

from demo import world
from demo.base_clip import caption_accuracy
from demo.base_config import BaseConfig
from demo.base_vae import psnr
from demo.judges import judge
from demo.tensors import draw

PROMPTS = 200  # of the base's styles, and as many of the new one

CARD = """\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
language: en
tags:
- text-to-image
- diffusers
- stable-diffusion-xl
- tiny
- handwritten-digits
---

# Digits base

A diffusion model small enough to commit and to fine-tune in minutes on two CPU cores, and good
enough to be judged. It has the layout of Stable Diffusion XL (two text encoders, `text_time`
conditioning) and draws one handwritten digit, {side} x {side} pixels, in the ink and on the paper
that the caption names. `evaluator/` holds the CLIP model that scores pictures; its preprocessing
has mean and standard deviation 0.5.

```python
from diffusers import StableDiffusionXLPipeline

pipe = StableDiffusionXLPipeline.from_pretrained("demo/base", dtype="auto")
prompt = "{prompt}"
pipe(prompt, num_inference_steps={steps}, guidance_scale={guidance}).images[0]
```

## What it knows

{known} styles: six inks on three papers, and gold ink on navy paper. "{new_style}" is
left for fine-tuning: the autoencoder and the CLIP have seen chalk, the UNet never.

## Figures

Measured by `demo.make_base` on this folder, loaded in fp32: {steps} Euler steps, guidance
{guidance}, {prompts} prompts each, seed {seed}. The judges are a support vector machine on the
shape of the ink and the nearest palette colours; neither shares anything with the model.

| | right digit | right ink and paper | both |
|---|---|---|---|
| prompts in the base's styles | {base[digit]:.1%} | {base[style]:.1%} | {base[both]:.1%} |
| prompts for the new style | {new[digit]:.1%} | {new[style]:.1%} | {new[both]:.1%} |

| part | parameters | made with | result | CPU seconds |
|---|---|---|---|---|
| CLIP (both text encoders, and the evaluator) | {clip_size} | {clip_made} | \
own caption nearest of 210: \
{caption_accuracy:.1%} of held-out pictures | {seconds[clip]} |
| VAE, f = {factor} | {vae_size} | {vae_made} | PSNR {psnr_base:.1f} dB in the base's styles, \
{psnr_new:.1f} dB in the new one | {seconds[vae]} |
| UNet | {unet_size} | {unet_made} | the first table | {seconds[unet]} |

The UNet is trained with v-prediction, zero-terminal SNR, trailing timesteps, min-SNR weights
(gamma {unet.snr_gamma}), an average of the weights (decay {unet.ema_decay}) and captions dropped to
zeros {unet.caption_dropout_rate:.0%} of the time.

## Data

The 1,797 handwritten digits that come with scikit-learn (UCI "Optical Recognition of Handwritten
Digits", E. Alpaydin and C. Kaynak, CC BY 4.0), warped and coloured by `demo/world.py`. Training saw
1,297 of them; {held_out} are held out.

## Rebuild

```
python -m demo.make_base --config configs/digits-base.yaml --out demo/base
```

## Limits

It draws single digits and nothing else, and understands only the captions of `demo/world.py`.
"""


def prompts(styles: tuple[str, ...], count: int) -> list[str]:
    """`count` full captions spread evenly over digits, `styles` and templates."""
    chosen = []
    for index in range(count):
        digit, turn = index % 10, index // 10
        style = world.style_index(styles[(2 * digit + turn) % len(styles)])
        options = world.captions(digit, style)
        chosen.append(options[(digit + turn) % len(options)])
    return chosen


def _drawn_right(
    pipe: StableDiffusionXLPipeline, config: BaseConfig, styles: tuple[str, ...]
) -> dict[str, float]:
    asked = prompts(styles, PROMPTS)
    pictures = draw(
        pipe,
        asked,
        seed=config.seed,
        num_inference_steps=config.sampling.num_inference_steps,
        guidance_scale=config.sampling.guidance_scale,
    )
    right = judge(pictures, asked)
    right["both"] = right["digit"] & right["style"]
    return {name: float(values.mean()) for name, values in right.items()}


def measure(folder: Path, config: BaseConfig) -> dict[str, Any]:
    """The figures of the model in `folder` for `model_card`."""
    pipe = StableDiffusionXLPipeline.from_pretrained(
        folder, torch_dtype=torch.float32, add_watermarker=False
    )
    clip = CLIPModel.from_pretrained(folder / "evaluator", torch_dtype=torch.float32).eval()
    size = {
        name: f"{sum(p.numel() for p in part.parameters()) / 1e6:.2f} M"
        for name, part in (("clip", clip), ("vae", pipe.vae), ("unet", pipe.unet))
    }
    return {
        "base": _drawn_right(pipe, config, world.BASE_STYLES),
        "new": _drawn_right(pipe, config, (world.NEW_STYLE,)),
        "caption_accuracy": caption_accuracy(clip, pipe.tokenizer),
        "psnr_base": psnr(pipe.vae, world.BASE_STYLES),
        "psnr_new": psnr(pipe.vae, (world.NEW_STYLE,)),
        "size": size,
    }


def model_card(
    config: BaseConfig, figures: Mapping[str, Any], cpu_seconds: Mapping[str, int | None]
) -> str:
    """The text of README.md, with the figures of `measure`."""
    made = {
        name: f"{part.steps:,} steps, batch {part.batch_size}, AdamW {part.learning_rate:g}"
        for name, part in (("clip", config.clip), ("vae", config.vae), ("unet", config.unet))
    }
    return CARD.format(
        **figures,
        **{f"{name}_size": text for name, text in figures["size"].items()},
        **{f"{name}_made": text for name, text in made.items()},
        side=world.SIZE,
        prompt=world.captions(7, 0)[0],
        steps=config.sampling.num_inference_steps,
        guidance=config.sampling.guidance_scale,
        seed=config.seed,
        known=len(world.BASE_STYLES),
        new_style=world.NEW_STYLE,
        prompts=PROMPTS,
        held_out=world.HELD_OUT,
        factor=2 ** (len(config.vae.block_out_channels) - 1),
        seconds={
            name: "not measured (built in several runs)" if seconds is None else seconds
            for name, seconds in cpu_seconds.items()
        },
        unet=config.unet,
    )
