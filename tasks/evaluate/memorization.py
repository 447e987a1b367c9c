"""Memorisation: the nearest training picture of each sample, by features and by pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from configs.settings.evaluate import Memorization
from tasks.evaluate.distances import Estimate, Resampling, normalise, share
from tasks.evaluate.draw import INK, PAPER
from tasks.evaluate.features import ReferenceFeatures
from tasks.panels import picture_grid, to_png

FEATURES = "memorized"
PIXELS = "memorized_pixels"  # names of the metrics
PAIRS = 8  # closest pairs that are shown
BLOCK = 512  # samples per matrix product
SIDE = 128
GAP = 4
LINE = 14  # of a picture in the strip of pairs, pixels


@dataclass(frozen=True)
class Nearest:
    """The most similar training picture of each of N samples."""

    index: NDArray[np.intp]  # [N], a row of the training features
    similarity: NDArray[np.float64]  # [N], cosine


@dataclass(frozen=True)
class NearestTraining:
    """The nearest training pictures by the image encoder and by pixels."""

    features: Nearest
    pixels: Nearest

    def metrics(self, settings: Memorization, resampling: Resampling) -> dict[str, Estimate]:
        """The share of samples over each threshold."""
        features = self.features.similarity >= settings.similarity
        pixels = self.pixels.similarity >= settings.pixel_similarity
        return {FEATURES: share(features, resampling), PIXELS: share(pixels, resampling)}


def nearest(samples: NDArray[Any], training: NDArray[Any]) -> Nearest:
    """The row of training [K, D] with the largest cosine to each of samples [N, D]; K is over 0."""
    x = normalise(samples)
    y = normalise(training)
    index = np.zeros(len(x), np.intp)
    similarity = np.zeros(len(x))
    for start in range(0, len(x), BLOCK):
        cosine = x[start : start + BLOCK] @ y.T
        best = cosine.argmax(axis=1)
        index[start : start + BLOCK] = best
        similarity[start : start + BLOCK] = cosine[np.arange(len(best)), best]
    return Nearest(index, similarity)


@dataclass(frozen=True)
class Pair:
    """A sample and its nearest training picture."""

    sample: int  # number of the picture
    by: str  # features | pixels
    similarity: float
    tar: str  # path in the images artifact
    key: str  # of the sample in that tar


def closest_pairs(samples: NearestTraining, training: ReferenceFeatures) -> list[Pair]:
    """The PAIRS most similar pairs: half of them by features, half by pixels, best first."""
    pairs = []
    for by, neighbours in (("features", samples.features), ("pixels", samples.pixels)):
        for number in np.argsort(-neighbours.similarity, kind="stable")[: PAIRS // 2].tolist():
            tar, key = training.pictures[int(neighbours.index[number])]
            pairs.append(Pair(number, by, float(neighbours.similarity[number]), tar, key))
    return pairs


def copies_table(facts: Mapping[str, Any], shares: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Table rows, one per way to compare: what the samples reach, and held-out pictures.

    Args:
        facts: `memorization` of metrics.json.
        shares: metric -> {value, n} of the tuned model.
    """
    rows = []
    ways = (("features", FEATURES, "similarity"), ("pixels", PIXELS, "pixel_similarity"))
    for by, name, limit in ways:
        closest = [pair["similarity"] for pair in facts["closest_pairs"] if pair["by"] == by]
        share = shares[name]
        held_out = facts.get("held_out", {}).get(name)
        count = facts["held_out_pictures"]
        counted = "—" if held_out is None else f"{round(held_out * count)} of {count:,}"
        rows.append(
            {
                "compared by": by,
                "counts from": facts["thresholds"][limit],
                "samples that count": f"{round(share['value'] * share['n'])} of {share['n']:,}",
                "closest sample": max(closest, default="—"),
                "held-out that count": counted,
                "closest held-out": facts.get("closest_held_out", {}).get(name, "—"),
            }
        )
    return rows


def render_pairs(pairs: Sequence[tuple[Pair, NDArray[np.uint8], NDArray[np.uint8]]]) -> bytes:
    """PNG bytes: samples above, their nearest training pictures below, with the similarity.

    Args:
        pairs: pair, sample u8 [H, W, 3], training picture u8 [H, W, 3].
    """
    cells = [_fit(sample) for _, sample, _ in pairs] + [_fit(training) for *_, training in pairs]
    grid = picture_grid(cells, len(cells), len(pairs), gap=GAP, paper=PAPER)
    page = Image.new("RGB", (grid.width + 2 * GAP, grid.height + 3 * LINE + 2 * GAP), PAPER)
    page.paste(grid, (GAP, 3 * LINE + GAP))
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default(11)
    pen.text((GAP, 2), "samples above, nearest training pictures below", INK, font)
    for column, (pair, *_) in enumerate(pairs):
        text = f"{pair.by} {pair.similarity:.3f}"
        pen.text((GAP + column * (SIDE + GAP), LINE + 4), text, INK, font)
    return to_png(page)


def _fit(picture: NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(picture)
    grows = image.width < SIDE
    return image.resize((SIDE, SIDE), Image.Resampling.NEAREST if grows else Image.Resampling.BOX)
