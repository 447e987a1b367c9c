"""A metric uses the pictures of its set, its model and its reference; copies are found."""

import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from picture_bytes import encode_picture
from PIL import Image, ImageOps

from artifacts.image_shards import Sample, write_tar
from artifacts.records import Damaged, digest_bytes
from artifacts.store import Artifact, KeyParts, Shard, Store
from configs.settings.evaluate import Memorization
from tasks.encode.crop_to_bucket import TransformSettings, is_holdout
from tasks.evaluate import draw
from tasks.evaluate.distances import Resampling, cmmd, frechet, kid
from tasks.evaluate.draw import _commit
from tasks.evaluate.edits import Prompt
from tasks.evaluate.features import Clip, Float32, Pixels, ReferenceFeatures, reference_features
from tasks.evaluate.judges import clip_scores
from tasks.evaluate.measure import LIMIT, MetricSuite
from tasks.evaluate.memorization import closest_pairs
from tasks.evaluate.seen_pictures import find_pictures, reference_pictures
from tasks.evaluate.stage import _grid
from tasks.pictures import Pictures

Picture = NDArray[np.uint8]
SETS = {
    "new": tuple(map(Prompt, ("a red cat", "a blue dog"))),
    "old": tuple(map(Prompt, ("a house", "a tree", "a hill"))),
}
TRANSFORM = TransformSettings(32, False, 8, 2.0, "center", False, 0, 0.4, 10**6)


def noise(*numbers: int) -> list[Picture]:
    return [np.random.default_rng(n).integers(0, 256, (32, 32, 3), np.uint8) for n in numbers]


def plain(red: int, blue: int) -> list[Picture]:
    return [np.full((32, 32, 3), (red, 0, blue), np.uint8)] * 5


def drawn(store: Store, key: str, pictures: list[Picture], out: Path) -> Shard:
    out.mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(out / f"{number:05d}.png")
    return _commit(store, key, out, len(pictures))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


class OtherEncoder:
    """An image encoder whose features are not those of CLIP."""

    def images(self, pictures: Iterable[Picture]) -> Float32:
        return np.stack([p[:2, :2].reshape(-1).astype(np.float32) for p in pictures])


TRAINING = range(70, 80)


@pytest.fixture
def suite(tiny_clip: Path) -> MetricSuite:
    """With random weights, texts resemble no picture: the prompts have features of pictures."""
    clip = Clip(tiny_clip, "cpu")
    encoders = {"clip": clip, "image": OtherEncoder(), "pixels": Pixels()}

    def references(pictures: list[Picture]) -> dict[str, ReferenceFeatures]:
        names = tuple(("a.tar", f"{number:03}") for number in range(len(pictures)))
        return {
            name: ReferenceFeatures(encoder.images(pictures), names, Shard(name, [], {}))
            for name, encoder in encoders.items()
        }

    return MetricSuite(
        rounds=(SETS,),
        compared=("new",),
        learnt=(),
        judges={},
        resampling=Resampling(20, 0),
        encoders=encoders,
        text_features=clip.images(noise(*range(80, 85))),
        held_out=references(noise(*range(90, 98))),
        training=references(noise(*TRAINING)),
        memorization=Memorization(),
    )


def test_the_metric_of_a_set_uses_its_pictures_and_encoder(
    store: Store, suite: MetricSuite, tmp_path: Path
) -> None:
    pictures = noise(*range(5))
    found = suite.measure(store, [drawn(store, "k", pictures, tmp_path / "out")]).metrics
    by_clip, by_image = (suite.encoders[name].images(pictures) for name in ("clip", "image"))
    scores = clip_scores(by_clip, suite.text_features)
    assert min(scores) > 0 and len(set(scores)) == 5
    assert found["clip_score/new"].value == pytest.approx(scores[:2].mean())
    assert found["clip_score/old"].value == pytest.approx(scores[2:].mean())
    held_out = {name: one.features for name, one in suite.held_out.items()}
    assert found["cmmd"].value == pytest.approx(
        cmmd(by_clip[:2], held_out["clip"], Resampling(20, 0)).value
    )
    assert found["fd"].value == pytest.approx(
        frechet(by_image[:2], held_out["image"], Resampling(20, 0)).value
    )


