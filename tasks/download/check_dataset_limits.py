"""Checks of a download's data, each with its limit in the recipe: above it, the stage fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.settings.data import Download
from tasks.download.retryable_and_final_failures import is_transient
from tasks.download.stage_errors import TooManyFailed

log = logging.getLogger("kiln")


@dataclass(frozen=True)
class Check:
    """One check."""

    setting: str  # of the section `download`
    problem: str  # of the rows or pictures that count
    found: float  # their share, 0 to 1
    limit: float

    @property
    def passed(self) -> bool:
        return self.found <= self.limit


def data_checks(summary: Mapping[str, Any], settings: Download) -> list[Check]:
    """The checks of a download, by its summary."""
    rows, images, data = summary["rows"], summary["images"], summary["data"]
    lengths = {int(length): count for length, count in data["caption_lengths"].items()}
    least = settings.min_caption_length
    short = sum(count for length, count in lengths.items() if length < least)
    return [
        Check("max_failed", "rows failed", (rows - images) / rows, settings.max_failed),
        _check(settings, "max_duplicates", "pictures repeat another one", data["duplicates"]),
        _check(
            settings,
            "max_short_captions",
            f"pictures have a caption of less than {least} characters",
            short / max(images, 1),
        ),
        _check(
            settings,
            "max_undersized",
            f"pictures have a side below {settings.image_size} pixels",
            data["undersized"] / max(images, 1),
        ),
    ]


def _check(settings: Download, setting: str, problem: str, found: float) -> Check:
    return Check(setting, problem, found, getattr(settings, setting))


def check_data(summary: Mapping[str, Any], settings: Download) -> None:
    """Raise TooManyFailed for the first check that fails, or if there is no picture."""
    for check in data_checks(summary, settings):
        if check.setting == "max_failed":
            _check_failures(check, summary)
        elif not check.passed:
            raise TooManyFailed(
                f"download: {check.found:.1%} of the {check.problem}; download.{check.setting} "
                f"allows {check.limit:.0%}"
            )


def warn_of_captions(summary: Mapping[str, Any], *, expected: bool = True) -> None:
    """Warn of pictures without a caption, or with lost letters; older downloads count none.

    Args:
        expected: whether the source has captions.
    """
    found = summary["data"].get("uncaptioned", {"rows": 0})
    if found["rows"] and expected:
        log.warning(
            "download: %s of %s pictures have no caption (%s) and train unconditionally; if this "
            "is wrong, check source.caption_column or the .txt files beside them",
            *(f"{found['rows']:,}", f"{summary['images']:,}", ", ".join(found["examples"])),
        )
    found = summary["data"].get("illegible", {"rows": 0})
    if found["rows"]:
        log.warning(
            "download: the captions of %s pictures have U+FFFD in place of letters (%s): their "
            "file is no UTF-8, or was made from one that was not",
            *(f"{found['rows']:,}", ", ".join(found["examples"])),
        )


def _check_failures(check: Check, summary: Mapping[str, Any]) -> None:
    rows, failed = summary["rows"], summary["rows"] - summary["images"]
    if check.passed and summary["images"]:
        return
    why = most_common({k: n for k, n in summary["outcomes"].items() if k != "success"})
    allowed = f"download.max_failed allows {check.limit:.0%}"
    if any(map(is_transient, summary["outcomes"])):
        allowed += "; --retry-failed fetches those with transient failures again"
    examples = summary["data"].get("examples", {})  # older downloads have none
    named = [
        f"{r}: {examples[r][0]}"
        for r, _ in Counter(summary["outcomes"]).most_common(4)
        if r in examples
    ]
    allowed += f"; for example {', '.join(named)}" if named else ""
    raise TooManyFailed(f"download: {failed:,} of {rows:,} rows failed ({why}); {allowed}")


def most_common(reasons: Mapping[str, int]) -> str:
    """The five most common reasons with their counts."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in Counter(reasons).most_common(5))
