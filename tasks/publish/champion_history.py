"""The champions of a model: a history that changes by compare-and-swap, and an alias after it.

The history is in two files. A change is written to the copy first, then to the history; who finds
the copy ahead completes the change. So what anybody has read is in both, and one may be damaged.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.compare_and_swap import VersionedContent, read, swap
from artifacts.records import FORMAT, Damaged, decode_record, encode_record
from configs.secrets import one_line

log = logging.getLogger("kiln")
ALIAS = "champion"
HISTORY, COPY = "history.json", "history.copy.json"
ROLLED_BACK = "rolled back"
Moves = list[dict[str, Any]]  # {version, why, at, token} and facts, oldest first


class RegistryError(ValueError):
    """A model or version is missing or damaged; the message lists the existing versions."""


class AliasNotWritten(RuntimeError):
    """The champion has changed, but its alias could not follow."""


class Champions:
    """The history below `root`; its last entry is the champion."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs, self._alias = fs, f"{root}/{ALIAS}"
        self._history, self._copy = f"{root}/{HISTORY}", f"{root}/{COPY}"

    def moves(self) -> Moves:
        """Changes of the champion.

        Raises RegistryError if the history is damaged, and its copy is damaged or missing.
        """
        found = _decode(read(self._fs, self._history), self._history)
        if found:
            return found
        copied = _decode(read(self._fs, self._copy), self._copy)
        if copied is None or (found is None and not copied):
            raise RegistryError(
                f"{self._history} and its copy {COPY} are damaged: restore one of them, or delete "
                "both and promote a version"
            )
        if found is None:
            log.warning("%s is damaged: its copy counts until the next promotion", self._history)
        return copied

    def damaged(self) -> list[str]:
        """Which of the history and its copy are damaged."""
        paths = {HISTORY: self._history, COPY: self._copy}
        return [n for n, path in paths.items() if _decode(read(self._fs, path), path) is None]

    def move(self, choose: Callable[[Moves], str], why: str, **facts: str) -> str:
        """Make `choose(moves)` the champion, whoever else changes it at the same time.

        Args:
            facts: stored with the change.

        Returns the version; what `choose` raises prevents the change.

        Raises:
            AliasNotWritten: the change is made, but the store failed before the alias followed.
        """
        token = uuid.uuid4().hex
        while True:
            seen, moves = self._read_both()
            mine = next((move for move in moves if move.get("token") == token), None)
            if mine is not None:  # written before, but the answer was lost
                version = str(mine["version"])
                break
            version = choose(moves)
            if version == last(moves):
                break
            at = datetime.now(UTC).isoformat(timespec="seconds")
            moves.append({"version": version, "why": why, "at": at, "token": token, **facts})
            try:
                self._write_both(seen, moves)
            except Exception:  # of any type; the change may be made, and its answer lost
                if all(move.get("token") != token for move in self.moves()):
                    raise
                break
        try:
            self.follow()
        except Exception as error:  # stores raise any type
            raise AliasNotWritten(
                f"{version} is the champion, but {self._alias} could not be written "
                f"({one_line(error)}): promote {version} again"
            ) from error
        return version

    def settle(self) -> Moves:
        """The moves; a `move` that has chosen before and is not among them chooses again."""
        while True:
            seen, moves = self._read_both()
            if swap(self._fs, self._copy, seen[0], _encode(moves, settled=uuid.uuid4().hex)):
                return moves

    def _read_both(self) -> tuple[tuple[VersionedContent, VersionedContent], Moves]:
        """The states of the copy and of the history, made equal, and their moves."""
        while True:
            seen = read(self._fs, self._copy), read(self._fs, self._history)  # in this order
            copied = _decode(seen[0], self._copy)
            found = _decode(seen[1], self._history)
            if copied == found and found is not None:
                return seen, found
            if copied is not None and len(copied) > len(found or []):
                swap(self._fs, self._history, seen[1], _encode(copied))
            else:
                swap(self._fs, self._copy, seen[0], _encode(self.moves()))

    def _write_both(self, seen: tuple[VersionedContent, VersionedContent], moves: Moves) -> None:
        data = _encode(moves)
        if swap(self._fs, self._copy, seen[0], data):
            swap(self._fs, self._history, seen[1], data)

    def alias(self) -> str | None:
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
        """Write the alias until it is the last champion: another may write an older one late."""
        while (champion := last(self.moves())) != self.alias():
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
            if champion == last(self.moves()):  # otherwise `seen` may be of a later champion
                swap(self._fs, self._alias, seen, champion.encode())


def _encode(moves: Moves, **facts: str) -> bytes:
    return encode_record({"format": FORMAT, "moves": moves, **facts})


def _decode(state: VersionedContent, path: str) -> Moves | None:
    """The moves of a state; none without a file, None if it is damaged."""
    if state.data is None:
        return []
    try:
        return list(decode_record(state.data, path)["moves"])
    except (Damaged, KeyError, TypeError):
        return None


def last(moves: Moves) -> str | None:
    """The champion; None without one."""
    return moves[-1]["version"] if moves else None


def not_rolled_back(moves: Moves) -> list[str]:
    """The champions that no rollback has removed, oldest first."""
    stack: list[str] = []
    for move in moves:
        if move["why"] == ROLLED_BACK and move["version"] in stack:
            while stack[-1] != move["version"]:
                stack.pop()
        else:
            stack.append(move["version"])
    return stack