def test_every_metric_of_drawn_pictures_resamples_prompts_with_all_their_pictures(
    store: Store, suite: MetricSuite, tmp_path: Path
) -> None:
    """Equal texts of two sets are one prompt."""
    cat, dog = Prompt("a cat"), Prompt("a dog")
    sets = {"new": (cat, cat, dog, dog), "old": (cat,)}
    judges = {"bright": lambda images, *_: images.mean(axis=(1, 2, 3)) > 127}
    repeated = replace(suite, rounds=(sets,), judges=judges, compared=("new", "old"))
    shard = drawn(store, "k", noise(*range(5)), tmp_path / "out")
    found = repeated.measure(store, [shard]).metrics
    single = {"clip_score/old", "bright/old"}
    assert {n: one.prompts for n, one in found.items()} == {n: 2 * (n not in single) for n in found}
    assert {"clip_score", "cmmd", "fd", "recall", "bright/new", "memorized"} < found.keys()


def test_the_distances_of_inception_use_its_features(
    store: Store, suite: MetricSuite, tmp_path: Path
) -> None:
    class Corner(OtherEncoder):
        def images(self, pictures: Iterable[Picture]) -> Float32:
            return super().images([picture[-2:, -2:] for picture in pictures])

    shard, pictures = drawn(store, "k", noise(*range(5)), tmp_path / "out"), noise(*range(5))
    without = suite.measure(store, [shard]).metrics
    held_out = Corner().images(noise(*range(90, 98)))
    reference = ReferenceFeatures(held_out, (), Shard("inception", [], {}))
    inception = replace(
        suite,
        encoders={**suite.encoders, "inception": Corner()},
        held_out={**suite.held_out, "inception": reference},
    )
    found, by_corner = inception.measure(store, [shard]).metrics, Corner().images(pictures[:2])
    assert set(found) - set(without) == {"fd_inception", "kid_inception"}
    assert found["fd_inception"].value == frechet(by_corner, held_out, Resampling(20, 0)).value
    assert found["kid_inception"].value == kid(by_corner, held_out, Resampling(20, 0)).value
    assert found["fd"].value == without["fd"].value != found["fd_inception"].value


def test_a_copy_of_a_training_picture_among_the_samples_is_found(
    store: Store, suite: MetricSuite, tmp_path: Path
) -> None:
    """The copy is brighter and has less contrast, as a sampler would draw it."""
    pictures = noise(*range(5))
    clean = suite.measure(store, [drawn(store, "clean", pictures, tmp_path / "clean")])
    (copied,) = noise(TRAINING[6])
    pictures[3] = (copied * 0.8 + 20).astype(np.uint8)
    planted = suite.measure(store, [drawn(store, "planted", pictures, tmp_path / "planted")])
    for name in ("memorized", "memorized_pixels"):
        assert clean.metrics[name].value == 0.0 and planted.metrics[name].value == 0.2
    assert clean.nearest is not None and planted.nearest is not None
    pairs = closest_pairs(planted.nearest, suite.training["pixels"])
    best = {pair.by: pair for pair in reversed(pairs)}
    for pair in best.values():
        assert (pair.sample, pair.tar, pair.key) == (3, "a.tar", "006")
        assert pair.similarity > 0.98


def test_the_base_is_above_the_tuned_model(store: Store, tmp_path: Path) -> None:
    base = drawn(store, "base", plain(red=200, blue=0), tmp_path / "base")
    tuned = drawn(store, "tuned", plain(red=0, blue=200), tmp_path / "tuned")
    page = np.asarray(
        Image.open(io.BytesIO(_grid(store, {"base": [base], "tuned": [tuned]}, SETS, {})))
    )
    column = page[:, draw.LABEL + 5].astype(int)
    rows = {"base": [200, 0, 0], "tuned": [0, 0, 200]}
    where = {name: np.flatnonzero((column == rgb).all(axis=1)) for name, rgb in rows.items()}
    block = len(page) // 2
    assert where["base"][0] < where["tuned"][0] < block < where["base"][-1] < where["tuned"][-1]


def images(store: Store, path: Path) -> tuple[Artifact, list[Sample]]:
    samples = []
    for number, levels in enumerate(noise(*range(30))):
        picture = encode_picture(Image.fromarray(levels))
        meta = {"sha256": digest_bytes(b"downloaded: " + picture)}
        samples.append(Sample(f"{number:03}", picture, "png", ("a thing",), meta))
    write_tar(path, samples)
    draft = store.draft(KeyParts("download", 1, {}, {}))
    draft.add_shard(
        store.commit_shard("download", "0" * 64, {".tar": str(path)}, {"samples": len(samples)})
    )
    return draft.commit({}, {}), samples


