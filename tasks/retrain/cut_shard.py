"""Cut a latent shard: some of its training samples, with their captions, as a shard of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import (
    LatentSample,
    LatentShard,
    ShardRef,
    Texts,
    flipped_group,
    write_latent_shard,
)
from artifacts.records import digest_json
from runtimes.data.shard_cache import ShardFiles
from runtimes.families import family_named


def cut_shard(
    ref: ShardRef, info: Mapping[str, Any], count: int, seed: str, path: Path, *, cache_bytes: int
) -> dict[str, int]:
    """Write `count` random training samples of a shard to `path`, with their mirrored copies.

    Args:
        info: content of latents.json.
        seed: of the choice.
        cache_bytes: size limit of the local cache of remote shards.

    Returns `train/<h>x<w>` -> number of samples.

    Raises:
        WrongInput: the shard is missing or damaged.
    """
    chosen = _choose(ref.groups, count, seed)
    files = ShardFiles([ref], open_limit=1, cache_bytes=cache_bytes)
    try:
        shard = files[0]
        groups = {
            name: [shard.sample(name, row) for row in rows]
            for group, rows in chosen.items()
            for name in (group, flipped_group(group))
            if name in shard.groups
        }
        used = {row for samples in groups.values() for one in samples for row in one.caption_rows}
        rows = [0, *sorted(used - {0})]  # row 0 is the empty caption's
        new_row = {row: position for position, row in enumerate(rows)}
        write_latent_shard(
            path,
            {name: [_renumbered(one, new_row) for one in found] for name, found in groups.items()},
            _texts(shard, rows, info),
        )
    finally:
        files.close()
    return {group: len(rows) for group, rows in chosen.items()}


def _choose(groups: Mapping[str, int], count: int, seed: str) -> dict[str, list[int]]:
    """`train/<h>x<w>` -> rows of `count` samples in reading order, of all sizes alike."""
    training = [(g, row) for g, n in groups.items() if g.startswith("train/") for row in range(n)]
    chosen: dict[str, list[int]] = {}
    for group, row in sorted(sorted(training, key=lambda at: digest_json([seed, *at]))[:count]):
        chosen.setdefault(group, []).append(row)
    return chosen


def _renumbered(sample: LatentSample, new_row: Mapping[int, int]) -> LatentSample:
    return replace(sample, caption_rows=tuple(new_row[row] for row in sample.caption_rows))


def _texts(shard: LatentShard, rows: list[int], info: Mapping[str, Any]) -> Texts:
    """The encoded captions of `rows`; token ids alone if the artifact has no embeddings."""
    input_ids = np.stack([shard.input_ids(row) for row in rows])
    if info.get("text_dtype") is not None:
        return Texts(None, None, input_ids)
    pooled = [one for row in rows if (one := shard.pooled_prompt_embeds(row)) is not None]
    varying = family_named(info["family"]).varying_lengths
    return Texts(_Embeds(shard, rows), pooled or None, input_ids, varying)


class _Embeds(Sequence[NDArray[np.uint16]]):
    """Embeddings of captions, read while they are written: those of a T5 are megabytes each."""

    def __init__(self, shard: LatentShard, rows: list[int]) -> None:
        self._shard, self._rows = shard, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._shard.prompt_embeds(self._rows[index])

    def __iter__(self) -> Iterator[NDArray[np.uint16]]:
        return map(self._shard.prompt_embeds, self._rows)
