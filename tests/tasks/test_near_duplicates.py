"""Copies of held-out pictures: what counts as one, and that training leaves them out."""

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from encode_stage import Pictures as Shard
from encode_stage import encode_recipe, images_of
from picture_bytes import encode_picture
from PIL import Image, ImageOps

from artifacts.latent_shards import LatentScale, LatentShard, open_latents
from artifacts.records import digest_bytes
from artifacts.store import Artifact, Store
from configs.errors import Failed
from runtimes.data.loader import BatchReader, Loader
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.folder import Base
from tasks.encode import near_duplicates
from tasks.encode.crop_to_bucket import is_holdout
from tasks.encode.near_duplicates import mirror_parts, near_any, thumbnail
from tasks.encode.stage import EncodeStage
from tasks.panels import Facts
from tasks.pictures import Pictures

HOLDOUT = 0.25


def landscape(seed: int) -> Image.Image:
    """A picture of 96 x 80 pixels with soft shapes, which no other seed has."""
    levels = np.random.default_rng(seed).integers(0, 256, (8, 9, 3), np.uint8)
    return Image.fromarray(levels).resize((96, 80), Image.Resampling.BICUBIC)


def saved_again(image: Image.Image) -> bytes:
    return encode_picture(image, "jpeg", quality=60)


