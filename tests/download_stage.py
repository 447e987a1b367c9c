"""Recipes whose download stage asks the server of pictures, and what the stage built."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from picture_server import Web
from shortest_recipe import shortest_recipe

from artifacts.image_shards import Sample, read_rows, read_tar
from artifacts.store import Artifact, Store
from configs.settings.recipe import Recipe
from tasks import download

PICTURES = 24


def rows(*paths: str) -> list[dict[str, Any]]:
    listed = [f"good/{n}" for n in range(PICTURES)] + list(paths)
    return [{"url": path, "caption": f"caption of {path}"} for path in listed]


def make_recipe(
    tmp_path: Path, web: Web, listed: list[dict[str, Any]], *, store: str = "store", **settings: Any
) -> Recipe:
    (tmp_path / store).mkdir(exist_ok=True)
    path = tmp_path / "urls.parquet"
    pq.write_table(pa.Table.from_pylist(listed), path)
    beam = settings.pop("beam", {"direct_running_mode": "in_memory", "direct_num_workers": 1})
    sha256 = {"sha256_column": "sha256"} if "sha256" in listed[0] else {}
    return shortest_recipe(
        store=str(tmp_path / store),
        source={"kind": "urls", "path": str(path), "base_url": f"http://{web.host}", **sha256},
        download={
            "image_size": 16,
            "allow_hosts": ["127.0.0.1"],
            "max_connections": 4,
            "max_requests_per_host": None,
            "timeout": 60.0,
            "backoff": 0.01,
            "retries": 1,
            "max_bytes": 100_000,
            "shard_size": 8,
            **settings,
        },
        beam=beam,
    )


def build(recipe: Recipe, *, retry_failed: bool = False) -> Artifact:
    store = Store(recipe.store)
    retry_run = uuid4().hex if retry_failed else None
    stage = download.DownloadStage.of(recipe, download.plan(recipe), store, retry_run)
    draft = store.draft(stage.parts)
    return draft.commit(stage.build(draft, lambda *_: None), {})


def shard_bytes(artifact: Artifact) -> dict[str, bytes]:
    return {entry.path: artifact.read(entry.path) for entry in artifact.files}


def rows_of(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """{URL: row} of the parquet files."""
    parquets = [e.path for e in artifact.files if e.path.endswith(".parquet")]
    return {row["url"]: row for path in parquets for row in read_rows(artifact.read(path))}


def samples_of(artifact: Artifact) -> list[Sample]:
    tars = [entry.path for entry in artifact.files if entry.path.endswith(".tar")]
    return [sample for tar in tars for sample in read_tar(artifact.url(tar))]
