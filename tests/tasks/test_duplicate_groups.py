"""Groups of duplicates: what is joined, transitively and in any order."""

import io
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from numpy.typing import NDArray
from picture_bytes import encode_picture
from PIL import Image, ImageOps
from scipy.fft import dctn

from tasks.encode.near_duplicates import thumbnail
from tasks.select import duplicates
from tasks.select.duplicates import clusters, join, join_near_embeddings, join_near_hashes

Groups = NDArray[np.int64]


def sets_of(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(groups == group).tolist()) for group in np.unique(groups)}


def test_groups_are_the_connected_components_of_all_pairs() -> None:
    rng = np.random.default_rng()
    for count in (1, 30, 300):
        groups = duplicates.ungrouped(count)
        graph = nx.empty_graph(count)
        for _ in range(5):
            some, others = rng.integers(0, count, (2, count // 8))
            groups = join(groups, some, others)
            graph.add_edges_from(zip(some.tolist(), others.tolist(), strict=True))
            assert sets_of(groups) == {frozenset(part) for part in nx.connected_components(graph)}
        assert all(groups[group] == group for group in groups)


def landscape(seed: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (8, 9, 3), np.uint8)
    return Image.fromarray(levels).resize((96, 80), Image.Resampling.BICUBIC)


def hashed(images: list[Image.Image]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """pHash of pictures and of their mirror images."""

    def one(image: Image.Image) -> int:
        small = image.convert("L").resize((32, 32), Image.Resampling.LANCZOS)
        low = dctn(np.asarray(small, np.float64))[:8, :8]
        return int.from_bytes(np.packbits(low > np.median(low)).tobytes(), "big")

    mirrored = [one(ImageOps.mirror(image)) for image in images]
    return np.array([*map(one, images)], np.uint64), np.array(mirrored, np.uint64)


def near(images: list[Image.Image], distance: int = 10) -> Groups:
    thumbnails = np.stack([thumbnail(image) for image in images])
    groups = duplicates.ungrouped(len(images))
    return join_near_hashes(groups, groups, *hashed(images), thumbnails.__getitem__, distance, 0.94)


def test_copies_are_grouped_with_their_original_and_with_nothing_else() -> None:
    images = []
    for seed in range(40):
        image = landscape(seed)
        small = image.resize((48, 40), Image.Resampling.BICUBIC)
        again = Image.open(io.BytesIO(encode_picture(image, "jpeg", quality=60)))
        images += [image, small, again, ImageOps.mirror(again), image.convert("L")]
    assert sets_of(near(images)) == {frozenset(range(n, n + 5)) for n in range(0, 200, 5)}
    order = np.random.default_rng().permutation(200)
    moved = sets_of(near([images[n] for n in order]))
    assert {frozenset(order[[*group]].tolist()) for group in moved} == sets_of(near(images))


def test_crops_are_grouped_with_their_original() -> None:
    images = []
    for seed in range(20):
        levels = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), np.uint8)
        image = Image.fromarray(levels).resize((160, 160), Image.Resampling.BICUBIC)
        images += [image, ImageOps.crop(image, 3), ImageOps.mirror(ImageOps.crop(image, 8))]
    originals = {frozenset(range(n, n + 3)) for n in range(0, 60, 3)}
    assert sets_of(near(images, distance=20)) == originals


def test_near_hashes_alone_join_nothing() -> None:
    """Pictures of one colour, and unlike thumbnails, have equal hashes."""
    plain = [Image.new("L", (32, 32), level) for level in (3, 90, 200)]
    assert len(sets_of(near(plain))) == 3
    thumbnails = np.random.default_rng(0).integers(0, 256, (50, 16, 16), np.uint8)
    same = np.full(50, 77, np.uint64)
    groups = duplicates.ungrouped(50)
    assert (
        len(sets_of(join_near_hashes(groups, groups, same, same, thumbnails.__getitem__, 20, 0.9)))
        == 50
    )


def test_hashes_within_the_distance_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 2**64, 4000, np.uint64)
    for bits in range(1, 11):
        for row in range(100):
            changed = np.bitwise_or.reduce(1 << rng.permutation(64)[:bits].astype(np.uint64))
            hashes[400 * bits - 400 + 2 * row + 1] = hashes[400 * bits - 400 + 2 * row] ^ changed
    groups = duplicates.ungrouped(4000)
    mirrored = rng.integers(0, 2**64, 4000, np.uint64)
    alike = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (4000, 1, 1))
    for distance in (4, 10):
        found = join_near_hashes(groups, groups, hashes, mirrored, alike.__getitem__, distance, 0.9)
        apart = np.bitwise_count(hashes[:, None] ^ hashes) <= distance
        expected = sets_of(join(groups, *np.nonzero(apart)))
        assert sets_of(found) == expected
        assert len(expected) == 4000 - 100 * distance


def test_near_embeddings_of_any_length_are_joined() -> None:
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((2000, 64))
    vectors[1::4] = vectors[::4] + 0.1 * rng.standard_normal((500, 64))
    vectors *= rng.uniform(0.5, 4, (2000, 1))
    rows = np.flatnonzero(np.arange(2000) % 10 != 9)
    groups = join_near_embeddings(
        duplicates.ungrouped(2000), rows, vectors.astype(np.float16), min_cosine=0.9
    )
    unit = duplicates.unit(vectors[rows])
    some, others = np.nonzero(unit @ unit.T > 0.9)
    assert sets_of(groups) == sets_of(join(duplicates.ungrouped(2000), rows[some], rows[others]))
    assert len(sets_of(groups)) == 1600


def test_a_group_is_closed_over_pairs_of_its_neighbours() -> None:
    """A chain of pictures, each like the next one alone."""
    angles = np.linspace(0, 1.5, 40)
    chain = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float16)
    rows = np.arange(40)
    cosines = [float(np.dot(*pair)) for pair in pairwise(duplicates.unit(chain))]
    assert min(cosines) > 0.999 > float(duplicates.unit(chain)[0] @ duplicates.unit(chain)[-1])
    assert set(join_near_embeddings(rows, rows, chain, 0.999).tolist()) == {0}


def test_clusters_are_those_of_the_embeddings_and_equal_at_each_run() -> None:
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((5, 32))
    of = rng.integers(0, 5, 300)
    vectors = (centres[of] + 0.05 * rng.standard_normal((300, 32))).astype(np.float16)
    rows = np.arange(300)
    found = clusters(rows, vectors, 5)
    assert sets_of(found) == sets_of(of)
    assert (found == clusters(rows, vectors, 5)).all()
