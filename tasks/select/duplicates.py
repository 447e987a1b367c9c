"""Groups of duplicates: pictures with near hashes and thumbnails, or with near embeddings.

Groups are closed transitively. A group's number is that of its first picture. Pictures are sorted
by sha256, so that the groups depend neither on the order of shards nor on that of entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import convolve1d
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasks.encode.near_duplicates import SIDE, mirror_parts

Rows = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Thumbnails = Callable[[Rows], NDArray[np.uint8]]  # numbers [M] -> u8 [M, 16, 16]
#: Each round sorts the hashes by another order of their bits, and compares each with the next ones.
ROUNDS = 64
WINDOW = 8
#: Pairs of thumbnails, or queries of embeddings, at once.
BLOCK = 1 << 14
#: Embeddings per inverted list of the index, and lists that a query reads. Fewer embeddings than
#: two lists are all compared.
LIST_SIZE = 512
PROBED = 8
#: Points per centroid that k-means learns from.
TRAINED_ON = 64


def _view(cropped: float) -> NDArray[np.float32]:
    """The matrix [16, 16] of the middle of a line of 16 pixels, smoothed by (1, 2, 1) / 4.

    Args:
        cropped: fraction of the line that is left out at each end.
    """
    edge = cropped * SIDE
    box = (edge, 0.0, SIDE - edge, float(SIDE))
    lines = Image.fromarray(np.eye(SIDE, dtype=np.float32))
    middle = lines.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
    return convolve1d(np.asarray(middle), (0.25, 0.5, 0.25), mode="nearest")


#: The whole and the middle of thumbnails: a crop by 5% a side resembles one of them. Grain, which a
#: crop shifts, is smoothed (docs/benchmarks-data.md).
VIEWS = (_view(0.0), _view(0.02))


def ungrouped(count: int) -> Rows:
    """Groups of one picture each: i64 [N]."""
    return np.arange(count)


def join(groups: Rows, some: Rows, others: Rows) -> Rows:
    """The groups i64 [N], after each of some pictures [M] was joined with one of the others."""
    numbers, ends = np.unique([groups[some], groups[others]], return_inverse=True)
    ends = ends.reshape(2, -1)
    size = len(numbers)
    graph = coo_array((np.ones(ends.shape[1], bool), (ends[0], ends[1])), shape=(size, size))
    parts, part = connected_components(graph, directed=False)
    first = np.full(parts, len(groups))
    np.minimum.at(first, part, numbers)
    renumbered = ungrouped(len(groups))
    renumbered[numbers] = first[part]
    return renumbered[groups]


def join_near_hashes(
    groups: Rows,
    rows: Rows,
    hashes: Hashes,
    mirrored: Hashes,
    thumbnails: Thumbnails,
    distance: int,
    min_correlation: float,
) -> Rows:
    """The groups, after pictures with near hashes and correlated thumbnails were joined.

    Hashes that differ in few bits are near each other in some of the sorted orders (Charikar, 2002,
    section 3). docs/benchmarks-data.md has the share of pairs that are found.

    Args:
        groups: i64 [N].
        rows: the pictures that have a hash, i64 [M].
        hashes: their perceptual hashes, u64 [M].
        mirrored: those of the mirror images, u64 [M].
        thumbnails: returns those of some hashes, by their numbers below M.
        distance: maximum number of bits in which hashes differ.
        min_correlation: of the thumbnails, from which near hashes are of one picture.
    """
    both = np.concatenate([hashes, mirrored])
    unlike = np.zeros(0, np.int64)  # pairs whose thumbnails do not correlate
    for seed in range(ROUNDS):
        order = _sorted_rows(both, seed)
        pairs = _near_in_window(both[order], distance)
        ends = order[pairs] % len(rows)
        of = groups[rows]
        ends = ends[:, of[ends[0]] != of[ends[1]]]
        keys = np.unique(ends.min(axis=0) * len(rows) + ends.max(axis=0))
        keys = np.setdiff1d(keys, unlike, assume_unique=True)
        some, others = np.divmod(keys, len(rows))
        near = _correlations(thumbnails, some, others) >= min_correlation
        unlike = np.concatenate([unlike, keys[~near]])
        groups = join(groups, rows[some[near]], rows[others[near]])
    return groups


def _sorted_rows(hashes: Hashes, seed: int) -> Rows:
    """Row numbers of hashes, sorted by a random order of their bits."""
    places = np.random.default_rng(seed).permutation(64).astype(np.uint64)
    byte = np.arange(256, dtype=np.uint64)[:, None]
    bits = byte >> np.arange(8, dtype=np.uint64) & np.uint64(1)
    tables = (bits << places.reshape(8, 1, 8)).sum(axis=2, dtype=np.uint64)  # of each byte
    bytes_of = hashes.view(np.uint8).reshape(-1, 8)
    permuted = np.zeros(len(hashes), np.uint64)
    for place in range(8):
        permuted |= tables[place][bytes_of[:, place]]
    # A row number in the last bits is sorted with its hash, five times as fast as by argsort.
    width = np.uint64(len(hashes).bit_length())
    permuted >>= width
    permuted <<= width
    permuted |= np.arange(len(hashes), dtype=np.uint64)
    permuted.sort()
    permuted &= (np.uint64(1) << width) - np.uint64(1)
    return permuted.astype(np.int64)


def _near_in_window(hashes: Hashes, distance: int) -> Rows:
    """Pairs of near hashes among each hash and the WINDOW next ones: i64 [2, M]."""
    found = []
    for step in range(1, min(WINDOW, len(hashes) - 1) + 1):
        near = np.bitwise_count(hashes[step:] ^ hashes[:-step]) <= distance
        first = np.flatnonzero(near)
        found.append(np.stack([first, first + step]))
    return np.concatenate(found, axis=1) if found else np.zeros((2, 0), np.int64)


def _correlations(thumbnails: Thumbnails, some: Rows, others: Rows) -> NDArray[np.float32]:
    """Greatest correlation of pairs of thumbnails, or of one and the other's middle: f32 [M].

    A thumbnail and its mirror image are one.
    """
    found = np.zeros(len(some), np.float32)
    for start in range(0, len(some), BLOCK):
        block = slice(start, start + BLOCK)
        [whole, middle], [whole_other, middle_other] = (
            [mirror_parts(_viewed(thumbnails(rows[block]), view)) for view in VIEWS]
            for rows in (some, others)
        )
        for pair in ((whole, whole_other), (middle, whole_other), (whole, middle_other)):
            kept, negated = np.einsum("pnd,pnd->pn", *pair)
            found[block] = np.maximum(found[block], kept + np.abs(negated))
    return found


def _viewed(grey: NDArray[np.uint8], view: NDArray[np.float32]) -> NDArray[np.float32]:
    """A view of thumbnails u8 [N, 16, 16]: f32, of the same shape."""
    viewed: NDArray[np.float32] = grey.astype(np.float32)
    for _ in ("width", "height"):
        viewed = (viewed.reshape(-1, SIDE) @ view).reshape(-1, SIDE, SIDE).swapaxes(1, 2)
    return viewed


def join_near_embeddings(
    groups: Rows, rows: Rows, embeddings: NDArray[np.float16], min_cosine: float
) -> Rows:
    """The groups, after pictures with near embeddings were joined.

    An inverted file of halves is searched (faiss): a query reads the PROBED nearest lists.

    Args:
        groups: i64 [N].
        rows: the pictures that have an embedding, i64 [M].
        embeddings: f16 [N, D], of any length; may be on a disk.
        min_cosine: from which embeddings are near.
    """
    import faiss

    if len(rows) == 0:
        return groups
    width = embeddings.shape[1]
    lists = max(1, len(rows) // LIST_SIZE)
    kind = f"IVF{lists},SQfp16"
    index: Any = faiss.index_factory(width, kind, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = PROBED
    index.train(_sample(embeddings, rows, lists))
    blocks = [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
    for block in blocks:
        index.add(unit(embeddings[block]))
    for block in blocks:
        limits, _, found = index.range_search(unit(embeddings[block]), min_cosine)
        some = np.repeat(block, np.diff(limits.astype(np.int64)))
        groups = join(groups, some, rows[found])
    return groups


def clusters(rows: Rows, embeddings: NDArray[np.float16], count: int) -> NDArray[np.int64]:
    """The clusters of embeddings by spherical k-means (faiss), i64 [M].

    Args:
        rows: the pictures that have an embedding, i64 [M].
        embeddings: f16 [N, D], of any length; may be on a disk.
        count: clusters; at most one for each embedding.
    """
    import faiss

    count = min(count, len(rows))
    if count == 0:
        return rows
    kmeans = faiss.Kmeans(embeddings.shape[1], count, niter=20, seed=1, spherical=True)
    kmeans.cp.init_method = faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS
    kmeans.cp.min_points_per_centroid = 1
    kmeans.train(_sample(embeddings, rows, count))
    found = [
        kmeans.index.search(unit(embeddings[rows[start : start + BLOCK]]), 1)[1][:, 0]
        for start in range(0, len(rows), BLOCK)
    ]
    return np.concatenate(found)


def unit(embeddings: NDArray[Any]) -> NDArray[np.float32]:
    """Embeddings of length 1, f32 [N, D]; those of length 0 stay."""
    vectors = embeddings.astype(np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


def _sample(embeddings: NDArray[np.float16], rows: Rows, centroids: int) -> NDArray[np.float32]:
    """Evenly spaced embeddings, TRAINED_ON per centroid, of length 1."""
    return unit(embeddings[rows[:: max(1, len(rows) // (TRAINED_ON * centroids))]])
