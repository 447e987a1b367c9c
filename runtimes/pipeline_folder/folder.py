"""A diffusers pipeline folder, opened once and described by its config files; weights stay unread.

Errors name the config file. `Base` has the family, the configs, and a description and a digest of
the encoders. The config of the trained denoiser is the base's or a replacement, plus extra inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from artifacts.models import digest_model
from artifacts.records import digest_json, parse_json
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.families import Family, TextEncoder, detect_family
from runtimes.families.inpainting_aesthetics import (
    UNET,
    ExtraInputs,
    inpainting_channels,
    latent_channels,
)
from runtimes.objective.noise_schedule import Schedule, read_schedule, read_scheduler_config
from runtimes.process.job import HasModel


class Config(dict[str, Any]):
    """A config file's settings; a missing setting raises Refused with the file's path."""

    def __init__(self, path: Path, contents: Mapping[str, Any]) -> None:
        super().__init__(contents)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise Refused(f"{self.path}: {name} is missing")


def read_config(path: Path) -> Config:
    """Read a config file. Raises Refused if it is missing or not a JSON object."""
    try:
        contents = parse_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise Refused(f"{path}: not there; a model's config was expected") from None
    except ValueError:
        raise Refused(f"{path}: not valid JSON") from None
    if not isinstance(contents, dict):
        raise Refused(f"{path}: not a model's config")
    return Config(path, contents)


TEXT_PARTS = tuple(
    kind + number for kind in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")
)
#: Entries of `Base.encoders` that are positive integers; pooled_dim may be None.
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
#: `encode.max_tokens` -> chunks of a caption, each of which CLIP reads with marks of its own.
CHUNKS = {77: 1, 150: 2, 225: 3}


@dataclass(frozen=True)
class Base:
    """A pipeline folder of a known family, opened. A config is read once, when it is needed.

    Every property raises Refused for a config that is missing or invalid.
    """

    folder: Path
    family: Family
    index: Config = field(repr=False, compare=False)  # model_index.json
    vae_folder: Path | None = None  # folder of the VAE that replaces the pipeline's own
    max_tokens: int = 77  # as encode.max_tokens
    emphasis: str = "text"  # as encode.captions.emphasis

    @classmethod
    def open(
        cls,
        folder: Path,
        vae_folder: Path | None = None,
        *,
        max_tokens: int = 77,
        emphasis: str = "text",
    ) -> Base:
        """Open a pipeline folder.

        Args:
            folder: a diffusers pipeline folder.
            vae_folder: an AutoencoderKL that replaces the pipeline's own, or a pipeline folder
                with `vae/`.
            max_tokens: as encode.max_tokens.
            emphasis: as encode.captions.emphasis.

        Raises:
            Refused: model_index.json is missing or invalid, or the family is unknown.
        """
        family, index = detect_family(folder)
        if vae_folder is not None and not (vae_folder / "config.json").is_file():
            vae_folder = vae_folder / "vae"
        config = Config(folder / "model_index.json", index)
        return cls(folder, family, config, vae_folder, max_tokens, emphasis)

    @classmethod
    def of(cls, job: HasModel) -> Base:
        """Open the pipeline of a job or request. Raises Refused."""
        vae = None if job.vae is None else Path(job.vae)
        return cls.open(Path(job.model), vae, max_tokens=job.max_tokens, emphasis=job.emphasis)

    @property
    def job_fields(self) -> dict[str, Any]:
        """The fields of a job or request by which another process opens this base."""
        vae = None if self.vae_folder is None else str(self.vae_folder)
        return {"model": str(self.folder), "vae": vae, **self.reading}

    @property
    def reading(self) -> dict[str, Any]:
        """How CLIP reads captions: arguments of `open`."""
        return {"max_tokens": self.max_tokens, "emphasis": self.emphasis}

    def part(self, name: str) -> Path:
        """The folder of a part, such as `scheduler`."""
        return self.vae if name == "vae" else self.folder / name

    def config(self, part: str) -> Config:
        """The config of a model that is a part, such as `text_encoder`."""
        return read_config(self.part(part) / "config.json")

    @property
    def vae(self) -> Path:
        """The folder of the VAE: the pipeline's own, or its replacement."""
        return self.folder / "vae" if self.vae_folder is None else self.vae_folder

    @cached_property
    def denoiser(self) -> Config:
        """The config of the denoiser."""
        return self.config(self.family.denoiser)

    @property
    def denoiser_folder(self) -> Path:
        """The folder of the denoiser."""
        return self.part(self.family.denoiser)

    @property
    def extras(self) -> ExtraInputs:
        """The extra inputs of the denoiser."""
        return ExtraInputs.from_config(self.denoiser)

    @cached_property
    def scheduler(self) -> dict[str, Any]:
        """The config of the scheduler."""
        return read_scheduler_config(self.part("scheduler"))

    def schedule(self, settings: Train | None = None) -> Schedule:
        """The noise schedule, with the changes from the settings. Raises Refused."""
        return read_schedule(self.part("scheduler"), settings)

    @cached_property
    def is_distilled(self) -> bool:
        """Whether the pipeline ignores the guidance scale."""
        return self.family.is_distilled(self.index)

    @property
    def draws_in_few_steps(self) -> bool:
        """Whether the model is distilled to few steps, where its configs tell."""
        return self.family.draws_in_few_steps(self.index, self.denoiser, self.scheduler)

    @cached_property
    def encoders(self) -> Mapping[str, Any]:
        """The content of `latents.json`, see artifacts/latent_shards.py, from config files alone.

        `size_step` is the divisor of an image's height and width, in pixels. `tokens` and
        `prompt_dim` are the shape [T, D] of a caption's prompt embeddings; `caption_tokens` is the
        maximum number of tokens of a caption.
        """
        try:
            info = _describe(self)
        except Refused:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"a setting of its configs is invalid: {error}"
            raise Refused(f"{self.folder}: {reason}") from None
        for name in _SIZES:
            size = 1 if name == "pooled_dim" and info[name] is None else info[name]
            if type(size) is not int or not 0 < size < 2**31:
                raise Refused(f"{self.folder}: its configs give {name} {info[name]!r}")
        for name in ("scaling_factor", "shift_factor"):
            if not _is_finite(info[name]):
                raise Refused(f"{self.folder}: its VAE's {name} is {info[name]!r}, not a number")
        patch = info["size_step"] // info["vae_scale_factor"]
        for name in ("latents_mean", "latents_std"):
            if not _is_per_channel(info[name], info["latent_channels"], patch):
                raise Refused(f"{self.folder}: its VAE's {name} are not numbers, one per channel")
        return info

    def digest_encoders(self) -> str:
        """sha256 of all files and settings that affect encodings. It excludes the denoiser."""
        replaced = self.vae_folder is not None
        parts = self.text_parts if replaced else (*self.text_parts, "vae")
        facts = {name: self.index.get(name) for name in self.text_parts}
        facts["info"] = dict(self.encoders)
        vae = digest_model(self.vae) if replaced else None
        return digest_json({"parts": digest_model(self.folder, parts), "vae": vae, "index": facts})

    def digest_texts(self) -> str:
        """sha256 of all files that affect embeddings of captions."""
        facts = {name: self.index.get(name) for name in self.text_parts}
        parts = digest_model(self.folder, self.text_parts)
        return digest_json({"parts": parts, "index": facts, "reading": self.reading})

    @property
    def text_parts(self) -> tuple[str, ...]:
        """The parts that encode captions, of which a pipeline may lack some."""
        processors = (encoder.processor for encoder in self.family.text_encoders)
        return (*TEXT_PARTS, *(name for name in processors if name is not None))

    def digest_vae(self) -> str:
        """sha256 of the VAE's files."""
        return digest_model(self.vae)

    def class_of(self, part: str) -> str | None:
        """The class that model_index.json names for a part; None if the pipeline lacks it."""
        entry = self.index.get(part)
        return entry[1] if isinstance(entry, list) and len(entry) == 2 else None

    def text_class(self, part: str) -> str:
        """The transformers class of a text encoder."""
        self.check_text_encoders()
        return str(self.class_of(part))

    def check_text_encoders(self) -> None:
        """Raise Refused for a text encoder or processor that is missing, or of another class."""
        for encoder in self.family.text_encoders:
            if encoder.processor is not None:
                read_config(self.part(encoder.processor) / "preprocessor_config.json")
            kind = self.class_of(encoder.component)
            if kind in encoder.classes or (kind is None and encoder.optional):
                continue
            raise Refused(
                f"{self.folder}: its {encoder.component} is {kind or 'missing'}, "
                f"{' or '.join(encoder.classes)} was expected"
            )

    @property
    def absent_text_parts(self) -> tuple[str, ...]:
        """Text encoders and tokenizers that model_index.json lists without a class: SD3's T5."""
        return tuple(name for name in TEXT_PARTS if self.index.get(name) == [None, None])

    @property
    def has_frozen_text(self) -> bool:
        """Whether the pipeline contains its family's T5 or LLM."""
        encoder = self.family.frozen_text
        return encoder is not None and self.class_of(encoder.component) is not None

    @cached_property
    def text_length(self) -> int:
        """Number of rows of a T5 or LLM in prompt_embeds, the largest where lengths vary.

        Without a T5 they are zeros, as in diffusers.
        """
        encoder = self.family.frozen_text
        assert encoder is not None, "the family must have a T5"
        tokens = self.family.text_tokens(self.denoiser)
        if not self.has_frozen_text:
            return tokens
        config = read_config(self.part(encoder.tokenizer) / "tokenizer_config.json")
        return min(tokens, int(config.get("model_max_length", tokens)))

    @property
    def unusual_text_length(self) -> int | None:
        """The maximum caption length if it is not the default of the pipeline's call."""
        encoder = self.family.frozen_text
        if encoder is None or self.text_length == (encoder.call_tokens or encoder.tokens):
            return None
        return self.text_length

    @cached_property
    def caption_limits(self) -> dict[str, int]:
        """Text encoder -> tokens of a caption that it reads; CLIP's come before a T5's or LLM's."""
        names = self.family.clip_encoders
        limits = {name: self.chunks * (self._positions(name) - 2) + 2 for name in names}
        if self.family.frozen_text is not None and self.has_frozen_text:
            limits[self.family.frozen_text.component] = self.text_length
        return limits

    @property
    def reads_unusually(self) -> bool:
        """Whether CLIP's embeddings of a caption are not those of the diffusers pipeline."""
        return self.chunks > 1 or self.emphasis == "weights"

    @property
    def chunks(self) -> int:
        """Chunks in which the CLIP encoders read a caption."""
        return CHUNKS[self.max_tokens]

    @property
    def input_ids_length(self) -> int:
        """Token ids T of a caption for a CLIP encoder: those of all chunks with their own marks."""
        return self.chunks * self._positions(self.family.clip_encoders[0])

    def _positions(self, clip_encoder: str) -> int:
        return int(self.config(clip_encoder)["max_position_embeddings"])

    @property
    def pooled_outputs(self) -> tuple[str | None, ...]:
        """Family.pooled_outputs of the CLIP encoders, whose classes are not checked."""
        kinds = [self.class_of(name) for name in self.family.clip_encoders]
        return self.family.pooled_outputs([k == "CLIPTextModelWithProjection" for k in kinds])

    @property
    def unusual_texts(self) -> dict[str, Any]:
        """How text encoders, or what they read, differ from those of the family's published models.

        Keys contain these facts; nearly all pipelines have none.
        """
        facts = {n: value for n, value in self.reading.items() if value != getattr(Base, n)}
        frozen = self.family.frozen_text
        if frozen is not None and not frozen.padded and _pads_left(self.part(frozen.tokenizer)):
            facts["padding_side"] = "left"
        for encoder, name in zip(self.family.clip, self.pooled_outputs, strict=True):
            if name is not None and encoder.pooled is None:
                facts["pooled"] = encoder.component
        return facts


