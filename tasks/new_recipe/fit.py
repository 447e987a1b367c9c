"""A draft that is loaded, planned, and changed as the plan advises until it fits its machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import STAGES, Recipe
from runtimes.pipeline_folder.folder import Base
from runtimes.process.questions import Unanswered
from tasks.new_recipe.draft import Draft
from tasks.new_recipe.machine import Machine
from tasks.plan.choose_memory import choices
from tasks.plan.gpu import GpuPlan, plan_for
from tasks.plan.plan import Say, estimate_disk, open_configs
from tasks.plan.tpu import SlicePlan, plan_slice_training
from tasks.publish.gate_power import undecidable

WHY = "so that it fits"
CHANGES = 3  # rounds of advice


@dataclass(frozen=True)
class Proven:
    """A draft that is a valid recipe, with its plan."""

    draft: Draft
    recipe: Recipe
    base: Base
    plan: GpuPlan | SlicePlan

    @property
    def refusal(self) -> str | None:
        """Why it does not fit; None: it fits."""
        if self.plan.fits:
            return None
        if isinstance(self.plan, GpuPlan):
            return self.plan.refusal()
        return f"{self.recipe.name}: no batch fits {self.plan.where.name}"

    @property
    def disk(self) -> int | None:
        """Bytes of disk that a run needs; None if the number of pictures is not known."""
        pictures = self.recipe.plan.pictures
        if pictures is None:
            return None
        trained = self.plan.step.parameters
        sizes = estimate_disk(self.recipe, self.base, pictures, STAGES, trained=trained)
        return sum(sizes.values())

    def gate(self) -> list[str]:
        """A line for each rule of the gate that so few pictures and prompts hardly decide."""
        lines = [*undecidable(self.recipe, {})]  # nothing was evaluated yet
        pictures = self.recipe.plan.pictures
        if pictures is not None:
            shares = [part.encode.holdout for part in self.recipe.by_source.values()]
            held_out = round(pictures * sum(shares) / len(shares))
            lines += undecidable(self.recipe, {}, held_out)
        return [line.removeprefix("gate rule ") for line in lines]


def prove(draft: Draft, machine: Machine, folder: Path, say: Say) -> Proven:
    """Load a draft and plan it; where it does not fit, take the fastest advice.

    Raises:
        Refused: the recipe is invalid, or the plan does not support it.
        Away: the base's configs cannot be fetched now.
    """
    for _ in range(CHANGES):
        recipe = loaded(draft, folder)
        base = open_configs(recipe)
        plan = _planned(recipe, base, machine, say)
        if plan.fits:
            break
        changes: dict[str, object] = {}
        if isinstance(plan, GpuPlan):
            changes = next(choices(plan), {})
        elif plan.largest is not None:
            changes = {"train.micro_batch_size": plan.largest.micro_batch_size}
        if not changes:
            break
        draft = draft.with_settings(changes, WHY)
    return Proven(draft, recipe, base, plan)


def loaded(draft: Draft, folder: Path) -> Recipe:
    """The recipe of a draft whose file would be in `folder`. Raises Refused if it is invalid."""
    with _file(draft, folder) as path:
        return load_recipe(str(path))


def _planned(recipe: Recipe, base: Base, machine: Machine, say: Say) -> GpuPlan | SlicePlan:
    try:
        if machine.gpu is None:
            assert machine.topology is not None
            return plan_slice_training(recipe, machine.topology, search=False, say=say)
        return plan_for(recipe, machine.gpu, base, say)
    except Unanswered as error:
        raise Refused(f"{recipe.name} cannot be planned: {error}") from None


@contextmanager
def _file(draft: Draft, folder: Path) -> Iterator[Path]:
    """The draft in a file that is deleted afterwards; a recipe is read with its folder."""
    try:
        number, name = tempfile.mkstemp(".yaml", ".kiln-new-", folder)
    except OSError as error:
        raise Refused(f"{folder}: no recipe can be written there ({error.strerror})") from None
    try:
        with os.fdopen(number, "w", encoding="utf-8") as stream:
            stream.write(draft.text())
        yield Path(name)
    finally:
        os.unlink(name)
