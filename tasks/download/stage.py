"""The download stage as the flow sees it: check, plan, build, show.

The download is a Beam pipeline: one element per shard, results in the store.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain, islice
from typing import Any

from PIL import Image, ImageOps

from artifacts.image_shards import read_tar
from artifacts.store import MANIFEST, Artifact, Draft, Store
from configs.errors import Away, Refused
from configs.settings.recipe import Recipe
from tasks.beam.workers import REPORTS, beam_options, quiet_import
from tasks.build_or_reuse import Stage
from tasks.download import shard_plan
from tasks.download.data_quality import DownloadStatistics, check_data, warn_of_captions
from tasks.download.http import is_transient
from tasks.download.shard import STAGE, VERSION, DownloadContext, all_reasons, may_retry, shard_key
from tasks.download.sources import SOURCES
from tasks.panels import Facts, Panel, PicturePanel, Table, picture_grid, to_png
from tasks.progress import Report

NOTES = "deferred"  # folder in the draft with a note for each deferred shard
#: Facts of a shard that the manifest has; its record has all of them.
IN_MANIFEST = ("samples", "outcomes", "retries")
BIN = 8  # characters of a caption
GRID = (8, 3)  # columns, rows
THUMBNAIL = 96  # pixels
log = logging.getLogger("kiln")


def settings_for_key(recipe: Recipe, retry: int = 0) -> dict[str, Any]:
    """The settings that affect the artifact, given the source's content."""
    return {**recipe.download.key_settings(), "retry": retry}


def check(recipe: Recipe) -> None:
    """Raise Refused if the source is unusable. Runs before any work, so cheap."""
    download = recipe.download
    if download.encode_format == "png" and download.encode_quality > 9:
        why = f"for png it is the compression level, 0 to 9 (got {download.encode_quality})"
        raise Refused(why, setting="download.encode_quality")
    SOURCES[recipe.source.kind](recipe.source).check()


def plan(recipe: Recipe, begin: shard_plan.Begin = lambda parts: None) -> shard_plan.DownloadPlan:
    """The source's rows, cut into shards: from the store unless it changed. Raises Refused.

    Args:
        begin: see plan_shards.
    """
    check(recipe)
    source = SOURCES[recipe.source.kind](recipe.source)
    size = recipe.download.shard_size
    key = shard_key(recipe.download)
    plan = shard_plan.plan_shards(source, Store(recipe.store), size, key, begin)
    if dropped := plan.artifact.summary.get("dropped"):
        words = "source: %s rows meet source.where, %s do not"
        log.info(words, f"{plan.rows:,}", f"{dropped:,}")
    return plan


def planned(
    recipe: Recipe, artifact: Artifact, begin: shard_plan.Begin = lambda parts: None
) -> shard_plan.DownloadPlan:
    """The plan that an artifact of stage `plan` has; the source may have grown since.

    Its rows are at their present places in the source. Raises Refused if a row has none, and the
    plan is from another machine.
    """
    stored = shard_plan.read_plan(artifact, shard_key(recipe.download))
    own = plan(recipe, begin)
    try:
        return shard_plan.place_rows(stored, own)
    except Refused:
        if not shard_plan.is_readable(artifact):
            raise
        return stored