COPIES = {
    "JPEG": saved_again,
    "half size": lambda image: encode_picture(image.resize((48, 40), Image.Resampling.BICUBIC)),
    "mirrored": lambda image: saved_again(ImageOps.mirror(image)),
    "grey": lambda image: encode_picture(image.convert("L")),
    "darker": lambda image: encode_picture(image.point(lambda level: level * 3 // 4)),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_near_its_original_and_nothing_else(kind: str) -> None:
    originals = [landscape(seed) for seed in range(40)]
    copies = [Image.open(io.BytesIO(COPIES[kind](image))) for image in originals]
    thumbnails = np.stack([thumbnail(image) for image in originals])
    for number, copy in enumerate(copies):
        near = near_any(thumbnails, mirror_parts(thumbnail(copy)[None]))
        assert np.flatnonzero(near).tolist() == [number]


def test_pictures_of_one_colour_are_near_nothing() -> None:
    plain = np.full((1, 16, 16), 7, np.uint8)
    assert not near_any(plain, mirror_parts(plain)).any()
    assert not near_any(plain, mirror_parts(plain[:0])).any()
    assert mirror_parts(plain).dtype == np.float32


def test_blocks_do_not_change_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    grey = np.stack([thumbnail(landscape(seed)) for seed in range(10)])
    monkeypatch.setattr(near_duplicates, "BLOCK", 3)
    assert near_any(grey, mirror_parts(grey[4:8])).tolist() == [4 <= n < 8 for n in range(10)]


def held_out(data: bytes) -> bool:
    return is_holdout(bytes.fromhex(digest_bytes(data)), HOLDOUT)


def shard_of(*pictures: bytes) -> Shard:
    return {f"{number:05}": (data, ("a place",)) for number, data in enumerate(pictures)}


class Library:
    """Originals of both splits, and their copies as JPEG and mirrored, of the split `train`."""

    def __init__(self) -> None:
        self.originals: list[bytes] = []
        self.copies: dict[bytes, bool] = {}  # of a training picture -> whether of a held-out one
        for seed in range(60):
            image = landscape(seed)
            data = encode_picture(image)
            self.originals.append(data)
            for make in (saved_again, COPIES["mirrored"]):
                copy = make(image)
                if not held_out(copy):
                    self.copies[copy] = held_out(data)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


def encode(
    shards: list[Shard],
    model: Path,
    tmp_path: Path,
    compared: list[Shard] | None = None,
    **settings: object,
) -> Artifact:
    recipe = encode_recipe(tmp_path / "store", model, holdout=HOLDOUT, batch_size=8, **settings)
    store = Store(recipe.store)
    images = images_of(store, shards, tmp_path)
    before = None if compared is None else Pictures(images_of(store, compared, tmp_path))
    stage = EncodeStage(recipe, images, Base.open(model), before)
    draft = store.draft(stage.parts)
    return draft.commit(stage.build(draft, lambda *_: None), {})


def trained_on(latents: Artifact) -> set[str]:
    """Sha256 of the pictures that come in an epoch of training."""
    opened = open_latents(latents.uri)
    shards = [LatentShard(ref.url) for ref in opened.shards]
    schedule = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})
    reader = BatchReader(opened, FAMILIES["sdxl"], Objective(schedule, LatentScale(0.5), seed=0))
    order = Loader(reader, batch_size=1, seed=0, window=1).order
    places = [place for step in range(order.total) for place in order.batch(step)]
    ids = [shards[place.shard].sample(place.group, place.row).id.hex() for place in places]
    assert len(ids) == len(set(ids)) == opened.training
    return set(ids)


def digests(pictures: Iterable[bytes]) -> set[str]:
    return {digest_bytes(data) for data in pictures}


@pytest.mark.slow
def test_no_copy_of_a_held_out_picture_is_trained_on(
    library: Library, tiny_sdxl: Path, tmp_path: Path
) -> None:
    shards = [shard_of(*library.originals), shard_of(*library.copies)]
    latents = encode(shards, tiny_sdxl, tmp_path)
    leaks = digests(data for data, of_held_out in library.copies.items() if of_held_out)
    training = digests(data for data in library.originals if not held_out(data))
    assert len(leaks) > 10
    assert trained_on(latents) == training | digests(library.copies) - leaks
    assert latents.summary["copies_left_out"] == len(leaks)
    panel = EncodeStage.show(latents)[0]
    assert isinstance(panel, Facts)
    words = panel.values["near-duplicates of held-out pictures"]
    assert words == f"{len(leaks)} left out of training"


@pytest.mark.slow
def test_a_setting_keeps_the_copies_in_training_and_says_so(
    library: Library, tiny_sdxl: Path, tmp_path: Path
) -> None:
    shards = [shard_of(*library.originals[:20]), shard_of(*list(library.copies)[:20])]
    latents = encode(shards, tiny_sdxl, tmp_path, leave_out_copies=False)
    everything = [*library.originals[:20], *list(library.copies)[:20]]
    assert trained_on(latents) == digests(data for data in everything if not held_out(data))
    panel = EncodeStage.show(latents)[0]
    assert isinstance(panel, Facts)
    words = panel.values["near-duplicates of held-out pictures"]
    assert words == "may be in training (encode.leave_out_copies: false)"


@pytest.mark.slow
def test_no_picture_of_a_set_that_grows_changes_its_side(
    library: Library, tiny_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that was trained on is left out once its copy is held out, and never held out."""
    copies = [*library.copies]
    parts = [shard_of(*copies[:10]), shard_of(*copies[10:40]), shard_of(*library.originals)]
    sides: list[tuple[set[str], set[str]]] = []
    monkeypatch.setattr(near_duplicates.Thumbnails, "commit", None)  # no picture is decoded twice
    for count in (1, 2, 3):
        latents = encode(parts[:count], tiny_sdxl, tmp_path)
        opened = open_latents(latents.uri)
        seen = trained_on(latents)
        everything = digests(data for part in parts[:count] for data, _ in part.values())
        held = everything - seen - opened.left_out
        assert held == digests(
            data for part in parts[:count] for data, _ in part.values() if held_out(data)
        )
        sides.append((seen, held))
    (one, held_one), (two, held_two), (three, held_three) = sides
    assert held_one <= held_two <= held_three
    assert not (one | two | three) & held_three
    assert two - three == digests(data for data in copies[:40] if library.copies[data])


@pytest.mark.slow
def test_copies_of_the_pictures_that_a_champion_was_measured_on_are_left_out(
    library: Library, tiny_sdxl: Path, tmp_path: Path
) -> None:
    """The source has lost the originals since."""
    leaks = [data for data, of_held_out in library.copies.items() if of_held_out][:5]
    others = [data for data, of_held_out in library.copies.items() if not of_held_out][:5]
    compared = [shard_of(*library.originals)]
    latents = encode([shard_of(*leaks, *others)], tiny_sdxl, tmp_path, compared)
    assert trained_on(latents) == digests(others)


@pytest.mark.slow
def test_latents_of_earlier_checkouts_are_not_encoded_again(
    library: Library, tiny_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [shard_of(*library.originals[:20], *list(library.copies)[:20])]
    expected = encode(shards, tiny_sdxl, tmp_path)
    (thumbnails,) = (tmp_path / "store/encode/shards").glob("*.npy")
    thumbnails.with_name(f"{thumbnails.name.partition('.')[0]}.json").unlink()
    thumbnails.unlink()
    monkeypatch.setattr("tasks.devices.shards.Committer._built", None)
    again = encode(shards, tiny_sdxl, tmp_path)
    assert again.digest == expected.digest


@pytest.mark.slow
def test_a_source_of_held_out_pictures_and_their_copies_has_nothing_to_train_on(
    library: Library, tiny_sdxl: Path, tmp_path: Path
) -> None:
    leaks = [data for data, of_held_out in library.copies.items() if of_held_out]
    originals = [data for data in library.originals if held_out(data)]
    with pytest.raises(Failed, match=rf"or near-duplicates of it \({len(leaks)}\); add pictures"):
        encode([shard_of(*leaks, *originals)], tiny_sdxl, tmp_path)
