"""Checkpoint files in the layouts of model sites, from the tiny models' folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file
from tiny_models import make_scheduler, make_text_config, make_tokenizer, make_unet, make_vae
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from runtimes.families.flux import original_layer
from runtimes.families.sdxl import stability_name

Tensors = dict[str, torch.Tensor]
UNET = "model.diffusion_model."
_RESNET_NORMS = {"norm1": "in_layers.0", "norm2": "out_layers.0"}
_VAE_RESNET = {"conv_shortcut": "nin_shortcut"}
_VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}
_OPENCLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def weights(part: Path) -> Tensors:
    (file,) = part.glob("*.safetensors")
    return load_file(file)


def config(part: Path) -> dict[str, Any]:
    return dict(json.loads((part / "config.json").read_text()))


def save_two_widths(folder: Path) -> None:
    """A tiny SDXL whose CLIP encoders differ in width, as the published ones do."""
    torch.manual_seed(3)
    wide = make_text_config()
    wide.hidden_size = 48
    StableDiffusionXLPipeline(
        vae=make_vae(),
        text_encoder=CLIPTextModel(make_text_config()),
        text_encoder_2=CLIPTextModelWithProjection(wide),
        tokenizer=make_tokenizer(),
        tokenizer_2=make_tokenizer("!"),
        unet=make_unet(
            cross_attention_dim=80,
            transformer_layers_per_block=(1, 1),
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 24,
        ),
        scheduler=make_scheduler(),
        add_watermarker=False,
    ).save_pretrained(folder)


def sd_tensors(model: Path) -> Tensors:
    """Stable Diffusion 1: UNet, VAE and CLIP."""
    clip = {f"cond_stage_model.transformer.{_hub(n)}": t for n, t in _text(model).items()}
    return unet_tensors(model) | vae_tensors(model) | clip


def sdxl_tensors(model: Path) -> Tensors:
    """SDXL: UNet, VAE, CLIP and OpenCLIP."""
    first = "conditioner.embedders.0.transformer."
    clip = {first + _hub(name): tensor for name, tensor in _text(model).items()}
    return unet_tensors(model) | vae_tensors(model) | clip | openclip_tensors(model)


def unet_tensors(model: Path) -> Tensors:
    unet = config(model / "unet")

    def original(name: str) -> str:
        layer, _, kind = name.rpartition(".")
        if layer == "conv_norm_out":
            return f"out.0.{kind}"
        block, _, last = layer.rpartition(".")
        if last in _RESNET_NORMS and ".resnets." in layer:
            return stability_name(f"{block}.{_RESNET_NORMS[last]}", unet) + f".{kind}"
        return f"{stability_name(layer, unet)}.{kind}"

    return {UNET + original(name): tensor for name, tensor in weights(model / "unet").items()}


def vae_tensors(model: Path, prefix: str = "first_stage_model.") -> Tensors:
    blocks = len(config(model / "vae")["block_out_channels"])

    def original(name: str) -> str:
        side, _, rest = name.partition(".")
        if side.endswith("quant_conv"):
            return name
        layer, _, kind = rest.rpartition(".")
        words = layer.split(".")
        if words[0] == "mid_block":
            number = int(words[2])
            if words[1] == "attentions":
                return f"{side}.mid.attn_1.{_VAE_ATTENTION['.'.join(words[3:])]}.{kind}"
            return f"{side}.mid.block_{number + 1}.{words[3]}.{kind}"
        if words[0] in ("down_blocks", "up_blocks"):
            is_down = words[0] == "down_blocks"
            number = int(words[1]) if is_down else blocks - 1 - int(words[1])
            place = f"{side}.{'down' if is_down else 'up'}.{number}"
            if words[2] == "resnets":
                last = _VAE_RESNET.get(words[4], words[4])
                return f"{place}.block.{words[3]}.{last}.{kind}"
            return f"{place}.{'downsample' if is_down else 'upsample'}.conv.{kind}"
        return f"{side}.{'norm_out' if layer == 'conv_norm_out' else layer}.{kind}"

    named = {prefix + original(n): t for n, t in weights(model / "vae").items()}
    is_matrix = (".q.weight", ".k.weight", ".v.weight", ".attn_1.proj_out.weight")
    return {n: t[..., None, None] if n.endswith(is_matrix) else t for n, t in named.items()}


def openclip_tensors(model: Path) -> Tensors:
    """The second text encoder, whose projections of queries, keys and values are one."""
    prefix = "conditioner.embedders.1.model."
    stored = {_hub(name): t for name, t in weights(model / "text_encoder_2").items()}
    tensors = {
        f"{prefix}positional_embedding": stored.pop(
            "text_model.embeddings.position_embedding.weight"
        ),
        f"{prefix}token_embedding.weight": stored.pop(
            "text_model.embeddings.token_embedding.weight"
        ),
        f"{prefix}text_projection": stored.pop("text_projection.weight").T.contiguous(),
    }
    for kind in ("weight", "bias"):
        tensors[f"{prefix}ln_final.{kind}"] = stored.pop(f"text_model.final_layer_norm.{kind}")
    for name in [name for name in stored if ".q_proj." in name]:
        three = [stored.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        number, kind = name.split(".")[3], name.rpartition(".")[2]
        place = f"{prefix}transformer.resblocks.{number}.attn.in_proj_{kind}"
        tensors[place] = torch.cat(three)
    for name, tensor in stored.items():
        _, _, _, number, rest = name.split(".", 4)
        layer, _, kind = rest.rpartition(".")
        tensors[f"{prefix}transformer.resblocks.{number}.{_OPENCLIP[layer]}.{kind}"] = tensor
    return tensors


def flux_tensors(model: Path, prefix: str = "") -> Tensors:
    """FLUX.1's transformer alone, as it is sold."""
    part = model / "transformer"
    settings = config(part)
    return {prefix + name: t for name, t in original_flux(weights(part), settings).items()}