@dataclass(frozen=True)
class DownloadStage(Stage):
    """The pictures of a planned source, as image shards."""

    recipe: Recipe
    plan: shard_plan.DownloadPlan
    retry: int = 0  # 0: the first download, without a further attempt at failed rows
    retry_run: str | None = None  # id of the run that fetches rows with transient failures again

    name = STAGE
    version = VERSION

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        plan: shard_plan.DownloadPlan,
        store: Store,
        retry_run: str | None = None,
    ) -> DownloadStage:
        """The stage of the retry that a run uses.

        Normally it is the newest retry in the store; with `retry_run` the retry after it, while a
        shard has transient failures and a retry left.
        """
        last = 0
        limit = recipe.download.retry_failed
        stages = [cls(recipe, plan, retry, retry_run) for retry in range(limit + 1)]
        for retry in range(1, limit + 1):
            if store.fs.exists(f"{store.root}/{STAGE}/{stages[retry].parts.key}/{MANIFEST}"):
                last = retry
        if retry_run is None:
            return stages[last]
        artifact = store.find(STAGE, stages[last].parts.key)
        entries = [] if artifact is None else artifact.files
        has_next = any(entry.meta and may_retry(entry.meta, recipe.download) for entry in entries)
        return stages[min(last + 1, limit) if has_next else last]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the pictures, and the retry."""
        return settings_for_key(self.recipe, self.retry)

    @property
    def inputs(self) -> dict[str, str]:
        """Every row of the source, and the layout of a retraining's shards."""
        layout = {} if self.plan.layout is None else {"layout": self.plan.layout}
        return {"source": self.plan.source_digest, **layout}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The plan."""
        return {"plan": self.plan.artifact}

    def build(self, draft: Draft, progress: Report) -> dict[str, Any]:
        """Download the plan's shards that the store lacks, and add all of them to the draft.

        With `retry_run`, rows with transient failures of the other shards are fetched again, once
        in all tries of that run.

        Returns:
            The artifact's summary: counts of rows, images, outcomes and shards.

        Raises:
            Refused: the source or the Beam options cannot be used.
            Away: an outage deferred shards; the next run downloads only these.
            Outage: a Away, after several such shards in a row.
            Failed: more rows failed than `download.max_failed` allows.
            Failed: the store is not writable; Away if it is full or does not answer.
        """
        with quiet_import():  # Beam takes seconds to import
            from tasks.download.download_on_beam import run_pipeline
        recipe = self.recipe
        plan = self.plan
        store = draft.store
        with SOURCES[recipe.source.kind](recipe.source).open() as served_at:
            context = DownloadContext(
                store=store.url,
                notes=f"{draft.path}/{NOTES}",
                reports=f"{draft.path}/{REPORTS}",
                source=recipe.source,
                settings=recipe.download,
                served_at=served_at,
                plan_key=shard_plan.plan_key(),
                rows=plan.rows,
                retry_run=self.retry_run,
            )
            options = beam_options(recipe, "download")
            deferred = run_pipeline(plan.shards, context, options, progress)
        if deferred:
            raise Away(
                f"download: {len(deferred)} of {len(plan.shards)} shards were deferred after "
                f"transient failures ({all_reasons(deferred)}); the others are committed: run "
                "again to download only these, or raise download.max_transient"
            )
        outcomes: Counter[str] = Counter()
        statistics = DownloadStatistics()
        for shard in store.committed_shards(STAGE, sorted(spec.key for spec in plan.shards)):
            if shard is None:
                raise RuntimeError("download: the pipeline ended without committing every shard")
            outcomes.update(shard.meta["outcomes"])
            statistics.add(shard.meta)
            draft.add_shard(replace(shard, meta={name: shard.meta[name] for name in IN_MANIFEST}))
        summary = {
            "rows": plan.rows,
            "images": outcomes["success"],
            "outcomes": dict(sorted(outcomes.items())),
            "shards": len(plan.shards),
            "data": statistics.summary(),
        }
        if dropped := plan.artifact.summary.get("dropped"):
            summary["dropped"] = dropped
        check_data(summary, recipe.download)
        return summary

    def check(self, summary: dict[str, Any]) -> None:
        """Raise Failed for too many failed rows, and warn of captions that are missing."""
        check_data(summary, self.recipe.download)
        has_captions = getattr(self.recipe.source, "caption_column", "caption") is not None
        warn_of_captions(summary, expected=has_captions and self.recipe.caption is None)

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """Panels: counts by outcome, and the first pictures."""
        summary = artifact.summary
        outcomes = Counter(summary["outcomes"]).most_common()
        kinds = {o: "transient" if is_transient(o) else "permanent" for o, _ in outcomes}
        kinds["success"] = ""
        rows = [
            {"outcome": o, "failure": kinds[o], "rows": n, "share": f"{n / summary['rows']:.1%}"}
            for o, n in outcomes
        ]
        examples = summary["data"]["examples"]
        reasons = sorted(examples, key=lambda reason: -summary["outcomes"].get(reason, 0))
        failed = [{"outcome": reason, "row": n} for reason in reasons for n in examples[reason]]
        facts = {name: summary[name] for name in ("rows", "images", "shards")}
        if "dropped" in summary:
            facts["rows that source.where drops"] = summary["dropped"]
        panels: list[Panel] = [Facts("Download", facts), Table("Outcomes", rows, bars="rows")]
        if failed:
            panels.append(Table("Examples of failed rows", failed))
        panels += _data_panels(summary)
        tars = [artifact.url(file.path) for file in artifact.files if file.path.endswith(".tar")]
        if pictures := _thumbnails(tars):
            grid = picture_grid(pictures, len(pictures), GRID[0], gap=0)
            panels.append(PicturePanel("Some of the pictures", to_png(grid)))
        return panels


def _data_panels(summary: dict[str, Any]) -> list[Panel]:
    """Duplicates, captions, sizes and hosts."""
    data = summary["data"]
    images = max(summary["images"], 1)
    texts = {
        "pictures without a caption": data["uncaptioned"]["rows"],
        "captions that are no UTF-8": data["illegible"]["rows"],
    }
    bins: Counter[int] = Counter()
    for length, count in data["caption_lengths"].items():
        bins[int(length) // BIN * BIN] += count
    lengths = [{"characters from": length, "pictures": bins[length]} for length in sorted(bins)]
    facts = {
        "fetched": f"{data['bytes'] / 1e9:,.3f} GB",
        "pictures with the bytes of another": f"{data['duplicates']:.2%}",
        "pictures below image_size": f"{data['undersized'] / images:.2%}",
        **{text: f"{n:,}" for text, n in texts.items() if n},
    }
    return [
        Facts("Data", facts),
        Table("Caption lengths", lengths, bars="pictures"),
        Table("Hosts with the most failures", data["failing_hosts"], bars="failed"),
        Table("Hosts that took the longest", data["slowest_hosts"]),
    ]


def _thumbnails(tars: list[str]) -> list[Image.Image]:
    """The first pictures of the shards, padded to squares. A shard may have none."""
    thumbnails = []
    for sample in islice(chain.from_iterable(map(read_tar, tars)), math.prod(GRID)):
        with Image.open(BytesIO(sample.image)) as picture:
            whole = picture.convert("RGB")
        scale = THUMBNAIL / max(whole.size)
        width, height = (max(1, round(side * scale)) for side in whole.size)
        thumbnail = whole.resize((width, height), Image.Resampling.BICUBIC)
        thumbnails.append(ImageOps.pad(thumbnail, (THUMBNAIL, THUMBNAIL), color="white"))
    return thumbnails
