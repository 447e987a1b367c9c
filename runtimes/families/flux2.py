"""FLUX.2 klein: a transformer over 2 x 2 patches, with hidden states of a Qwen3 as captions.

The published model is described by its code alone; diffusers' Flux2KleinPipeline is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from artifacts.safetensors import read_named_floats
from configs.errors import Refused
from runtimes.families import family
from runtimes.families.flux import original_layer, positions
from runtimes.objective.noise_schedule import ResolutionShift

_STATISTICS = ("bn.running_mean", "bn.running_var")
_TOP = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
}
_DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_SINGLE = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}

#: The first coordinate of reference number 1; those of later ones are its multiples.
REFERENCE_TIME = 10

_WIDTH_OF_9B = 4096  # of the transformer; 4B's is 3072


def _kohya_base(transformer: Mapping[str, Any], prediction_type: str) -> family.KohyaBase:
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    size = "9b" if width == _WIDTH_OF_9B else "4b"
    code = "https://github.com/black-forest-labs/flux2"
    return family.KohyaBase(f"flux_2_klein_{size}", f"Flux.2-klein-{size}", code)


class Flux2(family.PatchTransformer):
    """prompt_embeds concatenates the states of three layers of the Qwen3, with padding.

    The transformer gets no mask and attends to padding, whose states depend on the caption: all of
    them are stored. The latents of a 2 x 2 patch are normalised by the VAE's running statistics.
    """

    name = "flux2"
    pipelines = ("Flux2KleinPipeline",)
    denoiser_class = "Flux2Transformer2DModel"
    vae_class = "AutoencoderKLFlux2"
    default_scaling_factor = 1.0
    draws_latents = False  # Black Forest Labs' code never reads the log-variance
    blocks = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    chained_blocks = blocks
    text_encoders = (
        family.TextEncoder(
            "text_encoder", ("Qwen3ForCausalLM",), "llm", tokens=512, layers=(9, 18, 27)
        ),
    )
    inputs = ("prompt_embeds",)
    guidance_scale = 4.0
    max_references = 10  # of Black Forest Labs' interface; the code has no limit
    #: The last two are those of single blocks, fused with the MLP's.
    attention_layers = (*family.TWO_STREAMS, "to_qkv_mlp_proj", "attn.to_out")
    refused_devices = family.FLOAT64_ROPE
    kohya: ClassVar[family.KohyaNames | None] = family.KohyaNames(
        {},
        partial(original_layer, top=_TOP, double=_DOUBLE, single=_SINGLE, fused_single={}),
        _kohya_base,
        *("musubi-tuner", "networks.lora_flux_2"),
        in_invokeai=False,  # it takes such a file for FLUX.1
    )

    def chat(self, tokenizer: Any, caption: str) -> str:
        return family.chat_of_qwen3(tokenizer, caption, enable_thinking=False)

    def is_distilled(self, index: Mapping[str, Any]) -> bool:
        return bool(index.get("is_distilled", False))

    def latent_statistics(self, vae: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """Mean and standard deviation of the VAE's batch normalisation, for each patch's pixels.

        Raises:
            Refused: the weights lack them, or cannot be read.
        """
        statistics: dict[str, NDArray[np.float32]] = {}
        files = sorted(vae.glob("*.safetensors"))
        try:
            for path in files:
                statistics = read_named_floats(path, _STATISTICS) | statistics
        except (OSError, ValueError) as error:
            raise Refused(f"{vae}: its weights cannot be read: {error}") from None
        if not files:  # only the configs are there, to plan
            return {"latents_mean": None, "latents_std": None}
        if missing := set(_STATISTICS) - statistics.keys():
            raise Refused(f"{vae}: its weights lack {min(missing)}, by which latents are scaled")
        mean, variance = (statistics[name] for name in _STATISTICS)
        std = np.sqrt(variance + np.float32(config.get("batch_norm_eps", 1e-4)))
        return {"latents_mean": mean.tolist(), "latents_std": std.tolist()}

    def sampling_shift(self, shift: ResolutionShift, tokens: int, steps: int) -> float:
        """Black Forest Labs' fit: mu is linear in tokens, and below 4300 tokens also in steps.

        The fit at 200 steps is the scheduler's own shift, from 0.5 at 256 tokens to 1.15 at 4096.
        """
        at_200 = 0.00016927 * tokens + 0.45666666
        if tokens > 4300:
            return at_200
        at_10 = 8.73809524e-05 * tokens + 1.89833333
        slope = (at_200 - at_10) / 190
        return slope * steps + at_200 - 200 * slope

    def pipeline_arguments(
        self, pipe: Any, options: Mapping[str, Any], count: int
    ) -> dict[str, Any]:
        """The pipeline takes a negative prompt as embeddings alone."""
        arguments = dict(options)
        negative = arguments.pop("negative_prompt", None)
        if negative is not None:
            length = arguments["max_sequence_length"]
            embeds, _ = pipe.encode_prompt(negative, max_sequence_length=length)
            arguments["negative_prompt_embeds"] = embeds
        return arguments

    def reference_positions(self, latents: Any, number: int) -> Any:
        return image_positions(latents, REFERENCE_TIME * (number + 1))

    def pipeline_latents(self, noise: Any) -> Any:
        """Patches as channels [B, 4 C, h / 2, w / 2]."""
        rows, columns = (size // family.PATCH for size in noise.shape[-2:])
        patches = family.pack(noise).permute(0, 2, 1).reshape(len(noise), -1, rows, columns)
        return patches.contiguous()  # the reshaped view is in channels_last

    def predict(
        self, denoiser: Any, noisy_latents: Any, timesteps: Any, conditioning: Mapping[str, Any]
    ) -> Any:
        text = conditioning["prompt_embeds"]
        patches, places = self.append_references(
            *(family.pack(noisy_latents), image_positions(noisy_latents)),
            family.reference_latents(conditioning),
        )
        predicted = denoiser(
            patches,
            encoder_hidden_states=text,
            timestep=timesteps / 1000,
            img_ids=places,
            txt_ids=text_positions(text),
            return_dict=False,
        )[0]
        return family.unpack(predicted, noisy_latents)


def image_positions(latents: Any, time: int = 0) -> Any:
    """(time, row, column, 0) of each patch of latents [B, C, h, w]: [N, 4] f32."""
    import torch  # runtimes without PyTorch import this module too

    places = positions(latents, time)
    return torch.cat([places, torch.zeros_like(places[:, :1])], dim=-1)


def text_positions(prompt_embeds: Any) -> Any:
    """(0, 0, 0, t) of each token of embeddings [B, T, D]: [T, 4] f32."""
    import torch

    ones = torch.ones_like(prompt_embeds[0, :, :1], dtype=torch.float32)
    return torch.cat([torch.zeros_like(ones).expand(-1, 3), ones.cumsum(0) - 1], dim=-1)
