"""`auto` of `train.memory` and `train.stream_blocks`: what fits this machine's GPU, before any key.

Some settings of `train.memory` are in keys, such as `lora.base_precision`. The first run in a store
chooses these, and a later run of the recipe keeps them on any GPU, so that it continues the same
training; the others, as `stream_blocks`, are chosen for each GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from artifacts.records import digest_json
from artifacts.store import Store
from configs.errors import Refused
from configs.settings.recipe import Recipe
from runtimes.detect_hardware import usable_gpus
from runtimes.torch_models.gpu_specs import Gpu, known_gpu
from tasks.plan.gpu import GpuPlan, plan_for
from tasks.plan.gpu_memory import with_settings
from tasks.plan.plan import load_or_compute, open_configs

log = logging.getLogger("kiln")


def choose_memory(recipe: Recipe) -> Recipe:
    """The recipe with the plan's choice instead of `auto` of train.memory and train.stream_blocks.

    Without a GPU for it here, its settings stay, and no blocks are streamed.

    Raises:
        Refused: nothing fits, training is on another machine, or on an NPU.
        Away: the base's configs cannot be fetched now.
        Unanswered: the planner failed.
    """
    asked = [n for n in ("memory", "stream_blocks") if getattr(recipe.train, n) == "auto"]
    if not asked:
        return recipe
    if recipe.place.train is not None:
        raise Refused(
            f"train.{asked[0]}: auto knows this machine's GPU, and place.train trains on another: "
            "set what `kiln plan --gpu` advises"
        )
    if recipe.train.device.startswith("npu"):
        raise Refused(
            f"train.{asked[0]}: auto knows the memory of CUDA devices: set what `kiln plan --gpu` "
            "advises for this NPU's"
        )
    recipe = with_settings(recipe, {"train.memory": None})
    on_gpu = recipe.train.device.partition(":")[0] in ("auto", "cuda")
    gpus = usable_gpus() if on_gpu and recipe.runtime == "torch" else []
    if not gpus:
        return with_settings(recipe, {f"train.{n}": 0 for n in asked if n == "stream_blocks"})
    largest = max(gpus, key=lambda gpu: gpu.memory)
    gpu = Gpu(largest.name, largest.memory, known_gpu(largest.name))
    if "memory" not in asked:
        plan = plan_for(recipe, gpu, open_configs(recipe))
        if not plan.fits:
            raise Refused(plan.refusal())
        return plan.recipe

    def first_choice() -> dict[str, Any]:
        plan = plan_for(recipe, gpu, open_configs(recipe))
        fastest = next(choices(plan), None)
        if fastest is None:
            raise Refused(plan.refusal())
        return {name: v for name, v in fastest.items() if _is_in_a_key(recipe, {name: v})}

    chosen = load_or_compute(Store(recipe.store), _identity(recipe), first_choice)
    kept = with_settings(recipe, chosen)
    plan = plan_for(kept, gpu, open_configs(kept))
    others = next((some for some in choices(plan) if not _is_in_a_key(kept, some)), None)
    if others is None:
        raise Refused(
            f"train.memory: {kept.name} was begun with {chosen or 'its own settings'}, which do "
            f"not fit {gpu.name}: train on a larger GPU, or set train.memory null and what `kiln "
            "plan` advises, which begins anew"
        )
    log.info("train.memory: auto on %s: %s", gpu.name, chosen | others or "the recipe's settings")
    return with_settings(plan.recipe, others)


def choices(plan: GpuPlan) -> Iterator[dict[str, Any]]:
    """Dotted settings with which a recipe fits, the fastest first; empty ones if it fits.

    Adapters instead of all weights are another result, with another learning rate.
    """
    if plan.fits:
        yield {}
    excluded = {"train.method"}
    if find_spec("bitsandbytes") is None:
        excluded.add("train.optimizer")  # which is one of 8 bits
    yield from (a.settings for a in plan.advice if excluded.isdisjoint(a.settings))


def _is_in_a_key(recipe: Recipe, settings: Mapping[str, Any]) -> bool:
    return _key_settings(with_settings(recipe, settings)) != _key_settings(recipe)


def _key_settings(recipe: Recipe) -> list[dict[str, Any]]:
    return [section.key_settings() for section in (recipe.encode, recipe.train, recipe.evaluate)]


def _identity(recipe: Recipe) -> str:
    sources = [part.source.model_dump(mode="json") for part in recipe.by_source.values()]
    about = [recipe.model.model_dump(mode="json"), *sources]
    return digest_json(["train.memory", recipe.publish.name, about, _key_settings(recipe)])
