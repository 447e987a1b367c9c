"""Compare the source with the champion's, select a retraining's samples, and cut their shards.

A cut shard has some training samples of another, with their captions, as a shard of its own. The
selected samples are the new samples, and a replay of the champion's.

Changes of a source since the champion: rows are new or removed, shards kept or new.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts import latent_shards
from artifacts.image_shards import read_rows
from artifacts.records import Damaged, FileEntry, digest_json, read_checked
from artifacts.store import SHARDS, Artifact, Draft, Shard, Store
from configs.settings.data import Download
from configs.settings.recipe import Recipe
from runtimes.data.shard_cache import ShardFiles
from runtimes.families import family_named
from tasks.build_or_reuse import Stage
from tasks.download import shard_plan
from tasks.download.rows import shard_ends
from tasks.download.shard import STAGE as DOWNLOAD
from tasks.download.shard import shard_key
from tasks.encode.crop_to_bucket import STAGE, VERSION
from tasks.retrain.champion import Champion

Rows = dict[bytes, shard_plan.Span]  # row hash -> its place in the source
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class Changes:
    """The difference between a source and the images of the champion."""

    source: str  # sha256 (hex) over the hashes of all rows, in order
    rows: int
    new_rows: int
    removed_rows: int = 0
    rows_to_fetch: int = 0  # new rows, and those of shards that lost a row
    kept_shards: int = 0
    new_shards: int = 0


def merged_changes(by_source: Mapping[str, Changes]) -> Changes:
    """The changes of all sources of a mixture."""
    counts = [asdict(changes) for changes in by_source.values()]
    digests = {name: changes.source for name, changes in by_source.items()}
    sums = {name: sum(of[name] for of in counts) for name in counts[0] if name != "source"}
    return Changes(digest_json(digests), **sums)


@dataclass
class _Compared:
    """A source beside the champion's shards."""

    settings: Download
    kept: dict[str, shard_plan.ShardSpec]  # key -> a shard that the champion has, too
    rest: Rows  # rows outside the kept shards

    def match(self, key: str, hashes: list[bytes]) -> bool:
        """Keep an old shard with other neighbours now, if the source has all of its rows."""
        if not hashes or not all(row_hash in self.rest for row_hash in hashes):
            return False
        spec = _spec(self.settings, [(row_hash, self.rest[row_hash]) for row_hash in hashes])
        if spec.key != key:  # other settings
            return False
        self.kept[key] = spec
        return True


def plan_changes(
    settings: Download, store: Store, champion: Champion | None, plan: shard_plan.DownloadPlan
) -> tuple[shard_plan.DownloadPlan, Changes]:
    """The shards to train on, and what changed since the champion.

    The order of rows does not matter. New rows are cut into shards of their own, so that no old row
    is fetched or encoded again. The other rows of a shard that lost one are the exception. A
    repetition of an old row may count as new.

    Args:
        plan: the source's rows as they would be cut for a first training.

    Raises:
        Refused: the plan's rows cannot be read.
        Refused: the store lacks the champion's images.
    """
    if champion is None:
        count = len(plan.shards)
        fetched = Changes(plan.source_digest, plan.rows, plan.rows, 0, plan.rows, 0, count)
        return plan, fetched
    images = champion.load(store, DOWNLOAD, champion.images)
    lists = [entry for entry in images.files if entry.path.endswith(".parquet")]
    # Key of each shard -> its parquet.
    old = {at.path.removeprefix(f"../{SHARDS}/").partition(".")[0]: at for at in lists}
    kept = {spec.key: spec for spec in plan.shards if spec.key in old}
    rest: Rows = {}
    for row_hash, span in shard_plan.planned_hashes(
        spec for spec in plan.shards if spec.key not in old
    ):
        rest.setdefault(row_hash, span)  # the first among equal rows, so that spans stay in order
    compared = _Compared(settings, kept, rest)
    matched = set[bytes]()
    lost = set[bytes]()
    for key in sorted(old.keys() - kept.keys()):
        hashes = _row_hashes(images, old[key])
        (matched if compared.match(key, hashes) else lost).update(hashes)
    fetch = {row_hash: span for row_hash, span in rest.items() if row_hash not in matched}
    cut = _cut(settings, fetch)
    shards = (*compared.kept.values(), *cut)
    layout = digest_json(sorted(shard.key for shard in shards))
    count = sum(shard.rows for shard in shards)
    return replace(plan, rows=count, shards=shards, layout=layout), Changes(
        source=plan.source_digest,
        rows=plan.rows,
        new_rows=len(fetch.keys() - lost),
        removed_rows=len(lost - rest.keys()),
        rows_to_fetch=len(fetch),
        kept_shards=len(compared.kept),
        new_shards=len(cut),
    )