def _describe(base: Base) -> dict[str, Any]:
    family = base.family
    vae = base.config("vae")
    base.check_text_encoders()
    channels, factor = family.vae_layout(vae)
    clip = _describe_clip(base)
    return {
        "family": family.name,
        "latent_channels": channels,
        "vae_scale_factor": factor,
        "size_step": factor,
        "scaling_factor": vae.get("scaling_factor", family.default_scaling_factor),
        "shift_factor": vae.get("shift_factor") or 0.0,
        **family.latent_statistics(base.vae, vae),
        "empty_prompt": "zeros" if family.zero_empty_prompt(base.index) else "encoded",
        **({"distilled": True} if base.is_distilled else {}),
        **clip,
        **base.unusual_texts,
        **({} if family.frozen_text is None else _describe_frozen(base, clip, factor)),
    }


def _describe_clip(base: Base) -> dict[str, Any]:
    """Shapes of the CLIP encoders' outputs: number of tokens, embedding width, pooled width."""
    if not base.family.clip:
        return {"prompt_dim": 0, "pooled_dim": None}
    configs = [(encoder, base.config(encoder.component)) for encoder in base.family.clip]
    tokens = base.chunks * (configs[0][1]["max_position_embeddings"] - 2) + 2
    pooled = (
        config["projection_dim" if name == "text_embeds" else "hidden_size"]
        for name, (_, config) in zip(base.pooled_outputs, configs, strict=True)
        if name is not None
    )
    return {
        "tokens": tokens,
        "caption_tokens": tokens,
        "prompt_dim": sum(config["hidden_size"] for encoder, config in configs if encoder.states),
        "pooled_dim": sum(pooled) or None,
    }


