"""A data set of pictures with references, downloaded and encoded as runs do it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shortest_recipe import shortest_recipe

from artifacts.store import Artifact, Store
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.vae_text_encoders import Encoder
from tasks import download
from tasks.build_or_reuse import Stage, build_or_reuse
from tasks.download.references import ReferencesStage, plan_references, recipe_of_references
from tasks.encode.stage import EncodeStage
from tasks.progress import Progress

Rows = Sequence[tuple[bytes, str, Sequence[bytes]]]  # picture, caption, references


def write_data_set(path: Path, rows: Rows) -> Path:
    """A parquet file of embedded pictures; those of column `before` are lists."""
    before = pa.array([list(references) for _, _, references in rows], pa.list_(pa.binary()))
    table = {"image": [row[0] for row in rows], "text": [row[1] for row in rows], "before": before}
    pq.write_table(pa.table(table), path)
    return path


def recipe_of(store: Path, model: Path, source: dict[str, Any], **encode: Any) -> Recipe:
    settings = {"resolution": 16, "holdout": 0.25, "batch_size": 8, "device": "cpu"}
    settings |= {"bucket_step": 8, "leave_out_copies": False}
    return shortest_recipe(
        store=str(store),
        model={"path": str(model)},
        source=source,
        download={
            "min_image_size": 8,
            "shard_size": 16,
            "encode_format": "png",
            "encode_quality": 1,
            "allow_hosts": ["127.0.0.1"],
            "max_requests_per_host": None,
            "retries": 0,
        },
        beam={"direct_running_mode": "in_memory", "direct_num_workers": 1},
        encode={**settings, **encode},
    )


def data_set_source(path: Path) -> dict[str, Any]:
    return {"kind": "dataset", "path": str(path), "reference_columns": ["before"]}


def made(store: Store, stage: Stage) -> Artifact:
    build = partial(stage.build, progress=Progress(stage.name))
    artifact = build_or_reuse(store, stage.parts, build, parents=stage.parents).load(store)
    stage.check(artifact.summary)
    return artifact


def paired(recipe: Recipe, images: Artifact) -> Artifact:
    """The downloaded references, and which picture has which."""
    store = Store(recipe.store)
    plan = download.plan(recipe)
    part = recipe_of_references(recipe)
    own = plan_references(part, plan, lambda parts: None)
    pictures = own and made(store, download.DownloadStage.of(part, own, store))
    return made(store, ReferencesStage(images, plan, pictures, own))


def encoded(recipe: Recipe, *, references: bool = True) -> Artifact:
    """The latents of a recipe's source."""
    store = Store(recipe.store)
    images = made(store, download.DownloadStage.of(recipe, download.plan(recipe), store))
    pairs = paired(recipe, images) if references else None
    base = Base.open(Path(recipe.model.path))
    return made(store, EncodeStage(recipe, images, base, references=pairs))


def target_shards(latents: Artifact) -> dict[str, str]:
    """Path of each latent shard of targets -> sha256."""
    return {e.path: e.sha256 for e in latents.files if e.path.endswith(".safetensors")}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the pictures that the VAE encodes within, by `height x width` in pixels."""
    count: Counter[str] = Counter()
    images = Encoder.images

    def counting(self: Encoder, pixels: np.ndarray) -> Any:
        count["{2}x{3}".format(*pixels.shape)] += len(pixels)
        return images(self, pixels)

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "images", counting)
        yield count
