"""A metric uses the pictures of its set, its model and the held-out split."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from artifacts.artifact_key import KeyParts
from artifacts.digests import digest_bytes
from artifacts.image_shards import Sample, write_tar
from artifacts.store import Artifact, Shard, Store
from tasks.encode.decode_and_crop import TransformSettings
from tasks.encode.holdout_split import is_holdout
from tasks.evaluate import before_after_grid, metrics
from tasks.evaluate.clip_features import ClipFeatures
from tasks.evaluate.draw_pictures import _commit
from tasks.evaluate.metric_suite import MetricSuite
from tasks.evaluate.reference_pictures import reference_pictures
from tasks.evaluate.stage import _grid

Picture = NDArray[np.uint8]
SETS = {"new": ("a red cat", "a blue dog"), "old": ("a house", "a tree", "a hill")}
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


@pytest.fixture
def suite(tiny_clip: Path) -> MetricSuite:
    """With random weights, texts resemble no picture: the prompts have features of pictures."""
    clip = ClipFeatures(tiny_clip, "cpu")
    reference, prompts = (clip.images(noise(*range(n, n + 8))) for n in (90, 80))
    return MetricSuite(SETS, ("new",), (), 20, 0, clip, prompts[:5], reference)


def test_the_metric_of_a_set_uses_its_pictures(
    store: Store, suite: MetricSuite, tmp_path: Path
) -> None:
    pictures = noise(*range(5))
    found = suite.measure(store, drawn(store, "k", pictures, tmp_path / "out"))
    features = suite.clip.images(pictures)
    scores = metrics.clip_scores(features, suite.text_features)
    assert min(scores) > 0 and len(set(scores)) == 5
    assert found["clip_score/new"]["value"] == pytest.approx(scores[:2].mean())
    assert found["clip_score/old"]["value"] == pytest.approx(scores[2:].mean())
    expected = metrics.cmmd(features[:2], suite.reference, 20, 0)
    assert found["cmmd"]["value"] == pytest.approx(expected["value"])


def test_the_base_is_above_the_tuned_model(store: Store, tmp_path: Path) -> None:
    base = drawn(store, "base", plain(red=200, blue=0), tmp_path / "base")
    tuned = drawn(store, "tuned", plain(red=0, blue=200), tmp_path / "tuned")
    page = np.asarray(Image.open(io.BytesIO(_grid(store, [base, tuned], SETS))))
    column = page[:, before_after_grid.LABEL + 5].astype(int)
    rows = {"base": [200, 0, 0], "tuned": [0, 0, 200]}
    where = {name: np.flatnonzero((column == rgb).all(axis=1)) for name, rgb in rows.items()}
    block = len(page) // 2
    assert where["base"][0] < where["tuned"][0] < block < where["base"][-1] < where["tuned"][-1]


def images(store: Store, path: Path) -> tuple[Artifact, list[Sample]]:
    samples = []
    for number, picture in enumerate(noise(*range(30))):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "png")
        meta = {"sha256": digest_bytes(b"downloaded: " + buffer.getvalue())}
        samples.append(Sample(f"{number:03}", buffer.getvalue(), "png", ("a thing",), meta))
    write_tar(path, samples)
    draft = store.draft(KeyParts("download", 1, {}, {}))
    draft.add_shard(store.commit_shard("download", "0" * 64, {".tar": str(path)}, {}))
    return draft.commit({}, {}), samples


def test_the_reference_pictures_are_the_held_out_ones(store: Store, tmp_path: Path) -> None:
    artifact, samples = images(store, tmp_path / "a.tar")
    held = [s for s in samples if is_holdout(bytes.fromhex(s.meta["sha256"]), 0.4)]
    assert 0 < len(held) < len(samples)
    expected: list[Any] = [np.asarray(Image.open(io.BytesIO(s.image))) for s in held]
    np.testing.assert_array_equal(list(reference_pictures(artifact, TRANSFORM, 4)), expected)
    assert len(list(reference_pictures(artifact, TRANSFORM, 4, limit=2))) == 2
