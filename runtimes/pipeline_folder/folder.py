"""A diffusers pipeline folder as its config files describe it; no weights are loaded.

Errors name the config file. The encoders' configs give their description and digest. The config of
the trained denoiser is the base's or a replacement, plus extra inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from artifacts.models import digest_model
from artifacts.records import digest_json, parse_json
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.families import Family, TextEncoder, detect_family
from runtimes.families.extra_inputs import UNET, ExtraInputs, inpainting_channels, latent_channels
from runtimes.process.job import HasNetwork


class Config(dict[str, Any]):
    """A config file's settings; one that is missing raises Refused with the file's path."""

    path: Path

    def __missing__(self, name: str) -> Any:
        raise Refused(f"{self.path}: {name} is missing")


def read_config(path: Path) -> Config:
    """Read a config file. Raises Refused if it is missing or not a JSON object."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise Refused(f"{path}: not there; a model's config was expected") from None
    except ValueError:
        raise Refused(f"{path}: not valid JSON") from None
    if not isinstance(found, dict):
        raise Refused(f"{path}: not a model's config")
    config = Config(found)
    config.path = path
    return config


def read_index(model_folder: Path) -> Config:
    """The model_index.json of a pipeline. Raises Refused."""
    return read_config(model_folder / "model_index.json")


def read_part_config(model_folder: Path, part: str) -> Config:
    """The config of a pipeline's part, such as `vae`. Raises Refused."""
    return read_config(model_folder / part / "config.json")


def read_denoiser_config(model_folder: Path) -> Config:
    """The config of a pipeline's denoiser. Raises Refused."""
    return read_part_config(model_folder, detect_family(model_folder).denoiser)


TEXT_PARTS = (
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
)
#: Entries of `describe_encoders` that are positive integers; pooled_dim may be None.
_SIZES = (
    "latent_channels",
    "vae_scale_factor",
    "size_step",
    "tokens",
    "caption_tokens",
    "prompt_dim",
    "pooled_dim",
)
#: Captions per batch of the text encoders.
TEXT_BATCH = 32


def describe_encoders(model_folder: Path, vae_folder: Path | None = None) -> dict[str, Any]:
    """The content of `latents.json`, see artifacts/latent_shards.py, from config files alone.

    `size_step` is the divisor of an image's height and width, in pixels. `tokens` and `prompt_dim`
    are the shape [T, D] of a caption's prompt embeddings; `caption_tokens` is the maximum number
    of tokens of a caption.

    Args:
        model_folder: a diffusers pipeline folder of a known family.
        vae_folder: an AutoencoderKL that replaces the pipeline's own.

    Raises:
        Refused: a config is missing or invalid, or the family is unknown.
    """
    try:
        found = _describe(model_folder, vae_folder)
    except Refused:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(f"{model_folder}: a setting of its configs is invalid: {error}") from None
    for name in _SIZES:
        size = 1 if name == "pooled_dim" and found[name] is None else found[name]
        if type(size) is not int or not 0 < size < 2**31:
            raise Refused(f"{model_folder}: its configs give {name} {found[name]!r}")
    for name in ("scaling_factor", "shift_factor"):
        if not _is_finite(found[name]):
            raise Refused(f"{model_folder}: its VAE's {name} is {found[name]!r}, not a number")
    patch = found["size_step"] // found["vae_scale_factor"]
    for name in ("latents_mean", "latents_std"):
        if not _is_per_channel(found[name], found["latent_channels"], patch):
            raise Refused(f"{model_folder}: its VAE's {name} are not numbers, one per channel")
    return found


def absent_text_parts(model_folder: Path) -> tuple[str, ...]:
    """The text encoders and tokenizers that model_index.json lists without a class: SD3's T5."""
    index = read_index(model_folder)
    return tuple(name for name in TEXT_PARTS if index.get(name) == [None, None])


