"""A changed selection encodes what is newly chosen, and leaves out what is no longer chosen."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from caption_server import CaptionServer
from encode_stage import Pictures as Shard
from encode_stage import encode_recipe, images_of, picture_of
from numpy.typing import NDArray
from shortest_recipe import shortest_recipe

from artifacts.latent_shards import Latents, LatentScale, LatentShard, open_latents, shard_key
from artifacts.records import digest_bytes
from artifacts.store import Artifact, KeyParts, Store
from runtimes.data.loader import BatchReader, Holdout, Loader
from runtimes.data.sample_order import SampleIndex
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.vae_text_encoders import Encoder
from tasks.build_or_reuse import build_or_reuse
from tasks.caption.stage import CaptionStage
from tasks.encode.crop_to_bucket import TransformSettings, is_holdout
from tasks.encode.stage import EncodeStage
from tasks.evaluate.seen_pictures import reference_pictures
from tasks.pictures import Pictures, PictureShard, hex_of_rows
from tasks.progress import Progress

pytestmark = pytest.mark.slow
HOLDOUT = 0.25
PICTURES = [picture_of(number) for number in range(40)]
#: Three shards, the second of which has a picture twice.
AGAIN = next(
    data for data in PICTURES[12:24] if not is_holdout(bytes.fromhex(digest_bytes(data)), HOLDOUT)
)
TWICE = digest_bytes(AGAIN)
SHARDS: list[Shard] = [
    {f"{number:05}": (data, (f"picture {number}",)) for number, data in enumerate(some)}
    for some in (PICTURES[:12], [*PICTURES[12:24], AGAIN], PICTURES[24:])
]
ENTRIES = [data for shard in SHARDS for data, _ in shard.values()]


@pytest.fixture
def world(tiny_sdxl: Path, tmp_path: Path) -> "World":
    return World(tiny_sdxl, tmp_path)


class World:
    def __init__(self, model: Path, tmp_path: Path) -> None:
        self.recipe = encode_recipe(tmp_path / "store", model, holdout=HOLDOUT)
        self.store = Store(self.recipe.store)
        self.base = Base.open(model)
        self.images = images_of(self.store, SHARDS, tmp_path)
        self.scratch = tmp_path / "selection.parquet"

    def selection(self, kept: Iterable[int]) -> Artifact:
        """A selection of entries, by their numbers in the order of tars."""
        mask = np.isin(np.arange(len(ENTRIES)), [*kept])
        table = {
            "tar": [shard.sha256 for shard in self.shards for _ in range(shard.samples)],
            "row": pa.array([row for s in self.shards for row in range(s.samples)], pa.int32()),
            "id": pa.array(self.order, pa.binary(32)),
            "kept": mask,
        }
        pq.write_table(pa.table(table), self.scratch)
        draft = self.store.draft(KeyParts("select", 1, {}, {"kept": hex_of_rows(mask)}))
        draft.upload(str(self.scratch), "selection.parquet")
        return draft.commit({}, {})

    def captioned(self, model: str) -> Artifact:
        """Captions by a model of a server."""
        with CaptionServer() as server:
            endpoint = {"urls": [server.base_url], "model": model}
            caption = {"endpoint": endpoint}
            encode = {"holdout": 0}
            recipe = shortest_recipe(store=self.store.url, caption=caption, encode=encode)
            stage = CaptionStage(recipe, self.images)
            draft = self.store.draft(stage.parts)
            return draft.commit(stage.build(draft, Progress("caption")), {})

    def encode(self, kept: Iterable[int] | None, captions: Artifact | None = None) -> Artifact:
        selected = None if kept is None else self.selection(kept)
        stage = EncodeStage(self.recipe, self.images, self.base, None, selected, captions)
        build = partial(stage.build, progress=Progress("encode"))
        result = build_or_reuse(self.store, stage.parts, build, parents=stage.parents)
        return result.load(self.store)

    @property
    def encoded(self) -> dict[str, int]:
        """Latent shard -> time stamp of its record."""
        folder = Path(self.store.shards_path("encode"))
        safetensors = {path.name.partition(".")[0] for path in folder.glob("*.safetensors")}
        return {key: (folder / f"{key}.json").stat().st_mtime_ns for key in safetensors}

    @property
    def shards(self) -> list[PictureShard]:
        """The image shards in the order of a selection."""
        return sorted(Pictures(self.images).shards, key=lambda shard: shard.sha256)

    @property
    def order(self) -> list[bytes]:
        """Sha256 of the picture of each entry, in the order of a selection."""
        return [sample.source_sha256 for shard in self.shards for sample in shard.read()]


def reader_of(latents: Latents) -> BatchReader:
    schedule = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})
    return BatchReader(latents, FAMILIES["sdxl"], Objective(schedule, LatentScale(0.5), seed=0))


def measured(latents: Artifact) -> tuple[list[bytes], list[bytes]]:
    """Sha256 of the pictures in an epoch of training, and of those of the held-out loss, sorted."""
    opened = open_latents(latents.uri)
    shards = [LatentShard(ref.url) for ref in opened.shards]
    reader = reader_of(opened)
    order = Loader(reader, batch_size=1, seed=0, window=1).order
    training = [place for step in range(order.total) for place in order.batch(step)]
    held_out = held_out_samples(reader, 1000)

    def ids(places: Iterable) -> list[bytes]:
        return sorted(shards[p.shard].sample(p.group, p.row).id for p in places)

    assert len(training) == opened.training and len(held_out) == opened.held_out
    return ids(training), ids(held_out)


def held_out_samples(reader: BatchReader, samples: int) -> list[SampleIndex]:
    """The samples of the held-out loss, in order."""
    return Holdout(reader, samples=samples, draws=1, batch_size=4)._samples


def compared(latents: Artifact) -> list[tuple[bytes, list[int]]]:
    """Picture's sha256 and caption's token ids of three samples of the held-out loss, in order."""
    opened = open_latents(latents.uri)
    samples = held_out_samples(reader_of(opened), 3)
    found = []
    for place in samples:
        shard = LatentShard(opened.shards[place.shard].url)
        sample = shard.sample(place.group, place.row)
        found.append((sample.id, shard.input_ids(sample.caption_rows[0]).tolist()))
    return found


def references(pictures: Pictures) -> tuple[list[bytes], list[bytes]]:
    """Sha256 of the training and the held-out pictures that evaluations compare with, sorted."""
    settings = TransformSettings.of(encode_recipe("s", Path("base"), holdout=HOLDOUT))

    def ids(which: Literal["train", "holdout"]) -> list[bytes]:
        found = reference_pictures(pictures, settings, 8, which, 1000)
        return sorted(sample.source_sha256 for _, sample, _ in found)

    return ids("train"), ids("holdout")


def split(chosen: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Training and held-out pictures, sorted."""
    some = sorted(chosen)
    return (
        [sha256 for sha256 in some if not is_holdout(sha256, HOLDOUT)],
        [sha256 for sha256 in some if is_holdout(sha256, HOLDOUT)],
    )


