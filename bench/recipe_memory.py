"""Plan the shipped recipes for a GPU, and print their table: `python -m bench.recipe_memory`.

With `--write`, it renews tasks/plan/recipe_memory.json and the table of docs/recipes.md. No weights
and no hub are needed: bench/models has the configs of the published models.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.benchmark_inputs import published
from configs.load_recipe import CHECKOUT, load_recipe, recipe_names
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.gpu_specs import GIB, GpuSpec, parse_gpu
from tasks.plan.gpu import plan_for
from tasks.plan.gpu_time import copied_per_image, executed_flops, slowdown
from tasks.plan.shipped_plans import FILE, RecipeMemory, digest_settings, shipped_plans
from tasks.progress import bytes_in_words

DOCUMENT = CHECKOUT / "docs/recipes.md"
#: The table's place in the document.
TABLE = re.compile(r"(?<=<!-- python -m bench.recipe_memory -->\n)(\|.*\n)*")
#: Sizes of memory of common GPUs, in GB as on data sheets (2**30 bytes).
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 141)
#: GPUs of the columns with hours.
GPUS = tuple(
    spec for name in ("RTX 3060", "RTX 4070", "RTX 4090", "H100") if (spec := parse_gpu(name).spec)
)


def plan(recipe: Recipe, store: Path) -> RecipeMemory:
    """The plan of a recipe on config files; the store keeps the planned steps."""
    model = recipe.model
    base = Base.open(published(model.path), None if model.vae is None else published(model.vae))
    place = recipe.model_copy(update={"store": str(store)})
    planned = plan_for(place, parse_gpu("H100"), base)
    train = recipe.train
    return RecipeMemory(
        recipe=recipe.name,
        settings=digest_settings(recipe),
        training=planned.peaks.training,
        samples=planned.peaks.samples,
        sampling=planned.peaks.sampling,
        encoding=planned.peaks.encoding,
        checkpoint=planned.peaks.checkpoint,
        parameters=planned.step.parameters,
        checkpoint_bytes=planned.checkpoint_bytes,
        flops_per_image=executed_flops(planned.step),
        images=None if planned.steps is None else planned.steps * train.global_batch_size,
        product_dtype=train.product_dtype,
        host=planned.peaks.host,
        slowdown=slowdown(train, planned.step),
        copied_per_image=copied_per_image(train, planned.step),
    )


def plan_recipes(names: Sequence[str], store: Path | None) -> Iterator[RecipeMemory]:
    """The plans of shipped recipes."""
    with tempfile.TemporaryDirectory(prefix="kiln-plan-") as scratch:
        for name in names:
            yield plan(load_recipe(name), store or Path(scratch))


def planned_recipes() -> list[str]:
    """Names of the shipped recipes of runtime torch."""
    return [name for name in recipe_names() if load_recipe(name).runtime == "torch"]


def recipe_memory_table() -> Iterator[str]:
    """Lines of the table in docs/recipes.md, without the digits, which fit any GPU."""
    heads = [
        "recipe",
        "fits a GPU of",
        "encoding",
        "training",
        "samples",
        "evaluation",
        "host",
        "a checkpoint",
    ]
    yield _row(heads + [f"hours on {gpu.name}" for gpu in GPUS])
    yield _row(["---"] * (len(heads) + len(GPUS)))
    for plan in shipped_plans():
        if plan.recipe.startswith("digits"):
            continue
        sizes = [plan.encoding, plan.training, plan.samples, plan.sampling, plan.host]
        memory = [_gib(size) for size in sizes]
        hours = [_hours(plan, gpu) for gpu in GPUS]
        stored = bytes_in_words(plan.checkpoint_bytes)
        yield _row([f"`{plan.recipe}`", f"{card(plan)} GB", *memory, stored, *hours])


def _gib(size: int) -> str:
    if not size:
        return "none"
    return "below 0.1 GiB" if size < 0.1 * GIB else f"{size / GIB:.1f} GiB"


def _hours(plan: RecipeMemory, gpu: GpuSpec) -> str:
    if not plan.fits(gpu.memory):
        return "too small"
    hours = plan.hours(gpu)
    return "unknown" if hours is None else "below 0.1" if hours < 0.1 else f"{hours:,.1f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def card(plan: RecipeMemory) -> int | None:
    """The smallest of CARDS that a plan fits."""
    return next((size for size in CARDS if plan.fits(size * GIB)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew the file and the document")
    parser.add_argument("--store", type=Path, help="folder that keeps the planned steps")
    options = parser.parse_args()
    rows = [asdict(row) for row in plan_recipes(planned_recipes(), options.store)]
    if options.write:
        FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        table = "".join(f"{line}\n" for line in recipe_memory_table())
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(TABLE.sub(lambda _: table, text, count=1), encoding="utf-8")
        print(table)
    else:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
