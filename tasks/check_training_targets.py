"""Check a recipe's training targets against its base's files, before any stage runs."""

from __future__ import annotations

from pathlib import Path

from configs.recipe import Recipe
from runtimes.adapters.lora_layers import Layer, choose_layers
from runtimes.families import detect_family
from runtimes.pipeline_folder.denoiser_config import trained_config
from runtimes.pipeline_folder.describe_encoders import read_config
from tasks.publish.assemble_pipeline import weight_files

KINDS: dict[int, Layer] = {2: "linear", 4: "conv"}


def check(recipe: Recipe, model: Path) -> None:
    """Raise WrongInput if the base lacks a target layer or cannot become the asked denoiser.

    Args:
        model: pipeline folder of the base.
    """
    settings, family = recipe.train, detect_family(model)
    denoiser = family.denoiser
    if settings.method == "lora":
        layers = _layers(model / denoiser)
        choose_layers(denoiser, layers, settings.lora, family.attention_layers)
    path = settings.denoiser_config
    replacement = None if path is None else read_config(Path(path))
    trained_config(read_config(model / denoiser / "config.json"), settings, replacement)


def _layers(folder: Path) -> dict[str, Layer]:
    """Linear and convolution layers, identified by the rank of their weights."""
    from safetensors import safe_open

    found: dict[str, Layer] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="np") as stream:
            for name in stream.keys():  # noqa: SIM118 (not a dict)
                kind = KINDS.get(len(stream.get_slice(name).get_shape()))
                if kind is not None and name.endswith(".weight"):
                    found[name.removesuffix(".weight")] = kind
    return found
