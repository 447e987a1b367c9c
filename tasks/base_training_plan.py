"""What the plans of all kinds of accelerator share: duration, storage, cost, and their cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from artifacts.models import files_below, resolve_configs
from artifacts.records import digest_json, read_record, write_record
from artifacts.store import Store
from configs.settings.recipe import Recipe
from runtimes.contract import WrongInput
from runtimes.families import family_named
from runtimes.pipeline_folder.folder import vae_path
from runtimes.process.planner import GpuStepRequest, TpuStepRequest


class PlanFailed(RuntimeError):
    """The planner's process failed; the message has the last lines of its log."""


class TrainingPlan(ABC):
    """Duration, storage and cost of a recipe's training on some accelerators."""

    recipe: Recipe
    info: dict[str, Any]  # of the encoders, from describe_encoders

    @property
    @abstractmethod
    def chips(self) -> int:
        """Number of accelerators."""

    @property
    @abstractmethod
    def step_seconds(self) -> float | None:
        """Seconds per step; None if unknown."""

    @property
    @abstractmethod
    def assumption(self) -> str:
        """The assumption behind `step_seconds`."""

    @property
    @abstractmethod
    def fits(self) -> bool:
        """Whether each accelerator's memory is enough."""

    @property
    def steps(self) -> int | None:
        """Steps of the run; None for `train.epochs` without `plan.pictures`."""
        train, pictures = self.recipe.train, self.recipe.plan.pictures
        if train.epochs is not None and pictures is None:
            return None
        return train.with_steps(pictures or 0).steps

    @property
    def hours(self) -> float | None:
        return self.step_seconds and self.steps and self.step_seconds * self.steps / 3600

    @property
    def cost(self) -> float | None:
        price = self.recipe.plan.chip_hour_price
        return None if price is None else self.hours and self.hours * self.chips * price

    @property
    def bytes_per_picture(self) -> int:
        """Stored bytes per picture with one caption."""
        return self.latent_bytes + self.caption_bytes

    @property
    def latent_bytes(self) -> int:
        """Stored bytes of latents per picture."""
        return latent_bytes(self.recipe, self.info)

    @property
    def caption_bytes(self) -> int:
        """Stored bytes of a caption; a shard stores equal captions once."""
        return caption_bytes(self.recipe, self.info)

    @property
    def storage_bytes(self) -> int | None:
        """Stored bytes of all pictures; None without `plan.pictures`."""
        pictures = self.recipe.plan.pictures
        return None if pictures is None else pictures * self.bytes_per_picture


def latent_bytes(recipe: Recipe, info: Mapping[str, Any]) -> int:
    """Stored bytes of latents per picture: 16-bit moments, masks with masked means.

    Args:
        info: of the encoders, from describe_encoders.
    """
    encode = recipe.encode
    pixels = (encode.resolution // info["vae_scale_factor"]) ** 2
    moments = 2 * 2 * info["latent_channels"] * pixels
    masked = encode.masks * (1 + 2 * info["latent_channels"]) * pixels
    return int(moments + masked) * (2 if encode.flip else 1)


def caption_bytes(recipe: Recipe, info: Mapping[str, Any]) -> int:
    """Stored bytes of a caption: its 16-bit embeddings, or its 32-bit token ids alone.

    Args:
        info: of the encoders, from describe_encoders.
    """
    if recipe.encode.text == "token_ids":
        return int(4 * len(family_named(info["family"]).clip) * info["tokens"])
    return int(2 * (info["tokens"] * info["prompt_dim"] + (info["pooled_dim"] or 0)))


def config_folders(recipe: Recipe) -> tuple[Path, Path | None]:
    """Local folders of the base, and of a separate VAE; of a model on the hub with configs alone.

    Raises:
        ModelNotFound: the base or the VAE does not exist.
    """
    model = resolve_configs(recipe.model.path, revision=recipe.model.revision)
    separate = recipe.model.vae
    return model, None if separate is None else vae_path(model, resolve_configs(separate))


def load_or_compute(
    store: Store, key: str, compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """A record of the store's cache of plans, computed and written if it is not there."""
    path = f"{store.root}/plans/{key}.json"
    try:
        record = read_record(store.fs, path)
    except ValueError:  # a damaged record is replaced
        record = None
    if record is None:
        record = {"plan": compute()}
        write_record(store.fs, path, record)
    return dict(record["plan"])


def cache_key(
    version: int, request: GpuStepRequest | TpuStepRequest, versions: Mapping[str, Any]
) -> str:
    """A digest of a request, the contents of its folders' configs and the package versions.

    Args:
        version: of the planner.
        versions: of the packages that affect the plan.
    """
    there = [folder for folder in (request.model, request.vae) if folder is not None]
    settings = {**asdict(request), "model": None, "vae": None}
    configs = {
        f"{number}/{path.relative_to(folder)}": json.loads(path.read_text(encoding="utf-8"))
        for number, folder in enumerate(there)
        for path in files_below(Path(folder))
        if path.name.endswith("config.json") or path == Path(folder, "model_index.json")
    }
    return digest_json([version, settings, configs, versions])


def ask_planner(
    module: str, request: dict[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a planner's module in a child process on a request; the JSON object that it prints.

    Raises:
        WrongInput: the planner does not support the request.
        PlanFailed: the planner failed.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-plan-") as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-P", "-m", module, str(path)]
        variables = {**os.environ, **(environment or {})}
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise PlanFailed(f"the step could not be planned (exit code {done.returncode}): {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "wrong_input" in found:
        raise WrongInput(found["wrong_input"])
    return found
