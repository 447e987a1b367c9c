"""Settings of the section `select`: which described pictures are trained on."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from configs.settings.base_section import NullDrops, Section, setting


class Duplicates(Section):
    """Which pictures count as duplicates, and which one of them is kept."""

    exact: bool = True
    """Keep one of several entries with the same bytes."""
    perceptual: str | None = None
    """Describer of kind hash: pictures that were saved again, resized or mirrored are duplicates;
    null: they are not."""
    distance: Annotated[int, Field(ge=0, le=20)] = setting(10, needs="perceptual")
    """Maximum number of bits, of 64, in which the hashes of duplicates differ."""
    min_correlation: Annotated[float, Field(gt=0.0, le=1.0)] = setting(0.94, needs="perceptual")
    """Correlation of thumbnails from which pictures with near hashes are duplicates. 0.92 finds
    more copies that were cropped; drawings, which are alike, need 0.985."""
    semantic: str | None = None
    """Describer with embeddings: pictures with similar ones are duplicates; null: they are not."""
    min_cosine: Annotated[float, Field(gt=0.0, le=1.0)] = setting(0.95, needs="semantic")
    """Cosine of two embeddings from which pictures are semantic duplicates."""
    keep: Literal["largest", "best", "first"] = "largest"
    """Picture of a group that is kept. largest: the most pixels; best: the highest `prefer`; first:
    the first in its image shard, where rows are in the list's order; shards are in no order. Among
    equals, the sha256 decides."""


class Clusters(Section):
    """Clusters of embeddings by k-means: the column `cluster`."""

    describer: str
    """Describer with embeddings."""
    count: PositiveInt = 1000
    """Number of clusters."""


class Balance(Section):
    """Equally many pictures of each value of a column."""

    by: str
    """Column, such as a label, `host` or `cluster`. Null is a value."""
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Maximum number of pictures of a value, in multiples of the rarest value's; 1: equal numbers
    (undersampling)."""


class Select(Section):
    """Which pictures are trained on and evaluated, and why the others are not.

    Conditions are SQL over the columns of descriptions and of the source (docs/data.md).
    """

    where: str | None = None
    """SQL condition that a kept picture meets, such as `aesthetic > 5.5 and original_width >= 512`;
    null: every picture does."""
    duplicates: Duplicates = Duplicates()
    clusters: Clusters | None = None
    """Clusters of embeddings, for `cap` and `balance`; null: none."""
    cap: Annotated[dict[str, PositiveInt], NullDrops] = setting({})
    """Column, such as `host` or `cluster` -> maximum number of pictures of each of its values."""
    balance: Balance | None = None
    """Column whose values get equally many pictures; null: none."""
    limit: PositiveInt | None = None
    """Maximum number of pictures; null: all. With `balance`, the values share it equally."""
    prefer: str | None = None
    """SQL expression, such as `aesthetic`: where some pictures are dropped, those with the highest
    values are kept. null, and among equals: a choice by the sha256."""

    def faults(self) -> Iterator[str]:
        by = {*self.cap, *([self.balance.by] if self.balance else [])}
        if "cluster" in by and self.clusters is None:
            yield "cap and balance by cluster require clusters: set clusters.describer"
        if self.clusters is not None and "cluster" not in by:
            yield "clusters has no effect: cap or balance by `cluster`, or remove it"
        if self.duplicates.keep == "best" and self.prefer is None:
            yield "duplicates.keep: best requires prefer, such as a score"

    @property
    def describers(self) -> dict[str, tuple[str, str]]:
        """Dotted setting -> name and kind of the describer that it needs."""
        named = {
            "select.duplicates.perceptual": (self.duplicates.perceptual, "hash"),
            "select.duplicates.semantic": (self.duplicates.semantic, "clip"),
            "select.clusters.describer": (self.clusters and self.clusters.describer, "clip"),
        }
        return {setting: (name, kind) for setting, (name, kind) in named.items() if name}
