"""The artifact of a mixture: the latents of its sources as one, and what does not fit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from artifacts.latent_shards import open_latents
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Failed
from tasks.mixture import MixtureStage


def encoded(
    store: Store,
    name: str,
    shards: Sequence[str],
    *,
    ordered: bool = False,
    masked: int | None = None,
    **info: Any,
) -> Artifact:
    """Latents whose shards have three training and two held-out samples each."""
    draft = store.draft(KeyParts("encode", 1, {"name": name}, {}))
    for shard in shards:
        file = Path(store.root, shard)
        file.write_text(shard)
        meta = {"groups": {"holdout/8x8": 2, "train/8x8": 3}}
        files = {".safetensors": str(file)}
        draft.add_shard(store.commit_shard("encode", shard * 64, files, meta))
    draft.write("latents.json", json.dumps({"tokens": 77, "family": "sd", **info}).encode())
    if ordered:
        draft.write("held_out.json", json.dumps([[shards[0] * 64, "holdout/8x8", 1]]).encode())
    counts = {"samples": 5 * len(shards), "shards": len(shards)}
    return draft.commit(counts if masked is None else {**counts, "masked": masked}, {})


def mixed(store: Store, **sources: Artifact) -> Artifact:
    stage = MixtureStage("encode", sources)
    draft = store.draft(stage.parts)
    return draft.commit(stage.build(draft, lambda done, total, text: None), {})


def test_a_mixture_has_the_shards_and_held_out_samples_of_each_source(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    style = encoded(store, "style", ["c"], tokens=96, ordered=True)
    artifact = mixed(store, style=style, old=encoded(store, "old", ["a", "b"]))
    latents = open_latents(artifact.uri)
    assert [shard.source for shard in latents.shards] == ["old", "old", "style"]
    assert latents.training_by_source == {"old": 6, "style": 3}
    assert latents.info == {"tokens": 96, "family": "sd"}
    of_old = [(shard, "holdout/8x8", row) for shard in (0, 1) for row in (0, 1)]
    assert latents.held_out_order == [*of_old, (2, "holdout/8x8", 1)]
    assert artifact.summary["samples"] == 15
    assert artifact.summary["sources"]["style"] == style.summary


def test_a_source_with_masks_is_counted_beside_one_without(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    sources = {"cut": encoded(store, "cut", ["a"], masked=4), "old": encoded(store, "old", ["b"])}
    summary = mixed(store, **sources).summary
    assert (summary["samples"], summary["masked"]) == (10, 4)


def test_sources_of_other_encoders_are_no_mixture(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    flux = encoded(store, "flux", ["a"], family="flux")
    with pytest.raises(Failed, match="encode: family of sources flux and sd differ"):
        mixed(store, flux=flux, sd=encoded(store, "sd", ["b"]))
