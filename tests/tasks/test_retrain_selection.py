"""The samples of a retraining: all new ones, and a share of the champion's."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts.latent_shards import (
    INFO,
    LEFT_OUT,
    LatentSample,
    LatentShard,
    LeftOut,
    Texts,
    encode_left_out,
    open_latents,
    write_latent_shard,
)
from artifacts.store import Artifact, KeyParts, Store
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from configs.settings.train_parts import Profile
from tasks.encode.crop_to_bucket import STAGE
from tasks.retrain import decision
from tasks.retrain import selection as retrain_selection

pytestmark = pytest.mark.slow

OLD, NEW = range(20), range(20, 24)
#: What the encode stage names of a shard in its manifest.
META: dict[str, Any] = {"groups": {"train/4x4": 9, "holdout/4x4": 1}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def latents(store: Store, numbers: Any, name: str) -> Artifact:
    """An encode artifact of 10-sample shards."""
    with store.lock(STAGE, name) as lock:
        draft = store.draft(KeyParts(STAGE, 1, {"name": name}, {}), lock)
        for number in numbers:
            path = Path(store.root) / f"shard-{number}"
            path.write_bytes(bytes([number]))
            draft.add_shard(
                store.commit_shard(STAGE, f"{number:064}", {".safetensors": str(path)}, META)
            )
        draft.write(INFO, b"{}")
        return draft.commit({}, {})


def select(store: Store, share: float, champion: str = "c") -> tuple[Artifact, Recipe]:
    old, every = latents(store, OLD, "old"), latents(store, [*OLD, *NEW], "every")
    assert retrain_selection.new_samples(every, old) == 36
    assert retrain_selection.new_samples(old, old) == 0
    return select_from(store, every, old, share, champion)


def select_from(
    store: Store, every: Artifact, old: Artifact, share: float, champion: str = "c"
) -> tuple[Artifact, Recipe]:
    recipe = load_recipe("digits", {"retrain.replay": share})
    stage = retrain_selection.SelectionStage(recipe, every, old, champion)
    with store.lock(STAGE, stage.parts.key) as lock:
        draft = store.draft(stage.parts, lock)
        return draft.commit(stage.build(draft, None), {}), recipe


def shards(selection: Artifact) -> set[int]:
    names = (shard.url.rpartition("/")[2] for shard in open_latents(selection.uri).shards)
    return {int(name.partition(".")[0]) for name in names}


@pytest.mark.parametrize(("share", "replayed"), [(0.0, 0), (0.2, 9), (0.5, 36), (0.9, 180)])
def test_the_replay_is_its_share_of_the_training_samples(
    store: Store, share: float, replayed: int
) -> None:
    selection, _ = select(store, share)
    assert set(NEW) <= shards(selection)
    assert len(shards(selection) & set(OLD)) * 9 == replayed
    assert (selection.summary["new"], selection.summary["replayed"]) == (36, replayed)
    assert selection.summary["groups"]["train/4x4"] == 36 + replayed


def test_a_replay_beyond_the_old_samples_gives_a_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kiln"):
        select(store, 0.5)
        assert not caplog.messages
        select(store, 0.9)
    assert caplog.messages == [
        "retrain: replay 0.9: of 324 old samples, the champion's unchanged shards have 180"
    ]


SIZES = {"train/4x4": 30, "train/2x8": 10, "holdout/4x4": 5}  # of an old shard
TOKEN_IDS = {"text_dtype": "float32"}


def encoded_shard(store: Store, number: int, groups: dict[str, int], *, embeds: bool) -> Any:
    """A shard of samples with mirrored copies; sample i has captions 1 + i, of i tokens, and 0."""
    rng, named = np.random.default_rng(number), {}
    for group, count in groups.items():
        shape = (4, *map(int, group.partition("/")[2].split("x")))
        for name in (group, group.replace("train/", "flipped/")):
            named[name] = [
                LatentSample(
                    mean=rng.normal(size=shape).astype(np.float32),
                    logvar=rng.normal(size=shape).astype(np.float32),
                    id=bytes([number, index]) * 16,
                    original_size=(index, 9),
                    crop_top_left=(0, 0),
                    target_size=(8, 8),
                    flip=name.startswith("flipped/"),
                    caption_rows=(1 + index, 0),
                )
                for index in range(count)
            ]
    captions = 1 + max(groups.values())
    rows = [np.full((1 + row, 6), row, np.float32) for row in range(captions)]
    ids = np.arange(captions).reshape(captions, 1, 1)
    path = Path(store.root).parent / "shard.safetensors"
    write_latent_shard(path, named, Texts(rows if embeds else None, None, ids, embeds))
    key = f"{number:064}"
    return store.commit_shard(STAGE, key, {".safetensors": str(path)}, {"groups": groups})


def encoded(
    store: Store, shards: list[Any], info: dict[str, Any], left_out: LeftOut | None = None
) -> Artifact:
    keys = "".join(shard.key[-4:] for shard in shards)
    with store.lock(STAGE, keys) as lock:
        draft = store.draft(KeyParts(STAGE, 1, {"shards": keys} | info, {}), lock)
        for shard in shards:
            rows = sum(map(len, (left_out or {}).get(shard.key, {}).values()))
            draft.add_shard(replace(shard, meta=shard.meta | {"copies_left_out": rows}))
        if left_out:
            draft.write(LEFT_OUT, encode_left_out(left_out))
        draft.write(INFO, json.dumps({"family": "qwen_image"} | info).encode())
        return draft.commit({}, {})


@pytest.mark.parametrize("info", [{}, TOKEN_IDS], ids=["embeddings", "token ids"])
@pytest.mark.parametrize(("share", "replayed"), [(0.5, 6), (0.001, 1), (0.9, 54)])
def test_few_new_samples_have_their_share_of_a_large_shard(
    store: Store, info: dict[str, Any], share: float, replayed: int
) -> None:
    embeds = not info
    shards = [encoded_shard(store, number, SIZES, embeds=embeds) for number in range(3)]
    new = encoded_shard(store, 3, {"train/4x4": 6}, embeds=embeds)
    old, every = encoded(store, shards, info), encoded(store, [*shards, new], info)
    selection, _ = select_from(store, every, old, share)
    assert (selection.summary["new"], selection.summary["replayed"]) == (6, replayed)
    known = {ref.sha256 for ref in open_latents(every.uri).shards}
    [ref] = [one for one in open_latents(selection.uri).shards if one.sha256 not in known]
    [source] = {LatentShard(ref.url).sample(group, 0).id[0] for group in ref.groups}
    cut, whole = LatentShard(ref.url), LatentShard(every.url(f"../shards/{file(shards[source])}"))
    assert ref.groups == {g: n for g, n in cut.groups.items() if g.startswith("train/")}
    assert sum(ref.groups.values()) == replayed % 40
    for group, count in cut.groups.items():
        assert count == cut.groups[group.replace("flipped/", "train/")], "mirrored copies, too"
        for index in range(count):
            sample = cut.sample(group, index)
            before = whole.sample(group, sample.id[1])
            assert np.array_equal(sample.mean, before.mean) and sample.flip == before.flip
            for row, row_before in zip(sample.caption_rows, before.caption_rows, strict=True):
                assert cut.input_ids(row) == whole.input_ids(row_before)
                if embeds:
                    assert np.array_equal(cut.prompt_embeds(row), whole.prompt_embeds(row_before))


def test_copies_of_held_out_pictures_are_neither_counted_nor_replayed(store: Store) -> None:
    """Of an old shard 12 of 40 samples are left, of the new one 4 of 6."""
    shards = [encoded_shard(store, number, SIZES, embeds=True) for number in range(3)]
    new = encoded_shard(store, 3, {"train/4x4": 6}, embeds=True)
    left_out = {shard.key: {"train/4x4": {n: f"{n}" for n in range(28)}} for shard in shards}
    left_out[new.key] = {"train/4x4": {0: "a", 5: "b"}}
    old = encoded(store, shards, {})
    every = encoded(store, [*shards, new], {}, left_out)
    for share, replayed in ((0.5, 4), (0.9, 36)):
        selection, _ = select_from(store, every, old, share)
        assert (selection.summary["new"], selection.summary["replayed"]) == (4, replayed)
        latents = open_latents(selection.uri)
        assert latents.training == 4 + replayed and {"a", "b"} <= latents.left_out
        known = {ref.sha256 for ref in open_latents(every.uri).shards}
        for ref in latents.shards:
            shard = LatentShard(ref.url)
            for row in range(ref.groups.get("train/4x4", 0) if ref.sha256 not in known else 0):
                assert shard.sample("train/4x4", row).id[1] >= 28
    without, _ = select_from(store, encoded(store, [*shards, new], {}), old, 0.5)
    assert open_latents(without.uri).left_out == set()


def file(shard: Any) -> str:
    [entry] = shard.files
    return str(entry.path)


def test_each_champion_has_a_replay_of_its_own(store: Store) -> None:
    first, again, other = (shards(select(store, 0.5, c)[0]) for c in ("c", "c", "d"))
    assert first == again != other


def test_steps_are_proportional_to_the_samples_up_to_a_limit(store: Store) -> None:
    selection, recipe = select(store, 0.5)
    train = decision.recipe_of(recipe, selection).train
    assert (train.steps, train.epochs) == (23, None)  # 10 epochs of 72 samples, 32 a batch
    assert (recipe.train.lr_warmup_steps, train.lr_warmup_steps) == (20, 2)
    limited = {"max_steps": 7, "learning_rate": 1e-4, "epochs": 30.0}
    changed = recipe.model_copy(update={"retrain": recipe.retrain.model_copy(update=limited)})
    train = decision.recipe_of(changed, selection).train
    assert (train.steps, train.learning_rate) == (7, 1e-4)
    assert train.global_batch_size == recipe.train.global_batch_size
    traced = changed.train.model_copy(update={"profile": Profile(start=train.steps, steps=1)})
    traced = decision.recipe_of(changed.model_copy(update={"train": traced}), selection)
    assert Train(**traced.train.model_dump()).steps == train.steps, "without the trace"