def _describe_frozen(base: Base, clip: Mapping[str, Any], factor: int) -> dict[str, Any]:
    """Entries that differ with a T5 or LLM: its rows follow CLIP's, and latents form patches."""
    frozen = base.family.frozen_text
    assert frozen is not None
    width = base.family.prompt_width(base.denoiser)
    clip_rows = clip["tokens"] if clip["prompt_dim"] else 0
    info = {
        "size_step": factor * base.family.latent_multiple(base.denoiser),
        "tokens": clip_rows + base.text_length,
        "prompt_dim": width,
    }
    if base.has_frozen_text:
        info["caption_tokens"] = base.text_length
        states = _width(base.config(frozen.component), frozen)
        if states != width:
            raise Refused(
                f"{base.folder}: its {frozen.component} gives {states} numbers a token, its "
                f"transformer takes {width}"
            )
    if clip["prompt_dim"] > width:
        raise Refused(
            f"{base.folder}: its CLIP encoders give {clip['prompt_dim']} numbers a token, its "
            f"transformer takes {width}"
        )
    return info


def _width(config: Config, encoder: TextEncoder) -> int:
    """Width of the states that a T5 or LLM gives for a token."""
    if encoder.kind == "t5":
        return int(config["d_model"])
    nested = config.get("text_config") or config  # a model that also sees images nests it
    if "hidden_size" not in nested:
        nested = config
    return len(encoder.layers) * int(nested["hidden_size"])


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e308