def _cut(settings: Download, rows: Rows) -> list[shard_plan.ShardSpec]:
    """Shards of rows, the last of which may be small."""
    prefixes = [int.from_bytes(row_hash[:4], "big") for row_hash in rows]
    ends = shard_ends(np.array(prefixes, np.uint32), settings.shard_size)
    items = list(rows.items())
    starts = [0, *ends]
    parts = [items[a:b] for a, b in zip(starts, [*ends, len(items)], strict=True)]
    return [_spec(settings, part) for part in parts if part]


def _spec(settings: Download, rows: list[tuple[bytes, shard_plan.Span]]) -> shard_plan.ShardSpec:
    key = shard_key(settings)(shard_plan.rows_digest(row_hash for row_hash, _ in rows))
    return shard_plan.ShardSpec(key, len(rows), shard_plan.join_spans(span for _, span in rows))


def _row_hashes(images: Artifact, entry: FileEntry) -> list[bytes]:
    """The hashes of a shard's rows, in order; none of a damaged shard, which is fetched again."""
    try:
        data = read_checked(images.store.fs, images.path, entry.path, entry.sha256)
    except (Damaged, FileNotFoundError) as error:
        log.warning("retrain: %s; its rows count as new", error)
        return []
    return [bytes.fromhex(row["row_hash"]) for row in read_rows(data)]


def cut_shard(
    ref: latent_shards.ShardRef,
    info: Mapping[str, Any],
    count: int,
    seed: str,
    path: Path,
    *,
    cache_bytes: int,
) -> dict[str, int]:
    """Write `count` random training samples of a shard to `path`, with their mirrored copies.

    Samples that training leaves out are not among them.

    Args:
        info: content of latents.json.
        seed: the seed of the choice.
        cache_bytes: size limit of the local cache of remote shards.

    Returns `train/<h>x<w>` -> number of samples.

    Raises:
        Refused: the shard is missing or damaged.
    """
    chosen = _choose(ref, count, seed)
    files = ShardFiles([ref], open_limit=1, cache_bytes=cache_bytes)
    try:
        shard = files[0]
        groups = {
            name: [shard.sample(name, row) for row in rows]
            for group, rows in chosen.items()
            for name in (group, latent_shards.flipped_group(group))
            if name in shard.groups
        }
        used = {
            row for samples in groups.values() for sample in samples for row in sample.caption_rows
        }
        rows = [0, *sorted(used - {0})]  # row 0 is the empty caption's
        new_row = {row: position for position, row in enumerate(rows)}
        latent_shards.write_latent_shard(
            path,
            {
                name: [_renumbered(sample, new_row) for sample in samples]
                for name, samples in groups.items()
            },
            _texts(shard, rows, info),
        )
    finally:
        files.close()
    return {group: len(rows) for group, rows in chosen.items()}


def _choose(ref: latent_shards.ShardRef, count: int, seed: str) -> dict[str, list[int]]:
    """`train/<h>x<w>` -> rows of `count` samples in reading order, from all sizes alike."""
    training = [
        (group, row)
        for group, size in ref.groups.items()
        if group.startswith("train/")
        for row in range(size)
        if row not in ref.left_out.get(group, {})
    ]
    chosen: dict[str, list[int]] = {}
    for group, row in sorted(sorted(training, key=lambda at: digest_json([seed, *at]))[:count]):
        chosen.setdefault(group, []).append(row)
    return chosen


def _renumbered(
    sample: latent_shards.LatentSample, new_row: Mapping[int, int]
) -> latent_shards.LatentSample:
    return replace(sample, caption_rows=tuple(new_row[row] for row in sample.caption_rows))


def _texts(
    shard: latent_shards.LatentShard, rows: list[int], info: Mapping[str, Any]
) -> latent_shards.Texts:
    """The encoded captions of `rows`; token ids alone if the artifact has no embeddings."""
    input_ids = np.stack([shard.input_ids(row) for row in rows])
    if info.get("text_dtype") is not None:
        return latent_shards.Texts(None, None, input_ids)
    pooled = [embeds for row in rows if (embeds := shard.pooled_prompt_embeds(row)) is not None]
    varying = family_named(info["family"]).varying_lengths
    return latent_shards.Texts(_Embeds(shard, rows), pooled or None, input_ids, varying)


class _Embeds(Sequence[NDArray[np.uint16]]):
    """Embeddings of captions, read while they are written: those of a T5 are megabytes each."""

    def __init__(self, shard: latent_shards.LatentShard, rows: list[int]) -> None:
        self._shard = shard
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._shard.prompt_embeds(self._rows[index])

    def __iter__(self) -> Iterator[NDArray[np.uint16]]:
        return map(self._shard.prompt_embeds, self._rows)


#: Increment when other samples are selected, or when a cut shard has other content.
SELECTION = 2