def _describe(model_folder: Path, vae_folder: Path | None) -> dict[str, Any]:
    family = detect_family(model_folder)
    index = read_index(model_folder)
    vae = read_config(vae_path(model_folder, vae_folder) / "config.json")
    _check_text_encoders(model_folder, family, index)
    channels, factor = family.vae_layout(vae)
    return {
        "family": family.name,
        "latent_channels": channels,
        "vae_scale_factor": factor,
        "size_step": factor,
        "scaling_factor": vae.get("scaling_factor", family.default_scaling_factor),
        "shift_factor": vae.get("shift_factor") or 0.0,
        **family.latent_statistics(vae_path(model_folder, vae_folder), vae),
        "empty_prompt": "zeros" if family.zero_empty_prompt(index) else "encoded",
        **({"distilled": True} if family.is_distilled(index) else {}),
        **_describe_clip(model_folder, family),
        **unusual_texts(model_folder),
        **({} if family.frozen_text is None else _describe_frozen(model_folder, family, factor)),
    }


def _describe_clip(folder: Path, family: Family) -> dict[str, Any]:
    """Shapes of the CLIP encoders' outputs: number of tokens, embedding width, pooled width."""
    if not family.clip:
        return {"prompt_dim": 0, "pooled_dim": None}
    configs = [(e, read_part_config(folder, e.component)) for e in family.clip]
    tokens = configs[0][1]["max_position_embeddings"]
    pooled = (
        config["projection_dim" if name == "text_embeds" else "hidden_size"]
        for name, (_, config) in zip(pooled_outputs(folder), configs, strict=True)
        if name is not None
    )
    return {
        "tokens": tokens,
        "caption_tokens": tokens,
        "prompt_dim": sum(config["hidden_size"] for encoder, config in configs if encoder.states),
        "pooled_dim": sum(pooled) or None,
    }


def _describe_frozen(folder: Path, family: Family, factor: int) -> dict[str, Any]:
    """Entries that differ with a T5 or LLM: its rows follow CLIP's, and latents form patches."""
    assert family.frozen_text is not None
    transformer = read_part_config(folder, family.denoiser)
    clip = _describe_clip(folder, family)
    width = family.prompt_width(transformer)
    clip_rows = clip["tokens"] if clip["prompt_dim"] else 0
    tokens = text_length(folder)
    found = {
        "size_step": factor * family.latent_multiple(transformer),
        "tokens": clip_rows + tokens,
        "prompt_dim": width,
    }
    if has_frozen_text(folder):
        found["caption_tokens"] = tokens
        found_width = _width(folder, family.frozen_text)
        if found_width != width:
            raise Refused(
                f"{folder}: its {family.frozen_text.component} gives {found_width} numbers a "
                f"token, its transformer takes {width}"
            )
    if clip["prompt_dim"] > width:
        raise Refused(
            f"{folder}: its CLIP encoders give {clip['prompt_dim']} numbers a token, its "
            f"transformer takes {width}"
        )
    return found


def _width(folder: Path, encoder: TextEncoder) -> int:
    """Width of the states that a T5 or LLM gives for a token."""
    config = read_part_config(folder, encoder.component)
    if encoder.kind == "t5":
        return int(config["d_model"])
    nested = config.get("text_config") or config  # of a model that also sees images
    if "hidden_size" not in nested:
        nested = config
    return len(encoder.layers) * int(nested["hidden_size"])


def has_frozen_text(model_folder: Path) -> bool:
    """Whether a pipeline contains its family's T5 or LLM."""
    encoder = detect_family(model_folder).frozen_text
    index = read_index(model_folder)
    return encoder is not None and _class_of(index, encoder.component) is not None


def text_length(model_folder: Path) -> int:
    """Number of rows of a T5 or LLM in prompt_embeds, the largest where lengths vary.

    Without a T5 they are zeros, as in diffusers.
    """
    family = detect_family(model_folder)
    assert family.frozen_text is not None, "the family must have a T5"
    tokens = family.text_tokens(read_part_config(model_folder, family.denoiser))
    if not has_frozen_text(model_folder):
        return tokens
    config = read_config(model_folder / family.frozen_text.tokenizer / "tokenizer_config.json")
    return min(tokens, int(config.get("model_max_length", tokens)))


