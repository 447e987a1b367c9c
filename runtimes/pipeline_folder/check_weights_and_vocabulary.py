"""Faults of a pipeline's parts that loading them would find hours later, by headers and texts.

Loads no weights and no tokenizer. What is unknown here is left to the loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtimes.contract import WrongInput
from runtimes.families import TextEncoder, detect_family
from runtimes.pipeline_folder.describe_encoders import has_frozen_text
from runtimes.pipeline_folder.read_configs import read_config, read_part_config
from runtimes.pipeline_folder.weight_files import weight_shapes

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
#: The same of whole names.
INPUTS = dict.fromkeys(("conv_in", "x_embedder", "img_in"), (None, "in_channels"))
#: Tokens of a vocabulary of byte pairs that no merge makes, at most: letters and special tokens.
UNMERGED = 1024
#: Size of the byte alphabet: a vocabulary has more.
BYTES = 256


def check_weights(part: Path) -> None:
    """Raise WrongInput for weights that are damaged, or of another size than their config says."""
    shapes, config = weight_shapes(part), _flat(read_config(part / "config.json"))
    for name, shape in shapes.items():
        for setting, size in zip(_settings(name), shape, strict=False):
            wanted = None if setting is None else config.get(setting)
            if type(wanted) is int and size != wanted:
                raise WrongInput(
                    f"{part}: {name} has shape {shape}, {setting} in its config.json is {wanted}: "
                    "config and weights are of different models"
                )


def check_tokenizers(model_folder: Path) -> None:
    """Raise WrongInput for a tokenizer that is damaged or does not fit its text encoder."""
    family = detect_family(model_folder)
    frozen = [family.frozen_text] if has_frozen_text(model_folder) else []
    for encoder in filter(None, [*family.clip, *frozen]):
        _check_tokenizer(model_folder, encoder)


def _check_tokenizer(model_folder: Path, encoder: TextEncoder) -> None:
    folder = model_folder / encoder.tokenizer
    config = read_part_config(model_folder, encoder.component)
    check_vocabulary_files(folder, config)
    if encoder.kind == "clip":  # of others, text_length takes the smaller one
        given = read_config(folder / "tokenizer_config.json").get("model_max_length")
        wanted = config["max_position_embeddings"]
        if given != wanted:
            raise WrongInput(
                f"{folder}: model_max_length in its tokenizer_config.json is {given}, its text "
                f"encoder takes {wanted} tokens (max_position_embeddings): correct it"
            )


def check_vocabulary_files(folder: Path, encoder: dict[str, Any]) -> None:
    """Raise WrongInput for a vocabulary that is missing, cut short, or too large.

    Args:
        folder: with a tokenizer's files.
        encoder: config of the text encoder.
    """
    if not (folder / "tokenizer.json").is_file() and (folder / "spiece.model").is_file():
        return
    vocabulary, merges = _vocabulary(folder)
    rows = _flat(encoder).get("vocab_size", vocabulary)
    if not BYTES < vocabulary <= rows:
        raise WrongInput(f"{folder} has {vocabulary} tokens, its text encoder {rows}")
    if merges is not None and vocabulary - merges > UNMERGED:
        raise WrongInput(
            f"{folder}: its {merges} merges do not make its {vocabulary} tokens: the merges are "
            "cut short: fetch the model again"
        )


def _vocabulary(folder: Path) -> tuple[int, int | None]:
    """Number of tokens, and of merges where the vocabulary is one of byte pairs."""
    whole = folder / "tokenizer.json"
    if whole.is_file():
        model = read_config(whole).get("model")
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
            raise WrongInput(f"{whole}: it has no vocabulary: fetch the model again")
        merges = model.get("merges")
        return len(model["vocab"]), len(merges) if isinstance(merges, list) else None
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise WrongInput(
                f"{folder}: {name} is missing, and tokenizer.json too: fetch the model again"
            )
    return len(read_config(folder / "vocab.json")), sum(1 for _ in _merges(folder / "merges.txt"))


def _merges(path: Path) -> Iterator[str]:
    """The pairs of a file of merges. Raises WrongInput for a line that is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#version"):
            if len(line.split()) != 2:
                raise WrongInput(f"{path}, line {number}: no pair of tokens: fetch the model again")
            yield line


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the settings of its text model, where a model also sees images."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _settings(name: str) -> tuple[str | None, ...]:
    if "vision" in name or "visual" in name:  # of a model that also sees images
        return ()
    whole = INPUTS.get(name.removesuffix(".weight"), ())
    return next((found for end, found in DIMENSIONS.items() if name.endswith(end)), whole)
