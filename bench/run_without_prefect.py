"""Our side of a whole run, without Prefect: from a folder of pictures to trained weights.

    python -m bench.run_without_prefect OVERRIDES.json

OVERRIDES.json has dotted settings of the recipe `digits`. The last line printed is JSON: seconds by
stage.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from artifacts.store import Artifact, Store
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base


def no_progress(done: int, total: int, text: str = "") -> None:
    """Ignore the progress of a stage."""


class Stages:
    """The first three stages of a recipe, each built unless its artifact exists."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._store = Store(recipe.store)
        self._base = Base.open(Path(recipe.model.path))
        self.seconds: dict[str, float] = {}

    def latents(self) -> Artifact:
        """The latents of the recipe's pictures."""
        from tasks import download
        from tasks.encode.stage import EncodeStage

        plan = download.plan(self._recipe)
        images = self._artifact(download.DownloadStage(self._recipe, plan))
        return self._artifact(EncodeStage(self._recipe, images, self._base))

    def trained(self) -> Artifact:
        """The trained weights of the recipe."""
        from tasks.train import TrainStage

        return self._artifact(TrainStage(self._recipe, self.latents(), self._base, None))

    def _artifact(self, stage: Any) -> Artifact:
        from tasks.stage import build_or_reuse

        build = partial(stage.build, progress=no_progress)
        result = build_or_reuse(self._store, stage.parts, build, parents={})
        self.seconds[stage.name] = result.seconds
        return result.load(self._store)


def recipe_overrides(
    images: Path, model: Path, store: Path, size: int, **train: Any
) -> dict[str, Any]:
    """Overrides of the recipe `digits` for a folder of pictures, without held-out pictures."""
    return {
        "source.kind": "folder",
        "source.path": str(images),
        "model.path": str(model),
        "store": str(store),
        "download.image_size": size,
        "encode.resolution": size,
        "encode.holdout": 0.0,
        **{f"train.{name}": value for name, value in train.items()},
    }


def main(arguments: list[str]) -> None:
    """Run the stages with the overrides in a file, and print their seconds."""
    stages = Stages(load_recipe("digits", json.loads(Path(arguments[0]).read_text())))
    stages.trained()
    print(json.dumps(stages.seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