def caption_limits(model_folder: Path) -> dict[str, int]:
    """Text encoder -> tokens of a caption that it reads; first CLIP's, then that of a T5 or LLM."""
    family = detect_family(model_folder)
    configs = {name: read_part_config(model_folder, name) for name in family.clip_encoders}
    limits = {name: int(found["max_position_embeddings"]) for name, found in configs.items()}
    if family.frozen_text is not None and has_frozen_text(model_folder):
        limits[family.frozen_text.component] = text_length(model_folder)
    return limits


def unusual_text_length(model_folder: Path) -> int | None:
    """The maximum caption length if it is not the default of the pipeline's call."""
    encoder = detect_family(model_folder).frozen_text
    if encoder is None:
        return None
    found = text_length(model_folder)
    return None if found == (encoder.call_tokens or encoder.tokens) else found


def unusual_texts(model_folder: Path) -> dict[str, str]:
    """What a pipeline's text encoders do otherwise than the family's published ones.

    Keys have it. It is empty for nearly all pipelines.
    """
    family = detect_family(model_folder)
    found = dict[str, str]()
    frozen = family.frozen_text
    if frozen is not None and not frozen.padded and _pads_left(model_folder / frozen.tokenizer):
        found["padding_side"] = "left"
    for encoder, name in zip(family.clip, pooled_outputs(model_folder), strict=True):
        if name is not None and encoder.pooled is None:
            found["pooled"] = encoder.component
    return found


def pooled_outputs(model_folder: Path) -> tuple[str | None, ...]:
    """Family.pooled_outputs of a pipeline's CLIP encoders, whose classes are not checked."""
    family = detect_family(model_folder)
    index = read_index(model_folder)
    kinds = [_class_of(index, name) for name in family.clip_encoders]
    return family.pooled_outputs([kind == "CLIPTextModelWithProjection" for kind in kinds])


def _pads_left(tokenizer: Path) -> bool:
    """Whether a tokenizer pads before a caption, by its config or else by tokenizer.json."""
    config = read_config(tokenizer / "tokenizer_config.json")
    if "padding_side" in config:
        return bool(config["padding_side"] == "left")
    try:
        with (tokenizer / "tokenizer.json").open(encoding="utf-8") as file:
            head = file.read(2000)  # padding comes before the vocabulary, which is large
    except OSError:
        return False
    padding = head.partition('"padding"')[2].partition('"added_tokens"')[0]
    return '"Left"' in padding


def text_class(model_folder: Path, part: str) -> str:
    """The transformers class of a text encoder. Raises Refused."""
    index = read_index(model_folder)
    _check_text_encoders(model_folder, detect_family(model_folder), index)
    return str(_class_of(index, part))


def digest_encoders(model_folder: Path, vae_folder: Path | None = None) -> str:
    """sha256 of all files and settings that affect encodings. It excludes the denoiser."""
    parts = (*TEXT_PARTS, "vae") if vae_folder is None else TEXT_PARTS
    index = read_index(model_folder)
    facts = {name: index.get(name) for name in TEXT_PARTS}
    facts["info"] = describe_encoders(model_folder, vae_folder)
    vae = None if vae_folder is None else digest_model(vae_path(model_folder, vae_folder))
    return digest_json({"parts": digest_model(model_folder, parts), "vae": vae, "index": facts})


def vae_path(model_folder: Path, vae_folder: Path | None) -> Path:
    """The folder with the VAE's config.json; `vae_folder` may be a pipeline folder with `vae/`."""
    folder = model_folder if vae_folder is None else vae_folder
    is_vae = vae_folder is not None and (folder / "config.json").is_file()
    return folder if is_vae else folder / "vae"


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e308


def _is_per_channel(values: Any, channels: int, patch: int) -> bool:
    """Whether values are None, one per channel, or one per latent pixel of a channel's patch."""
    if values is None:
        return True
    known = (channels, channels * patch**2)
    return isinstance(values, list) and len(values) in known and all(map(_is_finite, values))


def _class_of(index: dict[str, Any], part: str) -> str | None:
    found = index.get(part)
    return found[1] if isinstance(found, list) and len(found) == 2 else None


