"""The encode stage: key, build, checks and panels of the latents artifact."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

from artifacts.latent_shards import (
    BAD_REFERENCE,
    HELD_OUT,
    INFO,
    LEFT_OUT,
    NOT_SELECTED,
    LeftOut,
    encode_left_out,
)
from artifacts.records import digest_json
from artifacts.references import INDEX, PROMPT_INDEX
from artifacts.store import Artifact, Draft, Shard, Store
from configs.errors import Failed
from configs.settings.recipe import Recipe
from runtimes.data.loader import TOKEN_STEP, padded_rows
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob
from tasks.beam.workers import REPORTS, Workers, beam_options, quiet_import, workers_of
from tasks.build_or_reuse import Stage
from tasks.code_version import runtime_facts, versions
from tasks.cut_captions import cut_facts, cuts_of, tell_cuts
from tasks.devices.shards import ShardTask
from tasks.encode import crop_to_bucket
from tasks.encode.encoders import EncodingPlan, encode_request, put_encoders
from tasks.encode.near_duplicates import (
    Thumbnails,
    copies_facts,
    copies_of_held_out,
    thumbnail_shards,
)
from tasks.encode.parts import ShardPart, held_out_order, not_selected, parts_of
from tasks.encode.prompts import EncodedPrompts, PromptPart, PromptSettings
from tasks.encode.references import (
    EncodedReferences,
    OfTargets,
    ReferencePart,
    ReferenceSettings,
    count_bad,
    meta_of,
    pictures_of,
    without,
)
from tasks.hosts.choose import Hosts
from tasks.panels import Facts, Panel, Table
from tasks.pictures import Pictures, PictureShard
from tasks.progress import Report

log = logging.getLogger("kiln")
#: A rule of thumb: metrics against fewer held-out pictures have wide intervals.
FEW_HELD_OUT = 20


@dataclass(frozen=True)
class EncodeStage(Stage):
    """Pictures and captions, as latent shards."""

    recipe: Recipe
    images: Artifact
    base: Base
    #: Those with the held-out pictures of a champion's evaluation; None without a champion.
    compared: Pictures | None = None
    selected: Artifact | None = None  # None: all pictures
    captions: Artifact | None = None  # None: the source's
    references: Artifact | None = None  # which target has which; None: none has any

    name = crop_to_bucket.STAGE
    version = crop_to_bucket.VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the latents."""
        return crop_to_bucket.settings_for_key(self.recipe)

    @property
    def inputs(self) -> dict[str, str]:
        """The pictures and the encoders. Raises Refused."""
        inputs = {name: artifact.digest for name, artifact in self.parents.items()}
        if self.compared is not None:
            inputs["compared"] = self.compared.images.digest
            if self.compared.digest is not None:
                inputs["compared_choice"] = self.compared.digest
        if self.references is not None:
            inputs["reference_settings"] = self._reference_settings.digest(self.base)
        return {**inputs, "encoders": self.base.digest_encoders()}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The pictures, their selection, captions and references."""
        chosen = {"selected": self.selected, "captions": self.captions}
        chosen["references"] = self.references
        there = {name: artifact for name, artifact in chosen.items() if artifact is not None}
        return {"images": self.images, **there}

    @cached_property
    def pictures(self) -> Pictures:
        """What is encoded."""
        return Pictures(self.images, self.selected, self.captions)

    @property
    def _reference_settings(self) -> ReferenceSettings:
        return ReferenceSettings.of(self.recipe, self.base)

    @cached_property
    def rule(self) -> dict[str, Any] | None:
        """Which captions of the tables are encoded; None without tables."""
        from tasks.caption.tables import Rule

        return None if self.captions is None else asdict(Rule.read(self.captions))

    def build(self, draft: Draft, progress: Report) -> dict[str, Any]:
        """Encode the image shards that have no latent shard, and add all latent shards.

        Raises:
            Refused: the model or the settings are invalid; nothing was encoded.
            Failed: more than `encode.max_bad` of the samples are bad, or no sample is left.
        """
        base = self.base
        store = draft.store
        parts = self._parts(store)
        if not parts:
            raise Failed("encode: the images artifact has no image shard")
        references = self._encoded_references(store)
        missing = [] if references is None else references.parts
        reports = f"{draft.path}/{REPORTS}"
        encoded = self.encode_missing(store, reports, progress, parts, missing)
        shards, pictures = encoded[: len(parts)], encoded[len(parts) :]
        unselected = not_selected(store, self.pictures, parts, shards)
        bad: LeftOut = {}
        of_targets: OfTargets = {}
        if references is not None:
            pictures = [*references.encoded.before, *pictures]
            indexed = references.index(pictures, shards, parts)
            draft.write(INDEX, indexed.data)
            bad, of_targets = indexed.bad, indexed.of_targets
        prompts: list[Shard] = []
        if base.family.sees_references:
            encoded_prompts = self._encoded_prompts(store, shards, of_targets)
            new = self.encode_missing(store, reports, progress, prompts=encoded_prompts.parts)
            prompts = [*encoded_prompts.encoded.before, *new]
            index, lost, prompt_count = encoded_prompts.index(prompts)
            draft.write(PROMPT_INDEX, index)
            bad = merged(bad, lost)
        bad = without(bad, unselected)
        dropped = merged(bad, unselected)
        summary = summarise(shards, base.encoders["vae_scale_factor"], base.caption_limits, dropped)
        if references is not None:
            summary["references"] = indexed.distinct
        if base.family.sees_references:
            summary["prompts"] = prompt_count
        if bad_count := count_bad(bad):
            summary["bad"][BAD_REFERENCE] = bad_count
        searches = self.recipe.encode.holdout and self.recipe.encode.leave_out_copies
        copies = self._copies(draft, shards, parts, progress) if searches else {}
        if left_out := merged(copies, dropped):
            draft.write(LEFT_OUT, encode_left_out(left_out))
        if len(self.parents) > 1:
            order = held_out_order(store, shards, dropped)
            draft.write(HELD_OUT, json.dumps(order).encode())
        summary["copies_left_out"] = sum(map(count_copies, left_out.values()))
        check_samples(summary, self.recipe.encode.max_bad)
        self._tell_uncaptioned(summary)
        self._add_targets(draft, shards, parts, left_out, unselected)
        for shard in pictures:
            alike = self._reference_settings.digest(base)
            draft.add_shard(replace(shard, meta=meta_of(shard, alike)))
        for shard in prompts:
            meta = {"alike": PromptSettings.of(self.recipe).digest(base)}
            draft.add_shard(replace(shard, meta=meta))
        info = self._info([*shards, *prompts])
        draft.write(INFO, json.dumps(info, indent=1, sort_keys=True).encode())
        return summary | {"run": runtime_facts(self.recipe.runtime)}

    def _tell_uncaptioned(self, summary: dict[str, Any]) -> None:
        if not summary["uncaptioned"]:
            return
        remedy = "check source.caption_column or the .txt files beside them"
        if self.captions is not None:
            remedy = "look at the captions that are bad, or set caption.on_bad to drop"
        log.warning(
            "encode: %d of %d pictures have no caption and train unconditionally; if this is "
            "wrong, %s",
            *(summary["uncaptioned"], summary["samples"], remedy),
        )

    def _add_targets(
        self,
        draft: Draft,
        shards: Sequence[Shard],
        parts: Sequence[ShardPart],
        left_out: LeftOut,
        unselected: LeftOut,
    ) -> None:
        """Add the latent shards of the pictures, with their counts."""
        for shard, part in zip(shards, parts, strict=True):
            meta = {"groups": shard.meta["groups"]}
            if len(self.parents) > 1:
                meta |= part.facts
            if shard.key in left_out:
                meta["copies_left_out"] = count_copies(left_out[shard.key])
            if shard.key in unselected:
                meta["not_selected"] = count_training(unselected[shard.key])
            draft.add_shard(replace(shard, meta=meta))

    def _info(self, captioned: Sequence[Shard]) -> dict[str, Any]:
        """What a reader of the latents must know, by the shards with captions."""
        base = self.base
        info = dict(base.encoders)
        settings = crop_to_bucket.TransformSettings.of(self.recipe)
        longest = [shard.meta["longest"] for shard in captioned if "longest" in shard.meta]
        if longest:  # lengths vary: training pads captions to one shape for a whole run
            info["tokens"] = padded_rows(max(longest), TOKEN_STEP)
        info |= {"masks": settings.masks, "scored": settings.scored}
        if settings.control and base.family.control is not None:
            info["control"] = base.family.control
        if self.recipe.encode.text_dtype is not None:
            info["text_dtype"] = self.recipe.encode.text_dtype
        return info

    def _encoded_references(self, store: Store) -> EncodedReferences | None:
        if self.references is None:
            return None
        alike = self._reference_settings.digest(self.base)
        return EncodedReferences(store, self.references, alike)

    def _encoded_prompts(
        self, store: Store, shards: Sequence[Shard], of_targets: OfTargets
    ) -> EncodedPrompts:
        """The prompts of latent shards.

        Args:
            of_targets: the references of their samples.
        """
        pictures = None if self.references is None else pictures_of(self.references)
        alike = PromptSettings.of(self.recipe).digest(self.base)
        return EncodedPrompts(store, pictures, alike, shards, of_targets)

    def _copies(
        self, draft: Draft, shards: Sequence[Shard], parts: Sequence[ShardPart], progress: Report
    ) -> LeftOut:
        """The copies of held-out pictures, by thumbnail shards that are named in the draft."""
        store = draft.store
        max_pixels = self.recipe.download.max_pixels
        own = [Thumbnails(part.pictures, max_pixels) for part in parts]
        keys = {one.key for one in own}
        before = () if self.compared is None else self.compared.shards
        others = {one.key: one for one in (Thumbnails(shard, max_pixels) for shard in before)}
        compared = thumbnail_shards(store, [others[key] for key in others.keys() - keys])
        thumbnails = thumbnail_shards(store, own)
        for shard in thumbnails:
            draft.add_shard(shard)
        kept = [self.pictures.kept_ids(part.pictures) for part in parts]
        holdout = self.recipe.encode.holdout
        return copies_of_held_out(store, shards, thumbnails, kept, compared, holdout, progress)

    def encode_missing(
        self,
        store: Store,
        reports: str,
        progress: Report,
        parts: Sequence[ShardPart] = (),
        references: Sequence[ReferencePart] = (),
        prompts: Sequence[PromptPart] = (),
    ) -> list[Shard]:
        """The shard of each part, then of `references` and `prompts`; missing ones are encoded.

        Several flows may do so at once: each shard is encoded by one of them.

        Args:
            reports: folder of the workers' reports, for this flow alone.

        Raises:
            Refused: the model or the settings are invalid; nothing was encoded.
        """
        # Beam takes seconds to import, which a reused artifact does not need.
        with quiet_import():
            from tasks.devices.commit_shards import CommitShards, commit_shards

        chosen = self.recipe.encode
        settings = crop_to_bucket.TransformSettings.of(self.recipe)
        crop_to_bucket.bucket_sizes(settings, self.base.encoders["size_step"])
        if not (parts or references or prompts):
            return []
        # Prompts that see references are encoded after these, by a process of their own.
        text = chosen.text if prompts or not self.base.family.sees_references else "token_ids"
        job = EncodeJob(
            runtime=self.recipe.runtime,
            **self.base.job_fields,
            batch_size=chosen.batch_size,
            device=chosen.device,
            dtype=chosen.dtype,
            text=text,
            text_precision=chosen.text_precision,
            offload=chosen.offload,
            compiled=store.compiled_url,
        )
        options = beam_options(self.recipe, "encode")
        is_remote = workers_of(options) is Workers.REMOTE
        hosts = Hosts.of(self.recipe, crop_to_bucket.STAGE)
        copy = put_encoders(store, self.base) if is_remote or hosts else None
        plan = EncodingPlan(
            job,
            settings,
            copy=copy,
            rule=self.rule,
            captions=chosen.captions,
            references=self._reference_settings if references else None,
        )
        dofn = CommitShards(store.url, reports, plan, chosen.processes)
        tasks = []
        for part in parts:
            thumbnails = Thumbnails(part.pictures, settings.max_pixels)
            request = encode_request(
                part.key, part.pictures, thumbnails.key if settings.holdout else None
            )
            tasks.append(ShardTask((part.key,), request, int(part.pictures.mask.sum())))
        for reference in references:
            count = int(reference.pictures.mask.sum())
            tasks.append(ShardTask((reference.key,), reference.request, count))
        for prompt in prompts:
            tasks.append(ShardTask((prompt.key,), prompt.request, len(prompt.prompts)))
        return commit_shards(tasks, store, dofn, options, progress, hosts)

    def _parts(self, store: Store) -> list[ShardPart]:
        """The latent shards of all pictures."""
        settings = crop_to_bucket.TransformSettings.of(self.recipe)
        encoders = self.base.digest_encoders()
        caption = {}
        if self.captions is not None:
            checks = self.captions.manifest["settings"]["checks"]
            caption = {"rule": self.rule, "checks": checks}

        def new(pictures: PictureShard) -> ShardPart:
            captioner = captions = None
            if pictures.captions is not None:
                captioner = digest_json({"prompts": pictures.captions["prompts"], **caption})
                captions = {"captioner": captioner, "table": pictures.captions["sha256"]}
            about = (pictures.sha256, encoders, self.recipe.encode, settings)
            key = crop_to_bucket.shard_key(*about, pictures.rows, captions)
            return ShardPart(key, pictures, captioner)

        return parts_of(store, self.pictures, self.parts, new)

    def check(self, summary: dict[str, Any]) -> None:
        """Raise Failed for too many bad samples; tell what few held-out pictures or copies mean."""
        settings = self.recipe.encode
        check_samples(summary, settings.max_bad)
        if 0 < summary["holdout"] < FEW_HELD_OUT:
            log.warning(
                "encode: fewer than %d held-out pictures (%d): a gate on them can hardly tell "
                "models apart: raise encode.holdout (%g) or add pictures",
                *(FEW_HELD_OUT, summary["holdout"], settings.holdout),
            )
        if copies := summary["copies_left_out"]:
            log.info("encode: %s near-duplicates of held-out pictures are not trained on", copies)
        mask = getattr(self.recipe.source, "mask", None)
        if mask is not None and "masked" not in summary:
            words = "encode: no picture has a mask (source.mask: %s): all are trained on as a whole"
            log.warning(words, mask)
        total = sum(summary["caption_tokens"].values())
        tell_cuts(crop_to_bucket.STAGE, summary["cut"], total, "captions")

    def helper(self, store: Store, progress: Report) -> Callable[[], object] | None:
        """A call that encodes shards beside another host's build; None: a cluster encodes them."""
        if self.recipe.hosts_of(crop_to_bucket.STAGE) is not None:
            return None
        reports = f"{store.root}/{self.name}/{self.parts.key}/{REPORTS}-{uuid4().hex}"
        return lambda: self.encode_missing(store, reports, progress, self._parts(store))

    def versions(self) -> Mapping[str, str]:
        """The code, and the packages that encode."""
        return versions(self.recipe.runtime)

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """Counts, buckets and caption lengths."""
        summary = artifact.summary
        counts = ("samples", "holdout", "captions", "uncaptioned", "truncated", "shards", "bytes")
        facts = {name: summary[name] for name in counts} | cut_facts(summary["cut"])
        if "masked" in summary:
            facts["pictures with a mask"] = summary["masked"]
        if "references" in summary:
            facts["distinct references"] = summary["references"]
        facts |= copies_facts(artifact.manifest["settings"], summary["copies_left_out"])
        facts |= {f"bad: {reason}": n for reason, n in summary["bad"].items()}
        buckets = [{"height x width": k, "samples": n} for k, n in summary["buckets"].items()]
        lengths = [{"tokens from": k, "captions": n} for k, n in summary["caption_tokens"].items()]
        return [
            Facts("Encoded", facts),
            Table("Buckets", buckets, bars="samples"),
            Table("Caption lengths", lengths, bars="captions"),
        ]


