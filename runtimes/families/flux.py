"""FLUX.1, dev and schnell: a transformer over 2 x 2 patches, with a CLIP encoder and a T5.

The published model is described by its code alone; diffusers' FluxPipeline is the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from runtimes.families import family

_TOP = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",  # norm_out.linear has no place: its halves are swapped there
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
}
_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
#: Layers that Black Forest Labs' code fuses along the output: (fused layer, position in it).
_FUSED_DOUBLE = {
    f"attn.{name}": (f"{stream}_attn.qkv", position)
    for stream, names in (
        ("img", ("to_q", "to_k", "to_v")),
        ("txt", ("add_q_proj", "add_k_proj", "add_v_proj")),
    )
    for position, name in enumerate(names)
}
_FUSED_SINGLE = {
    name: ("linear1", position)
    for position, name in enumerate(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"))
}
#: Normalisations of queries and keys, which have no adapters.
_NORMS_DOUBLE = {
    f"attn.norm_{added}{name[0]}": f"{stream}_attn.norm.{name}_norm"
    for stream, added in (("img", ""), ("txt", "added_"))
    for name in ("query", "key")
}
_NORMS_SINGLE = {f"attn.norm_{name[0]}": f"norm.{name}_norm" for name in ("query", "key")}
_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")
_MLP_RATIO = 4


def original_layer(
    layer: str,
    transformer: Mapping[str, Any],
    top: Mapping[str, str] = _TOP,
    double: Mapping[str, str] = _DOUBLE,
    single: Mapping[str, str] = _SINGLE,
    fused_single: Mapping[str, tuple[str, int]] = _FUSED_SINGLE,
) -> family.KohyaLayer | None:
    """Where Black Forest Labs' code has a layer of diffusers' transformer, or None.

    Their code fuses query, key and value, and in single blocks also the MLP's first layer.

    Args:
        layer: name in diffusers, such as `transformer_blocks.0.attn.to_q`.
        transformer: the transformer's config.
        top: names of layers outside of the blocks.
        double: names of layers that double blocks do not fuse.
        single: the same for single blocks.
        fused_single: layers that single blocks fuse, as _FUSED_DOUBLE has them.
    """
    if layer in top:
        return family.KohyaLayer(top[layer])
    match = _BLOCK.fullmatch(layer)
    is_single, number, rest = match.groups() if match else (None, "", "")
    block = f"{'single' if is_single else 'double'}_blocks.{number}"
    plain, fused = (single, fused_single) if is_single else (double, _FUSED_DOUBLE)
    if rest in plain:
        return family.KohyaLayer(f"{block}.{plain[rest]}")
    if rest not in fused:
        return None
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    name, position = fused[rest]
    rows = width * (3 + _MLP_RATIO if is_single else 3)
    return family.KohyaLayer(f"{block}.{name}", position * width, rows)


def original_weight(
    name: str, transformer: Mapping[str, Any], read: Callable[[str], Any], rows: int
) -> Any:
    """A weight of diffusers' transformer, from a file with the names of Black Forest Labs' code.

    Args:
        name: name in diffusers, such as `transformer_blocks.0.attn.to_q.weight`.
        transformer: the transformer's config.
        read: the file's weight of a name. It may raise.
        rows: rows of the weight.
    """
    layer, _, kind = name.rpartition(".")
    if layer == "norm_out.linear":  # the two halves are in another order
        halves = read(f"final_layer.adaLN_modulation.1.{kind}")
        return halves.roll(rows // 2, 0)
    match = _BLOCK.fullmatch(layer)
    norms = _NORMS_SINGLE if match and match[1] else _NORMS_DOUBLE
    if match and match[3] in norms:
        block = f"{'single' if match[1] else 'double'}_blocks.{match[2]}"
        return read(f"{block}.{norms[match[3]]}.scale")
    place = original_layer(layer, transformer)
    assert place is not None, f"{name} has no name in Black Forest Labs' code"
    return read(f"{place.layer}.{kind}")[place.first : place.first + rows]


class Flux(family.PatchTransformer):
    """prompt_embeds has T5's states, with padding; pooled_prompt_embeds CLIP's pooled output.

    The pipeline gives T5 no attention mask, so the states of padding depend on the caption, and
    the transformer attends to them: all of them are stored, and no mask.

    FLUX.1 dev is distilled: the guidance scale is an input (arXiv 2210.03142). Schnell has no such
    input, and was trained on half as many tokens of T5.
    """

    name = "flux"
    pipelines = ("FluxPipeline",)
    denoiser_class = "FluxTransformer2DModel"
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    chained_blocks = blocks
    text_encoders = (
        family.TextEncoder(
            "text_encoder", ("CLIPTextModel",), states=False, pooled="pooler_output"
        ),
        family.TextEncoder("text_encoder_2", ("T5EncoderModel",), "t5", tokens=512),
    )
    attention_layers = family.TWO_STREAMS
    guidance_input = True
    num_inference_steps = 28
    guidance_scale = 3.5
    refused_devices = family.FLOAT64_ROPE
    control = "latents"
    control_class = "FluxControlNetModel"
    control_pipeline = "FluxControlNetPipeline"
    control_argument = "control_image"
    kohya: ClassVar[family.KohyaNames | None] = family.KohyaNames(
        *({"text_encoder": "lora_te1"}, original_layer),
        lambda transformer, prediction_type: family.KohyaBase(
            "flux1",
            "flux-1-dev" if transformer.get("guidance_embeds") else "flux-1-schnell",
            "https://github.com/black-forest-labs/flux",
        ),
        network_module="networks.lora_flux",
        ignored="`final_layer`",  # it makes modules for the weights of blocks and of inputs
    )

    def takes_guidance(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("guidance_embeds", False))

    def draws_in_few_steps(
        self, index: Mapping[str, Any], config: Mapping[str, Any], scheduler: Mapping[str, Any]
    ) -> bool:
        return not self.takes_guidance(config)  # schnell

    def text_tokens(self, config: Mapping[str, Any]) -> int:
        return 512 if self.takes_guidance(config) else 256

    def pipeline_latents(self, noise: Any) -> Any:
        return family.pack(noise)

    def empty_control(self, denoiser: Any, scale: int, layers: Mapping[str, int]) -> Any:
        from diffusers import FluxControlNetModel  # seconds to import

        config = denoiser.config
        chosen = {"num_layers": 4, "num_single_layers": 10}  # diffusers' defaults
        chosen |= layers
        return FluxControlNetModel.from_transformer(
            denoiser,
            **{name: min(number, config[name]) for name, number in chosen.items()},
            attention_head_dim=config["attention_head_dim"],
            num_attention_heads=config["num_attention_heads"],
            load_weights_from_transformer=False,
        )

    def control_residuals(
        self, network: Any, control: Any, scale: float, inputs: Sequence[Any], named: Any
    ) -> dict[str, Any]:
        arguments = dict(named)
        if inputs:
            (arguments["hidden_states"],) = inputs
        packed = family.pack(control).to(arguments["hidden_states"].dtype)
        if not network.config["guidance_embeds"]:
            arguments["guidance"] = None
        blocks, single_blocks = network(
            **arguments, controlnet_cond=packed, conditioning_scale=scale
        )
        return {
            "controlnet_block_samples": blocks,
            "controlnet_single_block_samples": single_blocks,
        }

    def predict(
        self, denoiser: Any, noisy_latents: Any, timesteps: Any, conditioning: Mapping[str, Any]
    ) -> Any:
        text = conditioning["prompt_embeds"]
        patches, places = self.append_references(
            *(family.pack(noisy_latents), positions(noisy_latents)),
            family.reference_latents(conditioning),
        )
        predicted = denoiser(
            patches,
            encoder_hidden_states=text,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            timestep=timesteps / 1000,
            guidance=conditioning["guidance"] if self.takes_guidance(denoiser.config) else None,
            img_ids=places,
            txt_ids=text_positions(text),
            return_dict=False,
        )[0]
        return family.unpack(predicted, noisy_latents)


def positions(latents: Any, first: int = 0) -> Any:
    """(first, row, column) of each patch of latents [B, C, h, w], for rotary embeddings.

    Returns:
        [N, 3] f32.
    """
    import torch  # runtimes without PyTorch import this module too

    ones = torch.ones_like(latents[0, 0, :: family.PATCH, :: family.PATCH], dtype=torch.float32)
    places = torch.stack([ones * first, ones.cumsum(0) - 1, ones.cumsum(1) - 1], dim=-1)
    return places.reshape(-1, 3)


def text_positions(prompt_embeds: Any) -> Any:
    """Zeros for each token of embeddings [B, T, D], for rotary embeddings: [T, 3] f32."""
    import torch

    return torch.zeros_like(prompt_embeds[0, :, :3], dtype=torch.float32)
