"""SimpleTuner: a folder with config.json and its data backends, multidatabackend.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.errors import Refused
from tasks.imports import parts
from tasks.imports.translation import Rule, Translation, met, model_name, no_equivalent, place, to

CONFIG, BACKENDS = "config.json", "multidatabackend.json"
#: What SimpleTuner takes without a setting, where ours differs.
DEFAULTS = {"train_batch_size": 4, "resolution": 1024, "max_grad_norm": 2.0}
#: Their optimizers -> ours.
OPTIMIZERS = {
    "adamw_bf16": "adamw",
    "adamw_schedulefree": "adamw_schedule_free",
    "bnb-adamw8bit": "adamw_8bit",
    "bnb-lion": "lion",
    "bnb-lion8bit": "lion_8bit",
    "optimi-adamw": "adamw",
    "optimi-lion": "lion",
}
#: Model families whose base is not named.
BASES = {
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sd1x": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "flux": "black-forest-labs/FLUX.1-dev",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "qwen_image": "Qwen/Qwen-Image",
    "z-image": "Tongyi-MAI/Z-Image",
}


def _quantised(translation: Translation, value: Any) -> None:
    ours = {"int8": "int8", "nf4": "nf4", "fp8": "int8"}
    if value not in ("no_change", "fp16", "bf16", "fp32"):
        kind = str(value).partition("-")[0]
        translation.set("train.lora.base_precision", ours.get(kind, "int8"))


def _text_precision(translation: Translation, value: Any) -> None:
    if value not in ("no_change", "fp16", "bf16", "fp32"):
        translation.set("encode.text_precision", "nf4" if "nf4" in value else "int8")


def _optimizer(translation: Translation, value: Any) -> None:
    if value not in OPTIMIZERS:
        translation.remark("optimizer", "adamw; see train.optimizer")
    translation.set("train.optimizer", OPTIMIZERS.get(value, value if value == "muon" else "adamw"))


def _method(translation: Translation, value: Any) -> None:
    translation.set("train.method", "lora" if value == "lora" else "full")


def _lora_type(translation: Translation, value: Any) -> None:
    if value != "standard":
        translation.remark("lora_type", "trained as a plain LoRA")


def _resolution(translation: Translation, value: Any) -> None:
    """In megapixels or pixels, as `resolution_type` says."""
    translation.set("encode.resolution", _side(value))


def _side(value: Any) -> int:
    """The side of a square, of megapixels below 10 or of pixels."""
    return int(value) if value > 10 else round((float(value) * 2**20) ** 0.5 / 64) * 64


RULES: dict[str, Rule] = {
    "output_dir": met,
    "model_family": met,
    "model_flavour": no_equivalent("see model.path"),
    "pretrained_model_name_or_path": met,
    "model_type": _method,
    "lora_type": _lora_type,
    "base_model_precision": _quantised,
    "text_encoder_1_precision": _text_precision,
    "text_encoder_2_precision": _text_precision,
    "optimizer": _optimizer,
    "resolution": _resolution,
    "resolution_type": met,
    "train_batch_size": met,
    "gradient_accumulation_steps": met,
    "max_train_steps": met,
    "num_train_epochs": met,
    "ema_decay": lambda translation, value: (
        translation.set("train.ema_decay", value) if translation.given.get("use_ema") else None
    ),
    "use_ema": lambda translation, value: (
        translation.set("train.ema_decay", translation.number("ema_decay", 0.995))
        if value
        else None
    ),
    "validation_prompt": met,
    "validation_guidance": to("evaluate.guidance_scale"),
    "validation_num_inference_steps": to("evaluate.num_inference_steps"),
    "validation_seed": to("evaluate.seed"),
    "validation_negative_prompt": no_equivalent("evaluations have the empty one"),
    "validation_resolution": met,
    "tracker_run_name": met,
    "tracker_project_name": met,
    "minimum_image_size": no_equivalent("see download.min_image_size"),
    "aspect_bucket_alignment": to("encode.bucket_step"),
    "caption_dropout_probability": to("train.caption_dropout_rate"),
    "disable_benchmark": met,
    "resume_from_checkpoint": met,
}
#: Settings of a backend that `_source` reads, or that say where SimpleTuner keeps its files.
READ = {
    *("id", "type", "dataset_type", "disabled", "instance_data_dir", "dataset_name", "split"),
    *("image_column", "caption_column", "caption_strategy", "instance_prompt", "repeats"),
    *("resolution", "resolution_type", "crop", "crop_aspect", "crop_style", "probability"),
    *("is_regularisation_data", "is_regularization_data", "caption_filter_list"),
    *("cache_dir", "cache_dir_vae", "metadata_backend", "skip_file_discovery", "vae_cache_clear"),
    *("write_batch_size", "preserve_data_backend_cache", "hash_filenames", "default"),
}


def read(folder: str) -> Translation:
    """The recipe of a folder with config.json.

    Raises:
        Refused: a file cannot be read, or there are no pictures.
    """
    config = _load(Path(folder) / CONFIG)
    given = {name.lstrip("-").replace("-", "_"): _number(value) for name, value in config.items()}
    translation = Translation("S", DEFAULTS | given, RULES)
    translation.translate(translation.given)
    named = given.get("pretrained_model_name_or_path") or BASES.get(str(given.get("model_family")))
    if named is None:
        raise Refused(f"{folder}: pretrained_model_name_or_path is not set")
    translation.set("model.path", place(named))
    listed = Path(given.get("data_backend_config", BACKENDS))
    places = (listed, Path(folder) / listed, Path(folder) / listed.name)
    backends = _load(next((place for place in places if place.is_file()), places[1]))
    _finish(translation, backends)
    return translation


def _load(path: Path) -> Any:
    try:
        return json.loads(parts.read_text(str(path)))
    except json.JSONDecodeError as error:
        raise Refused(f"{path}: not valid JSON: {error}") from None


def _number(value: Any) -> Any:
    return parts.value_of(value) if isinstance(value, str) else value


def _finish(translation: Translation, backends: list[dict[str, Any]]) -> None:
    sources: dict[str, dict[str, Any]] = {}
    for backend in backends:
        kind = backend.get("dataset_type", "image")
        if kind == "text_embeds" or backend.get("disabled"):
            continue
        if kind != "image":
            translation.remarks.append(f"{backend.get('id')}: no equivalent of dataset_type {kind}")
            continue
        name = parts.source_name(str(backend.get("id", "pictures")), sources)
        sources[name] = _source(translation, name, backend)
    if not sources:
        raise Refused("simpletuner: no data backend has pictures")
    given = translation.given
    prompts = [given["validation_prompt"]] if given.get("validation_prompt") else []
    old = list[str]()
    for source in sources.values():
        own = source["encode"].get("captions", {}).get("prompts", ())
        path = source["source"]["path"]
        own = [*own, *parts.captions_of(path)][: parts.DRAWN]
        if "regularisation" in source:
            old += own
        elif "validation_prompt" not in given:
            prompts += own
    resolutions = [source["encode"]["resolution"] for source in sources.values()]
    translation.set("download.image_size", max(resolutions))
    translation.set("encode.holdout", 0)
    parts.set_sources(translation, sources)
    parts.set_batch(translation, int(given["train_batch_size"]))
    steps = given.get("max_train_steps") or None
    parts.set_length(translation, steps, given.get("num_train_epochs") or None)
    parts.set_evaluation(translation, prompts or ["a photograph"], old)
    named = given.get("hub_model_id") or given.get("output_dir") or next(iter(sources))
    translation.recipe.setdefault("publish", {})["name"] = model_name(named)
    translation.recipe["name"] = model_name(named)


def _source(translation: Translation, name: str, backend: dict[str, Any]) -> dict[str, Any]:
    """The entry of `sources` of a backend."""
    for setting in sorted(backend.keys() - READ):
        line = f"{setting} ({backend[setting]!r}) of {backend.get('id')}: no equivalent"
        translation.remarks.append(line)
    resolution = backend.get("resolution", translation.given["resolution"])
    encode: dict[str, Any] = {"resolution": _side(resolution)}
    if backend.get("crop_style") == "random":
        encode["crop"] = "random"
    if not backend.get("crop") or backend.get("crop_aspect") in ("preserve", "closest"):
        encode["aspect_buckets"] = True
    strategy = backend.get("caption_strategy", "textfile")
    if strategy == "instanceprompt":
        encode["captions"] = {"prompts": [backend["instance_prompt"]]}
    elif strategy not in ("textfile", "huggingface"):
        translation.remarks.append(
            f"caption_strategy ({strategy}) of {backend.get('id')}: captions are read from "
            "<picture>.txt, a table metadata.* or a column"
        )
    if backend.get("type") == "huggingface":
        named = ("image_column", "caption_column", "split")
        columns: dict[str, Any] = {n: backend[n] for n in named if n in backend}
        source: dict[str, Any] = {"kind": "dataset", "path": backend["dataset_name"], **columns}
    else:
        source = parts.folder_source(str(backend["instance_data_dir"]))
    entry: dict[str, Any] = {"source": source, "encode": encode}
    if backend.get("is_regularisation_data") or backend.get("is_regularization_data"):
        entry["regularisation"] = "prior"
    if backend.get("repeats"):
        entry["repeats"] = backend["repeats"] + 1  # theirs are further passes
    if backend.get("probability", 1) != 1:
        translation.remarks.append(f"probability of {name}: see sources.{name}.weight")
    return entry