def _is_per_channel(values: Any, channels: int, patch: int) -> bool:
    """Whether values are None, one per channel, or one per latent pixel of a channel's patch."""
    if values is None:
        return True
    known = (channels, channels * patch**2)
    return isinstance(values, list) and len(values) in known and all(map(_is_finite, values))


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
    """The config that replaces the base's denoiser's; None: no replacement. Raises Refused."""
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
    config = dict(base if instead is None else instead)
    if instead is not None:
        plain = _without_extras(instead)
        wanted = _without_extras(base)
        for name in _SHARED:
            # diffusers leaves out some settings that are false
            if (plain.get(name) or None) != (wanted.get(name) or None):
                actual = f"is {plain[name]}" if name in plain else "is missing"
                raise Refused(
                    f"train.denoiser_config: {name} {actual}, the base's is {wanted.get(name)}"
                )
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


def _without_extras(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its extra inputs."""
    extras = ExtraInputs.from_config(config)
    plain = dict(config)
    if extras.inpainting:
        plain["in_channels"] = latent_channels(config)
    if extras.aesthetic_score:
        plain["class_embed_type"] = None
    return plain


def vae_overflows(config: Mapping[str, Any], *, float16: bool) -> bool:
    """Whether a VAE must compute in float32, because float16 would overflow.

    Args:
        config: the VAE's; `force_upcast` is true if it is missing, as in diffusers.
        float16: whether other models compute in float16.
    """
    return float16 and bool(config.get("force_upcast", True))
