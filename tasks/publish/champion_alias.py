"""The alias `champion` of a model and its history, which moves it; candidates wait for a person.

<registry>/<name>/history.json   every change of the champion, oldest first; the last holds. And the
                                 candidates: versions that passed the gate and await approval
<registry>/<name>/champion       follows it: a symlink if local, else an object with the name

The history changes by compare-and-swap (artifacts/compare_and_swap.py), so no change is lost; the
alias follows.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts import records
from artifacts.compare_and_swap import VersionedContent, read, swap
from configs.errors import Failed, Refused
from configs.secrets import one_line

CHAMPION = "champion"  # an alias, also a file's name
CANDIDATE = "candidate"
HISTORY = "history.json"
ROLLED_BACK = "rolled back"
MODEL = "key_without_champion"  # of a move or a candidate
Entry = dict[str, Any]


class AliasNotWritten(Failed):
    """The champion has changed, but its alias could not follow."""


def in_days(days: float) -> str:
    """The time so many days from now."""
    return (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")


def in_words(candidate: Entry) -> str:
    """Until when a candidate awaits approval; or who rejected it, and why."""
    if (rejected := candidate.get("rejected")) is not None:
        return f"{candidate['version']} was rejected by {rejected['by']}: {rejected['why']}"
    return f"{candidate['version']} awaits approval until {_minute(candidate['until'])}"


def _minute(time: str) -> str:
    return f"{time[:16].replace('T', ' ')} UTC"


@dataclass(frozen=True)
class History:
    """Every change of the champion and every candidate, oldest first."""

    #: {version, key_without_champion, why, at, token}, and `by` if a person moved it.
    moves: Sequence[Entry] = ()
    #: {version, key_without_champion, champion, bound, until, hub, forced, at, token}: the champion
    #: then, whether the verdict holds for it alone; `rejected`: {by, why, at, token}.
    candidates: Sequence[Entry] = ()

    @property
    def champion(self) -> str | None:
        """The champion's version; None without one."""
        return self.moves[-1]["version"] if self.moves else None

    @property
    def versions(self) -> set[str]:
        """Those that were the champion or a candidate."""
        return {entry["version"] for entry in (*self.moves, *self.candidates)}

    @property
    def tokens(self) -> set[str]:
        """One for each change."""
        rejections = [entry["rejected"] for entry in self.candidates if "rejected" in entry]
        return {entry["token"] for entry in (*self.moves, *self.candidates, *rejections)}

    @property
    def waiting(self) -> Entry | None:
        """The candidate that awaits approval; None without one."""
        newest = self.candidates[-1] if self.candidates else None
        return None if newest is None or self.outcome(newest) else newest

    def outcome(self, candidate: Entry) -> str | None:
        """What has ended a candidate's wait, in words; None while it waits."""
        version, compared = candidate["version"], candidate["champion"]
        again = "the next run of its recipe"
        if "rejected" in candidate:
            return in_words(candidate)
        if (move := next((m for m in self.moves if m["version"] == version), None)) is not None:
            return f"{version} was promoted by {move.get('by', 'a run')}: {move['why']}"
        if version != (newest := self.candidates[-1]["version"]):
            return f"{version} was replaced by the candidate {newest}"
        if candidate["bound"] and compared != self.champion:
            return (
                f"{version} was compared with {compared or 'no champion'}, and {self.champion} is "
                f"the champion now: {again} measures it anew"
            )
        if candidate["until"] <= in_days(0):
            return f"{version} expired on {_minute(candidate['until'])}: {again} asks anew"
        return None

    def candidate(self, version: str | None) -> Entry | None:
        """The newest candidate that is a version; None without one."""
        return next((c for c in reversed(self.candidates) if c["version"] == version), None)

    def awaiting(self, which: str) -> Entry:
        """The candidate that a person decides on: a version, or the newest one (`candidate`).

        Raises:
            Refused: it does not wait.
        """
        newest = self.candidates[-1]["version"] if self.candidates else which
        candidate = self.candidate(newest if which == CANDIDATE else which)
        if candidate is None:
            raise Refused(f"{which}: no such version awaits approval")
        if (outcome := self.outcome(candidate)) is not None:
            raise Refused(outcome)
        return candidate

    def rejection(self, model: str) -> Entry | None:
        """The newest candidate of a model that a person rejected; None without one."""
        rejected = (c for c in reversed(self.candidates) if c[MODEL] == model and "rejected" in c)
        return next(rejected, None)

    def newest_first(self) -> list[str]:
        """The champion and those before it that no rollback has removed, one version of a model."""
        stack: list[Entry] = []
        for move in self.moves:
            while move["why"] == ROLLED_BACK and stack[-1]["version"] != move["version"]:
                stack.pop()
            stack.append(move)
        newest: dict[str, str] = {}
        for move in reversed(stack):
            newest.setdefault(move[MODEL], move["version"])
        return list(newest.values())

    def needed(self, readable: Container[str]) -> set[str]:
        """Champion, predecessor, readable versions that a rollback restores, waiting candidate."""
        champions = self.newest_first()
        restorable = [name for name in champions if name in readable]
        waiting = [] if self.waiting is None else [self.waiting["version"]]
        return {*champions[:2], *restorable[:2], *waiting}