def original_flux(stored: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> Tensors:
    fused: dict[str, dict[int, torch.Tensor]] = {}
    tensors: Tensors = {}
    for name, tensor in stored.items():
        layer, _, kind = name.rpartition(".")
        block = layer.partition(".attn.norm_")[0].replace(
            "single_transformer_blocks", "single_blocks"
        )
        block = block.replace("transformer_blocks", "double_blocks")
        if layer == "norm_out.linear":
            scale, shift = tensor.chunk(2)
            tensors[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat([shift, scale])
        elif ".attn.norm_" in layer:
            which = "query" if layer.endswith("q") else "key"
            stream = "txt" if "added" in layer else "img"
            norm = "norm" if block.startswith("single") else f"{stream}_attn.norm"
            tensors[f"{block}.{norm}.{which}_norm.scale"] = tensor
        else:
            place = original_layer(layer, settings)
            assert place is not None, layer
            fused.setdefault(f"{place.layer}.{kind}", {})[place.first] = tensor
    return tensors | {n: torch.cat([rows[at] for at in sorted(rows)]) for n, rows in fused.items()}


def write(path: Path, tensors: Tensors, **metadata: str) -> Path:
    """A safetensors file."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    return path


def pipeline_weights(model: Path) -> dict[str, torch.Tensor]:
    """All weights of a pipeline; transformers 5 leaves the prefix of CLIP's out."""
    parts = [part for part in sorted(model.iterdir()) if [*part.glob("*.safetensors")]]
    return {
        f"{part.name}.{name.removeprefix('text_model.')}": tensor
        for part in parts
        for name, tensor in weights(part).items()
    }


def _text(model: Path) -> Tensors:
    return weights(model / "text_encoder")


def _hub(name: str) -> str:
    """transformers 5 leaves the prefix of CLIP's weights out."""
    return name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}"
