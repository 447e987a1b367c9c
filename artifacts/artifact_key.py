"""The key of an artifact: a digest of all that determines its contents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from artifacts.hashing import digest_json


@dataclass(frozen=True)
class KeyParts:
    """What an artifact's key is made of: anything else may change without a rebuild."""

    stage: str
    version: int
    settings: dict[str, Any]
    inputs: dict[str, str]  # name -> digest

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "version": self.version,
            "settings": self.settings,
            "inputs": self.inputs,
        }

    @property
    def key(self) -> str:
        return digest_json(self.as_dict())
