"""The describe stage: key, build, checks and panels of the descriptions of pictures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from uuid import uuid4

import numpy as np

from artifacts.store import Artifact, Draft, Shard, Store
from configs.errors import Failed
from configs.settings.describe import Describe
from configs.settings.recipe import Recipe
from tasks.beam.workers import REPORTS, Workers, beam_options, quiet_import, workers_of
from tasks.build_or_reuse import Stage
from tasks.code_version import runtime_facts, versions
from tasks.describe.describers import Spec, column_name, kind_of, specs_of
from tasks.describe.tables import NAMED, STAGE, VERSION, EarlierTables, table_key
from tasks.describe.worker import DescribingPlan, describe_request
from tasks.devices.shards import ShardTask
from tasks.hosts.choose import Hosts
from tasks.panels import Facts, Panel, Table
from tasks.progress import Report

#: Bars of a histogram.
BARS = 10


@dataclass(frozen=True)
class DescribeStage(Stage):
    """Values of each picture, as tables of the image shards."""

    recipe: Recipe
    images: Artifact

    name = STAGE
    version = VERSION

    @property
    def chosen(self) -> Describe:
        """The section of the recipe."""
        assert self.recipe.describe is not None
        return self.recipe.describe

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Name -> describer; remote models are fetched. Raises Refused or Away."""
        return specs_of(self.chosen, self.recipe.download.max_pixels)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the descriptions."""
        return self.chosen.key_settings()

    @property
    def inputs(self) -> dict[str, str]:
        """The pictures and the describers. Raises Refused or Away."""
        named = {f"{NAMED}{name}": spec.digest for name, spec in self.specs.items()}
        return {"images": self.images.digest, **named}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The pictures."""
        return {"images": self.images}

    def build(self, draft: Draft, progress: Report) -> dict[str, Any]:
        """Describe the pictures that a describer has not described, and add all tables.

        Raises:
            Refused: a model is invalid.
            Failed: more than `describe.max_bad` of the pictures are bad for a describer.
        """
        shards, described = self.describe_missing(draft.store, f"{draft.path}/{REPORTS}", progress)
        summary = self._summarise(shards, described)
        self.check(summary)
        for shard in shards:
            meta = {name: shard.meta[name] for name in ("tar", "describer")}
            draft.add_shard(Shard(shard.key, shard.files, meta))
        return summary | {"run": runtime_facts("torch")}

    def describe_missing(
        self, store: Store, reports: str, progress: Report
    ) -> tuple[list[Shard], Counter[str]]:
        """The tables of all image shards and describers; those that the store lacks are computed.

        Several flows may do so at once: each table is computed by one of them.

        Args:
            reports: folder of the workers' reports, for this flow alone.

        Returns:
            The tables, and the digest of a describer -> pictures that it has described now.

        Raises:
            Refused: a model is invalid.
            Failed: there is no image shard.
        """
        tars = {e.sha256: e for e in self.images.files if e.path.endswith(".tar")}
        if not tars:
            raise Failed("describe: the images artifact has no image shard")
        specs = {spec.digest: spec for spec in self.specs.values()}
        keys = {(tar, digest): table_key(tar, digest) for tar in tars for digest in specs}
        committed = store.committed_shards(STAGE, keys.values())
        shards = {
            place: shard for place, shard in zip(keys, committed, strict=True) if shard is not None
        }
        described = Counter[str]()
        missing = {place: key for place, key in keys.items() if place not in shards}
        if missing:
            beside = self._earlier(store, specs, {tar for tar, _ in missing})
            # Describers of embeddings read the tables of others.
            for of in (False, True):
                chosen = {d: spec for d, spec in specs.items() if (spec.of is not None) == of}
                requests = defaultdict[tuple[str, str | None], dict[str, Any]](dict)
                for (tar, digest), key in missing.items():
                    if digest in chosen:
                        asked = {"key": key, "earlier": beside(tar, digest)}
                        requests[tar, chosen[digest].of][digest] = asked
                made = self._commit(store, reports, progress, chosen, requests, shards)
                for shard in made:
                    shards[shard.meta["tar"], shard.meta["describer"]] = shard
                    described[shard.meta["describer"]] += shard.meta["described"]
        return [shards[place] for place in keys], described

    def _earlier(
        self, store: Store, specs: Mapping[str, Spec], tars: set[str]
    ) -> Callable[[str, str], list[tuple[str, str]]]:
        """A call that gives the earlier tables with pictures of an image shard, for a describer."""
        present = {e.sha256 for e in self.images.files if e.path.endswith(".tar")}
        earlier = EarlierTables.find(store, present, specs)
        if earlier is None:
            return lambda tar, digest: []
        beside = earlier.beside(self.images, tars)
        return lambda tar, digest: earlier.places(beside.get(tar, ()), digest)

    def _commit(
        self,
        store: Store,
        reports: str,
        progress: Report,
        specs: Mapping[str, Spec],
        requests: Mapping[tuple[str, str | None], Mapping[str, Any]],
        shards: Mapping[tuple[str, str], Shard],
    ) -> list[Shard]:
        """Compute tables: (tar, describer whose embeddings are read) -> describer -> request."""
        if not requests:
            return []
        # Beam takes seconds to import, which a reused artifact does not need.
        with quiet_import():
            from tasks.devices.commit_shards import CommitShards, commit_shards

        tars = {e.sha256: e for e in self.images.files if e.path.endswith(".tar")}
        tasks = []
        for (tar, of), tables in requests.items():
            if of is None:
                place = (self.images.url(tars[tar].path), tar)
            else:
                [entry] = shards[tar, of].files
                place = (store.shard_url(STAGE, entry.path), entry.sha256)
            request = describe_request(*place, tar, tables, of=of is not None)
            keys = tuple(asked["key"] for asked in tables.values())
            tasks.append(ShardTask(keys, request, tars[tar].meta["samples"]))
        used = {digest for tables in requests.values() for digest in tables}
        options = beam_options(self.recipe, STAGE)
        is_remote = workers_of(options) is Workers.REMOTE
        hosts = Hosts.of(self.recipe, STAGE)
        copies = is_remote or hosts is not None
        opened = {d: specs[d].put(store) if copies else specs[d] for d in sorted(used)}
        max_pixels = self.recipe.download.max_pixels
        plan = DescribingPlan(opened, max_pixels, self.chosen.batch_size, self.chosen.device)
        dofn = CommitShards(store.url, reports, plan, self.chosen.processes)
        return commit_shards(tasks, store, dofn, options, progress, hosts)

    def _summarise(self, shards: Sequence[Shard], described: Mapping[str, int]) -> dict[str, Any]:
        """Counts over all tables, and the histogram of each number."""
        by_digest = defaultdict[str, list[Shard]](list)
        for shard in shards:
            by_digest[shard.meta["describer"]].append(shard)
        bad: dict[str, dict[str, int]] = {}
        histograms: dict[str, list[list[float]]] = {}
        values: dict[str, dict[str, str]] = {}
        for name, spec in self.specs.items():
            own = by_digest[spec.digest]
            reasons = sum((Counter(shard.meta["bad_reasons"]) for shard in own), Counter())
            bad[name] = dict(sorted(reasons.items()))
            values[name] = {column_name(name, v): v for v in kind_of(spec).values(spec)}
            for column, value in values[name].items():
                if bars := histogram([s.meta["quantiles"].get(value, []) for s in own]):
                    histograms[column] = bars
        pictures = {shard.meta["tar"]: shard.meta["samples"] for shard in shards}
        return {
            "pictures": sum(pictures.values()),
            "described": {name: described[spec.digest] for name, spec in self.specs.items()},
            "bad": bad,
            "values": values,
            "histograms": histograms,
            "tables": len(shards),
            "bytes": sum(entry.size for shard in shards for entry in shard.files),
        }

    def check(self, summary: dict[str, Any]) -> None:
        """Raise Failed for too many pictures that a describer could not read."""
        max_bad = self.chosen.max_bad
        for name, reasons in summary["bad"].items():
            bad = sum(reasons.values())
            if bad > max_bad * summary["pictures"]:
                words = ", ".join(f"{reason}: {n}" for reason, n in reasons.items())
                raise Failed(
                    f"describe: {name} has no values of {bad} of {summary['pictures']} pictures "
                    f"({words}), more than describe.max_bad ({max_bad:g}) allows"
                )

    def helper(self, store: Store, progress: Report) -> Callable[[], object] | None:
        """A call that describes shards beside another host's build; None: a cluster does."""
        if self.recipe.hosts_of(STAGE) is not None:
            return None
        reports = f"{store.root}/{self.name}/{self.parts.key}/{REPORTS}-{uuid4().hex}"
        return partial(self.describe_missing, store, reports, progress)

    def versions(self) -> Mapping[str, str]:
        """The code, and the packages that describe."""
        return versions("torch")

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """Counts, the rate, and a histogram of each number."""
        summary = artifact.summary
        facts = {name: summary[name] for name in ("pictures", "tables", "bytes")}
        rows = [
            {"describer": name, "described now": count, "bad": sum(summary["bad"][name].values())}
            for name, count in summary["described"].items()
        ]
        seconds = artifact.manifest["run"].get("seconds")
        if seconds and any(summary["described"].values()):
            facts["pictures per second"] = round(max(summary["described"].values()) / seconds, 1)
        for name, reasons in summary["bad"].items():
            facts |= {f"bad: {name}: {reason}": count for reason, count in reasons.items()}
        bars = [
            Table(column, [{"from": low, "share in %": share} for low, share in bars], "share in %")
            for column, bars in summary["histograms"].items()
        ]
        return [Facts("Described", facts), Table("Describers", rows), *bars]


def histogram(quantiles: Sequence[Sequence[float]]) -> list[list[float]]:
    """[lowest value, share in %] of each bar, from the quantiles of many tables."""
    points = [value for some in quantiles for value in some]
    if not points:
        return []
    counts, edges = np.histogram(points, BARS)
    shares = 100 * counts / len(points)
    return [
        [float(f"{low:.4g}"), round(float(share), 1)]
        for low, share in zip(edges[:-1], shares, strict=True)
    ]
