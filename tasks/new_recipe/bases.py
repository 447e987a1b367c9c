"""The bases that a new recipe can start from: the shipped recipes that fit a machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from configs.errors import Refused
from configs.load_recipe import CHECKOUT, load_recipe, recipe_names
from configs.settings.recipe import Model, Recipe
from runtimes.families import detect_family
from runtimes.pipeline_folder.single_file import is_single_file, open_checkpoint, resolve_base
from tasks.new_recipe.machine import Machine
from tasks.plan.shipped_plans import RecipeMemory, memory_of

Goal = Literal["subject", "style", "everything"]
#: The demo's tiny base, which a CPU trains.
DEMO = "demo"
#: The ready answer, if it fits; else the base that trains fastest.
USUAL = "sdxl"


@dataclass(frozen=True)
class Base:
    """A base model, and the shipped recipe that the new one extends."""

    name: str  # as a person names it
    recipe: str  # that it extends
    shipped: Recipe  # of this name
    model: str | None = None  # another model than the recipe's

    @cached_property
    def samples(self) -> int:
        """Training samples of the shipped recipe."""
        return self.shipped.train.steps * self.shipped.train.global_batch_size

    @cached_property
    def memory(self) -> RecipeMemory | None:
        """The plan of the shipped recipe."""
        return memory_of(self.shipped)

    def hours(self, machine: Machine, samples: int) -> float | None:
        """Hours of training on so many samples; None if they are not known."""
        spec = None if machine.gpu is None else machine.gpu.spec
        hours = None if spec is None or self.memory is None else self.memory.hours(spec)
        return hours and hours * samples / self.samples / machine.count


def offers(machine: Machine, goal: Goal) -> list[Base]:
    """The bases that fit a machine, each by its fastest recipe; the ready answer is first.

    All weights are trained for everything if they fit, adapters otherwise.
    """
    best: dict[str, Base] = {}
    for base in _of_machine(machine):
        is_full = base.shipped.train.method == "full"
        if (is_full and goal != "everything") or not _fits(base, machine):
            continue
        known = best.get(base.name)
        if known is None or _rank(base, goal) < _rank(known, goal):
            best[base.name] = base
    return sorted(best.values(), key=lambda base: (base.name != USUAL, _work(base)))


def _rank(base: Base, goal: Goal) -> tuple[bool, float]:
    is_full = base.shipped.train.method == "full"
    return is_full != (goal == "everything"), _work(base)


def _work(base: Base) -> float:
    """The relative time of a sample."""
    return base.memory.flops_per_image * base.memory.slowdown if base.memory else 0.0


def _fits(base: Base, machine: Machine) -> bool:
    return machine.gpu is None or base.memory is None or base.memory.fits(machine.gpu.memory)


def _of_machine(machine: Machine) -> Iterator[Base]:
    for base in _shipped():
        recipe = base.shipped
        if (base.name == DEMO) != (machine.kind == "cpu"):
            continue
        if machine.kind == "tpu":
            if recipe.runtime != "torch" and recipe.train.init == "base":
                yield base
        elif recipe.runtime == "torch" and (machine.kind in ("gpu", "cpu") or _is_plain(recipe)):
            yield base


def _is_plain(recipe: Recipe) -> bool:
    """Whether a recipe has nothing of CUDA devices alone."""
    train = recipe.train
    offloads = recipe.encode.offload or recipe.evaluate.offload
    return not (offloads or train.stream_blocks or train.lora.base_precision)


@cache
def _shipped() -> tuple[Base, ...]:
    """The shipped recipes that a new one may extend."""
    found = []
    for name in recipe_names():
        recipe = load_recipe(name)
        is_demo = recipe.source is not None and recipe.source.kind == "digits"
        if recipe.sources or recipe.train.train_text_encoder or (is_demo and name != "digits-lora"):
            continue
        short = re.sub(r"(-lora)?(-v5p)?(-\d+gb)?$", "", name)
        found.append(Base(DEMO if is_demo else short, name, recipe))
    return tuple(found)


def choose(text: str, machine: Machine, goal: Goal) -> Base:
    """The base that a person names: an offer, a shipped recipe, or a model by path or hub id.

    Raises:
        Refused: it is unknown, or the model is of no family of a shipped recipe.
        Away: the hub does not answer now.
    """
    text = text.strip()
    known = offers(machine, goal)
    if (offer := next((base for base in known if base.name == text), None)) is not None:
        return offer
    if text in recipe_names() and _fits(named := Base(text, text, load_recipe(text)), machine):
        return named
    if text in recipe_names() or any(base.name == text for base in _shipped()):
        fitting = ", ".join(base.name for base in known) or "none"
        raise Refused(f"{text} does not fit {machine.words} (bases that do: {fitting})")
    if not ("/" in text or is_single_file(text) or os.path.isdir(text)):
        fitting = ", ".join(base.name for base in known)
        raise Refused(f"{text} is no base ({fitting}), shipped recipe, path or hub id")
    path = os.path.abspath(os.path.expanduser(text)) if os.path.exists(text) else text
    family = _family(path)
    alike = [
        base for base in (*known, *_shipped()) if _family_of(base.shipped.model.path) == family
    ]
    if not alike:
        raise Refused(f"{text}: no shipped recipe is of its family, {family}: see docs/families.md")
    return Base(text, alike[0].recipe, alike[0].shipped, path)


def _family(path: str) -> str:
    model = Model(path=path)
    if is_single_file(path):
        return open_checkpoint(model).family
    return detect_family(resolve_base(model, configs=True))[0].name


@cache
def _family_of(path: str) -> str:
    """The family of a shipped recipe's model; the hub is not asked."""
    folder = CHECKOUT / "bench/models" / path.rpartition("/")[2]
    return detect_family(folder if folder.is_dir() else Path(path))[0].name


def listed(bases: Sequence[Base], machine: Machine, samples: int) -> Iterator[str]:
    """A line for each base: its recipe, its memory, and hours where they are known."""
    for base in bases:
        words = [f"kiln recipes {base.recipe}"]
        if base.memory is not None:
            words.insert(0, f"{base.memory.largest / 2**30:.1f} GiB")
        if (hours := base.hours(machine, samples)) is not None:
            words.insert(1, f"{hours:,.1f} h")
        yield f"{base.name:12} {', '.join(words)}"
