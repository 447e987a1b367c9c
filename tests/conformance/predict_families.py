"""The reference's calls of the transformers of flow models, with the functions of their pipelines.

Nothing of runtimes/ is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import (
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImageTransformer2DModel,
)

Tensor = torch.Tensor
#: (model, noisy latents [B, C, h, w], timesteps [B] to 1000, conditioning) -> prediction.
Predict = Callable[[Any, Tensor, Tensor, Mapping[str, Tensor]], Tensor]


def _flux(model: Any, noisy: Tensor, timesteps: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    count, _, height, width = noisy.shape
    ids = FluxPipeline._prepare_latent_image_ids(
        count, height // 2, width // 2, "cpu", torch.float32
    )
    predicted = model(
        FluxPipeline._pack_latents(noisy, *noisy.shape),
        encoder_hidden_states=given["prompt_embeds"],
        pooled_projections=given["pooled_prompt_embeds"],
        timestep=timesteps / 1000,
        guidance=given["guidance"],
        img_ids=ids,
        txt_ids=torch.zeros(given["prompt_embeds"].shape[1], 3),
    ).sample
    return FluxPipeline._unpack_latents(predicted, height * 8, width * 8, 8)


def _flux2(model: Any, noisy: Tensor, timesteps: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    pipe = Flux2KleinPipeline
    patches = pipe._patchify_latents(noisy)
    ids = pipe._prepare_latent_ids(patches)
    predicted = model(
        pipe._pack_latents(patches),
        encoder_hidden_states=given["prompt_embeds"],
        timestep=timesteps / 1000,
        guidance=None,
        img_ids=ids,
        txt_ids=pipe._prepare_text_ids(given["prompt_embeds"]),
    ).sample
    return pipe._unpatchify_latents(pipe._unpack_latents_with_ids(predicted, ids))


def _z_image(model: Any, noisy: Tensor, timesteps: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """The transformer takes lists of samples; its time, and its output, run the other way."""
    pictures = list(noisy.unsqueeze(2).unbind())
    predicted = model(pictures, (1000 - timesteps) / 1000, _captions(given)).sample
    return -torch.stack(predicted).squeeze(2)


def _qwen_image(
    model: Any, noisy: Tensor, timesteps: Tensor, given: Mapping[str, Tensor]
) -> Tensor:
    """Captions are padded to the batch's longest, as the pipeline pads its prompts'."""
    count, _, height, width = noisy.shape
    captions = _captions(given)
    longest = max(map(len, captions))
    predicted = model(
        QwenImagePipeline._pack_latents(noisy, *noisy.shape),
        encoder_hidden_states=torch.nn.utils.rnn.pad_sequence(captions, batch_first=True),
        encoder_hidden_states_mask=given["prompt_embeds_mask"][:, :longest].bool(),
        timestep=timesteps / 1000,
        img_shapes=[[(1, height // 2, width // 2)]] * count,
    ).sample
    return QwenImagePipeline._unpack_latents(predicted, height * 8, width * 8, 8).squeeze(2)


def _captions(given: Mapping[str, Tensor]) -> list[Tensor]:
    """Embeddings [T, D] of each caption, without padding."""
    pairs = zip(given["prompt_embeds"], given["prompt_embeds_mask"].bool(), strict=True)
    return [embeds[kept] for embeds, kept in pairs]


#: Transformers that are not called with latents [B, C, h, w] and a timestep alone.
PREDICT: dict[type[torch.nn.Module], Predict] = {
    FluxTransformer2DModel: _flux,
    Flux2Transformer2DModel: _flux2,
    ZImageTransformer2DModel: _z_image,
    QwenImageTransformer2DModel: _qwen_image,
}
