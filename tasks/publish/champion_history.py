"""The champions of a model: a history that changes by compare-and-swap, and an alias after it."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.compare_and_swap import State, read, swap

ALIAS = "champion"
ROLLED_BACK = "rolled back"
Moves = list[dict[str, Any]]  # {version, why, at, token}, oldest first


class RegistryError(ValueError):
    """A model or version is missing or damaged; the message lists the existing versions."""


class Champions:
    """The history below `root`; its last entry is the champion."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs, self._history, self._alias = fs, f"{root}/history.json", f"{root}/{ALIAS}"

    def moves(self) -> Moves:
        """Changes of the champion. Raises RegistryError if the file is damaged."""
        return self._moves(read(self._fs, self._history))

    def move(self, choose: Callable[[Moves], str], why: str) -> str:
        """Make `choose(moves)` the champion, whoever else changes it at the same time.

        Returns the version; what `choose` raises prevents the change.
        """
        token = uuid.uuid4().hex
        while True:
            state = read(self._fs, self._history)
            moves = self._moves(state)
            mine = next((move for move in moves if move.get("token") == token), None)
            if mine is not None:  # written before, but the answer was lost
                version = str(mine["version"])
                break
            version = choose(moves)
            if version == last(moves):
                break
            at = datetime.now(UTC).isoformat(timespec="seconds")
            moves.append({"version": version, "why": why, "at": at, "token": token})
            if swap(self._fs, self._history, state, json.dumps(moves, indent=1).encode()):
                break
        self._follow()
        return version

    def alias(self) -> str | None:
        """The version that the alias names: a symlink if local, else an object with the name."""
        try:
            if isinstance(self._fs, LocalFileSystem):
                return os.readlink(self._alias)
            return str(self._fs.cat_file(self._alias).decode())
        except FileNotFoundError:
            return None

    def _follow(self) -> None:
        """Write the alias until it is the last champion: another may write an older one late."""
        while (champion := last(self.moves())) != self.alias():
            assert champion is not None
            if isinstance(self._fs, LocalFileSystem):
                temporary = f"{self._alias}.{uuid.uuid4().hex}.tmp"
                os.symlink(champion, temporary)
                os.replace(temporary, self._alias)
                continue
            seen = read(self._fs, self._alias)
            if champion == last(self.moves()):  # otherwise `seen` may be of a later champion
                swap(self._fs, self._alias, seen, champion.encode())

    def _moves(self, state: State) -> Moves:
        if state.data is None:
            return []
        try:
            moves = json.loads(state.data)
            _ = [move["version"] for move in moves]
        except (KeyError, TypeError, ValueError):
            raise RegistryError(f"{self._history} is damaged: restore it") from None
        return list(moves)


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
