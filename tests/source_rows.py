"""Sources of tests, and their rows as the workers of a download read them."""

import csv
import gzip
import json
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from picture_bytes import plain_picture
from shortest_recipe import shortest_recipe

from configs.settings.recipe import Recipe
from tasks import download
from tasks.download import shard_plan
from tasks.download.lists import ServedAt
from tasks.download.rows import Row
from tasks.download.shard import DownloadContext, planned_rows

CAPTIONS = ["a cat", "", 'two\nlines, "quoted"', "ein Bär 🐻", "comma, comma", "last"]
ROWS = [{"url": f"http://example.org/{n}.jpg", "caption": c} for n, c in enumerate(CAPTIONS)]


def make_recipe(source: dict[str, Any], store: Any = "memory://store", **settings: Any) -> Recipe:
    return shortest_recipe(source=source, store=str(store), download={"shard_size": 4, **settings})


def write_list(path: Path, rows: list[dict[str, Any]]) -> str:
    kind = path.name.split(".")[1]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
        return str(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as stream:
        if kind == "json":
            json.dump(rows, stream)
        elif kind in ("csv", "tsv"):
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
        else:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def png(number: int) -> bytes:
    return plain_picture(8, 8, number)


def context(recipe: Recipe) -> DownloadContext:
    key = shard_plan.plan_key()
    return DownloadContext(recipe.store, "", recipe.source, recipe.download, ServedAt(), key)


def rows_of(recipe: Recipe, scratch: Path) -> list[Row]:
    """All rows, read shard by shard as the workers do."""
    rows = []
    for number, shard in enumerate(download.plan(recipe).shards):
        folder = scratch / f"{recipe.source.kind}-{number}"
        folder.mkdir(exist_ok=True)
        rows += planned_rows(shard, context(recipe), folder)
    return rows


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def many_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {"url": f"http://example.org/{draw.getrandbits(64)}", "caption": "c"} for _ in range(count)
    ]
