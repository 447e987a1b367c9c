"""Read the config files of a pipeline folder; their errors name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from artifacts.records import parse_json
from runtimes.contract import WrongInput
from runtimes.families import detect_family


class Config(dict[str, Any]):
    """A config file's settings; one that is missing raises WrongInput with the file's path."""

    path: Path

    def __missing__(self, name: str) -> Any:
        raise WrongInput(f"{self.path}: {name} is missing")


def read_config(path: Path) -> Config:
    """Read a config file. Raises WrongInput if it is missing or not a JSON object."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise WrongInput(f"{path}: not there; a model's config was expected") from None
    except ValueError:
        raise WrongInput(f"{path}: not valid JSON") from None
    if not isinstance(found, dict):
        raise WrongInput(f"{path}: not a model's config")
    config = Config(found)
    config.path = path
    return config


def read_index(model_folder: Path) -> Config:
    """The model_index.json of a pipeline. Raises WrongInput."""
    return read_config(model_folder / "model_index.json")


def read_part_config(model_folder: Path, part: str) -> Config:
    """The config of a pipeline's part, such as `vae`. Raises WrongInput."""
    return read_config(model_folder / part / "config.json")


def read_denoiser_config(model_folder: Path) -> Config:
    """The config of a pipeline's denoiser. Raises WrongInput."""
    return read_part_config(model_folder, detect_family(model_folder).denoiser)
