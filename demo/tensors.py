"""Pictures and captions of the demo's world as tensors, and back."""

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import StableDiffusionXLPipeline
from numpy.typing import NDArray
from torch import Tensor
from transformers import CLIPTokenizer


def pixels(images: NDArray[np.uint8]) -> Tensor:
    """Pictures uint8 [N, H, W, 3] as [N, 3, H, W] in -1..1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def token_ids(tokenizer: CLIPTokenizer, texts: Sequence[str], length: int) -> Tensor:
    """Token ids [N, length] of captions, padded and cut."""
    encoded = tokenizer(
        list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    return encoded.input_ids


@torch.no_grad()
def encode_prompts(pipe: StableDiffusionXLPipeline, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """`prompt_embeds` [N, 77, D] and `pooled_prompt_embeds` [N, P] of captions."""
    embeds, _, pooled, _ = pipe.encode_prompt(
        list(texts), device=pipe.device, do_classifier_free_guidance=False
    )
    return embeds, pooled


@torch.no_grad()
def draw(
    pipe: StableDiffusionXLPipeline,
    prompts: Sequence[str],
    *,
    seed: int,
    num_inference_steps: int = 20,
    guidance_scale: float = 3.0,
    batch_size: int = 100,
) -> NDArray[np.uint8]:
    """Pictures [N, H, W, 3], one a prompt; the same seed and batch size draw the same ones."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        pipe(
            list(prompts[start : start + batch_size]),
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            generator=generator,
            output_type="np",
        ).images
        for start in range(0, len(prompts), batch_size)
    ]
    return (np.concatenate(drawn) * 255).round().astype(np.uint8)
