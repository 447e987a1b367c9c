"""Checkpoint files of whole models, as model sites offer them, converted once to pipeline folders.

A file has a denoiser and often a VAE and CLIP encoders, by the names of their authors' code. What
it lacks, and all configs, comes from a pipeline of equal architecture: its components. diffusers
converts UNets, VAEs and CLIP encoders; families/flux.py has the names of FLUX.1's layers, since
diffusers converts it in its published width alone. A process of its own converts: it needs the
memory of the model.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import models
from artifacts.tensor_header import TensorPlace, header_bytes, read_header
from configs.errors import Refused, naming
from configs.secrets import one_line, without_secrets
from configs.settings.evaluate import Sibling
from configs.settings.recipe import Model
from runtimes.families import detect_family, family_named
from runtimes.families.flux import original_weight
from runtimes.pipeline_folder.folder import TEXT_PARTS, read_config
from runtimes.pipeline_folder.weights import check_fit, stored_weight_files
from runtimes.process.questions import answer, ask

log = logging.getLogger("kiln")
SUFFIX = ".safetensors"
PICKLES = (".ckpt", ".pt", ".pth", ".bin")
#: Increment when a converted folder has other content.
VERSION = 1
ORIGIN = "single_file.json"  # in a converted folder: the digests of what it is made of
INDEX = "model_index.json"
#: Suffixes of files that are no weights: configs, vocabularies, chat templates.
TEXTS = (".json", ".txt", ".model", ".jinja")
DENOISER = "model.diffusion_model."  # prefix of its weights, where a file has other parts
#: Family -> part -> prefixes of its weights. FLUX.1's text encoders are always the published ones.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "sd": {"vae": ("first_stage_model.",), "text_encoder": ("cond_stage_model.",)},
    "sdxl": {
        "vae": ("first_stage_model.",),
        "text_encoder": ("conditioner.embedders.0.",),
        "text_encoder_2": ("conditioner.embedders.1.",),
    },
    "flux": {"vae": ("vae.", "first_stage_model.")},
    "flux_kontext": {"vae": ("vae.", "first_stage_model.")},
}
#: Families whose files have the same weights: a file's name and the components tell them apart.
FLUX = {"flux": "flux-dev", "flux_kontext": "flux-kontext"}
#: Kind of model in diffusers -> the pipeline that diffusers takes its components from.
COMPONENTS = {
    "v1": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "v2": "stabilityai/stable-diffusion-2-1",
    "inpainting": "stable-diffusion-v1-5/stable-diffusion-inpainting",
    "inpainting_v2": "stabilityai/stable-diffusion-2-inpainting",
    "xl_base": "stabilityai/stable-diffusion-xl-base-1.0",
    "xl_inpaint": "diffusers/stable-diffusion-xl-1.0-inpainting-0.1",
    "flux-dev": "black-forest-labs/FLUX.1-dev",
    "flux-kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "flux-schnell": "black-forest-labs/FLUX.1-schnell",
}
#: Ends of names by which a file has adapters (LoRA, LoHa, LoKr) instead of a model.
ADAPTERS = (".lora_down.weight", ".lora_A.weight", ".lora.down.weight", ".hada_w1_a", ".lokr_w1")
#: Empty tensors in SDXL files -> the setting of the scheduler that they stand for.
MARKS: dict[str, tuple[str, Any]] = {
    "v_pred": ("prediction_type", "v_prediction"),
    "ztsnr": ("rescale_betas_zero_snr", True),
}
#: Dtypes as the format names them; bits of those that NumPy lacks.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # -> as PyTorch names them
#: Ends of ComfyUI's names of what belongs to 8-bit floats. The first two multiply the weight.
SCALES = (".scale_weight", ".weight_scale")
OF_FP8 = (*SCALES, ".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file, described by its header."""

    path: Path
    place: str  # as the recipe names it
    family: str
    published: str  # hub id of the published pipeline of its architecture
    parts: tuple[str, ...]  # whose weights it has
    tensors: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: Path, place: str) -> Checkpoint:
        """Read the header of a file.

        Raises:
            Refused: it is damaged, has adapters or integers, or is of no known architecture.
        """
        known = {**DTYPES, **dict.fromkeys((*FP8, "U8", "I8", "BOOL"), "u1")}
        try:
            with path.open("rb") as stream:
                dtypes = {name: np.dtype(kind) for name, kind in known.items()}
                metadata, tensors = read_header(stream, dtypes)
        except ValueError as error:
            sent = "; a site that wants a login sends a page: download the file by hand"
            why = f"{error}{sent if '://' in place else ''}"
            raise Refused(f"{place} is no valid safetensors file: {why}") from None
        if any(name.endswith(ADAPTERS) for name in tensors):
            raise Refused(
                f"{place} has adapters, not a model",
                remedy="set the model that they are for, and train.lora.start to this file",
            )
        for name, tensor in tensors.items():
            if name.endswith(".weight") and tensor.dtype in ("U8", "I8"):
                raise Refused(
                    f"{place}: {name} has integers: get the file in bf16, fp16 or fp8 of this model"
                )
        family, kind = _architecture(tensors, place)
        starts = PARTS[family].items()
        parts = (part for part, prefixes in starts if any(n.startswith(prefixes) for n in tensors))
        denoiser = family_named(family).denoiser
        return cls(path, place, family, COMPONENTS[kind], (denoiser, *parts), tensors, metadata)

    @property
    def is_fp8(self) -> bool:
        """Whether some weights are 8-bit floats."""
        return any(tensor.dtype in FP8 for tensor in self.tensors.values())

    @property
    def prefix(self) -> str:
        """What the names of the denoiser's weights begin with."""
        return DENOISER if any(name.startswith(DENOISER) for name in self.tensors) else ""

    def dtype(self, part: str) -> str:
        """The widest dtype of a part's weights, as PyTorch names it; diffusers loads float32."""
        prefixes = PARTS[self.family].get(part, self.prefix)
        own = {n: t for n, t in self.tensors.items() if n.startswith(prefixes)}
        dtypes = {tensor.dtype for name, tensor in own.items() if not name.endswith(OF_FP8)}
        if dtypes & {"F64", "F32"} or {"F16", "BF16"} <= dtypes:
            return "float32"
        return "float16" if "F16" in dtypes else "bfloat16"


