"""Plan the shipped recipes for a GPU, and print their table: `python -m bench.recipe_memory`.

With `--write`, it renews tasks/gpu/recipe_memory.json and the table of docs/recipes.md. No weights
and no hub are needed: bench/published_configs.py has the sizes of the published models.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.published_configs import write_published_configs
from configs.checkout import CHECKOUT
from configs.load_and_extend_recipe import load_recipe
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.describe_encoders import vae_path
from runtimes.torch_models.gpu_specs import parse_gpu
from tasks.gpu.gpu_training_plan import plan_for
from tasks.gpu.recipe_memory import FILE, RecipeMemory, planned_recipes, recipe_memory_table

DOCUMENT = CHECKOUT / "docs/recipes.md"
#: The table's place in the document.
TABLE = re.compile(r"(?<=<!-- python -m bench.recipe_memory -->\n)(\|.*\n)*")
#: GPUs of the columns with hours.
GPUS = tuple(spec for name in ("RTX 4090", "H100") if (spec := parse_gpu(name).spec))


def plan(recipe: Recipe, configs: dict[str, Path], store: Path) -> RecipeMemory:
    """The plan of a recipe on config files.

    Args:
        configs: folder by hub id.
        store: keeps the planned steps.
    """
    base = recipe.model.path
    model = configs.get(base, Path(base))
    vae = None if recipe.model.vae is None else vae_path(model, configs[recipe.model.vae])
    place = recipe.model_copy(update={"store": str(store)})
    return RecipeMemory.of(plan_for(place, parse_gpu("H100"), model, vae))


def plan_recipes(names: Sequence[str], store: Path | None) -> Iterator[RecipeMemory]:
    """The plans of shipped recipes."""
    with tempfile.TemporaryDirectory(prefix="kiln-plan-") as scratch:
        folder = Path(scratch)
        configs = write_published_configs(folder / "models")
        for name in names:
            yield plan(load_recipe(name), configs, store or folder / "store")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew the file and the document")
    parser.add_argument("--store", type=Path, help="folder that keeps the planned steps")
    options = parser.parse_args()
    rows = [asdict(row) for row in plan_recipes(planned_recipes(), options.store)]
    if options.write:
        FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        table = "".join(f"{line}\n" for line in recipe_memory_table(GPUS))
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(TABLE.sub(lambda _: table, text, count=1), encoding="utf-8")
        print(table)
    else:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