def merged(copies: LeftOut, dropped: LeftOut) -> LeftOut:
    """What is left out for either reason; of rows with both, they are not selected."""
    left_out: LeftOut = {}
    for shards in (copies, dropped):
        for key, groups in shards.items():
            for group, rows in groups.items():
                left_out.setdefault(key, {}).setdefault(group, {}).update(rows)
    return left_out


def count_copies(groups: Mapping[str, Mapping[int, str]]) -> int:
    """Near-duplicates of held-out pictures among what is left out of a shard."""
    reasons = (NOT_SELECTED, BAD_REFERENCE)
    return sum(why not in reasons for rows in groups.values() for why in rows.values())


def count_training(groups: Mapping[str, Mapping[int, str]]) -> int:
    """Training samples among what is left out of a shard."""
    return sum(len(rows) for group, rows in groups.items() if group.startswith("train/"))


def summarise(
    shards: list[Shard], factor: int, limits: dict[str, int], dropped: LeftOut
) -> dict[str, Any]:
    """Counts over all shards. `captions` are distinct within their shard, not over all.

    Args:
        dropped: samples that are not selected, which do not count as samples.
        factor: pixels per latent pixel.
        limits: tokens of a caption that each text encoder reads; the last encoder's is the longest.
    """
    groups: Counter[str] = Counter()
    buckets: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    tokens: Counter[int] = Counter()
    cut: Counter[str] = Counter()
    for shard in shards:
        groups.update(shard.meta["groups"])
        groups.subtract({name: len(rows) for name, rows in dropped.get(shard.key, {}).items()})
        bad.update(shard.meta["bad_reasons"])
        tokens.update({int(k): n for k, n in shard.meta["caption_tokens"].items()})
        cut.update(shard.meta["cut"])
    groups = +groups
    for group, count in groups.items():
        height, width = (int(side) * factor for side in group.partition("/")[2].split("x"))
        buckets[f"{height}x{width}"] += count
    holdout = sum(n for group, n in groups.items() if group.startswith("holdout/"))
    masked = sum(shard.meta.get("masked", 0) for shard in shards)
    return {
        "samples": groups.total(),
        "holdout": holdout,
        "groups": dict(sorted(groups.items())),
        "buckets": dict(buckets.most_common()),
        "captions": sum(shard.meta["captions"] for shard in shards),
        "caption_tokens": {str(lowest): n for lowest, n in sorted(tokens.items())},
        "uncaptioned": sum(shard.meta["uncaptioned"] for shard in shards),
        **({"masked": masked} if masked else {}),
        "cut": cuts_of(cut, limits),
        "truncated": sum(shard.meta["truncated"] for shard in shards),
        "bad": dict(sorted(bad.items())),
        "shards": len(shards),
        "bytes": sum(entry.size for shard in shards for entry in shard.files),
    }


def check_samples(summary: dict[str, Any], max_bad: float) -> None:
    """Raise Failed for too many bad samples; committed shards stay for the next run."""
    bad = sum(summary["bad"].values())
    reasons = ", ".join(f"{reason}: {n}" for reason, n in summary["bad"].items()) or "none read"
    if summary["samples"] == 0:
        raise Failed(f"encode: no sample is left ({reasons})")
    if bad > max_bad * (bad + summary["samples"]):
        raise Failed(
            f"encode: {bad} of {bad + summary['samples']} samples are bad ({reasons}), more than "
            f"encode.max_bad ({max_bad:g}) allows; NaN latents mostly come from a VAE in half "
            "precision (encode.dtype)"
        )
    left_out = summary["copies_left_out"]
    if summary["samples"] == summary["holdout"] + left_out:
        copies = f" or near-duplicates of it ({left_out})" if left_out else ""
        raise Failed(
            f"encode: all {summary['samples']} samples are in the held-out split{copies}; add "
            "pictures or lower encode.holdout"
        )