def _check_text_encoders(model_folder: Path, family: Family, index: dict[str, Any]) -> None:
    for encoder in family.text_encoders:
        found = _class_of(index, encoder.component)
        if found in encoder.classes or (found is None and encoder.optional):
            continue
        raise Refused(
            f"{model_folder}: its {encoder.component} is {found or 'missing'}, "
            f"{' or '.join(encoder.classes)} was expected"
        )


#: Keys in which a replacement must equal the base's config: the interface to VAE and text encoders,
#: and the default image size.
_SHARED = (
    "_class_name",
    "in_channels",
    "out_channels",
    "cross_attention_dim",
    "joint_attention_dim",
    "pooled_projection_dim",
    "addition_embed_type",
    "class_embed_type",
    "encoder_hid_dim_type",
    "num_class_embeds",
    "addition_time_embed_dim",
    "projection_class_embeddings_input_dim",
    "sample_size",
    "guidance_embeds",
    "cap_feat_dim",
)


def folder_extras(folder: Path) -> ExtraInputs:
    """The extra inputs of the denoiser in a folder. Raises Refused."""
    return ExtraInputs.from_config(read_config(folder / "config.json"))


def replacement_config(settings: Train) -> dict[str, Any] | None:
    """The config that replaces the base's denoiser's; None if none does. Raises Refused."""
    path = settings.denoiser_config
    return None if path is None else read_config(Path(path))


def trained_config(
    base: Mapping[str, Any], settings: Train, instead: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config of the trained denoiser, with the extra inputs of the settings.

    Args:
        base: config of the base's denoiser.
        instead: config of a randomly initialised denoiser that replaces the base's.

    Raises:
        Refused: the extra inputs of config and settings contradict each other, the denoiser's
            class does not support them, or `instead` does not fit the base's pipeline.
    """
    if instead is not None:
        _check_fits(_without_extras(instead), _without_extras(base))
    config = dict(base if instead is None else instead)
    has = ExtraInputs.from_config(config)
    asked = ExtraInputs.from_settings(settings)
    for name in ("inpainting", "aesthetic_score"):
        if getattr(has, name) and not getattr(asked, name):
            raise Refused(f"the base's denoiser has this input: set train.{name}: true")
        if getattr(asked, name) and config.get("_class_name", UNET) != UNET:
            raise Refused(f"train.{name} is for UNets, the base's is {config['_class_name']}")
        if getattr(asked, name) and not getattr(has, name) and settings.method == "lora":
            raise Refused(
                f"train.{name}: the base lacks the weights, and adapters cannot add them: set "
                "train.method: full, or choose a base that has them"
            )
    if asked.inpainting:
        config["in_channels"] = inpainting_channels(config)
    if asked.aesthetic_score:
        own = config.get("class_embed_type") not in (None, "timestep")
        if own or config.get("num_class_embeds") is not None:
            raise Refused("train.aesthetic_score: the base has classes of its own")
        config["class_embed_type"] = "timestep"
    return config


def job_config(job: HasNetwork, settings: Train) -> dict[str, Any]:
    """The config of the denoiser that a job or request trains. Raises Refused."""
    return trained_config(read_denoiser_config(job.model_folder), settings, job.denoiser_config)


def _without_extras(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its extra inputs."""
    extras = ExtraInputs.from_config(config)
    plain = dict(config)
    if extras.inpainting:
        plain["in_channels"] = latent_channels(config)
    if extras.aesthetic_score:
        plain["class_embed_type"] = None
    return plain


def _check_fits(config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise Refused if a replacement's config does not fit the base's pipeline."""
    for name in _SHARED:
        given = config.get(name)
        wanted = base.get(name)
        if (given or None) != (wanted or None):  # diffusers leaves out some settings that are false
            actual = "is missing" if name not in config else f"is {given}"
            raise Refused(f"train.denoiser_config: {name} {actual}, the base's is {wanted}")


def vae_overflows(config: Mapping[str, Any], *, float16: bool) -> bool:
    """Whether a VAE must compute in float32, because float16 would overflow.

    Args:
        config: the VAE's; `force_upcast` is true if it is missing, as in diffusers.
        float16: whether other models compute in float16.
    """
    return float16 and bool(config.get("force_upcast", True))
