"""Weight files of a pipeline folder, and faults that loading them would find hours later.

Shapes of weights are checked against the component's config. Faults are found by headers and texts:
no weights and no tokenizer are loaded, and what is unknown here is left to the loader. Runtimes
without PyTorch use this file too, so it imports no framework.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import Refused
from runtimes.pipeline_folder.folder import Base, read_config

DENOISER_WEIGHTS = "diffusion_pytorch_model"  # diffusers' name
TEXT_WEIGHTS = "model"  # transformers'
#: Variants that are read where a part has no plain weights, in order of preference.
HALF_PRECISION = ("bf16", "fp16")
_PIECE = r"(?:-\d+-of-\d+)?"
VARIANT = re.compile(rf"[^.]+?{_PIECE}(?:\.(?P<variant>[^.]+?){_PIECE})?\.safetensors")
_SHARD_OF = re.compile(r"-\d+-of-(\d+)")
_POINTER = b"version https://git-lfs."
FILE_NAME = re.compile(r"(?!\.{1,2}$)[^/\\\0]+")
WeightShapes = Mapping[str, tuple[int, ...]]  # weight name -> shape


def weight_variant(folder: Path) -> str | None:
    """The `variant` argument of from_pretrained for a component's folder.

    None if there are weights without a variant. Names with a variant: `model.fp16.safetensors`;
    with shards `model.fp16-00001-of-00002.safetensors`, or the older form
    `model-00001-of-00002.fp16.safetensors`.
    """
    matches = [VARIANT.fullmatch(path.name) for path in folder.glob("*.safetensors")]
    variants = {match["variant"] for match in matches if match}
    return None if None in variants else min(variants, default=None)


def pipeline_variant(folder: Path) -> str | None:
    """The `variant` argument of from_pretrained for a pipeline's folder."""
    parts = [part for part in sorted(folder.iterdir()) if part.is_dir()]
    return next((variant for part in parts if (variant := weight_variant(part)) is not None), None)


def weight_files(folder: Path, stem: str = DENOISER_WEIGHTS) -> list[Path]:
    """The weight files of a component, in full precision if available, else in half.

    Args:
        folder: the component's folder.
        stem: file name without extension and variant.

    Raises:
        Refused: there are no weight files.
    """
    for variant in ("", *(f".{name}" for name in HALF_PRECISION)):
        whole = folder / f"{stem}{variant}.safetensors"
        index = folder / f"{stem}.safetensors.index{variant}.json"
        if whole.exists():
            return [whole]
        if index.exists():
            return [folder / name for name in _shard_names(index)]
    raise Refused(f"{folder / stem}.safetensors is missing: the weights of the part are required")


