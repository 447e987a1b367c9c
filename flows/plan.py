"""Tell what a recipe takes on a TPU slice."""

from __future__ import annotations

import json
import sys
from typing import Any

from configs.schema import Recipe
from tasks.plan import Planned, make_plan

GIB = 2**30


class DoesNotFit(ValueError):
    """The recipe's batch is too large for the slice; the message says which one is not."""


class NoSlice(ValueError):
    """Neither the command nor the recipe names one."""


def tell(recipe: Recipe, topology: str | None, *, search: bool, as_json: bool) -> None:
    """Print the plan. Raises DoesNotFit if the recipe cannot be trained there as it stands."""
    if topology is None and recipe.tpu is not None:
        topology = recipe.tpu.accelerator_type
    if topology is None:
        raise NoSlice(f"recipe {recipe.name} has no section tpu: give --topology, such as v5p-8")
    found = make_plan(recipe, topology, search=search, say=lambda t: print(t, file=sys.stderr))
    if as_json:
        print(json.dumps(facts(found)))
    else:
        for name, words in _lines(found):
            print(f"{name:9} {words}")
    if not found.fits:
        raise DoesNotFit(_refusal(found))


def facts(found: Planned) -> dict[str, Any]:
    """The plan as one JSON object; bytes and FLOPs are of one chip and one step."""
    plan, size = found.plan, found.size
    seconds = found.step_seconds
    return {
        "recipe": found.recipe.name,
        "topology": found.where.name,
        "chips": found.where.chips,
        "compiler": plan.compiler,
        "fits": found.fits,
        "hbm_bytes": found.where.chip.hbm_bytes,
        "argument_bytes": plan.arguments,
        "temporary_bytes": plan.temporaries,
        "total_bytes": plan.total or None,  # a refusal may not say it
        "parameters": plan.parameters,
        "flops_per_image": plan.flops_per_image,
        "flops": plan.flops or None,
        "bytes_accessed": plan.bytes_accessed or None,
        "global_batch_size": size.global_batch_size,
        "micro_batch_size": size.micro_batch_size,
        "step_seconds": seconds,
        "images_per_second": None if seconds is None else size.global_batch_size / seconds,
        "assumption": found.assumption,
        "largest_micro_batch_size": found.largest and found.largest.micro_batch_size,
        "bytes_per_picture": found.bytes_per_picture,
        "storage_bytes": _storage(found),
        "hours": found.hours,
        "cost": found.cost,
        "plan_seconds": plan.seconds,
    }


def _lines(found: Planned) -> list[tuple[str, str]]:
    plan, where, size, train = found.plan, found.where, found.size, found.recipe.train
    other = "" if found.recipe.runtime == "jax" else ", as runtime jax trains it"
    lines = [
        (
            "recipe",
            f"{found.recipe.name}, {plan.parameters / 1e6:,.1f} M parameters trained{other}",
        ),
        ("slice", f"{where.name}: {where.chips} chips ({where.topology}), {where.hosts} hosts"),
        ("compiler", f"{plan.compiler}, in {plan.seconds:.0f} s"),
        (
            "batch",
            f"{size.global_batch_size} in {size.micro_batches} micro-batches, "
            f"{size.per_chip} pictures a chip at once, arrays shared by {train.fsdp}",
        ),
        ("memory", _memory(found)),
        ("work", _work(plan.flops_per_image, plan.flops, plan.bytes_accessed)),
        ("time", _time(found)),
        ("storage", _stored(found)),
    ]
    if found.largest is not None:
        lines.append(("largest", f"train.micro_batch_size {found.largest.micro_batch_size} fits"))
    return lines


def _memory(found: Planned) -> str:
    plan, hbm = found.plan, found.where.chip.hbm_bytes
    words = f"{plan.arguments / GIB:.2f} GiB arguments"
    if not plan.total:
        return f"{words}; what else there is does not fit {hbm / GIB:g} GiB a chip"
    if plan.temporaries:
        words += f" + {plan.temporaries / GIB:.2f} GiB temporaries"
    spare = (hbm - plan.total) / GIB
    fits = (
        f"fits, {spare:.1f} GiB to spare" if found.fits else f"too much by {max(-spare, 0):.1f} GiB"
    )
    return f"{words}, {plan.total / GIB:.2f} of {hbm / GIB:g} GiB a chip: {fits}"


def _work(of_image: float | None, of_step: float, moved: float) -> str:
    words = [] if of_image is None else [f"{of_image / 1e12:.4g} TFLOP an image"]
    if of_step:
        words.append(
            f"{of_step / 1e12:.4g} TFLOP and {moved / 1e9:,.0f} GB moved a chip and step, with "
            "what is recomputed"
        )
    return "; ".join(words) or "not known"


def _time(found: Planned) -> str:
    seconds, steps = found.step_seconds, found.steps
    if seconds is None or steps is None or found.hours is None:
        return "not known"
    words = (
        f"{seconds:.3g} s a step, {found.size.global_batch_size / seconds:,.1f} images/s "
        f"({found.assumption}); {steps:,} steps in {found.hours:,.1f} hours"
    )
    return words if found.cost is None else f"{words}, at a cost of {found.cost:,.0f}"


def _stored(found: Planned) -> str:
    words = f"{found.bytes_per_picture / 1e3:,.0f} kB of latents and embeddings a picture"
    whole = _storage(found)
    return words if whole is None else f"{words}, {whole / 1e9:,.1f} GB in all"


def _storage(found: Planned) -> int | None:
    pictures = found.recipe.plan.pictures
    return None if pictures is None else pictures * found.bytes_per_picture


def _refusal(found: Planned) -> str:
    where, hbm = found.where, found.where.chip.hbm_bytes
    need = f"{found.plan.total / GIB:.1f} GiB" if found.plan.total else "more"
    words = (
        f"{found.size.micro_batch_size} pictures at once need {need} of the "
        f"{hbm / GIB:g} GiB that a chip of {where.name} has: "
    )
    if found.largest is None:
        return words + "even one a chip is too many; raise train.fsdp, or take more chips"
    most = found.largest.micro_batch_size
    return words + f"the largest that fits is train.micro_batch_size={most}"
