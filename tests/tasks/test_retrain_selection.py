"""The samples of a retraining: all new ones, and a share of the champion's."""

from pathlib import Path
from typing import Any

import pytest

from artifacts.artifact_key import KeyParts
from artifacts.latent_shards import INFO, open_latents
from artifacts.store import Artifact, Store
from configs.load_and_extend_recipe import load_recipe
from configs.settings.holdout_divergence_profile_wandb import Profile
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from tasks.encode.latent_keys import STAGE
from tasks.retrain import continue_training, select_new_and_replayed

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
    recipe = load_recipe("digits", {"retrain.replay": share})
    old, every = latents(store, OLD, "old"), latents(store, [*OLD, *NEW], "every")
    assert select_new_and_replayed.new_samples(every, old) == 36
    assert select_new_and_replayed.new_samples(old, old) == 0
    parts = select_new_and_replayed.key_parts(recipe, every, old, champion)
    with store.lock(STAGE, parts.key) as lock:
        draft = store.draft(parts, lock)
        summary = select_new_and_replayed.build(recipe, every, old, champion, draft)
        return draft.commit(summary, {}), recipe


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


def test_each_champion_has_a_replay_of_its_own(store: Store) -> None:
    first, again, other = (shards(select(store, 0.5, c)[0]) for c in ("c", "c", "d"))
    assert first == again != other


def test_steps_are_proportional_to_the_samples_up_to_a_limit(store: Store) -> None:
    selection, recipe = select(store, 0.5)
    train = continue_training.recipe_of(recipe, selection).train
    assert (train.steps, train.epochs) == (23, None)  # 10 epochs of 72 samples, 32 a batch
    assert (recipe.train.lr_warmup_steps, train.lr_warmup_steps) == (20, 2)
    limited = {"max_steps": 7, "learning_rate": 1e-4, "epochs": 30.0}
    changed = recipe.model_copy(update={"retrain": recipe.retrain.model_copy(update=limited)})
    train = continue_training.recipe_of(changed, selection).train
    assert (train.steps, train.learning_rate) == (7, 1e-4)
    assert train.global_batch_size == recipe.train.global_batch_size
    traced = changed.train.model_copy(update={"profile": Profile(start=train.steps, steps=1)})
    traced = continue_training.recipe_of(changed.model_copy(update={"train": traced}), selection)
    assert Train(**traced.train.model_dump()).steps == train.steps, "without the trace"