@dataclass(frozen=True)
class SelectionStage(Stage):
    """New samples and a replay of old samples, as latent shards."""

    recipe: Recipe
    latents: Artifact  # of all rows of the source
    old: Artifact  # latents of the champion's rows
    champion: str  # its digest

    name = STAGE
    version = VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """The share of old samples."""
        return {"replay": self.recipe.retrain.replay, "selection": SELECTION}

    @property
    def inputs(self) -> dict[str, str]:
        """All latents, the champion's, and the champion."""
        latents = {"latents": self.latents.digest, "old": self.old.digest}
        return {**latents, "champion": self.champion}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The latents of all rows."""
        return {"latents": self.latents}

    def build(self, draft: Draft, progress: object) -> dict[str, Any]:
        """Add the new shards, and old samples up to the share `retrain.replay`, to the draft.

        The old samples are whole shards, and a part of one more, without its held-out samples.

        Returns the summary: samples by group, shards, and `new` and `replayed` training samples.
        """
        share = self.recipe.retrain.replay
        known = {shard.key for shard in _shards(self.old)}
        shards = _shards(self.latents)
        latents = self.latents
        left_out = latent_shards.read_left_out(latents.store.fs, latents.path, latents.files)
        new = [shard for shard in shards if shard.key not in known]
        unchanged = [shard for shard in shards if shard.key in known and _count([shard])]
        # The old samples' share of all; at least one.
        wanted = max(1, round(_count(new) * share / (1 - share))) if share else 0
        replay, rest = _sample(unchanged, wanted, self.champion)
        if rest is not None:
            rows = left_out.get(rest.key, {})
            replay.append(self._cut(rest, rows, wanted - _count(replay), draft))
        if (replayed := _count(replay)) < wanted:
            message = (
                "retrain: replay %s: of %s old samples, the champion's unchanged shards have %s"
            )
            log.warning(message, share, f"{wanted:,}", f"{replayed:,}")
        for shard in (chosen := [*new, *replay]):
            draft.add_shard(shard)
        draft.write(latent_shards.INFO, self.latents.read(latent_shards.INFO))
        keys = {shard.key for shard in chosen}
        if stays := {key: rows for key, rows in left_out.items() if key in keys}:
            draft.write(latent_shards.LEFT_OUT, latent_shards.encode_left_out(stays))
        groups: Counter[str] = Counter()
        for shard in chosen:
            groups.update(shard.meta["groups"])
        return {
            "samples": groups.total(),
            "groups": dict(sorted(groups.items())),
            "shards": len(chosen),
            "new": _count(new),
            "replayed": _count(replay),
        }

    def _cut(
        self, shard: Shard, left_out: Mapping[str, Mapping[int, str]], count: int, draft: Draft
    ) -> Shard:
        """A shard of `count` training samples of another, without the rows `left_out`."""
        [entry] = shard.files
        url = self.latents.url(f"../{SHARDS}/{entry.path}")
        ref = latent_shards.ShardRef(url, entry.size, entry.sha256, shard.meta["groups"], left_out)
        info = json.loads(self.latents.read(latent_shards.INFO))
        seed = self.champion
        cache_bytes = self.recipe.train.cache_bytes
        with tempfile.TemporaryDirectory(prefix="kiln-replay-") as folder:
            path = Path(folder, "shard.safetensors")
            groups = cut_shard(ref, info, count, seed, path, cache_bytes=cache_bytes)
            parts = {"cut": entry.sha256, "samples": count, "seed": seed, "of": SELECTION}
            key = digest_json({**parts, "left_out": left_out})
            files = {".safetensors": str(path)}
            return draft.store.commit_shard(STAGE, key, files, {"groups": groups})


def new_samples(latents: Artifact, old: Artifact) -> int:
    """Number of training samples in the shards that the champion's latents lack."""
    known = {shard.key for shard in _shards(old)}
    return _count([shard for shard in _shards(latents) if shard.key not in known])


def _sample(shards: Sequence[Shard], wanted: int, seed: str) -> tuple[list[Shard], Shard | None]:
    """Whole shards in a random order from `seed`, and the next shard if a part of it is wanted."""
    chosen: list[Shard] = []
    for shard in sorted(shards, key=lambda shard: digest_json([seed, shard.key])):
        missing = wanted - _count(chosen)
        if _count([shard]) > missing:
            return chosen, shard if missing else None
        chosen.append(shard)
    return chosen, None


def _count(shards: list[Shard]) -> int:
    """Training samples; mirrored ones and those left out do not count."""
    groups = (shard.meta["groups"] for shard in shards)
    stored = sum(n for group in groups for name, n in group.items() if name.startswith("train/"))
    left_out = ("copies_left_out", "not_selected")
    return stored - sum(shard.meta.get(name, 0) for shard in shards for name in left_out)


def _shards(latents: Artifact) -> list[Shard]:
    """The latent shards of an artifact, in the order of their names."""
    prefix = f"../{SHARDS}/"
    entries = [entry for entry in latents.files if "groups" in entry.meta]
    named = [replace(entry, path=entry.path.removeprefix(prefix)) for entry in entries]
    return [Shard(entry.path.partition(".")[0], [entry], entry.meta) for entry in named]