class ChampionAlias:
    """The alias below `root`, moved by changes of its history."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs = fs
        self._alias = f"{root}/{CHAMPION}"
        self._history = f"{root}/{HISTORY}"

    def history(self) -> History:
        """All changes. Raises Refused if they are damaged."""
        return self._read()[1]

    def change(self, edit: Callable[[History, dict[str, str]], History]) -> History:
        """Replace the history by `edit(history, stamp)`, whoever else changes it at the same time.

        An entry that `edit` adds has the stamp, {at, token}. What it raises prevents the change.

        Returns the history after the change.
        """
        stamp = {"at": in_days(0), "token": uuid.uuid4().hex}
        changed = History()
        while True:
            state, history = self._read()
            if stamp["token"] in history.tokens:  # the answer to the swap was lost
                return changed
            changed = edit(history, stamp)
            if changed == history:
                return changed
            try:
                if self._swap(state, changed):
                    return changed
            except Exception:  # any type; the change may be made, and its answer lost
                if stamp["token"] not in self.history().tokens:
                    raise
                return changed

    def move(
        self, choose: Callable[[History], tuple[str, str]], why: str, by: str | None = None
    ) -> None:
        """Make a version the champion, and let the alias follow.

        Args:
            choose: returns the version and its model's key; what it raises prevents the change.
            by: the person that moves it; None: a run.

        Raises:
            AliasNotWritten: the change is made, but the store failed before the alias followed.
        """

        def moved(history: History, stamp: dict[str, str]) -> History:
            version, model = choose(history)
            if version == history.champion:
                return history
            entry = {"version": version, MODEL: model, "why": why, **stamp}
            return replace(history, moves=[*history.moves, entry | ({"by": by} if by else {})])

        version = self.change(moved).champion
        try:
            self.follow()
        except Exception as error:  # stores raise any type
            raise AliasNotWritten(
                f"{version} is the champion, but {self._alias} could not be written "
                f"({one_line(error)}): promote {version} again"
            ) from error

    def settle(self) -> History:
        """The history; a change that has read it before and is not in it reads it again."""
        while True:
            state, history = self._read()
            if self._swap(state, history, settled=uuid.uuid4().hex):
                return history

    def _read(self) -> tuple[VersionedContent, History]:
        state = read(self._fs, self._history)
        if state.data is None:
            return state, History()
        try:
            record = records.decode_record(state.data, self._history)
            return state, History(list(record["moves"]), list(record.get("candidates", ())))
        except (records.Damaged, KeyError, TypeError):
            raise Refused(
                f"{self._history} is damaged: restore it, or delete it and promote a version"
            ) from None

    def _swap(self, state: VersionedContent, history: History, **facts: str) -> bool:
        data = records.encode_record({"format": records.FORMAT, **vars(history), **facts})
        return swap(self._fs, self._history, state, data) is not None

    def target(self) -> str | None:
        """The version that the alias names: a symlink if local, else an object with the name."""
        try:
            if isinstance(self._fs, LocalFileSystem):
                return os.readlink(self._alias)
            return str(self._fs.cat_file(self._alias).decode())
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return None  # no symlink, as after a copy of the registry that followed it

    def follow(self) -> None:
        """Write the alias until it names the last champion: others may write an older name late."""
        while (champion := self.history().champion) != self.target():
            assert champion is not None
            if isinstance(self._fs, LocalFileSystem):
                temporary = f"{self._alias}.{uuid.uuid4().hex}.tmp"
                if os.path.isdir(self._alias) and not os.path.islink(self._alias):
                    os.rename(self._alias, f"{temporary}.copy")
                os.symlink(champion, temporary)
                os.replace(temporary, self._alias)
                shutil.rmtree(f"{temporary}.copy", ignore_errors=True)
                continue
            seen = read(self._fs, self._alias)
            if champion == self.history().champion:  # otherwise `seen` may name a later one
                swap(self._fs, self._alias, seen, champion.encode())
