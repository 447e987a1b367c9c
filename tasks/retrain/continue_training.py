"""Train from the champion's weights: the settings, the check and the model folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from artifacts.gc import CONTINUED
from artifacts.store import Artifact, Draft
from configs.errors import Refused
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from configs.settings.train_parts import Profile
from runtimes.adapters.lora import LORA_WEIGHTS
from runtimes.objective.noise_schedule import FLOW, is_flow
from runtimes.pipeline_folder.folder import Base
from tasks import train
from tasks.progress import Progress
from tasks.stage import local_weights

#: A warm-up takes a tenth of a retraining's steps at most.
LEAST_STEPS_PER_WARMUP_STEP = 10


def recipe_of(recipe: Recipe, selection: Artifact) -> Recipe:
    """The recipe with the steps of a retraining, in proportion to the selected samples."""
    settings = recipe.retrain
    summary = selection.summary
    planned = recipe.train.model_copy(update={"epochs": settings.epochs})
    proportional = planned.with_steps(summary["new"] + summary["replayed"]).steps
    steps = min(proportional, settings.max_steps)
    changed: dict[str, Any] = {
        "steps": steps,
        # The recipe's warm-up is for more steps: the rate would never reach its peak.
        "lr_warmup_steps": min(recipe.train.lr_warmup_steps, steps // LEAST_STEPS_PER_WARMUP_STEP),
        "epochs": None,
        "init": "base",  # the start has the denoiser's weights and its config
        "denoiser_config": None,
    }
    profile = recipe.train.profile
    if profile.start + profile.steps > steps:
        changed["profile"] = Profile()  # a trace of steps that this short run lacks
    if settings.learning_rate is not None:
        changed["learning_rate"] = settings.learning_rate
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changed)})


def check_start(recipe: Recipe, base: Base, start: Artifact) -> None:
    """Raise Refused if the weights of `start` have another base, or were trained otherwise."""
    fixed = Train.names_with("fixed_by_weights")
    before = _with_those_of(base, start.manifest["settings"])
    now = _with_those_of(base, train.settings_for_key(recipe))
    changed = [
        f"train.{name}"
        for name in Train.model_fields
        if name in fixed and before.get(name) != now.get(name)
    ]
    if start.manifest["inputs"]["base"] != train.digest_base(recipe.train, base):
        changed.append("model")
    if changed:
        raise Refused(
            f"retrain.start: champion: training cannot continue from its weights "
            f"({', '.join(changed)}): set retrain.start: base"
        )


@dataclass(frozen=True)
class ContinuedTraining(train.TrainStage):
    """Selected latents, as weights trained on from those of a champion.

    The held-out samples are of all latents, whichever shards are selected: few of them may have
    none.
    """

    @property
    def parents(self) -> dict[str, Artifact]:
        """The selection, and the weights that it continues."""
        assert self.start is not None
        return {"latents": self.latents, CONTINUED: self.start}

    def build(
        self, draft: Draft, progress: Progress, adapters: str | None = None
    ) -> dict[str, Any]:
        """Train from the weights or adapters of `start`, on the selected samples."""
        assert self.start is not None
        if self.recipe.train.method == "lora":
            adapters = f"{self.start.uri}/{LORA_WEIGHTS}"
        with starting_model(self.base, self.start) as model:
            return super(ContinuedTraining, replace(self, base=model)).build(
                draft, progress, adapters
            )

    def facts(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The samples that the run was trained on."""
        selected = self.latents.summary
        counts = {name: selected[name] for name in ("new", "replayed")}
        return {"samples": {**counts, "steps": self.recipe.train.steps}}


def _with_those_of(base: Base, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the base's prediction type and terminal SNR instead of null."""
    own = base.scheduler
    resolved = {
        "prediction_type": FLOW if is_flow(own) else own.get("prediction_type", "epsilon"),
        "zero_terminal_snr": own.get("rescale_betas_zero_snr", False),
    }
    return settings | {n: value for n, value in resolved.items() if settings.get(n) is None}


@contextmanager
def starting_model(base: Base, start: Artifact) -> Iterator[Base]:
    """The base in another folder, with the trained parts of `start` instead of its own.

    The scheduler stays the base's: the recipe's settings define that of the trained model.
    """
    with local_weights(start) as weights, TemporaryDirectory(prefix="kiln-start-") as folder:
        trained = {name: path for name, path in weights.parts.items() if name != "scheduler"}
        parts = {path.name: path for path in base.folder.iterdir()} | trained
        for name, part in parts.items():
            Path(folder, name).symlink_to(part.resolve())
        yield replace(base, folder=Path(folder))
