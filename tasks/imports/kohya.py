"""kohya's sd-scripts: dataset TOML, training TOML, command lines, and folders `10_name class`.

A subset takes a setting from itself, its dataset, `[general]`, or the arguments, in this order
(config_README of sd-scripts).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import Refused
from tasks.imports import parts
from tasks.imports.translation import Rule, Translation, met, model_name, no_equivalent, side_of

#: What sd-scripts takes without a setting, where ours differs.
DEFAULTS = {
    "learning_rate": 2e-6,
    "max_train_steps": 1600,
    "train_batch_size": 1,
    "network_dim": 4,
    "network_alpha": 1,
    "resolution": 512,
}
#: `10_name class`: repeats and class tokens of a folder.
FOLDER = re.compile(r"(\d+)_(.+)")


def _optimizer_arguments(translation: Translation, value: Any) -> None:
    """`weight_decay=0.01 betas=0.9,0.99`; others are remarks."""
    others = []
    for text in value if isinstance(value, list) else [value]:
        name, _, number = str(text).partition("=")
        numbers = [float(n) for n in re.findall(r"[\d.]+(?:e-?\d+)?", number)]
        if name == "weight_decay":
            translation.set("train.weight_decay", numbers[0])
        elif name == "betas" and len(numbers) == 2:
            translation.set("train.adam_betas", numbers)
        elif name == "eps":
            translation.set("train.adam_epsilon", numbers[0])
        elif text not in _IMPLIED:
            others.append(str(text))
    if others:
        translation.remark("optimizer_args", f"no equivalent of {', '.join(others)}")


#: Arguments that our optimizers have.
_IMPLIED = {
    *("scale_parameter=False", "relative_step=False", "warmup_init=False"),
    *("use_bias_correction=True", "safeguard_warmup=True", "decouple=True"),
}


def _network(translation: Translation, value: Any) -> None:
    if value != "networks.lora" and not str(value).startswith("networks.lora_"):
        translation.remark("network_module", "trained as a plain LoRA")


def _network_arguments(translation: Translation, value: Any) -> None:
    for text in value if isinstance(value, list) else [value]:
        name, _, rest = str(text).partition("=")
        if name == "conv_dim":
            translation.set("train.lora.target_modules", "all")
            translation.remark("network_args", "convolutions have the rank and alpha of the others")
        elif name == "dora_wd" and rest.lower() == "true":
            translation.set("train.lora.dora", True)
        else:
            translation.remark("network_args", f"no equivalent of {text}")


def _prompts(translation: Translation, value: Any) -> None:
    """A file with a prompt per line, whose options such as `--w 512` are left out."""
    if not str(value).endswith(".txt"):
        raise Refused(f"sample_prompts {value}: only text files with a prompt per line are read")
    lines = [line.strip() for line in parts.read_text(str(value)).splitlines()]
    prompts = [line.partition(" --")[0] for line in lines if line and not line.startswith("#")]
    translation.given["prompts"] = prompts


RULES: dict[str, Rule] = {
    "output_dir": met,  # the store has artifacts of all recipes
    "config_file": met,
    "train_data_dir": met,
    "reg_data_dir": met,
    "train_batch_size": met,
    "gradient_accumulation_steps": met,
    "max_train_steps": met,
    "max_train_epochs": met,
    "prompts": met,
    "network_module": _network,
    "network_args": _network_arguments,
    "network_train_unet_only": met,
    "network_train_text_encoder_only": no_equivalent("the denoiser is always trained"),
    "cache_latents_to_disk": met,
    "cache_text_encoder_outputs_to_disk": met,
    "optimizer_args": _optimizer_arguments,
    "sample_prompts": _prompts,
    "prior_loss_weight": met,
    "max_token_length": lambda translation, value: translation.set(
        "encode.max_tokens", 77 if int(value) == 75 else int(value)
    ),
    "save_model_as": no_equivalent("safetensors in the layouts of diffusers and kohya"),
    "clip_skip": no_equivalent("captions have the encoder's layer of the base"),
    "masked_loss": met,
    "weighted_captions": met,
}


def _bucket_ratio(params: Mapping[str, Any]) -> float:
    """The largest ratio of sides whose buckets of this area keep to both limits of a side."""
    side = side_of(params["resolution"])
    longest = int(params.get("max_bucket_reso", 1024))
    shortest = int(params.get("min_bucket_reso", 256))
    return round(max(1.0, min((longest / side) ** 2, (side / shortest) ** 2)), 3)


#: Setting of a subset -> the setting of `encode`, or of its captions.
ENCODE = {
    "flip_aug": "flip",
    "bucket_reso_steps": "bucket_step",
    "enable_bucket": "aspect_buckets",
    "validation_split": "holdout",
}
CAPTIONS = {
    "shuffle_caption": "shuffle",
    "keep_tokens": "keep_tags",
    "caption_tag_dropout_rate": "tag_dropout",
    "caption_separator": "separator",
}
#: Settings of a subset that `_source` reads, or that hold here always.
READ = {
    *("image_dir", "num_repeats", "class_tokens", "is_reg", "resolution", "batch_size"),
    *("min_bucket_reso", "max_bucket_reso", "caption_dropout_rate", "random_crop"),
    *("caption_extension", "alpha_mask", "conditioning_data_dir", "prior_loss_weight"),
    *("cache_info", "metadata_file", "subsets", "dataset_repeats", "train_batch_size"),
    "masked_loss",
    *ENCODE,
    *CAPTIONS,
}
#: Settings of a subset that have no equivalent.
LEFT_OUT = {
    "color_aug": "pictures keep their colours",
    "face_crop_aug_range": "crops are at the centre or random",
    "bucket_no_upscale": "small pictures are enlarged to their bucket: see download.min_image_size",
    "caption_prefix": "write it into the captions, or see encode.captions.replace",
    "caption_suffix": "write it into the captions, or see encode.captions.replace",
    "keep_tokens_separator": "encode.captions.keep_tags counts tags",
    "secondary_separator": "one separator divides tags",
    "enable_wildcard": "wildcards are not read",
    "token_warmup_min": "all tags are there from the first step",
    "token_warmup_step": "all tags are there from the first step",
    "caption_dropout_every_n_epochs": "see train.caption_dropout_rate",
    "network_multiplier": "see sources.NAME.loss_weight",
    "debug_dataset": "see `kiln data`",
}


def _source(translation: Translation, params: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of `sources` of a subset."""
    folder = params.get("image_dir")
    if folder is None or "metadata_file" in params:
        raise Refused("a subset with metadata_file: write its captions to <picture>.txt first")
    encode: dict[str, Any] = {"resolution": side_of(params["resolution"])}
    encode |= {ours: params[name] for name, ours in ENCODE.items() if params.get(name)}
    if encode.get("aspect_buckets"):
        encode["max_aspect"] = _bucket_ratio(params)
    else:
        encode.pop("bucket_step", None)
    if params.get("random_crop"):
        encode["crop"] = "random"
    if captions := _captions(translation, folder, params):
        encode["captions"] = captions
    source: dict[str, Any] = {"source": parts.folder_source(folder), "encode": encode}
    masks = params.get("conditioning_data_dir") if params.get("masked_loss") else None
    if params.get("alpha_mask"):
        source["source"]["mask"] = "alpha"
    elif masks:
        source["source"] |= {"mask": "files", "mask_folder": os.path.abspath(masks)}
    if masks or params.get("alpha_mask"):
        translation.set("train.masked_loss", {})
    if params.get("caption_dropout_rate"):
        source["caption_dropout_rate"] = params["caption_dropout_rate"]
    if params.get("is_reg"):
        source["regularisation"] = "images"
        source["loss_weight"] = _unless(params.get("prior_loss_weight"), 1.0)
        if params.get("num_repeats", 1) != 1:
            translation.remark("num_repeats", f"{folder}: a step draws as many as of the others")
    else:
        source["repeats"] = _unless(params.get("num_repeats", params.get("dataset_repeats")), 1)
    return source


