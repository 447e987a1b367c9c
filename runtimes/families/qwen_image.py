"""Qwen-Image (arXiv 2508.02324): a transformer of two streams; a Qwen2.5-VL reads the captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from runtimes.families import family


class QwenImage(family.PatchTransformer):
    """prompt_embeds is as long as the caption; the VAE is for video, a picture is one frame."""

    name = "qwen_image"
    pipelines = ("QwenImagePipeline",)
    denoiser_class = "QwenImageTransformer2DModel"
    vae_class = "AutoencoderKLQwenImage"
    default_scaling_factor = 1.0
    blocks = ("QwenImageTransformerBlock",)
    chained_blocks = blocks
    text_encoders = (
        family.TextEncoder(
            *("text_encoder", ("Qwen2_5_VLForConditionalGeneration",), "llm"),
            tokens=1024,
            call_tokens=512,
            prefix=34,
            padded=False,
        ),
    )
    inputs = ("prompt_embeds",)
    guidance_scale = 4.0  # the pipeline's true_cfg_scale
    attention_layers = family.TWO_STREAMS
    refused_devices = family.COMPLEX_ROPE
    kohya: ClassVar[family.KohyaNames | None] = family.KohyaNames(
        *({}, lambda layer, config: family.KohyaLayer(layer)),
        lambda transformer, prediction_type: family.KohyaBase(
            *("qwen_image", "Qwen-Image", "https://github.com/QwenLM/Qwen-Image")
        ),
        *("musubi-tuner", "networks.lora_qwen_image"),
    )

    def chat(self, tokenizer: Any, caption: str) -> str:
        return template(self.pipelines[0]).format(caption)

    def vae_layout(self, config: Mapping[str, Any]) -> tuple[int, int]:
        return config["z_dim"], 2 ** len(config["temperal_downsample"])

    def encode_pictures(self, vae: Any, pixels: Any) -> tuple[Any, Any]:
        posterior = vae.encode(pixels.unsqueeze(2)).latent_dist
        return posterior.mean.squeeze(2), posterior.logvar.squeeze(2)

    def decode_latents(self, vae: Any, latents: Any) -> Any:
        return vae.decode(latents.unsqueeze(2), return_dict=False)[0].squeeze(2)

    def guide(self, unconditional: Any, conditional: Any, weight: Any) -> Any:
        """The guided prediction of a patch has the norm of its conditional prediction."""
        guided = super().guide(unconditional, conditional, weight)
        batch, channels, height, width = guided.shape
        side = family.PATCH
        parted = (batch, channels, height // side, side, width // side, side)
        patches = guided.reshape(parted)
        wanted = conditional.reshape(parted)
        ratio = (_square(wanted) / _square(patches)) ** 0.5
        return (patches * ratio).reshape(guided.shape)

    def pipeline_arguments(
        self, pipe: Any, options: Mapping[str, Any], count: int
    ) -> dict[str, Any]:
        """The pipeline is guided by `true_cfg_scale`, and only with a negative prompt."""
        arguments = dict(options)
        scale = arguments.pop("guidance_scale")
        negative = arguments.pop("negative_prompt", None) or [""] * count
        return arguments | {
            "true_cfg_scale": scale,
            "negative_prompt": negative if scale > 1 else None,
        }

    def pipeline_latents(self, noise: Any) -> Any:
        return family.pack(noise)

    def make_constants(self, denoiser: Any) -> None:
        place = denoiser.pos_embed
        denoiser.pos_embed = type(place)(place.theta, place.axes_dim, place.scale_rope)

    def predict(
        self, denoiser: Any, noisy_latents: Any, timesteps: Any, conditioning: Mapping[str, Any]
    ) -> Any:
        """The rotary factors are computed here, on the latents' device.

        References are pictures after the noisy one; the prediction has the noisy one's tokens.
        """
        import torch

        pictures = [noisy_latents, *family.reference_latents(conditioning)]
        grids = [(p.shape[-2] // family.PATCH, p.shape[-1] // family.PATCH) for p in pictures]
        text = conditioning["prompt_embeds"]
        rope = partial(rotations, denoiser.pos_embed, grids, text.shape[1])
        patches = [family.pack(picture) for picture in pictures]
        with family.calling(denoiser.pos_embed, lambda *_, device, **__: rope(device)):
            predicted = denoiser(
                patches[0] if len(patches) == 1 else torch.cat(patches, dim=1),
                encoder_hidden_states=text,
                encoder_hidden_states_mask=conditioning["prompt_embeds_mask"],
                timestep=timesteps / 1000,
                img_shapes=[[(1, *grid) for grid in grids]] * len(noisy_latents),
                return_dict=False,
            )[0]
        return family.unpack(predicted, noisy_latents)


@cache
def template(pipeline: str = "QwenImagePipeline") -> str:
    """The chat template of a pipeline class of the installed diffusers."""
    import diffusers

    kind = getattr(diffusers, pipeline)
    prompt_template: str = kind(**dict.fromkeys(signature(kind).parameters)).prompt_template_encode
    return prompt_template


def _square(parted: Any) -> Any:
    """Sum of a patch's squares: [B, C, rows, 2, columns, 2] -> [B, 1, rows, 1, columns, 1]."""
    for axis in (1, 3, 5):
        parted = (parted**2 if axis == 1 else parted).sum(axis, keepdims=True)
    return parted


def rotations(
    embedder: Any, grids: Sequence[tuple[int, int]], tokens: int, device: Any
) -> tuple[Any, Any]:
    """Complex rotary factors of the pictures' tokens [N, d / 2] and of the text [tokens, d / 2].

    The first axis numbers the pictures. Rows and columns are counted from each picture's middle.
    The text follows at the edge of the largest one, on the diagonal of all three axes.

    Args:
        grids: (rows, columns) of each picture's tokens.
    """
    import torch

    pictures = []
    for number, (rows, columns) in enumerate(grids):
        down, across = (np.arange(size) - (size - size // 2) for size in (rows, columns))
        grid = np.meshgrid([number], down, across, indexing="ij")
        pictures.append(np.stack([axis.ravel() for axis in grid], axis=-1))
    after = np.arange(tokens) + max(size // 2 for grid in grids for size in grid)

    def factors(positions: NDArray[Any]) -> Any:
        angles = []
        for axis, width in enumerate(embedder.axes_dim):
            exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
            frequencies = np.float32(1) / np.float32(embedder.theta) ** exponents
            angles.append(np.outer(positions[:, axis].astype(np.float32), frequencies))
        angle = torch.tensor(np.concatenate(angles, axis=1)).to(device)
        return torch.complex(angle.cos(), angle.sin())

    return factors(np.concatenate(pictures)), factors(np.stack([after] * 3, axis=-1))
