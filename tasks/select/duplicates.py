"""Groups of duplicates: pictures with near hashes and thumbnails, or with near embeddings.

Groups are closed transitively. A group's number is that of its first picture. Pictures are sorted
by sha256, so that the groups depend neither on the order of shards nor on that of entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasks.encode.near_duplicates import mirror_parts

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
    section 3). docs/benchmarks.md has the share of pairs that are found.

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
    values = np.arange(256, dtype=np.uint64)
    bytes_of = hashes.view(np.uint8).reshape(-1, 8)
    permuted = np.zeros(len(hashes), np.uint64)
    for byte in range(8):
        table = np.zeros(256, np.uint64)
        for bit in range(8):
            table |= (values >> np.uint64(bit) & np.uint64(1)) << places[8 * byte + bit]
        permuted |= table[bytes_of[:, byte]]
    # A row number in the last bits is sorted with its hash, five times as fast as by argsort.
    bits = np.uint64(len(hashes).bit_length())
    permuted >>= bits
    permuted <<= bits
    permuted |= np.arange(len(hashes), dtype=np.uint64)
    permuted.sort()
    permuted &= (np.uint64(1) << bits) - np.uint64(1)
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
    """Correlation of pairs of thumbnails, or of one and the other's mirror image: f32 [M]."""
    found = np.zeros(len(some), np.float32)
    for start in range(0, len(some), BLOCK):
        block = slice(start, start + BLOCK)
        parts = [mirror_parts(thumbnails(rows[block])) for rows in (some, others)]
        kept, negated = np.einsum("pnd,pnd->pn", *parts)
        found[block] = kept + np.abs(negated)
    return found


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
