"""The stand-in for a describer's model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tasks.describe.describers import Describer, Picture, Spec


class StandIn(Describer):
    """Takes the setting `seconds` per batch."""

    @classmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        return {"": pa.float32()}

    def prepare(self, source: Picture) -> float:
        return float(source.image.resize((1, 1)).getpixel((0, 0))[0])  # type: ignore[index]

    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        time.sleep(self.spec.settings["seconds"])
        return [(value,) for value in prepared]
