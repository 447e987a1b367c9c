"""Tables of captions: one row per sample of an image shard, in the order of its tar.

Columns: row int32; id binary(32), the sha256 of the downloaded bytes; a text per prompt, null where
the picture was not captioned; cut, the prompts whose caption was cut off; reasons, JSON of prompt
-> why its caption is bad.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.records import canonical_json
from artifacts.store import Artifact
from configs.settings.caption import Caption
from tasks.describe.tables import read_table

SUFFIX = ".parquet"
#: File of an artifact: the rule by which training reads its captions.
RULE = "rule.json"


@dataclass(frozen=True)
class CaptionedSample:
    """The captions of one sample."""

    id: bytes
    texts: Mapping[str, str]  # prompt -> clean text; without those that nobody gave
    cut: Sequence[str] = ()  # prompts
    reasons: Mapping[str, str] | None = None  # prompt -> why it is bad; None: not captioned

    @property
    def good(self) -> tuple[str, ...]:
        """The texts that nothing is wrong with, in the order of the prompts."""
        bad = self.reasons or {}
        return tuple(text for name, text in self.texts.items() if name not in bad)


@dataclass(frozen=True)
class Rule:
    """Which captions of a picture training reads; see configs.settings.caption.Caption."""

    prefix: str = ""
    keep_source: bool = False
    on_bad: str = "source"

    @classmethod
    def of(cls, settings: Caption) -> Rule:
        return cls(settings.prefix, settings.keep_source, settings.on_bad)

    def as_json(self) -> bytes:
        return canonical_json(asdict(self))

    @classmethod
    def read(cls, artifact: Artifact) -> Rule:
        """The rule of a captions artifact."""
        return cls(**json.loads(artifact.read(RULE)))


def captions_to_train(
    sample: CaptionedSample, source: Sequence[str], rule: Rule
) -> tuple[str, ...] | None:
    """The captions that training reads, at least one, with the prefix; None: it is left out.

    A picture that was not captioned has the source's captions.

    Args:
        source: the captions of the source; those without a letter count as none.
    """
    kept = tuple(text for text in source if text.strip())
    if sample.reasons is None:
        captions = kept
    else:
        captions = (*sample.good, *(kept if rule.keep_source else ()))
        if not captions and rule.on_bad == "drop":
            return None
        if not captions and rule.on_bad == "source":
            captions = kept
    prefixed = (f"{rule.prefix}{caption}".strip() for caption in captions or ("",))
    return tuple(dict.fromkeys(prefixed))


def tables_of(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """Sha256 of an image shard's tar -> tar, url, sha256 and prompts of its table."""
    return {
        entry.meta["tar"]: {
            "tar": entry.meta["tar"],
            "url": artifact.url(entry.path),
            "sha256": entry.sha256,
            "prompts": entry.meta["prompts"],
        }
        for entry in artifact.files
        if entry.path.endswith(SUFFIX)
    }


def read_captions(url: str, sha256: str) -> list[CaptionedSample]:
    """The rows of a table, in order. Raises Damaged."""
    return [_sample(row) for row in read_table(url, sha256).to_pylist()]


def _sample(row: dict[str, Any]) -> CaptionedSample:
    del row["row"]
    reasons = row.pop("reasons")
    sample_id = row.pop("id")
    cut = row.pop("cut")
    texts = {name: text for name, text in row.items() if text is not None}
    return CaptionedSample(sample_id, texts, cut, None if reasons is None else json.loads(reasons))


def write_captions(path: Path, prompts: Sequence[str], samples: Sequence[CaptionedSample]) -> None:
    """Write a table; equal samples have equal bytes."""
    fields = [("row", pa.int32()), ("id", pa.binary(32)), *((p, pa.string()) for p in prompts)]
    schema = pa.schema([*fields, ("cut", pa.list_(pa.string())), ("reasons", pa.string())])
    rows = list(_rows(samples))
    pq.write_table(pa.Table.from_pylist(rows, schema), path, compression="zstd")


def _rows(samples: Sequence[CaptionedSample]) -> Iterator[dict[str, Any]]:
    for row, sample in enumerate(samples):
        reasons = None if sample.reasons is None else json.dumps(sample.reasons, sort_keys=True)
        values = {"row": row, "id": sample.id, "cut": list(sample.cut), "reasons": reasons}
        yield {**values, **sample.texts}
