"""References of an edit model's targets: their download, and which target has which.

References are the distinct pictures that a source's rows name beside their own, and are downloaded
as a source of their own. The targets' image shards do not know them: other references of the same
pictures change neither these nor their latents. The stage `references` pairs the two.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.records import digest_bytes
from artifacts.store import Artifact, Draft, Store
from configs.errors import Refused
from configs.settings.recipe import Recipe
from runtimes.families import Family, families_with_references
from tasks.build_or_reuse import Stage
from tasks.download import shard_plan
from tasks.download.shard import shard_key
from tasks.download.sources import References, ReferencesOf, planned_references
from tasks.panels import Facts, Panel
from tasks.progress import Report
from tasks.reference_pairs import COLUMNS, PAIRS, Pair, rows_of

log = logging.getLogger("kiln")
#: Name of the stage.
REFERENCES = "references"
#: Of the table PAIRS.
SCHEMA = pa.schema(zip(COLUMNS, (pa.string(), pa.binary(32), pa.list_(pa.binary(32))), strict=True))
#: Least side of references in the download, so that a lower `encode.reference_pixels` fetches none.
LEAST_SIDE = 1024


def recipe_of_references(recipe: Recipe) -> Recipe:
    """The recipe of the references' download.

    They keep their aspect ratio, and limits of captions and sizes are for targets.
    """
    side = max(LEAST_SIDE, math.isqrt(recipe.encode.reference_pixels - 1) + 1)
    settings = {
        "image_size": side,
        "resize_mode": "keep_ratio",
        "only_if_bigger": True,
        **dict.fromkeys(("max_duplicates", "max_short_captions", "max_undersized"), 1.0),
    }
    download = recipe.download.model_copy(update=settings)
    source = ReferencesOf(recipe.source)
    return recipe.model_copy(update={"source": source, "download": download})


def plan_references(
    recipe: Recipe, targets: shard_plan.DownloadPlan, begin: shard_plan.Begin
) -> shard_plan.DownloadPlan | None:
    """The plan of the references' download; None if no row has any.

    Args:
        recipe: of `recipe_of_references`.
        targets: the plan of the pictures that have them.
        begin: see plan_shards.
    """
    if next(planned_references(targets), None) is None:
        return None
    assert isinstance(recipe.source, ReferencesOf)
    source = References(replace(recipe.source, plan=targets))
    store = Store(recipe.store)
    size = recipe.download.shard_size
    return shard_plan.plan_shards(source, store, size, shard_key(recipe.download), begin)


def check_number(family: Family, most: int, who: str) -> None:
    """Raise Refused for more references of a picture than the family reads.

    Args:
        most: the largest number of references of a picture.
        who: subject and verb of the error, such as "a picture has".
    """
    if most > family.max_references:
        limit = f"reads {family.max_references}" if family.max_references else "does not read any"
        raise Refused(
            f"{who} {most} {'references' if most > 1 else 'reference'}, but family {family.name} "
            f"{limit}: remove some, or set model.path to another family's "
            f"({families_with_references()})",
            setting="source",
        )


@dataclass(frozen=True)
class ReferencesStage(Stage):
    """Which downloaded picture has which downloaded references."""

    images: Artifact
    plan: shard_plan.DownloadPlan  # of the targets
    pictures: Artifact | None  # the downloaded references; None: no row has any
    pictures_plan: shard_plan.DownloadPlan | None

    name = REFERENCES
    version = 1

    @property
    def settings(self) -> dict[str, Any]:
        """None."""
        return {}

    @property
    def inputs(self) -> dict[str, str]:
        """The pairs, and the downloaded references."""
        of_pictures = {} if self.pictures is None else {"pictures": self.pictures.digest}
        return {"pairs": digest_bytes(self._table), **of_pictures}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The targets' pictures and the references."""
        of_pictures = {} if self.pictures is None else {"pictures": self.pictures}
        return {"images": self.images, **of_pictures}

    @cached_property
    def pairs(self) -> dict[str, list[Pair]]:
        """Key of an image shard -> its pictures in the order of the tar."""
        fetched = dict(self._fetched())
        named: dict[tuple[str, int], list[bytes | None]] = {}
        for row, place in planned_references(self.plan):
            named.setdefault(row, []).append(fetched.get(place["url"]))
        pairs = {}
        for key, rows in rows_of(self.images, [spec.key for spec in self.plan.shards]):
            pairs[key] = [
                Pair(bytes.fromhex(sha256), _all(named.get((key, number), ())))
                for number, sha256 in enumerate(rows)
                if sha256 is not None
            ]
        return pairs

    def _fetched(self) -> Iterator[tuple[str, bytes | None]]:
        """URL of each reference -> sha256 of its bytes; None if it was not downloaded."""
        if self.pictures is None or self.pictures_plan is None:
            return
        key = shard_plan.plan_key()
        specs = {spec.key: spec for spec in self.pictures_plan.shards}
        for shard, rows in rows_of(self.pictures, [*specs]):
            urls = shard_plan.read_spans(specs[shard].spans, key)["url"].to_pylist()
            for url, sha256 in zip(urls, rows, strict=True):
                yield url, None if sha256 is None else bytes.fromhex(sha256)

    @cached_property
    def _table(self) -> bytes:
        columns = (
            (key, pair.id, pair.references) for key, pairs in self.pairs.items() for pair in pairs
        )
        tars, ids, references = (
            zip(*columns, strict=True) if any(self.pairs.values()) else ((),) * 3
        )
        table = pa.table([list(tars), list(ids), list(references)], schema=SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue().to_pybytes()

    def build(self, draft: Draft, progress: Report) -> dict[str, Any]:
        """Write the pairs."""
        draft.write(PAIRS, self._table)
        pairs = [pair for of_shard in self.pairs.values() for pair in of_shard]
        complete = [pair.references for pair in pairs if pair.references is not None]
        counts = Counter(map(len, complete))
        return {
            "pictures": len(pairs),
            "with_references": sum(n for number, n in counts.items() if number),
            "by_number": {str(number): counts[number] for number in sorted(counts)},
            "references": len({sha256 for ids in complete for sha256 in ids}),
            "bad": len(pairs) - len(complete),
        }

    def check(self, summary: dict[str, Any]) -> None:
        """Warn of references that are missing, and raise Refused if none is left."""
        if self.pictures is None:
            log.warning(
                "source: no picture has a reference: all train as without; check "
                "source.reference_columns"
            )
        elif summary["bad"]:
            log.warning(
                "references: %s of %s pictures are left out, since a reference of theirs was not "
                "downloaded: the report of stage references names the outcomes",
                *(f"{summary['bad']:,}", f"{summary['pictures']:,}"),
            )
        if summary["pictures"] and summary["bad"] == summary["pictures"]:
            raise Refused("references: no picture has all of its references: see the download")

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """Counts of pictures by their references."""
        summary = artifact.summary
        facts = {
            "pictures": summary["pictures"],
            "distinct references": summary["references"],
            "pictures left out, a reference is missing": summary["bad"],
        }
        for number, count in summary["by_number"].items():
            facts[f"pictures with {number} references"] = count
        return [Facts("References", facts)]


def _all(ids: Iterable[bytes | None]) -> tuple[bytes, ...] | None:
    """The ids, unless one is None."""
    known = [*ids]
    return None if None in known else tuple(sha256 for sha256 in known if sha256 is not None)
