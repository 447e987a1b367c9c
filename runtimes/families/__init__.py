"""Model families: one file per family; registry.py is the table of them."""

from runtimes.families.family import Captioned, Conditioning, Family, TextEncoder
from runtimes.families.registry import (
    FAMILIES,
    all_families,
    denoiser_classes,
    detect_family,
    family_named,
    repeated_blocks,
)

__all__ = [
    "FAMILIES",
    "Captioned",
    "Conditioning",
    "Family",
    "TextEncoder",
    "all_families",
    "denoiser_classes",
    "detect_family",
    "family_named",
    "repeated_blocks",
]