def stored_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a part's weights: the plain ones, else those in half precision.

    Only the standard names of diffusers and transformers count; other files are other copies.
    """
    for variant in ("", *(rf"\.{name}" for name in HALF_PRECISION)):
        name = re.compile(
            rf"(diffusion_pytorch_model|model)(-\d+-of-\d+)?{variant}(-\d+-of-\d+)?\.safetensors"
        )
        files = [p for p in sorted(folder.glob("*.safetensors")) if name.fullmatch(p.name)]
        if files:
            return files
    return []


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a part's weights, of `stored_weight_files`; only headers are read.

    Raises:
        Refused: a file is damaged, or a shard is missing.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    paths = stored_weight_files(folder)
    counts = [match for path in paths if (match := _SHARD_OF.search(path.name))]
    if counts and len(counts) == len(paths) < (total := int(counts[0][1])):
        raise Refused(
            f"{folder}: only {len(paths)} of {total} files of weights are there: fetch "
            "the model again"
        )
    for path in paths:
        try:
            with safe_open(path, framework="np") as stream:
                for name in stream.keys():  # noqa: SIM118 (not a dict)
                    shapes[name] = tuple(stream.get_slice(name).get_shape())
        except SafetensorError as error:
            with path.open("rb") as head:
                if head.read(len(_POINTER)) == _POINTER:
                    raise Refused(
                        f"{path} is a pointer of Git LFS, no weights: run `git lfs pull` in its "
                        "folder"
                    ) from None
            raise Refused(f"{path} is no valid safetensors file: {error}") from None
    return shapes


def _shard_names(index: Path) -> list[str]:
    """The files that an index of weights names. Raises Refused if a file is not beside it."""
    named = read_config(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise Refused(f"{index}: weight_map is no object of file names: the model is damaged")
    for name in named.values():
        if not (isinstance(name, str) and FILE_NAME.fullmatch(name)):
            raise Refused(f"{index}: {name!r} is no file beside it: the model may be hostile")
    return sorted(set(named.values()))


def check_fit(path: Path, wanted: WeightShapes, stored: WeightShapes) -> None:
    """Raise Refused if names or shapes in a file differ from those of the config.

    Args:
        path: for the message.
        wanted: shapes by the config.
        stored: shapes in the file.
    """
    for what, names in (
        ("lacks", wanted.keys() - stored.keys()),
        ("has, and its config knows nothing of,", stored.keys() - wanted.keys()),
    ):
        if names:
            raise Refused(f"{path} {what} {len(names)} weights, such as {min(names)}")
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise Refused(f"{path}: {name} has shape {stored[name]}, its config requires {shape}")


#: End of a weight's name -> settings of its config that are its first dimensions; None: not known.
DIMENSIONS: dict[str, tuple[str | None, ...]] = {
    "token_embedding.weight": ("vocab_size", "hidden_size"),  # CLIP
    "position_embedding.weight": ("max_position_embeddings", "hidden_size"),
    "shared.weight": ("vocab_size", "d_model"),  # T5
    "embed_tokens.weight": ("vocab_size", "hidden_size"),  # Qwen
    "decoder.conv_in.weight": (None, "latent_channels"),  # VAE
    "attn2.to_k.weight": (None, "cross_attention_dim"),  # UNet
    "pos_embed.proj.weight": (None, "in_channels"),  # SD3
    "context_embedder.weight": (None, "joint_attention_dim"),  # SD3, FLUX, FLUX.2
    "cap_embedder.1.weight": ("dim", "cap_feat_dim"),  # Z-Image
    "txt_in.weight": (None, "joint_attention_dim"),  # Qwen-Image
}
#: The same by whole names.
INPUTS = dict.fromkeys(("conv_in", "x_embedder", "img_in"), (None, "in_channels"))
#: Tokens of a vocabulary of byte pairs that no merge makes, at most: letters and special tokens.
UNMERGED = 1024
#: Size of the byte alphabet: a vocabulary has more.
BYTES = 256


def check_weights(part: Path) -> None:
    """Raise Refused for weights that are damaged, or of another size than their config says."""
    shapes = weight_shapes(part)
    config = _flat(read_config(part / "config.json"))
    for name, shape in shapes.items():
        for setting, size in zip(_settings(name), shape, strict=False):
            wanted = None if setting is None else config.get(setting)
            if type(wanted) is int and size != wanted:
                raise Refused(
                    f"{part}: {name} has shape {shape}, {setting} in its config.json is {wanted}: "
                    "config and weights are of different models"
                )


def check_tokenizers(base: Base) -> None:
    """Raise Refused for a tokenizer that is damaged or does not fit its text encoder."""
    for encoder in base.family.text_encoders:
        if encoder.kind != "clip" and not base.has_frozen_text:
            continue
        folder = base.part(encoder.tokenizer)
        config = base.config(encoder.component)
        check_vocabulary_files(folder, config)
        if encoder.kind == "clip":  # other kinds: text_length takes the smaller limit
            length = read_config(folder / "tokenizer_config.json").get("model_max_length")
            wanted = config["max_position_embeddings"]
            if length != wanted:
                raise Refused(
                    f"{folder}: model_max_length in its tokenizer_config.json is {length}, its "
                    f"text encoder takes {wanted} tokens (max_position_embeddings): correct it"
                )


def check_vocabulary_files(folder: Path, encoder: dict[str, Any]) -> None:
    """Raise Refused for a vocabulary that is missing, cut short, or too large.

    Args:
        folder: with a tokenizer's files.
        encoder: config of the text encoder.
    """
    if not (folder / "tokenizer.json").is_file() and (folder / "spiece.model").is_file():
        return
    vocabulary, merges = _vocabulary(folder)
    rows = _flat(encoder).get("vocab_size", vocabulary)
    if not BYTES < vocabulary <= rows:
        raise Refused(f"{folder} has {vocabulary} tokens, its text encoder {rows}")
    if merges is not None and vocabulary - merges > UNMERGED:
        raise Refused(
            f"{folder}: its {merges} merges do not make its {vocabulary} tokens: the merges are "
            "cut short: fetch the model again"
        )


def _vocabulary(folder: Path) -> tuple[int, int | None]:
    """Number of tokens, and number of merges where the vocabulary has byte pairs."""
    whole = folder / "tokenizer.json"
    if whole.is_file():
        model = read_config(whole).get("model")
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
            raise Refused(f"{whole}: it has no vocabulary: fetch the model again")
        merges = model.get("merges")
        return len(model["vocab"]), len(merges) if isinstance(merges, list) else None
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise Refused(
                f"{folder}: {name} is missing, and tokenizer.json too: fetch the model again"
            )
    vocabulary = len(read_config(folder / "vocab.json"))
    merges = 0
    path = folder / "merges.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#version"):
            if len(line.split()) != 2:
                raise Refused(f"{path}, line {number}: no pair of tokens: fetch the model again")
            merges += 1
    return vocabulary, merges


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the settings of its text model, where a model also sees images."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _settings(name: str) -> tuple[str | None, ...]:
    if "vision" in name or "visual" in name:  # the part for images
        return ()
    whole = INPUTS.get(name.removesuffix(".weight"), ())
    return next((settings for end, settings in DIMENSIONS.items() if name.endswith(end)), whole)
