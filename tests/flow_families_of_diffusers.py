"""FLUX.2 klein, Z-Image and Qwen-Image as diffusers trains and draws with them.

The reference of training is the arithmetic of diffusers' train_dreambooth_lora_flux2_klein.py,
train_dreambooth_lora_z_image.py and train_dreambooth_lora_qwen_image.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers_script import Script, levels, start_noise
from flow_families import GUIDANCE, SIZE, FlowFamily, Trained

from runtimes.process.job import TrainJob

PROMPTS = ("a red cat", "two dogs in a wide forest")
#: The layers that the scripts of Z-Image and Qwen-Image adapt without --lora_layers.
ATTENTION = ["to_k", "to_q", "to_v", "to_out.0"]


def _script_of_flux2(job: TrainJob) -> Script:
    pipe = Flux2KleinPipeline.from_pretrained(job.model)
    normal = pipe.vae.bn

    def scale(latents: torch.Tensor) -> torch.Tensor:
        patches = pipe._patchify_latents(latents[None])
        std = torch.sqrt(normal.running_var + pipe.vae.config.batch_norm_eps)
        scaled = (patches - normal.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
        return pipe._unpatchify_latents(scaled)[0]

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        embeds, patches = torch.stack(prompts), pipe._patchify_latents(noisy)
        ids = pipe._prepare_latent_ids(patches)
        output = model(
            hidden_states=pipe._pack_latents(patches),
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=embeds,
            txt_ids=pipe._prepare_text_ids(embeds),
            img_ids=ids,
            return_dict=False,
        )[0]
        return pipe._unpatchify_latents(pipe._unpack_latents_with_ids(output, ids))

    model = Flux2Transformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scale, draws=False)


def _drawn_by_flux2(pipe: Flux2KleinPipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    latents = pipe._patchify_latents(noise)
    found = pipe(prompt=list(prompts), latents=latents, max_sequence_length=40, **given)
    return levels(found.images)


def _script_of_z_image(job: TrainJob) -> Script:
    vae = ZImagePipeline.from_pretrained(job.model).vae.config

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        samples = list(noisy.unsqueeze(2).unbind(0))
        output = model(samples, (1000 - timesteps) / 1000, prompts, return_dict=False)[0]
        return -torch.stack(output).squeeze(2)

    model = ZImageTransformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(
        job, model, predict, lambda z: (z - vae.shift_factor) * vae.scaling_factor, draws=False
    )


def _drawn_by_z_image(pipe: ZImagePipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    found = pipe(prompt=list(prompts), latents=noise, max_sequence_length=64, **given)
    return levels(found.images)


def _script_of_qwen_image(job: TrainJob) -> Script:
    pipe = QwenImagePipeline.from_pretrained(job.model)
    config = pipe.vae.config

    def scale(latents: torch.Tensor) -> torch.Tensor:
        mean, std = (
            torch.tensor(x)[:, None, None] for x in (config.latents_mean, config.latents_std)
        )
        return (latents - mean) * (1.0 / std)

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        count, _, height, width = noisy.shape
        longest = max(map(len, prompts))
        mask = torch.stack([torch.arange(longest) < len(one) for one in prompts])
        output = model(
            hidden_states=pipe._pack_latents(noisy, *noisy.shape),
            encoder_hidden_states=torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
            encoder_hidden_states_mask=mask,
            timestep=timesteps / 1000,
            img_shapes=[[(1, height // 2, width // 2)]] * count,
            return_dict=False,
        )[0]
        return pipe._unpack_latents(output, 4 * height, 4 * width, 4).squeeze(2)

    model = QwenImageTransformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scale)


def _drawn_by_qwen_image(pipe: QwenImagePipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "true_cfg_scale": GUIDANCE, **SIZE}
    given |= {"negative_prompt": [""] * len(prompts), **changes}
    latents = pipe._pack_latents(noise, *noise.shape)
    found = pipe(prompt=list(prompts), latents=latents, max_sequence_length=288, **given)
    return levels(found.images)


def _grey_of_flux2(model: Path) -> dict[str, Any]:
    """Its pipeline takes the embeddings of a negative prompt alone."""
    pipe = Flux2KleinPipeline.from_pretrained(model)
    embeds, _ = pipe.encode_prompt(["grey"] * 2, max_sequence_length=40)
    return {"negative_prompt_embeds": embeds}


def _grey(model: Path) -> dict[str, Any]:
    return {"negative_prompt": ["grey"] * 2}


FLUX2 = FlowFamily(
    "flux2",
    Flux2KleinPipeline,
    ("a red cat", "two dogs"),
    _drawn_by_flux2,
    Trained(
        _script_of_flux2,
        # The layers of the text stream, and the fused ones of single blocks, beside the script's.
        ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "to_qkv_mlp_proj"],
        adapted=8 + 2 * 2,  # double and single blocks
        in_soak=("accumulated",),  # the others prove it, with captions of varying lengths
    ),
    plain={"guidance_scale": 1.0},
    grey=_grey_of_flux2,
)
Z_IMAGE = FlowFamily(
    "z_image",
    ZImagePipeline,
    PROMPTS,
    _drawn_by_z_image,
    Trained(
        _script_of_z_image,
        ATTENTION,
        adapted=(2 + 2) * 4,  # layers and refiners
        in_soak=("weighted",),  # FLUX.2 proves it
    ),
    plain={"guidance_scale": 0.0},
    grey=_grey,
)
QWEN_IMAGE = FlowFamily(
    "qwen_image",
    QwenImagePipeline,
    PROMPTS,
    _drawn_by_qwen_image,
    Trained(
        _script_of_qwen_image,
        ATTENTION,
        adapted=2 * 8,  # both streams
        in_soak=("weighted",),  # FLUX.2 proves it
        info={"tokens": 64},
    ),
    plain={"true_cfg_scale": 1.0},
    grey=_grey,
)