def _unless(value: Any, default: float) -> Any:
    """The value; None if it is the default."""
    return None if value == default else value


def _captions(translation: Translation, folder: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The section `encode.captions` of a subset."""
    captions = {ours: params[name] for name, ours in CAPTIONS.items() if params.get(name)}
    if captions.get("separator") == ",":
        del captions["separator"]
    extension = params.get("caption_extension", ".caption")
    if extension != ".txt" and any(parts.captions_of(folder, extension)):
        translation.remark("caption_extension", f"{folder}: rename *{extension} to *.txt")
    elif params.get("class_tokens") and not parts.has_captions(folder):
        captions["prompts"] = [params["class_tokens"]]
    return captions


def subsets_of(folder: str, *, regularises: bool) -> list[dict[str, Any]]:
    """The subsets of a folder of folders `10_name class`; other folders are none."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise Refused(f"{folder}: no such folder")
    matches = [(path, FOLDER.fullmatch(path.name)) for path in sorted(root.iterdir())]
    subsets = [
        {"image_dir": str(path), "num_repeats": int(match[1]), "class_tokens": match[2]}
        | ({"is_reg": True} if regularises else {})
        for path, match in matches
        if match is not None and path.is_dir()
    ]
    if not subsets:
        raise Refused(f"{folder}: no folder in it is named as kohya's, such as `10_sks dog`")
    return subsets


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a training TOML, whose sections have no meaning."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def _load(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(parts.read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"{path}: not valid TOML: {error}") from None


def read(words: Sequence[str]) -> Translation:
    """The recipe of a dataset TOML, training TOML, folder or command line, or of several of these.

    Raises:
        Refused: a file cannot be read, or there are no pictures.
    """
    given: dict[str, Any] = {}
    dataset: dict[str, Any] = {}
    script = ""
    command = list(words)
    while command and (command[0].endswith(".toml") or os.path.isdir(command[0])):
        path = command.pop(0)
        if os.path.isdir(path):
            given["train_data_dir"] = path
        elif "datasets" in (table := _load(path)):
            dataset = table
        else:
            given |= _flat(table)
    if command:
        script, arguments = parts.parse_arguments(parts.split_command(command))
        if not script and not arguments:
            raise Refused(f"{command[0]}: it is no TOML, folder or command line of a script")
        if "config_file" in arguments:
            given |= _flat(_load(_toml(arguments["config_file"])))
        given |= arguments
    if not dataset and "dataset_config" in given:
        dataset = _load(given["dataset_config"])
    if not dataset:
        dataset = {"datasets": [{"subsets": [*_folders(given)]}]}
    return _translate(given, dataset, script)


def _toml(path: str) -> str:
    return path if path.endswith(".toml") else f"{path}.toml"  # as sd-scripts does


def _folders(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "train_data_dir" not in given:
        raise Refused("kohya: there are no pictures: name a dataset TOML, or a folder of folders")
    yield from subsets_of(given["train_data_dir"], regularises=False)
    if given.get("reg_data_dir"):
        yield from subsets_of(given["reg_data_dir"], regularises=True)


def _translate(given: dict[str, Any], dataset: dict[str, Any], script: str) -> Translation:
    is_lora = "network" in script or any(name.startswith("network_") for name in given)
    ignored = () if is_lora else ("network_dim", "network_alpha")
    defaults = {name: value for name, value in DEFAULTS.items() if name not in ignored}
    if "sdxl" in script or "flux" in script or "sd3" in script:
        defaults["resolution"] = 1024
    translation = Translation("K", defaults | given, RULES)
    of_subsets = {*READ, *LEFT_OUT}
    translation.translate(name for name in translation.given if name not in of_subsets)
    if is_lora:
        translation.set("train.method", "lora")
        translation.recipe["train"]["lora"].setdefault("target_modules", "linear")
    sources: dict[str, dict[str, Any]] = {}
    arguments = {name: value for name, value in given.items() if name in LEFT_OUT}
    batches = set[int]()
    for group in dataset["datasets"]:
        for subset in group.get("subsets", ()):
            levels = (subset, group, dataset.get("general", {}), translation.given)
            params = ChainMap(*(dict(level) for level in levels))
            _remark_subset(translation, subset, group, dataset.get("general", {}), arguments)
            matched = FOLDER.fullmatch(Path(str(params.get("image_dir"))).name)
            name = matched[2] if matched else Path(str(params.get("image_dir"))).name
            sources[parts.source_name(name, sources)] = _source(translation, params)
            batches.add(int(params.get("batch_size", params["train_batch_size"])))
    if not sources:
        raise Refused("kohya: the dataset TOML has no [[datasets.subsets]]")
    if len(batches) > 1:
        translation.remark("batch_size", f"batches mix datasets: {max(batches)} of {batches}")
    parts.set_batch(translation, max(batches))
    epochs = translation.given.get("max_train_epochs")
    steps = None if epochs is not None else translation.given["max_train_steps"]
    parts.set_length(translation, steps, epochs)
    _finish(translation, sources)
    _train_text_encoders(translation, is_lora, script)  # beside the captions of sources
    return translation


def _remark_subset(translation: Translation, *levels: Mapping[str, Any]) -> None:
    """A remark for each setting of a subset, its dataset or [general] that has no equivalent."""
    for name in dict.fromkeys(name for level in levels for name in level):
        value = next(level[name] for level in levels if name in level)
        if name in LEFT_OUT and value:
            line = f"{name} ({value!r}): no equivalent: {LEFT_OUT[name]}"
        elif name not in READ and name not in LEFT_OUT:
            line = f"{name} ({value!r}): unknown setting of a subset"
        else:
            continue
        if line not in translation.remarks:
            translation.remarks.append(line)


def _train_text_encoders(translation: Translation, is_lora: bool, script: str) -> None:
    """kohya trains the CLIP encoders with a LoRA of SD and SDXL, unless it is told not to."""
    given = translation.given
    is_clip = not any(family in script for family in ("flux", "sd3", "lumina", "hunyuan", "anima"))
    apart = ("network_train_unet_only", "cache_text_encoder_outputs")
    is_off = any(given.get(name) for name in apart) or given.get("text_encoder_lr") in (0, [0])
    trained = is_lora and is_clip and not is_off
    trained |= script == "train_db" or bool(given.get("train_text_encoder"))
    if given.get("weighted_captions") and trained:
        translation.remark("weighted_captions", "text, since the text encoders are trained")
    elif given.get("weighted_captions"):
        translation.set("encode.captions.emphasis", "weights")
    if not trained:
        for name in ("text_encoder_lr", "train_text_encoder"):
            translation.recipe["train"].pop(name, None)
        return
    translation.set("train.train_text_encoder", True)
    translation.set("encode.text", "token_ids")


def _finish(translation: Translation, sources: dict[str, dict[str, Any]]) -> None:
    """Sources, prompts to draw, and the name of the model."""
    prompts = list(translation.given.get("prompts", ()))
    old = list[str]()
    for source in sources.values():
        given = source["encode"].get("captions", {}).get("prompts", ())
        own = [*given, *parts.captions_of(source["source"]["path"])][: parts.DRAWN]
        if "regularisation" in source:
            old += own
        elif "prompts" not in translation.given:
            prompts += own
    if not prompts:
        raise Refused("kohya: there is no prompt to draw: set class_tokens or sample_prompts")
    recipe = translation.recipe
    translation.set("encode.holdout", 0)  # of sources without validation_split
    largest = max(source["encode"]["resolution"] for source in sources.values())
    translation.set("download.image_size", largest)
    parts.set_sources(translation, sources)
    parts.set_evaluation(translation, prompts[: 2 * parts.DRAWN], old)
    name = recipe.setdefault("publish", {}).setdefault("name", model_name(next(iter(sources))))
    recipe["name"] = name
