"""The evaluate stage: compare the tuned model with its base on equal prompts and noise."""

from tasks.evaluate.features import check_clip
from tasks.evaluate.measure import flatten, metric_names
from tasks.evaluate.pictures import STAGE, VERSION
from tasks.evaluate.prompts import sample_prompts
from tasks.evaluate.samples import SampleScorer
from tasks.evaluate.stage import (
    build,
    check,
    check_size,
    key_parts,
    metrics_of_published,
    settings_for_key,
    show,
)

__all__ = [
    "STAGE",
    "VERSION",
    "SampleScorer",
    "build",
    "check",
    "check_clip",
    "check_size",
    "flatten",
    "key_parts",
    "metric_names",
    "metrics_of_published",
    "sample_prompts",
    "settings_for_key",
    "show",
]
