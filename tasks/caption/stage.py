"""The caption stage: key, build, checks and panels of the captions artifact."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from PIL import Image, ImageOps

from artifacts.image_shards import read_tar
from artifacts.models import digest_model, model_files, put_model, resolve_model
from artifacts.records import digest_json
from artifacts.store import Artifact, Draft, Shard, Store
from configs.errors import Failed, naming
from configs.settings.caption import Caption
from configs.settings.recipe import Recipe
from tasks.beam.workers import REPORTS, Workers, beam_options, quiet_import, workers_of
from tasks.build_or_reuse import Stage, recent_artifacts
from tasks.caption.shard import STAGE, VERSION, CaptioningPlan, caption_request
from tasks.caption.tables import RULE, Rule, captions_to_train, read_captions, tables_of
from tasks.code_version import runtime_facts, versions
from tasks.describe.describers import Spec, specs_of
from tasks.describe.tables import EarlierTables
from tasks.describe.tables import tables_of as tables_of_describe
from tasks.devices.shards import ShardTask
from tasks.download import listed
from tasks.encode.crop_to_bucket import BadSample, decode, is_holdout
from tasks.hosts.choose import Hosts
from tasks.panels import Facts, Panel, PicturePanel, Table, picture_grid, to_png
from tasks.pictures import Pictures, PictureShard
from tasks.progress import Report

#: Earlier artifacts whose captions are used again, the newest first.
EARLIER = 3
EXAMPLES = "examples.json"
PICTURES = "examples.png"
SHOWN = 12  # examples
SIDE = 128  # of their pictures, in pixels
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class CaptionStage(Stage):
    """Captions of the chosen pictures, as tables beside the image shards."""

    recipe: Recipe
    images: Artifact
    selected: Artifact | None = None
    described: Artifact | None = None

    name = STAGE
    version = VERSION

    @property
    def chosen(self) -> Caption:
        """The section of the recipe."""
        assert self.recipe.caption is not None
        return self.recipe.caption

    @cached_property
    def model(self) -> Path | None:
        """The local folder of the model; None for an endpoint. Raises Refused."""
        if self.chosen.endpoint is not None:
            return None
        with naming("caption.model"):
            return resolve_model(self.chosen.model, revision=self.chosen.revision)

    @cached_property
    def clip(self) -> Spec | None:
        """The describer whose embeddings captions are compared with; None: none. Raises Refused."""
        if self.chosen.checks.min_likeness is None:
            return None
        assert self.recipe.describe is not None
        specs = specs_of(self.recipe.describe, self.recipe.download.max_pixels)
        return next(spec for spec in specs.values() if spec.kind == "clip")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the captions."""
        return {**self.chosen.key_settings(), "holdout": self.recipe.encode.holdout}

    @property
    def inputs(self) -> dict[str, str]:
        """The pictures, the choice of them, and the model. Raises Refused."""
        inputs = {"images": self.images.digest}
        if self.selected is not None:
            inputs["selected"] = self.selected.digest
        if self.model is not None:
            inputs["model"] = digest_model(self.model)
        if self.clip is not None:
            inputs["clip"] = self.clip.digest
        return inputs

    @property
    def parents(self) -> dict[str, Artifact]:
        """The pictures, and what chose them."""
        chosen = {"selected": self.selected, "described": self.described}
        return {"images": self.images} | {n: a for n, a in chosen.items() if a is not None}

    @cached_property
    def prompts(self) -> dict[str, str]:
        """Prompt's name -> digest of all that its captions of a picture depend on, by name."""
        chosen = self.chosen
        captioner = {"model": self.inputs.get("model"), "dtype": chosen.dtype}
        if chosen.endpoint is not None:
            captioner = {"endpoint": chosen.endpoint.model}
        common = captioner | {
            "version": VERSION,
            "max_new_tokens": chosen.max_new_tokens,
            "temperature": chosen.temperature,
            "seed": chosen.seed,
            "image_size": chosen.image_size,
            "max_pixels": self.recipe.download.max_pixels,
        }
        prompts = sorted(chosen.prompts.items())
        return {name: digest_json(common | {"prompt": prompt}) for name, prompt in prompts}

    def build(self, draft: Draft, progress: Report) -> dict[str, Any]:
        """Caption the pictures without captions, and add all tables.

        Raises:
            Refused: the model or the settings are invalid; nothing was captioned.
            Failed: more than `caption.max_bad` of the captions are bad.
            Away: no server answers.
        """
        shards = self.caption_missing(draft.store, f"{draft.path}/{REPORTS}", progress)
        for shard in shards:
            draft.add_shard(shard)
        rule = Rule.of(self.chosen)
        draft.write(RULE, rule.as_json())
        self._write_examples(draft, shards, rule)
        summary = summarise(shards) | {"prompts": self.prompts}
        self.check(summary)
        return summary | {"run": runtime_facts(CaptioningPlan.runtime)}

    def caption_missing(self, store: Store, reports: str, progress: Report) -> list[Shard]:
        """The tables of all image shards with chosen pictures; those that lack are made.

        Several flows may do so at once: each table is made by one of them.

        Args:
            reports: folder of the workers' reports, for this flow alone.

        Raises:
            Refused, Failed, Away: as `build`.
        """
        with quiet_import():
            from tasks.devices.commit_shards import CommitShards, commit_shards

        tasks = self._tasks(store)
        if not tasks:
            raise Failed("caption: no picture is chosen")
        options = beam_options(self.recipe, "caption")
        is_remote = workers_of(options) is Workers.REMOTE
        is_endpoint = self.chosen.endpoint is not None
        hosts = None if is_endpoint else Hosts.of(self.recipe, STAGE)
        copies = is_remote or hosts is not None
        plan = CaptioningPlan(
            settings=self.chosen.model_dump(mode="json"),
            prompts=self.prompts,
            max_pixels=self.recipe.download.max_pixels,
            model=None,
            clip=self.clip.put(store) if self.clip and copies else self.clip,
            device="cpu" if is_endpoint else self.chosen.device,
        )
        if is_endpoint and not is_remote:  # an engine may show what it is sent
            from tasks.caption.endpoint import key_of  # seconds to import

            plan = replace(plan, key=key_of(self.recipe.publish.name))
        if self.model is not None:
            digest = self.inputs["model"]
            url = put_model(store, digest, model_files(self.model)) if copies else None
            plan = replace(plan, model=str(self.model), model_digest=digest, model_url=url)
        processes = None if is_endpoint else self.chosen.processes
        dofn = CommitShards(store.url, reports, plan, processes)
        return commit_shards(tasks, store, dofn, options, progress, hosts)

    def _tasks(self, store: Store) -> list[ShardTask]:
        """What to caption, once for image shards with equal bytes."""
        known = self._earlier(store)
        described = {} if self.described is None else tables_of_describe(self.described)
        facts = {"stage": STAGE, "version": VERSION, "prompts": self.prompts}
        facts |= {"checks": self.settings["checks"], "clip": self.inputs.get("clip")}
        tasks = {}
        for shard in self._shards:
            key = digest_json(facts | {"tar": shard.sha256, "rows": shard.rows})
            embeddings = None
            if self.clip is not None and self.described is not None:
                table = described[shard.sha256][self.clip.digest]
                embeddings = {"url": self.described.url(table.path), "sha256": table.sha256}
            request = caption_request(key, shard, known.get(shard.sha256, ()), embeddings)
            tasks[key] = ShardTask((key,), request, int(shard.mask.sum()))
        return list(tasks.values())

    @cached_property
    def _shards(self) -> list[PictureShard]:
        """The pictures to caption.

        Held-out pictures, and all pictures with `caption.only_missing`, keep the source's captions
        where they have some.
        """
        shards = Pictures(self.images, self.selected).shards
        holdout = self.recipe.encode.holdout
        if not holdout and not self.chosen.only_missing:
            return shards

        def is_asked(sha256: str, caption: str | None) -> bool:
            keeps = self.chosen.only_missing or is_holdout(bytes.fromhex(sha256), holdout)
            return not (keeps and (caption or "").strip())

        asked = {}
        for tar, rows in listed.tables_of(self.images):
            pictures = zip(rows["sha256"].to_pylist(), rows["caption"].to_pylist(), strict=True)
            asked[tar] = np.array([is_asked(*picture) for picture in pictures], bool)
        return [shard.with_rows(shard.mask & asked[shard.sha256]) for shard in shards]

    def _earlier(self, store: Store) -> dict[str, list[dict[str, Any]]]:
        """Sha256 of an image shard -> earlier tables with captions of its pictures.

        They have captions of the same prompts, and are of the image shard, or of one that is gone.
        """
        known: dict[str, list[dict[str, Any]]] = {}
        tars = {entry.sha256 for entry in self.images.files}
        digests = set(self.prompts.values())
        alike = (
            artifact
            for artifact in recent_artifacts(store, STAGE)
            if artifact and digests & set(artifact.summary.get("prompts", {}).values())
        )
        for recent in islice(alike, EARLIER):
            if (artifact := store.load(STAGE, recent.key)) is None:
                continue
            tables = tables_of(artifact)
            for tar in tables.keys() & tars:
                known.setdefault(tar, []).append(tables[tar])
            gone = {e.meta["tar"]: {STAGE: e} for e in artifact.files if "tar" in e.meta}
            gone = {tar: entries for tar, entries in gone.items() if tar not in tars}
            beside = EarlierTables(artifact, gone).beside(self.images, tars - known.keys())
            for tar, others in beside.items():
                known.setdefault(tar, []).extend(tables[other] for other in others)
        return known

    def _write_examples(self, draft: Draft, shards: Sequence[Shard], rule: Rule) -> None:
        """Write pictures and captions of the first image shard that has some, for people."""
        tars = {shard.sha256: shard.tar for shard in self._shards}
        shard = next((shard for shard in shards if shard.meta["kept"]), shards[0])
        store = draft.store
        table = store.shard_url(STAGE, shard.files[0].path), shard.files[0].sha256
        pictures: list[Image.Image] = []
        examples: list[dict[str, Any]] = []
        samples = read_tar(tars[shard.meta["tar"]])
        for sample, captions in zip(samples, read_captions(*table), strict=False):
            if len(examples) == SHOWN:
                break
            if captions.reasons is None:
                continue
            try:
                image = decode(sample.image, self.recipe.download.max_pixels)
            except BadSample:
                continue
            pictures.append(ImageOps.pad(image, (SIDE, SIDE), color="white"))
            trained = captions_to_train(captions, sample.captions, rule)
            examples.append(
                {
                    "texts": dict(captions.texts),
                    "reasons": dict(captions.reasons),
                    "source": sample.captions[0],
                    "trained": None if trained is None else list(trained),
                }
            )
        draft.write(EXAMPLES, json.dumps(examples).encode())
        if pictures:
            page = picture_grid(pictures, len(pictures), 6, gap=4)
            draft.write(PICTURES, to_png(page))

    def check(self, summary: dict[str, Any]) -> None:
        """Raise Failed for too many bad captions."""
        bad = sum(summary["bad"].values())
        total = bad + sum(summary["good"].values())
        if bad > self.chosen.max_bad * total:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in summary["bad"].items())
            raise Failed(
                f"caption: {bad} of {total} captions are bad ({reasons}), more than "
                f"caption.max_bad ({self.chosen.max_bad:g}) allows: look at caption.checks, the "
                "prompts and the model"
            )
        if summary["without"]:
            log.info(
                "caption: each caption of %d of %d pictures is bad (caption.on_bad: %s)",
                *(summary["without"], summary["kept"], self.chosen.on_bad),
            )

    def helper(self, store: Store, progress: Report) -> Callable[[], object] | None:
        """A call that captions shards beside another host's build; None: a cluster does."""
        if self.recipe.hosts_of(STAGE) is not None:
            return None
        reports = f"{store.root}/{self.name}/{self.parts.key}/{REPORTS}-{uuid4().hex}"
        return partial(self.caption_missing, store, reports, progress)

    def versions(self) -> Mapping[str, str]:
        """The code, and the packages that caption."""
        return versions(CaptioningPlan.runtime)

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """Counts by reason, and examples with what training reads."""
        summary = artifact.summary
        facts = {"pictures": summary["kept"], "without a good caption": summary["without"]}
        good = [{"prompt": name, "good captions": n} for name, n in summary["good"].items()]
        bad = [{"bad captions": reason, "count": n} for reason, n in summary["bad"].items()]
        panels: list[Panel] = [
            Facts("Captioned", facts),
            Table("Good captions", good, bars="good captions"),
            Table("Bad captions", bad, bars="count"),
        ]
        examples = json.loads(artifact.read(EXAMPLES))
        if examples:
            rows = [{"": n + 1, **_example(example)} for n, example in enumerate(examples)]
            panels.append(PicturePanel("Examples, row by row", artifact.read(PICTURES)))
            panels.append(Table("Their captions", rows))
        return panels


def _example(example: dict[str, Any]) -> dict[str, str]:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in example["reasons"].items())
    trained = example["trained"]
    read = "left out" if trained is None else " / ".join(trained) or "(empty)"
    return {"training reads": read, "bad": reasons, "source": example["source"]}


def summarise(shards: Sequence[Shard]) -> dict[str, Any]:
    """Counts over all tables."""
    good: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for shard in shards:
        good.update(shard.meta["good"])
        bad.update(shard.meta["bad_reasons"])
    return {
        "kept": sum(shard.meta["kept"] for shard in shards),
        "good": dict(sorted(good.items())),
        "bad": dict(bad.most_common()),
        "without": sum(shard.meta["without"] for shard in shards),
        "shards": len(shards),
    }
