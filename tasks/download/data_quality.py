"""Statistics of a download, and the limits that a recipe sets for them.

A shard's record has facts of bounded size, such as hosts and failed rows. Each check of a
download's data has its limit in the recipe: above it, the stage fails.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from configs.errors import Failed
from configs.secrets import without_secrets
from configs.settings.data import Download
from tasks.download.http import is_transient
from tasks.download.politeness import host_of
from tasks.download.rows import Row

#: Hosts of a shard with the most failures, and as many with the longest requests.
HOSTS = 8
#: Hosts of a whole download that are shown.
SHOWN = 10
#: Pictures of a whole download whose hashes are compared; beyond it, a sample by hash.
HASHES = 1_000_000
#: Failed rows of each reason that are named, and the length of a name in characters.
EXAMPLES = 3
LONGEST_NAME = 200
#: Stands in a caption for bytes that are no UTF-8, as of files in Latin-1.
ILLEGIBLE = "\ufffd"
#: Caption lengths above it count as it, in characters.
LONGEST = 64
#: Hosts of a whole download in memory.
MOST_HOSTS = 20_000

log = logging.getLogger("kiln")
Host = list[int]  # rows, rows without a picture, milliseconds of all rows


def shard_statistics(
    rows: Sequence[Row],
    outcomes: Sequence[Mapping[str, Any]],
    costs: Sequence[tuple[float, int]],
    settings: Download,
    planned: int,
    earlier: Mapping[str, Any] | None = None,
    base_url: str | None = None,
) -> dict[str, Any]:
    """The facts.

    Args:
        base_url: the base of relative URLs.
        costs: seconds and fetched bytes of each row, in this download of the shard.
        planned: rows of the whole download.
        earlier: the facts of an earlier download, whose bytes and times count too.
    """
    hosts: dict[str, Host] = {}
    pictures: list[tuple[Row, Mapping[str, Any]]] = []
    failed: defaultdict[str, list[Row]] = defaultdict(list)
    for row, outcome, (seconds, _) in zip(rows, outcomes, costs, strict=True):
        is_success = outcome["status"] == "success"
        if is_success:
            pictures.append((row, outcome))
        else:
            failed[outcome.get("error_message", outcome["status"])].append(row)
        _add(hosts, host_of(row.url, base_url), [1, not is_success, round(1000 * seconds)])
    fetched = sum(size for _, size in costs)
    before: Mapping[str, Any] = {"bytes": 0, "hosts": {}} if earlier is None else earlier
    for name, (_, _, milliseconds) in before["hosts"].items():
        _add(hosts, name, [0, 0, milliseconds])
    share = min(1.0, HASHES / max(planned, 1))
    hashes = [outcome["sha256"][:16] for _, outcome in pictures]
    captioned = [row for row, _ in pictures]
    lengths = Counter(min(len(row.captions[0].strip()), LONGEST) for row in captioned)
    illegible = [row for row in captioned if any(ILLEGIBLE in text for text in row.captions)]
    smaller = [min(int(o["width"]), int(o["height"])) < settings.image_size for _, o in pictures]
    return {
        "bytes": before["bytes"] + fetched,
        "fetched": fetched,  # by this download alone
        "examples": {reason: _named(listed)["examples"] for reason, listed in failed.items()},
        "hosts": {name: hosts[name] for name in sorted(_worst(hosts, HOSTS)) if name},
        "caption_lengths": {str(length): count for length, count in sorted(lengths.items())},
        "illegible": _named(illegible),
        "uncaptioned": _named([row for row in captioned if not any(map(str.strip, row.captions))]),
        "undersized": sum(smaller),
        # Equal pictures are in the sample together.
        "hashes": [value for value in hashes if int(value[:8], 16) < share * 2**32],
        "hashed_share": share,
    }


def _name(row: Row) -> str:
    name = row.place or row.url or f"the row of caption {row.captions[0]!r}"
    return without_secrets(name)[:LONGEST_NAME]


def _named(rows: Sequence[Row]) -> dict[str, Any]:
    """The number of rows, and the first by place, URL or caption, without secrets."""
    return {"rows": len(rows), "examples": [_name(row) for row in rows[:EXAMPLES]]}


def _add(hosts: dict[str, Host], name: str, facts: Sequence[int]) -> None:
    hosts[name] = [a + b for a, b in zip(hosts.get(name, (0, 0, 0)), facts, strict=True)]


def _worst(hosts: Mapping[str, Host], count: int) -> set[str]:
    """The hosts with the most failures, and those that took the longest."""
    failing = sorted((name for name in hosts if hosts[name][1]), key=lambda n: -hosts[n][1])
    slowest = sorted(hosts, key=lambda name: -hosts[name][2])
    return {*failing[:count], *slowest[:count]}


class DownloadStatistics:
    """The facts of all shards of a download, added one after another; memory is bounded."""

    def __init__(self) -> None:
        self.bytes = 0
        self.undersized = 0
        self.caption_lengths: Counter[int] = Counter()
        self.hosts: dict[str, Host] = {}
        self.examples: dict[str, list[str]] = {}
        self.named: dict[str, dict[str, Any]] = {
            what: {"rows": 0, "examples": []} for what in ("illegible", "uncaptioned")
        }
        self._hashes: list[np.ndarray[Any, np.dtype[np.uint64]]] = []
        self._share = 1.0

    def add(self, facts: Mapping[str, Any]) -> None:
        """Add the facts of a shard, from its record."""
        self.bytes += facts["bytes"]
        self.undersized += facts["undersized"]
        self.caption_lengths.update({int(k): n for k, n in facts["caption_lengths"].items()})
        for reason, names in facts["examples"].items():
            self.examples[reason] = [*self.examples.get(reason, ()), *names][:EXAMPLES]
        for what, named in self.named.items():
            named["rows"] += facts[what]["rows"]
            named["examples"] = [*named["examples"], *facts[what]["examples"]][:EXAMPLES]
        for name, host in facts["hosts"].items():
            _add(self.hosts, name, host)
        if len(self.hosts) > MOST_HOSTS:
            self.hosts = {name: self.hosts[name] for name in _worst(self.hosts, MOST_HOSTS // 4)}
        self._hashes.append(np.array([int(value, 16) for value in facts["hashes"]], np.uint64))
        self._share = min(self._share, facts["hashed_share"])

    def summary(self) -> dict[str, Any]:
        """What a manifest says of them."""
        failing = {name: host for name, host in self.hosts.items() if host[1]}
        return {
            "bytes": self.bytes,
            "undersized": self.undersized,
            "duplicates": self.duplicates(),
            "caption_lengths": {str(k): n for k, n in sorted(self.caption_lengths.items())},
            "examples": self.examples,
            **self.named,
            "failing_hosts": list(_described(failing, 1)),
            "slowest_hosts": list(_described(self.hosts, 2)),
        }

    def duplicates(self) -> float:
        """Share of pictures, 0 to 1, whose bytes an earlier picture has.

        Above a million rows it is that of a sample: the pictures whose hash is below a limit.
        """
        hashes = np.concatenate(self._hashes or [np.empty(0, np.uint64)])
        sampled = hashes[(hashes >> np.uint64(32)) < self._share * 2**32]
        return 1 - len(np.unique(sampled)) / len(sampled) if len(sampled) else 0.0


def _described(hosts: Mapping[str, Host], by: int) -> Iterator[dict[str, Any]]:
    """The hosts that are worst by one of their facts."""
    for name in sorted(hosts, key=lambda name: (-hosts[name][by], name))[:SHOWN]:
        rows, failed, milliseconds = hosts[name]
        seconds = round(milliseconds / 1000 / rows, 2)
        yield {"host": name, "rows": rows, "failed": failed, "seconds per row": seconds}


def check_data(summary: Mapping[str, Any], settings: Download) -> None:
    """Raise Failed for the first limit of the recipe that is exceeded, or without any picture."""
    rows = summary["rows"]
    images = summary["images"]
    data = summary["data"]
    if images == 0 or (rows - images) / rows > settings.max_failed:
        raise Failed(_failures(summary, settings.max_failed))
    least = settings.min_caption_length
    lengths = data["caption_lengths"].items()
    short = sum(count for length, count in lengths if int(length) < least)
    side = settings.image_size
    for setting, share, problem in (
        ("max_duplicates", data["duplicates"], "repeat another one"),
        ("max_short_captions", short / images, f"have a caption of less than {least} characters"),
        ("max_undersized", data["undersized"] / images, f"have a side below {side} pixels"),
    ):
        limit = getattr(settings, setting)
        if share > limit:
            raise Failed(
                f"download: {share:.1%} of the pictures {problem}; download.{setting} allows "
                f"{limit:.0%}"
            )


def warn_of_captions(summary: Mapping[str, Any], *, expected: bool = True) -> None:
    """Warn of pictures without a caption, or with lost letters.

    Args:
        expected: whether the source has captions.
    """
    uncaptioned = summary["data"]["uncaptioned"]
    if uncaptioned["rows"] and expected:
        log.warning(
            "download: %s of %s pictures have no caption (%s) and train unconditionally; if this "
            "is wrong, check source.caption_column or the .txt files beside them",
            f"{uncaptioned['rows']:,}",
            f"{summary['images']:,}",
            ", ".join(uncaptioned["examples"]),
        )
    illegible = summary["data"]["illegible"]
    if illegible["rows"]:
        log.warning(
            "download: the captions of %s pictures have U+FFFD in place of letters (%s): their "
            "file is no UTF-8, or was made from one that was not",
            f"{illegible['rows']:,}",
            ", ".join(illegible["examples"]),
        )


def _failures(summary: Mapping[str, Any], limit: float) -> str:
    outcomes = summary["outcomes"]
    examples = summary["data"]["examples"]
    why = most_common({reason: n for reason, n in outcomes.items() if reason != "success"})
    allowed = f"download.max_failed allows {limit:.0%}"
    if any(map(is_transient, outcomes)):
        allowed += "; --retry-failed fetches those with transient failures again"
    reasons = [reason for reason, _ in Counter(outcomes).most_common(4) if reason in examples]
    named = ", ".join(f"{reason}: {examples[reason][0]}" for reason in reasons)
    allowed += f"; for example {named}" if named else ""
    failed = summary["rows"] - summary["images"]
    return f"download: {failed:,} of {summary['rows']:,} rows failed ({why}); {allowed}"


def most_common(reasons: Mapping[str, int]) -> str:
    """The five most common reasons with their counts."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in Counter(reasons).most_common(5))
