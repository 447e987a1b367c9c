"""References are downloaded and encoded once by content, and targets' latents do not know them."""

from pathlib import Path

import numpy as np
import pytest
from picture_bytes import noise_picture
from referenced_data import (
    counted,
    data_set_source,
    encoded,
    made,
    recipe_of,
    target_shards,
    write_data_set,
)

from artifacts.latent_shards import Latents, LatentScale, LatentShard, from_bfloat16, open_latents
from artifacts.records import digest_bytes
from artifacts.references import SUFFIX, stored_group
from artifacts.store import Store
from configs.errors import Refused
from runtimes.data.loader import BatchReader, Holdout, Loader
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective
from tasks.download.references import REFERENCES as REFERENCES_STAGE
from tasks.encode.references import EncodedReferences
from tasks.mixture import MixtureStage

REFERENCES = [noise_picture(1000 + n, 24, 32) for n in range(5)]  # 24 wide, 32 high
TARGETS = [noise_picture(number, 16, 16) for number in range(40)]


def rows_with(references: list[bytes]) -> list[tuple[bytes, str, list[bytes]]]:
    return [
        (data, f"picture {n}", [references[n % len(references)]]) for n, data in enumerate(TARGETS)
    ]


def test_references_are_encoded_once_by_content(
    tiny_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_data_set(tmp_path / "data.parquet", rows_with(REFERENCES[:4]))
    recipe = recipe_of(tmp_path / "store", tiny_sd, data_set_source(path))
    with counted(monkeypatch) as count:
        without = encoded(recipe, references=False)
    assert count == {"16x16": 40}
    with counted(monkeypatch) as count:
        latents = encoded(recipe)
    assert count == {"32x24": 4}, "40 targets of 4 references encode 4, and no target"
    assert target_shards(latents) == target_shards(without), "the same bytes and keys"

    changed = [*REFERENCES[:3], REFERENCES[4]]
    write_data_set(path, rows_with(changed))
    with counted(monkeypatch) as count:
        latents = encoded(recipe)
    assert count == {"32x24": 1}, "one changed reference encodes one"
    assert target_shards(latents) == target_shards(without)

    write_data_set(path, rows_with(changed[::-1]))
    with counted(monkeypatch) as count:
        swapped = encoded(recipe)
    assert not count, "other references of the same targets encode nothing"
    assert swapped.digest != latents.digest
    assert open_latents(swapped.uri).training == open_latents(latents.uri).training


@pytest.mark.slow
def test_a_thousand_targets_that_share_ten_references_encode_ten(
    tiny_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [noise_picture(1000 + number, 24, 24) for number in range(11)]

    def write(references: list[bytes]) -> Path:
        rows = [
            (noise_picture(number, 16, 16), "", [references[number % 10]]) for number in range(1000)
        ]
        return write_data_set(tmp_path / "data.parquet", rows)

    source = data_set_source(write(shared[:10]))
    recipe = recipe_of(tmp_path / "store", tiny_sd, source, batch_size=100)
    recipe = recipe.model_copy(
        update={"download": recipe.download.model_copy(update={"shard_size": 400})}
    )
    with counted(monkeypatch) as count:
        latents = encoded(recipe)
    assert count == {"16x16": 1000, "24x24": 10} and latents.summary["references"] == 10
    assert sum(open_latents(latents.uri).groups().values()) == 1000

    write([*shared[:9], shared[10]])
    with counted(monkeypatch) as count:
        encoded(recipe)
    assert count == {"24x24": 1}, "one changed reference encodes one, of 1,000 targets none"


def loader_of(latents: Latents, world: int = 1, rank: int = 0, dropout: float = 0.0) -> Loader:
    schedule = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})
    objective = Objective(schedule, LatentScale(0.5), seed=3)
    reader = BatchReader(latents, FAMILIES["sd"], objective, reference_dropout_rate=dropout)
    return Loader(reader, batch_size=4, seed=3, window=2, rank=rank, world=world)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Family sd reads references; none of ours that is as small does."""
    monkeypatch.setattr(type(FAMILIES["sd"]), "max_references", 3)


#: References of three sizes, the last of which is 40 x 16 in whole steps of 8 pixels.
SIZES = [noise_picture(2000 + n, *size) for n, size in enumerate([(24, 32), (16, 16), (41, 20)])]


@pytest.fixture(scope="module")
def varied(
    tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Latents, dict[bytes, list[bytes]]]:
    """Latents of targets with 0, 1 and 3 references; sha256 of a target -> its references."""
    lists = [[], [SIZES[0]], SIZES, SIZES[::-1]]
    rows = [(data, f"picture {n}", lists[n % 4]) for n, data in enumerate(TARGETS)]
    folder = tmp_path_factory.mktemp("varied")
    path = write_data_set(folder / "data.parquet", rows)
    latents = encoded(recipe_of(folder / "store", tiny_sd, data_set_source(path)))
    named = {bytes.fromhex(digest_bytes(data)): own for data, _, own in rows}
    return open_latents(latents.uri), named


def test_a_batch_has_the_references_of_its_samples(varied, reading: None) -> None:
    latents, named = varied
    assert {group.partition("/")[2] for group in latents.groups()} == {
        *("4x4", "4x4+8x6", "4x4+8x6+4x4+4x10", "4x4+4x10+4x4+8x6")
    }, "a batch has one number of references, and one size of each"
    loader = loader_of(latents)
    shards = [LatentShard(ref.url) for ref in latents.shards]
    means: dict[bytes, np.ndarray] = {}
    seen: set[bytes] = set()
    for step in range(2 * loader.order.steps_before(1)):
        places = loader.order.batch(step)
        inputs = loader.batch(step).conditioning
        ids = []
        for place in places:
            ref = latents.shards[place.shard]
            row = ref.stored_row(place.group, place.row)
            ids.append(shards[place.shard].sample(stored_group(place.group), row).id)
        seen |= {*ids}
        count = len(named[ids[0]])
        assert {n for n in inputs if n.startswith("reference")} == {
            f"reference_{number}" for number in range(count)
        }
        for number in range(count):
            for row, sha256 in enumerate(ids):
                mean = inputs[f"reference_{number}"][row]
                known = means.setdefault(named[sha256][number], mean)
                np.testing.assert_array_equal(mean, known)
    assert len(means) == 3 and len({mean.shape for mean in means.values()}) == 3
    assert len(seen) == latents.training, "all targets are trained on"
    with_shards = [LatentShard(ref.url) for ref in latents.references.shards]
    stored = [
        0.5 * from_bfloat16(with_shards[place.shard].mean(place.group, place.row))
        for place in latents.references.table
    ]
    assert all(any(np.array_equal(mean, one) for one in stored) for mean in means.values())


def test_the_order_with_references_is_the_same_after_a_resume_and_of_other_worlds(
    varied, reading: None
) -> None:
    latents, _ = varied
    loader = loader_of(latents, dropout=0.5)
    batches = [loader.batch(step) for step in range(12)]
    again = loader_of(latents, dropout=0.5)
    halves = [loader_of(latents, 2, rank, dropout=0.5) for rank in range(2)]
    for step in reversed(range(12)):
        both = [half.batch(step) for half in halves]
        whole = batches[step].conditioning
        np.testing.assert_equal(again.batch(step).conditioning, whole)
        for name, array in whole.items():
            np.testing.assert_equal(np.concatenate([b.conditioning[name] for b in both]), array)


def test_dropout_takes_the_references_of_whole_batches_and_no_other_input(
    varied, reading: None
) -> None:
    latents, _ = varied
    kept, dropping = loader_of(latents), loader_of(latents, dropout=0.5)
    dropped = 0
    for step in range(40):
        whole, some = kept.batch(step).conditioning, dropping.batch(step).conditioning
        names = {name for name in whole if name.startswith("reference")}
        assert not names & some.keys() or names <= some.keys()
        dropped += bool(names) and not names & some.keys()
        for name in whole.keys() - names:
            np.testing.assert_equal(whole[name], some[name])
    assert 8 <= dropped <= 24, "about half of the 30 batches with references"


def test_held_out_batches_have_references(varied, reading: None) -> None:
    latents, _ = varied
    loader = loader_of(latents)
    holdout = Holdout(loader._reader, samples=100, draws=2, batch_size=3)
    numbers = [n for of_batch, _ in holdout.batches() for n in of_batch]
    counts = [
        len([name for name in batch.conditioning if name.startswith("reference")])
        for _, batch in holdout.batches()
    ]
    assert sorted({*numbers}) == [*range(latents.held_out)] and {*counts} == {0, 1, 3}


def test_sources_of_a_mixture_have_their_own_references_or_none(
    tiny_sd: Path, tmp_path: Path, reading: None
) -> None:
    folder = tmp_path / "store"
    lists = {"one": REFERENCES[:2], "other": REFERENCES[2:3], "plain": None}
    parts = {}
    for first, (name, references) in enumerate(lists.items()):
        targets = [noise_picture(3000 + 20 * first + n, 16, 16) for n in range(20)]
        rows = [
            (data, name, [] if references is None else [references[n % len(references)]])
            for n, data in enumerate(targets)
        ]
        source = data_set_source(write_data_set(tmp_path / f"{name}.parquet", rows))
        recipe = recipe_of(folder, tiny_sd, source)
        parts[name] = encoded(recipe, references=references is not None)
    latents = open_latents(made(Store(str(folder)), MixtureStage("encode", parts)).uri)
    assert len(latents.references.table) == 3
    for name, part in parts.items():
        own, alone = latents.of_source(name), open_latents(part.uri)
        assert own.groups() == alone.groups()
        for ref, before in zip(own.shards, alone.shards, strict=True):
            for group, targets in ref.references.items():
                places = [latents.references.table[row] for row in targets.rows]
                found = [latents.references.shards[place.shard].url for place in places]
                earlier = before.references[group].rows
                shards = [alone.references.table[row].shard for row in earlier]
                assert found == [alone.references.shards[n].url for n in shards]
                assert [p[1:] for p in places] == [alone.references.table[n][1:] for n in earlier]


def test_a_damaged_or_missing_reference_shard_is_encoded_again(
    tiny_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_data_set(tmp_path / "data.parquet", rows_with(REFERENCES[:2])[:8])
    recipe = recipe_of(tmp_path / "store", tiny_sd, data_set_source(path), holdout=0.0)
    latents = encoded(recipe)
    store = Store(recipe.store)
    pairs = store.load(REFERENCES_STAGE, latents.manifest["run"]["parents"]["references"]["key"])
    [entry] = [entry for entry in latents.files if entry.path.endswith(SUFFIX)]
    [file] = (tmp_path / "store/encode/shards").glob(f"*{SUFFIX}")
    data = file.read_bytes()

    def missing() -> int:
        return len(EncodedReferences(store, pairs, entry.meta["alike"]).parts)

    assert missing() == 0
    damaged = bytearray(data)
    damaged[-2 * 32 - 1] ^= 1  # of a mean; the ids are behind it
    file.write_bytes(damaged)
    assert missing() == 1
    file.unlink()
    assert missing() == 1
    write_data_set(path, rows_with(REFERENCES[1::-1])[:8])  # another artifact, of the same shard
    with counted(monkeypatch) as count:
        encoded(recipe)
    assert count == {"32x24": 2}


def test_a_family_that_reads_fewer_references_refuses_the_latents(
    varied, monkeypatch: pytest.MonkeyPatch
) -> None:
    latents, _ = varied
    with pytest.raises(Refused, match=r"up to 3 references.*sd reads none"):
        loader_of(latents)
    monkeypatch.setattr(type(FAMILIES["sd"]), "max_references", 2)
    with pytest.raises(Refused, match=r"sd reads 2: those that read some: sd \(up to 2\)"):
        loader_of(latents)


def test_a_target_whose_reference_is_missing_is_left_out_and_told(
    tiny_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, reading: None
) -> None:
    rows = rows_with(REFERENCES[:4])
    for number in (5, 6, 7):
        rows[number] = (*rows[number][:2], [REFERENCES[0], b"no picture"])
    for number in range(0, 40, 3):
        if number not in (5, 6, 7):
            rows[number] = (*rows[number][:2], [])
    path = write_data_set(tmp_path / "data.parquet", rows)
    source = data_set_source(path)
    latents = encoded(recipe_of(tmp_path / "store", tiny_sd, source, max_bad=0.2))
    assert "3 of 40 pictures are left out, since a reference of theirs" in caplog.text
    assert latents.summary["bad"] == {"bad reference": 3} and latents.summary["samples"] == 37
    opened = open_latents(latents.uri)
    assert opened.training + opened.held_out == 37
    bad = {bytes.fromhex(digest_bytes(TARGETS[number])) for number in (5, 6, 7)}
    loader = loader_of(opened)
    shards = [LatentShard(ref.url) for ref in opened.shards]
    trained = set()
    for step in range(2 * loader.order.steps_before(1)):
        for place in loader.order.batch(step):
            row = opened.shards[place.shard].stored_row(place.group, place.row)
            trained.add(shards[place.shard].sample(stored_group(place.group), row).id)
    assert len(trained) == opened.training and not trained & bad
