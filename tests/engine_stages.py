"""Stages of a small recipe on an engine of Beam, and the bytes that they write."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picture_sources import make_pictures, write_folder
from shortest_recipe import shortest_recipe

from artifacts.store import Artifact, Store
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from tasks.describe.stage import DescribeStage
from tasks.encode.stage import EncodeStage


def make_recipe(
    folder: Path, store: str, model: Path, beam: Mapping[str, Any], **sections: Any
) -> Recipe:
    """A recipe of 24 pictures in six shards; `beam` is for both stages."""
    if not (folder / "pictures").exists():
        write_folder(folder / "pictures", make_pictures(24))
    sizes = {"image_size": 32, "min_image_size": 16, "shard_size": 4}
    encode = {"resolution": 32, "holdout": 0.25, "batch_size": 4, "device": "cpu"}
    return shortest_recipe(
        model={"path": str(model)},
        store=str(folder / store),
        source={"kind": "folder", "path": str(folder / "pictures")},
        download={**sizes, "beam": dict(beam)},
        encode={**encode, "beam": dict(beam)},
        shared_folders=[str(folder)],
        **sections,
    )


def encoded(recipe: Recipe, images: Artifact) -> Artifact:
    model = Path(recipe.model.path)
    stage = EncodeStage(recipe, images, Base.open(model))
    draft = Store(recipe.store).draft(stage.parts)
    return draft.commit(stage.build(draft, lambda *_: None), {})


def described(recipe: Recipe, images: Artifact) -> Artifact:
    stage = DescribeStage(recipe, images)
    draft = Store(recipe.store).draft(stage.parts)
    return draft.commit(stage.build(draft, lambda *_: None), {})


def content(artifact: Artifact) -> list[tuple[str, str]]:
    return [(entry.path, entry.sha256) for entry in artifact.files]
