"""Command lines of diffusers' example scripts: text-to-image and DreamBooth, full and LoRA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from configs.errors import Refused
from tasks.imports import parts
from tasks.imports.translation import Rule, Translation, met, model_name, no_equivalent

#: What all scripts take without an argument, where ours differs.
DEFAULTS: dict[str, Any] = {
    "resolution": 512,
    "train_batch_size": 4,
    "learning_rate": 1e-4,
    "lr_warmup_steps": 500,
}
#: Part of a script's name -> its own, the later before the earlier.
DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "train_text_to_image": {"train_batch_size": 16, "num_train_epochs": 100},
    "train_dreambooth": {"num_train_epochs": 1, "learning_rate": 5e-6},
    "train_dreambooth_lora": {"learning_rate": 5e-4},
    "_lora": {"rank": 4},
    "sdxl": {"resolution": 1024},
    "train_dreambooth_lora_": {"learning_rate": 1e-4, "adam_weight_decay": 1e-4},
}
#: Scripts whose examples are steps of other kinds.
OTHER_STEPS = ("controlnet", "inpaint", "dpo", "textual_inversion", "unconditional", "img2img")


def _optimizer(translation: Translation, value: Any) -> None:
    translation.set("train.optimizer", str(value).lower())


RULES: dict[str, Rule] = {
    "output_dir": met,  # its name is the model's
    "train_batch_size": met,
    "gradient_accumulation_steps": met,
    "max_train_steps": met,
    "num_train_epochs": met,
    "instance_prompt": met,
    "class_prompt": met,
    "instance_data_dir": met,
    "class_data_dir": met,
    "with_prior_preservation": met,
    "prior_loss_weight": met,
    "num_class_images": met,
    "dataset_name": met,
    "train_data_dir": met,
    "image_column": met,
    "caption_column": met,
    "repeats": met,
    "validation_prompt": met,
    "validation_prompts": met,
    "center_crop": met,
    "num_validation_images": no_equivalent("see evaluate.prompts.NAME.images_per_prompt"),
    "sample_batch_size": no_equivalent("see evaluate.batch_size"),
    "prior_generation_precision": no_equivalent("see evaluate.dtype"),
    "cache_latents": met,
    "optimizer": _optimizer,
    "dataset_config_name": no_equivalent("see source.path and source.split"),
    "cache_dir": no_equivalent("see KILN_CACHE"),
    "max_train_samples": no_equivalent("see source.where or `select`"),
    "local_rank": met,
}


def read(words: Sequence[str]) -> Translation:
    """The recipe of a command line, given as words, one text, or a file such as a shell script.

    Raises:
        Refused: the script is none of diffusers' examples for text-to-image, or has no pictures.
    """
    script, given = parts.parse_arguments(parts.split_command(words))
    if not script.startswith(("train_text_to_image", "train_dreambooth")):
        raise Refused(
            f"diffusers: {script or 'no script'}: the command line of train_text_to_image*.py or "
            "train_dreambooth*.py is read"
        )
    if any(other in script for other in OTHER_STEPS):
        raise Refused(f"diffusers: {script}: its training step has no equivalent")
    defaults = dict(DEFAULTS)
    for part, own in DEFAULTS_OF.items():
        defaults |= own if part in script else {}
    translation = Translation("D", defaults | given, RULES)
    translation.translate(translation.given)
    if "_lora" in script:
        translation.set("train.method", "lora")
    _translate_data(translation, is_dreambooth="dreambooth" in script)
    return translation


def _translate_data(translation: Translation, *, is_dreambooth: bool) -> None:
    given = translation.given
    recipe = translation.recipe
    encode = recipe["encode"]
    encode["holdout"] = 0
    encode["crop"] = "center" if given.get("center_crop") else "random"
    translation.set("download.image_size", encode["resolution"])
    source: dict[str, Any] = {"source": _source(given)}
    prompts = [*_listed(given.get("validation_prompts") or given.get("validation_prompt"))]
    sources = {"pictures": source}
    prior = bool(given.get("with_prior_preservation"))
    if is_dreambooth:
        instance = given.get("instance_prompt")
        if not instance:
            raise Refused("diffusers: a DreamBooth script needs --instance_prompt")
        if "caption_column" not in given:
            source["encode"] = {"captions": {"prompts": [instance]}}
        repeats = given.get("repeats", 1)
        source["repeats"] = None if repeats == 1 else repeats
        prompts = prompts or [instance]
        sources = {"instance": source}
    old = list[str]()
    if prior:
        sources["class"] = _class_source(given)
        old = [given["class_prompt"]]
    if not prompts:
        path = source["source"]["path"]
        prompts = [*parts.captions_of(path)][: parts.DRAWN] or ["a photograph"]
        translation.remarks.append("validation_prompt: it is not given; see evaluate.prompts")
    parts.set_sources(translation, sources)
    # Each sample of a batch has a picture of the class beside it, and the two losses are added.
    parts.set_batch(translation, int(given["train_batch_size"]), 2 if prior else 1)
    steps = given.get("max_train_steps")
    if prior and steps is None:
        steps = _steps_beside_class(given)
    parts.set_length(translation, steps, given.get("num_train_epochs"))
    parts.set_evaluation(translation, prompts, old)
    name = model_name(given.get("output_dir", "imported"))
    recipe.setdefault("publish", {})["name"] = name
    recipe["name"] = name


def _steps_beside_class(given: dict[str, Any]) -> int:
    """Steps of the epochs, in which DreamBooth's scripts take each picture of the class once."""
    pictures = parts.pictures_of(given.get("instance_data_dir", ""))
    batches = math.ceil(max(pictures, _class_pictures(given)) / int(given["train_batch_size"]))
    updates = math.ceil(batches / int(given.get("gradient_accumulation_steps", 1)))
    return int(given["num_train_epochs"]) * updates


def _class_pictures(given: dict[str, Any]) -> int:
    return int(given.get("num_class_images", 100))


def _source(given: dict[str, Any]) -> dict[str, Any]:
    folder = given.get("instance_data_dir") or given.get("train_data_dir")
    if folder:
        column = given.get("caption_column")
        return parts.folder_source(folder) | ({"caption_column": column} if column else {})
    if "dataset_name" not in given:
        raise Refused("diffusers: no pictures: --instance_data_dir, --train_data_dir or dataset")
    named = ("image_column", "caption_column")
    columns: dict[str, Any] = {name: given[name] for name in named if name in given}
    return {"kind": "dataset", "path": given["dataset_name"], **columns}


def _class_source(given: dict[str, Any]) -> dict[str, Any]:
    """Pictures of the class: those of the folder if there are enough, else the base draws them."""
    prompt = given.get("class_prompt")
    if not prompt:
        raise Refused("diffusers: --with_prior_preservation needs --class_prompt")
    count = _class_pictures(given)
    folder = given.get("class_data_dir")
    source: dict[str, Any] = {"regularisation": "images"}
    if given.get("prior_loss_weight", 1.0) != 1.0:
        source["loss_weight"] = given["prior_loss_weight"]
    if folder and parts.pictures_of(folder) >= count:
        captions = {"captions": {"prompts": [prompt]}}
        return {"source": parts.folder_source(folder), "encode": captions, **source}
    return {"source": {"kind": "drawn", "prompts": [prompt], "count": count}, **source}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
