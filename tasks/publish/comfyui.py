"""A workflow for ComfyUI that draws with published adapters, as JSON and inside a picture.

ComfyUI opens either file: the node graph in its API format, where an input is a value or
[node, output]. It has the prompt, sampler, steps, guidance and size of the model card. The names
of the base's files are those under which ComfyUI's own templates have them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy import uint8
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from configs.settings.recipe import Recipe
from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.families import Family
from runtimes.objective.noise_schedule import SCHEDULERS, ResolutionShift, is_flow
from runtimes.pipeline_folder.folder import Base
from runtimes.sample.sampling_inputs import image_size
from tasks.evaluate.draw import sampler_settings
from tasks.publish.assemble import KOHYA_SUFFIX

WORKFLOW = "comfyui.json"
PICTURE = "comfyui.png"
#: PNG text key of a graph in API format.
PNG_KEY = "prompt"
Nodes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Files:
    """The files of a base in ComfyUI's folders; without text encoders, a checkpoint has all."""

    model: str
    text_encoders: tuple[str, ...] = ()
    vae: str | None = None


_T5 = ("clip_l.safetensors", "t5xxl_fp16.safetensors")
_QWEN3 = ("qwen_3_4b.safetensors",)
#: Architecture, as KohyaBase has it -> files.
FILES = {
    "stable-diffusion-v1": Files("v1-5-pruned-emaonly.safetensors"),
    "stable-diffusion-v2-512": Files("v2-1_512-ema-pruned.safetensors"),
    "stable-diffusion-v2-768-v": Files("v2-1_768-ema-pruned.safetensors"),
    "stable-diffusion-xl-v1-base": Files("sd_xl_base_1.0.safetensors"),
    "flux-1-dev": Files("flux1-dev.safetensors", _T5, "ae.safetensors"),
    "flux-1-schnell": Files("flux1-schnell.safetensors", _T5, "ae.safetensors"),
    "Flux.2-klein-4b": Files("flux-2-klein-base-4b.safetensors", _QWEN3, "flux2-vae.safetensors"),
    "Flux.2-klein-9b": Files(
        *("flux-2-klein-base-9b.safetensors", ("qwen_3_8b.safetensors",), "flux2-vae.safetensors")
    ),
    "Qwen-Image": Files(
        *("qwen_image_bf16.safetensors", ("qwen_2.5_vl_7b.safetensors",)),
        "qwen_image_vae.safetensors",
    ),
    "Z-Image": Files("z_image_bf16.safetensors", _QWEN3, "ae.safetensors"),
}
#: Family -> type of its text encoders' loader.
ENCODER_TYPES = {"flux": "flux", "flux2": "flux2", "qwen_image": "qwen_image", "z_image": "lumina2"}
#: Scheduler in diffusers -> sampler and schedule of KSampler. PNDM's multistep method is LMS's.
SAMPLERS = {
    "DDIMScheduler": ("ddim", "ddim_uniform"),
    "DDIMParallelScheduler": ("ddim", "ddim_uniform"),
    "DDPMScheduler": ("ddpm", "normal"),
    "DPMSolverMultistepScheduler": ("dpmpp_2m", "normal"),
    "EulerAncestralDiscreteScheduler": ("euler_ancestral", "normal"),
    "FlowMatchEulerDiscreteScheduler": ("euler", "simple"),
    "LMSDiscreteScheduler": ("lms", "normal"),
    "PNDMScheduler": ("lms", "normal"),
    "UniPCMultistepScheduler": ("uni_pc", "normal"),
}
_OTHER = ("euler", "normal")


def adapter_file(family: Family, name: str, lora: Lora, *, kohya: bool) -> str | None:
    """The published file that ComfyUI reads, or None: DoRA's magnitudes in diffusers' layout.

    Args:
        name: stem of the file in kohya's layout.
        kohya: whether that file exists.
    """
    if kohya and family.kohya is not None and family.kohya.in_comfyui:
        return f"{name}{KOHYA_SUFFIX}"
    return None if lora.dora else LORA_WEIGHTS


class _Graph:
    """Nodes by number; a link is a node's number and the number of its output."""

    def __init__(self) -> None:
        self.nodes: Nodes = {}

    def add(self, class_type: str, output: int = 0, **inputs: Any) -> list[Any]:
        """Add a node; returns a link to one of its outputs."""
        number = str(len(self.nodes) + 1)
        self.nodes[number] = {"class_type": class_type, "inputs": inputs}
        return [number, output]


