"""Z-Image (arXiv 2511.22699): one stream of 2 x 2 patches and a caption's states of a Qwen3.

diffusers' transformer takes lists of samples, whose shapes depend on their captions. `forward` here
computes the same with masks, in one shape for all captions, as XLA needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from runtimes.families import family

#: Name of the embedder and the final layer: a patch's side, and its frames.
_SIZES = f"{family.PATCH}-1"
TURBO_SHIFT = 3.0  # of Z-Image-Turbo's noise levels; that of Z-Image is 6
_MULTIPLE = 32  # captions and images are padded to such a number of tokens


class ZImage(family.PatchTransformer):
    """prompt_embeds is as long as the caption: the transformer has a learned token for padding."""

    name = "z_image"
    pipelines = ("ZImagePipeline",)
    denoiser_class = "ZImageTransformer2DModel"
    draws_latents = False  # as diffusers' train_dreambooth_lora_z_image.py
    blocks = ("ZImageTransformerBlock",)
    chained_blocks = blocks
    #: Users of other trainers report that the base breaks with these in 8 bits.
    unquantized = ("noise_refiner", "context_refiner", "adaLN_modulation")
    text_encoders = (
        family.TextEncoder(
            *("text_encoder", ("Qwen3Model", "Qwen3ForCausalLM"), "llm"),
            tokens=512,
            layers=(-2,),
            padded=False,
        ),
    )
    inputs = ("prompt_embeds",)
    refused_devices = family.COMPLEX_ROPE
    kohya: ClassVar[family.KohyaNames | None] = family.KohyaNames(
        *({}, lambda layer, config: family.KohyaLayer(layer)),
        lambda transformer, prediction_type: family.KohyaBase(
            *("z_image", "Z-Image", "https://github.com/Tongyi-MAI/Z-Image")
        ),
        *("musubi-tuner", "networks.lora_zimage"),
        in_comfyui=False,
        in_invokeai=False,
    )

    def chat(self, tokenizer: Any, caption: str) -> str:
        return family.chat_of_qwen3(tokenizer, caption, enable_thinking=True)

    def prompt_width(self, config: Mapping[str, Any]) -> int:
        return int(config["cap_feat_dim"])

    def draws_in_few_steps(
        self, index: Mapping[str, Any], config: Mapping[str, Any], scheduler: Mapping[str, Any]
    ) -> bool:
        return scheduler.get("shift") == TURBO_SHIFT

    def guidance_weight(self, sampler: Mapping[str, Any]) -> float:
        """The pipeline adds scale (conditional - unconditional) to the conditional: 0 is none."""
        return super().guidance_weight(sampler) + 1

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return int(config["in_channels"])  # the transformer cuts the patches itself

    def predict(
        self, denoiser: Any, noisy_latents: Any, timesteps: Any, conditioning: Mapping[str, Any]
    ) -> Any:
        """The transformer's time runs from noise, at 0, to the picture, and so does its output."""
        text = conditioning["prompt_embeds"]
        mask = conditioning["prompt_embeds_mask"]
        with family.calling(denoiser, partial(forward, denoiser)):
            return -denoiser(noisy_latents, (1000 - timesteps) / 1000, text, mask)


def forward(model: Any, latents: Any, time: Any, prompt_embeds: Any, mask: Any) -> Any:
    """The transformer's output [B, C, h, w].

    Args:
        model: ZImageTransformer2DModel of diffusers.
        latents: [B, C, h, w].
        time: [B], from 0 (noise) to 1.
        prompt_embeds: [B, T, D].
        mask: [B, T], 1 for tokens of the caption and 0 for padding.
    """
    import torch

    rows, columns = (size // family.PATCH for size in latents.shape[-2:])
    adaln = model.t_embedder(time * model.t_scale).type_as(latents)
    missing = -prompt_embeds.shape[1] % _MULTIPLE
    mask = torch.nn.functional.pad(mask.float(), (0, missing))
    text = model.cap_embedder(torch.nn.functional.pad(prompt_embeds, (0, 0, 0, missing)))
    text = torch.where(mask[..., None] > 0, text, model.cap_pad_token)
    ends = (mask.sum(1) / _MULTIPLE).ceil().mul(_MULTIPLE)  # [B], with learned padding
    counted = torch.ones_like(mask).cumsum(1)  # [B, T]: 1, 2, ...
    attended = counted <= ends[:, None]

    image = model.all_x_embedder[_SIZES](patches(latents))
    padding = model.x_pad_token.expand(len(image), -rows * columns % _MULTIPLE, -1)
    image = torch.cat([image, padding.to(image.dtype)], dim=1)
    image_rope = rotations(model, image_positions(latents, ends, padding.shape[1]))
    none = torch.zeros_like(counted)
    text_rope = rotations(model, torch.stack([counted, none, none], dim=-1))

    for layer in model.noise_refiner:
        image = _run(model, layer, image, None, image_rope, adaln)
    for layer in model.context_refiner:
        text = _run(model, layer, text, attended, text_rope)
    every = torch.ones_like(image[..., 0], dtype=torch.bool)
    joint = torch.cat([image, text], dim=1)
    rope = torch.cat([image_rope, text_rope], dim=1)
    for layer in model.layers:
        joint = _run(model, layer, joint, torch.cat([every, attended], dim=1), rope, adaln)
    output = model.all_final_layer[_SIZES](joint, c=adaln)
    side = family.PATCH
    values = output[:, : rows * columns].reshape(len(output), rows, columns, side, side, -1)
    return values.permute(0, 5, 1, 3, 2, 4).reshape(latents.shape)


def _run(model: Any, layer: Any, *inputs: Any) -> Any:
    """A block's output; with gradient checkpointing it is computed again in the backward pass."""
    import torch

    if torch.is_grad_enabled() and model.gradient_checkpointing:
        return model._gradient_checkpointing_func(layer, *inputs)
    return layer(*inputs)


def patches(latents: Any) -> Any:
    """Latents [B, C, h, w] as patches [B, h w / 4, 4 C]; a patch's values are ordered (2, 2, C)."""
    batch, channels, height, width = latents.shape
    side = family.PATCH
    parted = latents.reshape(batch, channels, height // side, side, width // side, side)
    return parted.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def image_positions(latents: Any, ends: Any, padding: int) -> Any:
    """(1 + end of the caption, row, column) of each patch, then zeros: [B, N, 3] f32.

    Args:
        latents: [B, C, h, w].
        ends: captions' lengths [B] with learned padding.
        padding: number of padding tokens after the patches.
    """
    import torch

    ones = torch.ones_like(latents[:, 0, :: family.PATCH, :: family.PATCH], dtype=torch.float32)
    axes = [ones * (ends[:, None, None] + 1), ones.cumsum(1) - 1, ones.cumsum(2) - 1]
    places = torch.stack(axes, dim=-1).flatten(1, 2)
    return torch.nn.functional.pad(places, (0, 0, 0, padding))


def rotations(model: Any, positions: Any) -> Any:
    """Rotary factors [B, N, d / 2], complex, of positions [B, N, 3] f32.

    The angles are rounded from float64, as in diffusers' table.
    """
    import torch

    by_axis = []
    for axis, (width, length) in enumerate(zip(model.axes_dims, model.axes_lens, strict=True)):
        frequencies = model.rope_theta ** -(np.arange(0, width, 2) / width)
        angles = np.outer(np.arange(length), frequencies).astype(np.float32)
        table = torch.tensor(angles).to(positions.device)
        by_axis.append(table[positions[..., axis].long()])
    angle = torch.cat(by_axis, dim=-1)
    return torch.complex(angle.cos(), angle.sin())