def _architecture(tensors: Mapping[str, TensorPlace], place: str) -> tuple[str, str]:
    """The family of a file, and its kind of COMPONENTS."""
    shapes = {name.removeprefix(DENOISER): tensor.shape for name, tensor in tensors.items()}
    others = ("single_stream_modulation.lin.weight", "distilled_guidance_layer.in_proj.bias")
    if "double_blocks.0.img_attn.norm.key_norm.scale" in shapes and shapes.keys().isdisjoint(
        others
    ):
        if "guidance_in.in_layer.weight" not in shapes:
            return "flux", "flux-schnell"
        family = "flux_kontext" if "kontext" in place.rpartition("/")[2].lower() else "flux"
        return family, FLUX[family]
    if "input_blocks.0.0.weight" not in shapes:
        raise Refused(
            f"{place} is of no architecture that is read as a file (those are SD 1 and 2, SDXL and "
            "FLUX.1): give its folder in diffusers' layout"
        )
    is_inpainting = shapes["input_blocks.0.0.weight"][1] == 9
    if "label_emb.0.0.weight" in shapes:
        return "sdxl", "xl_inpaint" if is_inpainting else "xl_base"
    widths = {shape[-1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight")}
    kinds = ("inpainting_v2", "v2") if widths == {1024} else ("inpainting", "v1")
    return "sd", kinds[0] if is_inpainting else kinds[1]


def is_single_file(path: str) -> bool:
    """Whether a model's place names a checkpoint file, and no folder.

    Sites of models serve a file at a web address without its name; a folder's ends with a slash.
    """
    if path.startswith(("http://", "https://")):
        return not path.endswith("/")
    return os.path.isfile(path) or path.endswith((SUFFIX, *PICKLES))


def open_checkpoint(model: Model | Sibling) -> Checkpoint:
    """The checkpoint file of a recipe's model, fetched if it is remote. Raises Refused, Away."""
    place = without_secrets(model.path)
    if place.endswith(PICKLES):
        raise Refused(f"{place}: such a file can run code: get this model as a .safetensors file")
    return Checkpoint.open(models.resolve_file(model.path), place)


def resolve_base(model: Model | Sibling, *, configs: bool = False) -> Path:
    """The local pipeline folder of a recipe's model; a checkpoint file is converted once.

    Args:
        configs: whether a hub id's configs are enough.

    Raises:
        Refused: the model does not exist, or the file is no checkpoint that is read.
        Away: its place does not answer now.
    """
    if is_single_file(model.path):
        return _converted(open_checkpoint(model), model.components)
    if model.components is not None:
        raise Refused("it is for a checkpoint file: remove it", setting="model.components")
    resolve = models.resolve_configs if configs else models.resolve_model
    return resolve(model.path, revision=model.revision)


def _converted(checkpoint: Checkpoint, components: str | None) -> Path:
    """The folder of a checkpoint in the cache. The digests of all that it is made of name it."""
    with naming("model.components"):
        folder = _resolve_components(checkpoint, components or checkpoint.published)
        files = _component_files(checkpoint, folder)
    made_of = {
        "checkpoint": models.digest_model_file(checkpoint.path),
        "components": {name: models.digest_model_file(path) for name, path in files.items()},
        "diffusers": version("diffusers"),
        "version": VERSION,
    }

    def convert(copy: Path) -> None:
        size = checkpoint.path.stat().st_size * (4 if checkpoint.is_fp8 else 1)  # two of 16 bits
        if shutil.disk_usage(copy.parent).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        log.info("%s: converting it to a folder of diffusers, once", checkpoint.place)
        ask("-m", __name__, str(checkpoint.path), checkpoint.place, str(folder), str(copy))
        _write_json(copy / ORIGIN, made_of)

    return models.cached(made_of, checkpoint.place, convert, models.digest_model)


def file_sha256(folder: Path) -> str | None:
    """sha256 (hex) of the checkpoint file that a folder was converted from; None of others."""
    origin = folder / ORIGIN
    return read_config(origin)["checkpoint"] if origin.is_file() else None


def _resolve_components(checkpoint: Checkpoint, place: str) -> Path:
    """A local folder with the components; of a hub id, the weights that are needed are fetched."""
    family = family_named(checkpoint.family)
    parts = ("vae", *(encoder.component for encoder in family.text_encoders))
    lacking = [f"{part}/*{SUFFIX}" for part in parts if part not in checkpoint.parts]
    texts = [pattern for pattern in models.HUB_FILES if SUFFIX not in pattern]
    folder = models.resolve_model(place, files=[*texts, *lacking])
    theirs = detect_family(folder)[0].name
    if theirs != checkpoint.family and not {theirs, checkpoint.family} <= FLUX.keys():
        raise Refused(
            f"{place} is a pipeline of family {theirs}, and {checkpoint.place} is of "
            f"{checkpoint.family}: give one of that family"
        )
    return folder


def _component_files(checkpoint: Checkpoint, folder: Path) -> dict[str, Path]:
    """Relative path -> file of the components that the pipeline gets, its licences included."""
    files = [folder / INDEX, *(path for form in models.LICENSE_FILES for path in folder.glob(form))]
    for part in _parts_of(checkpoint, folder):
        texts = [p for p in sorted((folder / part).iterdir()) if p.suffix in TEXTS]
        if part in checkpoint.parts:
            files += [path for path in texts if path.name == "config.json"]
            continue
        weights = stored_weight_files(folder / part)
        if not weights and (folder / part / "config.json").is_file():
            raise Refused(f"{folder} has no weights of {part}, which {checkpoint.place} lacks too")
        files += texts + weights
    return {str(path.relative_to(folder)): path for path in sorted(files)}


def _parts_of(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """The parts of the components that the pipeline has: no safety checker, no image encoder."""
    index = read_config(folder / INDEX)
    known = (family_named(checkpoint.family).denoiser, "vae", "scheduler", *TEXT_PARTS)
    return [part for part in known if index.get(part) not in (None, [None, None])]


def convert(checkpoint: Checkpoint, folder: Path, out: Path) -> None:
    """Write the pipeline of a checkpoint and its components.

    Weights keep their dtype; 8-bit floats become bfloat16, with their scales.

    Raises:
        Refused: the file lacks weights, or they do not fit the configs of the components.
    """
    import diffusers
    import torch
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    parts = _parts_of(checkpoint, folder)
    for name, path in _component_files(checkpoint, folder).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        _copy(path.resolve(), out / name)
    index = dict(read_config(folder / INDEX))
    gone = [n for n, entry in index.items() if isinstance(entry, list) and n not in parts]
    _write_json(out / INDEX, {**index, **{name: [None, None] for name in gone}})
    scheduler = out / "scheduler/scheduler_config.json"
    if changes := [change for mark, change in MARKS.items() if mark in checkpoint.tensors]:
        _write_json(scheduler, {**read_config(scheduler), **dict(changes)})
    if license := checkpoint.metadata.get("modelspec.license"):
        header = json.dumps({"license": "other", "license_name": license})  # JSON is YAML
        (out / "README.md").write_text(f"---\n{header}\n---\n", encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        file = Path(temporary, f"checkpoint{SUFFIX}")  # diffusers reads others as pickles
        if checkpoint.is_fp8:
            _write_as_bfloat16(checkpoint, file)
        else:
            file.symlink_to(checkpoint.path)
        try:
            for part, model in _load(checkpoint, index["_class_name"], file, folder).items():
                model.to(getattr(torch, checkpoint.dtype(part))).save_pretrained(out / part)
        except (KeyError, ValueError, RuntimeError, SingleFileComponentError) as error:
            lacks = "meta tensor" in str(error)  # a weight without values
            why = "it lacks weights that these describe" if lacks else one_line(error)
            raise Refused(
                f"{checkpoint.place} does not fit the configs of model.components {folder}: {why}"
            ) from None


def _load(checkpoint: Checkpoint, pipeline: str, file: Path, folder: Path) -> dict[str, Any]:
    """Part -> model with the weights of the file, of which the memory is mapped."""
    import diffusers

    given: dict[str, Any] = {"config": str(folder), "local_files_only": True}
    if checkpoint.family not in FLUX:
        encoders = [encoder.component for encoder in family_named(checkpoint.family).text_encoders]
        absent = {n: None for n in ("vae", *encoders) if n not in checkpoint.parts}
        whole = getattr(diffusers, pipeline).from_single_file(file, **given, **absent)
        return {part: getattr(whole, part) for part in checkpoint.parts}
    loaded = {"transformer": _load_flux(checkpoint, file, folder / "transformer")}
    if "vae" in checkpoint.parts:
        loaded["vae"] = diffusers.AutoencoderKL.from_single_file(file, subfolder="vae", **given)
    return loaded


def _load_flux(checkpoint: Checkpoint, file: Path, folder: Path) -> Any:
    import diffusers
    import torch
    from safetensors import safe_open

    config = read_config(folder / "config.json")
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel.from_config(config)
    wanted = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    with safe_open(file, framework="pt") as stream:
        prefix = checkpoint.prefix
        weights = {
            name: original_weight(name, config, lambda n: stream.get_tensor(prefix + n), shape[0])
            for name, shape in wanted.items()
        }
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    check_fit(checkpoint.path, wanted, shapes)
    model.load_state_dict(weights, assign=True)
    return model


def _write_as_bfloat16(checkpoint: Checkpoint, out: Path) -> None:
    """Copy a file tensor by tensor, with 8-bit floats as bfloat16 times their scales."""
    import torch

    def read(name: str) -> Any:
        tensor = checkpoint.tensors[name]
        stream.seek(tensor.start)
        dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"} | FP8
        flat = torch.frombuffer(bytearray(stream.read(tensor.size)), dtype=torch.uint8)
        return flat.view(getattr(torch, dtype[tensor.dtype])).reshape(tensor.shape)

    def scale_of(name: str, ndim: int) -> Any:
        """The scale of the whole weight, or of each of its rows."""
        stem = name.removesuffix(".weight")
        scale = next((stem + end for end in SCALES if stem + end in checkpoint.tensors), None)
        return 1.0 if scale is None else read(scale).float().reshape(-1, *[1] * (ndim - 1))

    kept = {n: t for n, t in checkpoint.tensors.items() if not n.endswith(OF_FP8)}
    header = (
        (name, "BF16" if t.dtype in FP8 else t.dtype, t.shape, t.size * (1 + (t.dtype in FP8)))
        for name, t in kept.items()
    )
    with checkpoint.path.open("rb") as stream, out.open("wb") as copy:
        copy.write(header_bytes(header))
        for name, tensor in kept.items():
            stream.seek(tensor.start)
            if tensor.dtype in FP8:
                scaled = read(name).float() * scale_of(name, len(tensor.shape))
                bits = scaled.to(torch.bfloat16).reshape(-1).view(torch.uint8)
                copy.write(bits.numpy().data)
            else:
                copy.write(stream.read(tensor.size))


def _copy(source: Path, target: Path) -> None:
    """Copy a file; weights are linked instead, where the filesystem can: that costs no disk."""
    if target.suffix == SUFFIX:
        with suppress(OSError):
            target.hardlink_to(source)
            return
    shutil.copyfile(source, target)


def _write_json(path: Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    file, place, folder, out = sys.argv[1:]
    answer(lambda: convert(Checkpoint.open(Path(file), place), Path(folder), Path(out)))