def test_a_changed_selection_encodes_only_what_is_new_and_measures_only_what_is_chosen(
    world: World,
) -> None:
    order = world.order
    one = world.encode(range(0, 41, 2))
    assert measured(one) == split(order[0:41:2])
    assert one.summary["samples"] == 21
    first = world.encoded

    fewer = world.encode(range(0, 41, 4))
    pictures = Pictures.of(fewer, world.images)
    assert references(pictures) == split(order[0:41:4]), "the references are chosen alike"
    assert world.encoded == first, "nothing is encoded"
    assert measured(fewer) == split(order[0:41:4])
    assert fewer.summary["samples"] == 11

    wanted = [*range(0, 41, 4), 1, 3, 39]
    more = world.encode(wanted)
    added = world.encoded.keys() - first.keys()
    assert {key: world.encoded[key] for key in first} == first, "no shard is encoded again"
    new = [ref for ref in open_latents(more.uri).shards if shard_key(ref.url) in added]
    assert sum(sum(ref.groups.values()) for ref in new) == 3, "three pictures are encoded"
    assert measured(more) == split(order[number] for number in wanted)

    again = world.encode(range(0, 41, 2))
    assert again.digest == one.digest and world.encoded.keys() == first.keys() | added


def test_captioners_and_earlier_selections_are_compared_on_the_same_held_out_samples(
    world: World,
) -> None:
    one, other = (world.captioned(model) for model in ("one", "other"))
    world.encode(range(0, 41, 2), one)
    grown = world.encode(range(41), one)
    whole = world.encode(range(41), other)
    assert len(open_latents(grown.uri).shards) > len(open_latents(whole.uri).shards)
    assert len(compared(grown)) == 3
    assert compared(grown) == compared(whole)


def test_all_pictures_that_were_encoded_without_a_selection_serve_one(world: World) -> None:
    world.encode(None)
    before = world.encoded
    some = world.encode(range(5, 30))
    assert world.encoded == before
    assert measured(some) == split(world.order[5:30])


def test_of_a_picture_in_two_rows_the_chosen_one_is_trained_on(world: World) -> None:
    """Its captions differ."""
    entries = [sample for shard in world.shards for sample in shard.read()]
    rows = [n for n, sample in enumerate(entries) if sample.source_sha256.hex() == TWICE]
    world.encode(None)
    encoder = Encoder(world.base, device="cpu")
    for number in rows:
        latents = open_latents(world.encode([number, *range(5)]).uri)
        (ids,) = trained_input_ids(latents, bytes.fromhex(TWICE))
        np.testing.assert_array_equal(ids, encoder.input_ids([*entries[number].captions])[0])


def trained_input_ids(latents: Latents, sha256: bytes) -> Iterator[NDArray[np.int32]]:
    """Token ids of a picture's captions in training."""
    for ref in latents.shards:
        shard = LatentShard(ref.url)
        for group, count in shard.groups.items():
            for row in set(range(count)) - ref.left_out.get(group, {}).keys():
                sample = shard.sample(group, row)
                if sample.id == sha256:
                    yield shard.input_ids(sample.caption_rows[0])