def test_the_reference_pictures_are_those_of_the_split(store: Store, tmp_path: Path) -> None:
    artifact, samples = images(store, tmp_path / "a.tar")
    held = [s for s in samples if is_holdout(bytes.fromhex(s.meta["sha256"]), 0.4)]
    trained = [s for s in samples if s not in held]
    assert held and trained
    for split, wanted in (("holdout", held), ("train", trained)):
        expected: list[Any] = [np.asarray(Image.open(io.BytesIO(s.image))) for s in wanted]
        found = list(reference_pictures(Pictures(artifact), TRANSFORM, 4, split, LIMIT))
        np.testing.assert_array_equal([picture for *_, picture in found], expected)
        assert [sample.key for _, sample, _ in found] == [s.key for s in wanted]
        assert len(list(reference_pictures(Pictures(artifact), TRANSFORM, 4, split, 2))) == 2
    copies = {s.meta["sha256"] for s in trained[:2]}
    rest = [
        sample.key
        for _, sample, _ in reference_pictures(
            Pictures(artifact), TRANSFORM, 4, "train", LIMIT, copies
        )
    ]
    assert rest == [s.key for s in trained[2:]], "a copy of a held-out picture is not trained on"
    chosen = {(path, sample.key) for path, sample, _ in found[1:3]}
    again = find_pictures(artifact, chosen, TRANSFORM, 4)
    assert again.keys() == chosen
    for path, sample, picture in found[1:3]:
        np.testing.assert_array_equal(again[path, sample.key], picture)


def test_of_held_out_pictures_that_are_alike_one_is_a_reference(
    store: Store, tmp_path: Path
) -> None:
    _, samples = images(store, tmp_path / "a.tar")
    [held, *_] = [s for s in samples if is_holdout(s.source_sha256, 0.4)]
    mirrored = ImageOps.mirror(Image.open(io.BytesIO(held.image)))
    mirrored.save(buffer := io.BytesIO(), "PNG")
    sha256 = held.meta["sha256"][:2] + "0" * 62  # on the same side of the split
    copy = replace(held, key="z", image=buffer.getvalue(), meta={**held.meta, "sha256": sha256})
    write_tar(tmp_path / "b.tar", [*samples, copy])
    draft = store.draft(KeyParts("download", 1, {"copy": 1}, {}))
    files = {".tar": str(tmp_path / "b.tar")}
    draft.add_shard(store.commit_shard("download", "1" * 64, files, {"samples": len(samples) + 1}))
    pictures = Pictures(draft.commit({}, {}))
    found = {
        distinct: [
            sample.key
            for _, sample, _ in reference_pictures(
                pictures, TRANSFORM, 4, "holdout", LIMIT, distinct=distinct
            )
        ]
        for distinct in (False, True)
    }
    assert found[False] == [*found[True], "z"]


def test_no_tar_is_read_where_nothing_is_held_out(store: Store, tmp_path: Path) -> None:
    artifact, _ = images(store, tmp_path / "a.tar")
    (tar,) = Path(store.shards_path("download")).glob("*.tar")
    tar.unlink()
    assert (
        list(
            reference_pictures(
                Pictures(artifact), replace(TRANSFORM, holdout=0.0), 4, "holdout", LIMIT
            )
        )
        == []
    )


def test_a_replaced_tar_is_no_reference(store: Store, tmp_path: Path) -> None:
    artifact, _ = images(store, tmp_path / "a.tar")
    (tar,) = Path(store.shards_path("download")).glob("*.tar")
    tar.write_bytes(tar.read_bytes()[:-1] + b"!")  # in the padding, which nothing else reads
    with pytest.raises(Damaged):
        list(reference_pictures(Pictures(artifact), TRANSFORM, 4, "holdout", LIMIT))


def test_features_of_references_are_computed_once_for_their_content(
    store: Store, tmp_path: Path
) -> None:
    artifact, _ = images(store, tmp_path / "a.tar")
    seen: list[int] = []

    class Counting(OtherEncoder):
        def images(self, pictures: Iterable[Picture]) -> Float32:
            batch = list(pictures)
            seen.append(len(batch))
            return super().images(batch)

    def features(encoders: dict[str, str], **facts: Any) -> dict[str, ReferenceFeatures]:
        pictures = reference_pictures(Pictures(artifact), TRANSFORM, 4, "train", LIMIT)
        models = {name: Counting() for name in encoders}
        facts = {"images": artifact.digest, **facts}
        return reference_features(store, models, encoders, facts, pictures)

    first = features({"clip": "a", "pixels": "p"})
    count = len(first["clip"].pictures)
    assert seen == [count, count]
    again = features({"clip": "a", "pixels": "p"})
    assert len(seen) == 2
    np.testing.assert_array_equal(again["clip"].features, first["clip"].features)
    assert again["clip"].pictures == first["clip"].pictures
    features({"clip": "b"})
    features({"clip": "a"}, limit=9)
    assert len(seen) == 4