def workflow(
    recipe: Recipe, base: Base, scheduler: Mapping[str, Any], adapters: str, prompt: str
) -> Nodes | None:
    """The node graph for adapters; None without one: of some families, inpainting, references.

    Args:
        scheduler: config of the model's scheduler in diffusers.
        adapters: name of the file for ComfyUI.
        prompt: the card's.
    """
    family = base.family
    is_plain = not (recipe.train.inpainting or recipe.train.aesthetic_score)
    if family.kohya is None or not is_plain or recipe.has_references:
        return None
    kind = scheduler.get("prediction_type", "epsilon")
    files = FILES.get(family.kohya.base(base.denoiser, kind).architecture)
    if files is None:
        return None
    path = recipe.model.path
    own = Path(path).name if path.endswith(".safetensors") else files.model
    settings = sampler_settings(recipe.evaluate)
    height, width = image_size(settings, family, base.denoiser, base.encoders["vae_scale_factor"])
    graph = _Graph()
    if files.vae is None:
        model = graph.add("CheckpointLoaderSimple", ckpt_name=own)
        clip, vae = ([model[0], output] for output in (1, 2))
    else:
        model = graph.add("UNETLoader", unet_name=own, weight_dtype="default")
        clip = _text_encoders(graph, family, files)
        vae = graph.add("VAELoader", vae_name=files.vae)
    if files.vae is None or recipe.train.train_text_encoder:
        both: dict[str, Any] = {"strength_model": 1.0, "strength_clip": 1.0}
        model = graph.add("LoraLoader", model=model, clip=clip, lora_name=adapters, **both)
        clip = [model[0], 1]
    else:
        model = graph.add(
            "LoraLoaderModelOnly", model=model, lora_name=adapters, strength_model=1.0
        )
    model = _noise_levels(graph, model, base, scheduler, settings, (height, width))
    positive = graph.add("CLIPTextEncode", clip=clip, text=prompt)
    if family.takes_guidance(base.denoiser):
        guidance = settings["guidance_scale"]
        positive = graph.add("FluxGuidance", conditioning=positive, guidance=guidance)
    negative = graph.add("CLIPTextEncode", clip=clip, text="")
    name = recipe.evaluate.scheduler
    kind = scheduler["_class_name"] if name is None else SCHEDULERS[name]
    sampler, schedule = SAMPLERS.get(kind, _OTHER)
    guided = family.is_guided(settings, base.encoders)
    samples = graph.add(
        "KSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent_image=graph.add(_latents(family), width=width, height=height, batch_size=1),
        seed=settings["seed"],
        steps=settings["num_inference_steps"],
        cfg=family.guidance_weight(settings) if guided else 1.0,
        sampler_name=sampler,
        scheduler="karras" if scheduler.get("use_karras_sigmas") else schedule,
        denoise=1.0,
    )
    images = graph.add("VAEDecode", samples=samples, vae=vae)
    graph.add("SaveImage", images=images, filename_prefix=recipe.publish.file_stem)
    return graph.nodes


def _text_encoders(graph: _Graph, family: Family, files: Files) -> list[Any]:
    kind = ENCODER_TYPES[family.name]
    if len(files.text_encoders) == 1:
        return graph.add("CLIPLoader", clip_name=files.text_encoders[0], type=kind)
    first, second = files.text_encoders
    return graph.add("DualCLIPLoader", clip_name1=first, clip_name2=second, type=kind)


def _latents(family: Family) -> str:
    if family.denoiser == "unet":
        return "EmptyLatentImage"
    return "EmptyFlux2LatentImage" if family.name == "flux2" else "EmptySD3LatentImage"


def _noise_levels(
    graph: _Graph,
    model: list[Any],
    base: Base,
    scheduler: Mapping[str, Any],
    settings: Mapping[str, Any],
    size: tuple[int, int],
) -> list[Any]:
    """The model with the noise levels of its scheduler: ComfyUI's defaults may be others."""
    if not is_flow(scheduler):
        if scheduler.get("prediction_type") != "v_prediction":
            return model
        zero = bool(scheduler.get("rescale_betas_zero_snr"))
        return graph.add("ModelSamplingDiscrete", model=model, sampling="v_prediction", zsnr=zero)
    family = base.family
    patch = family.latent_multiple(base.denoiser)
    shift = ResolutionShift.from_config(scheduler, patch)
    factor = float(scheduler.get("shift", 1.0))
    height, width = size
    if shift is not None:
        side = base.encoders["vae_scale_factor"] * patch
        tokens = (height // side) * (width // side)
        mu = family.sampling_shift(shift, tokens, settings["num_inference_steps"])
        factor = math.exp(mu) if shift.exponential else mu
    if family.name in ("flux", "flux2"):  # with equal ends, the size has no effect
        mu = round(math.log(factor), 4)
        ends: dict[str, Any] = {"max_shift": mu, "base_shift": mu, "width": width, "height": height}
        return graph.add("ModelSamplingFlux", model=model, **ends)
    return graph.add("ModelSamplingAuraFlow", model=model, shift=round(factor, 4))


def write(nodes: Nodes, picture: NDArray[uint8], out: Path) -> None:
    """Write the workflow, and a picture u8 [H, W, 3] of the model that contains it."""
    text = json.dumps(nodes, indent=1)
    (out / WORKFLOW).write_text(text + "\n", encoding="utf-8")
    chunk = PngInfo()
    chunk.add_text(PNG_KEY, json.dumps(nodes))
    Image.fromarray(picture).save(out / PICTURE, pnginfo=chunk)
