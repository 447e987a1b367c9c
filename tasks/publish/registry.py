"""The registry: numbered versions of a model, one of them the champion, and its history.

<registry>/<name>/v1/                 a published model's folder; complete once it has manifest.json
<registry>/<name>/history.json        every change of the champion, oldest first; the last one holds
<registry>/<name>/history.copy.json   the same, written before it
<registry>/<name>/champion            follows it: a symlink if local, else an object with the name

The history changes by compare-and-swap (artifacts/compare_and_swap.py), so no change is lost; the
alias `champion` changes after it. A change is written to the copy first, then to the history; who
finds the copy ahead completes the change. So what anybody has read is in both, and one may be
damaged.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import EllipsisType
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.compare_and_swap import VersionedContent, create, read, swap
from artifacts.filesystems import delete_tree, entries, files, name_of, subfolders
from artifacts.gc import record_registry
from artifacts.lock import Lock, hold
from artifacts.records import (
    FORMAT,
    SMALL,
    Damaged,
    FileEntry,
    copy_checked,
    decode_record,
    digest_json,
    encode_record,
    file_fault,
    read_record,
    stamped,
    write_atomic,
)
from artifacts.store import LOCK, MANIFEST, Artifact, Store
from configs.errors import Failed, Refused
from configs.explain_errors import hint_of
from configs.secrets import one_line
from tasks.stage import REPORT

log = logging.getLogger("kiln")
ALIAS = "champion"
HISTORY = "history.json"
COPY = "history.copy.json"
ROLLED_BACK = "rolled back"
Moves = list[dict[str, Any]]  # {version, why, at, token} and facts, oldest first


class AliasNotWritten(Failed):
    """The champion has changed, but its alias could not follow."""


class Champions:
    """The history below `root`; its last entry is the champion."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs = fs
        self._alias = f"{root}/{ALIAS}"
        self._history = f"{root}/{HISTORY}"
        self._copy = f"{root}/{COPY}"

    def moves(self) -> Moves:
        """Changes of the champion.

        Raises Refused if the history is damaged, and its copy is damaged or missing.
        """
        found = _decode(read(self._fs, self._history), self._history)
        if found:
            return found
        copied = _decode(read(self._fs, self._copy), self._copy)
        if copied is None or (found is None and not copied):
            raise Refused(
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


CHAMPION = "champion"
CANDIDATE = "candidate"  # aliases
SAME_MODEL = "key_without_champion"  # fact of a move of the champion


class ChampionChanged(Refused):
    """The champion is another than the one that a promotion was decided against."""


@dataclass(frozen=True)
class Version:
    """A published version."""

    name: str  # v1, v2, ...
    uri: str
    manifest: dict[str, Any]


def registry_url(store: str, registry: str | None) -> str:
    """URL of a registry: `registry` if given, else the folder of that name in the store."""
    return registry or Store(store).url_of("registry")


def _key_without_champion(settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """A version's key, whichever champion its gate compared it with."""
    others = {name: value for name, value in inputs.items() if name != "champion"}
    return digest_json([dict(settings), others])


def _key_of(manifest: Mapping[str, Any]) -> str:
    return _key_without_champion(manifest["settings"], manifest["inputs"])


class Registry:
    """The versions of one model name in a registry. Raises Refused for an invalid URL."""

    def __init__(self, url: str, name: str) -> None:
        self.store = Store(url)
        self.fs = self.store.fs
        self.name = name
        self.root = f"{self.store.root}/{name}"
        self._champions = Champions(self.fs, self.root)

    def url(self, version: str) -> str:
        """URL of a version's folder; a plain path if local."""
        return self.store.url_of(f"{self.name}/{version}")

    def versions(self) -> list[Version]:
        """Complete versions, oldest first."""
        found = []
        for name, manifest in self._manifests():
            if isinstance(manifest, str):
                log.warning("registry %s/%s: %s", self.name, name, manifest)
            else:
                found.append(Version(name, self.url(name), manifest))
        return found

    def unreadable(self) -> list[tuple[str, str]]:
        """(version, fault) of every version with a damaged manifest."""
        return [(name, fault) for name, fault in self._manifests() if isinstance(fault, str)]

    def champion(self) -> Version | None:
        """The champion; None without one. Raises Refused if it is damaged."""
        name = last(self.history())
        if name is None:
            return None
        champion = self._version(name)
        if champion is None:
            raise Refused(
                f"{self.name}: the champion {name} is damaged: restore it, or promote another"
            )
        return champion

    def publish(self, artifact: Artifact) -> Version:
        """Copy a publish artifact to the next version, or return its existing version.

        Damaged files of the existing version are replaced one by one, each at once: a reader sees
        no file half written.

        Raises:
            Damaged: the artifact's own files are not those that were committed.
            LockLost: another publisher took over.
        """
        record_registry(artifact.store, self.store)
        with hold(self.fs, f"{self.root}/{LOCK}") as lock:
            for version in self._likely_first():
                if version.manifest["key"] == artifact.key and self._mend(version, artifact, lock):
                    return version
            return self._add(artifact, self._next_name(artifact), lock)

    def promote(
        self, version: str, why: str = "promoted", *, expected: str | EllipsisType | None = ...
    ) -> Version:
        """Make a version the champion.

        Args:
            expected: the present champion's version, None for none; default: whichever it is.

        Raises:
            Refused: the version does not exist.
            ChampionChanged: the champion is neither `expected` nor this version already, as after
                a promotion whose answer was lost.
            AliasNotWritten: it is the champion, but the alias could not be written.
        """
        found = self.version(version)

        def chosen(moves: Moves) -> str:
            self.version(version)  # `keep` may have deleted it meanwhile
            if expected not in (..., last(moves)) and last(moves) != version:
                champion = last(moves) or "none"
                raise ChampionChanged(f"{self.name}: the champion is {champion}, not {expected}")
            return version

        self._champions.move(chosen, why, **{SAME_MODEL: _key_of(found.manifest)})
        return found

    def version(self, name: str) -> Version:
        """The version with a name such as v2. Raises Refused if it does not exist."""
        # Any other name is no folder of a version.
        found = self._version(name) if re.fullmatch(r"v\d+", name) else None
        if found is None:
            names = ", ".join(version.name for version in self.versions())
            if not names:
                models = subfolders(self.fs, self.store.root) or ["none"]
                hint = hint_of(self.name, models)
                raise Refused(f"{self.name} {name}: no such model in the registry ({hint})")
            raise Refused(f"{self.name} {name}: no such version (there are: {names})")
        return found

    def has(self, name: str) -> bool:
        """Whether a version is complete, damaged or not."""
        held = entries(self.fs, f"{self.root}/{name}")  # raises where `exists` would say no
        return MANIFEST in map(name_of, held)

    def rollback(self) -> Version:
        """Restore the previous champion; repeated calls go back to the oldest that is kept.

        Raises:
            Refused: there is no champion or no earlier one.
        """

        def earlier(moves: Moves) -> str:
            current = last(moves)
            if current is None:
                raise Refused(f"{self.name}: there is no champion to roll back from")
            readable = {version.name for version in self.versions()}
            found = next((n for n in _newest_first(moves) if n != current and n in readable), None)
            if found is None:
                raise Refused(f"{self.name}: no champion before {current} is kept")
            return found

        return self.version(self._champions.move(earlier, ROLLED_BACK))

    def candidate(self) -> Version | None:
        """The newest version, unless it is or was the champion."""
        newest = next(reversed(self.versions()), None)
        return None if newest is None or self.was_champion(newest.name) else newest

    def find(self, which: str) -> Version:
        """The version `v2`, or that of the alias `champion` or `candidate`; "" is the champion.

        Raises:
            Refused: it does not exist.
        """
        if which not in ("", CHAMPION, CANDIDATE):
            return self.version(which)
        found = self.candidate() if which == CANDIDATE else self.champion()
        if found is None:
            raise Refused(f"{self.name}: there is no {which or CHAMPION}")
        return found

    def keep(self, count: int) -> list[str]:
        """Delete all but the newest `count` versions, the champion and the one before it.

        Returns the names of the deleted versions.
        """
        with hold(self.fs, f"{self.root}/{LOCK}") as lock:
            names = [version.name for version in self.versions()]
            deleted = [name for name in names[:-count] if self._delete(name, {*names}, lock)]
            self._delete_leftovers(lock)
        return deleted

    def _delete_leftovers(self, lock: Lock) -> None:
        """Delete folders without a manifest, which killed processes left, below the last version.

        Their numbers are never used again.
        """
        names = self._version_names()
        needed = _newest_first(self.history())[:2]
        complete = [name for name in names if self.has(name)]
        for name in names[: names.index(complete[-1])] if complete else []:
            if name not in (*complete, *needed):
                lock.check()
                delete_tree(self.fs, f"{self.root}/{name}")

    def _delete(self, name: str, readable: Container[str], lock: Lock) -> bool:
        """Delete a version; False if it is the champion, or the one that a rollback restores.

        So it is if it has become one meanwhile.

        Args:
            readable: the versions whose manifest is whole.
        """
        root = f"{self.root}/{name}"
        if name in _restorable(self.history(), readable):
            return False
        lock.check()
        manifest = self.fs.cat_file(f"{root}/{MANIFEST}")
        self.fs.rm_file(f"{root}/{MANIFEST}")
        # A promotion that found the manifest is among the moves, or looks for it again.
        if name in _restorable(self._champions.settle(), readable):
            create(self.fs, f"{root}/{MANIFEST}", manifest)
            return False
        delete_tree(self.fs, root)
        return True

    def mend_alias(self) -> None:
        """Write the alias if it is not the champion, as after a store's error in a promotion."""
        if self.history():
            self._champions.follow()

    def was_champion(self, version: str) -> bool:
        """Whether a version is or was the champion, also as another version of the same model.

        A copy of the present champion was not: it replaces one with damaged files.
        """
        moves = self.history()
        if any(move["version"] == version for move in moves):
            return True
        manifest = self._manifest(version)
        if not isinstance(manifest, dict):
            return False
        mine = _key_of(manifest)
        same = {move["version"] for move in moves if move.get(SAME_MODEL) == mine}
        return bool(same) and last(moves) not in same

    def earlier_champion(
        self, settings: Mapping[str, Any], inputs: Mapping[str, str]
    ) -> Version | None:
        """The last champion that was published with these settings and inputs, or its copy.

        None if there is no version of it.

        Args:
            settings: of a publish artifact's key.
            inputs: of the same key; its champion does not count.
        """
        mine = _key_without_champion(settings, inputs)
        same = [m["version"] for m in reversed(self.history()) if m.get(SAME_MODEL) == mine]
        kept = next(filter(None, map(self._version, dict.fromkeys(same))), None)
        if kept is not None or not same:
            return kept
        # `keep` deleted it, and a run published a copy.
        return next((v for v in self.versions() if _key_of(v.manifest) == mine), None)

    def last_move(self) -> dict[str, Any] | None:
        """The last change of the champion: {version, why, at}; None without a champion."""
        moves = self.history()
        return moves[-1] if moves else None

    def history(self) -> Moves:
        """Changes of the champion, oldest first. Raises Refused if they are damaged."""
        return self._champions.moves()

    def damaged_histories(self) -> list[str]:
        """Names of the damaged files among the history and its copy."""
        return self._champions.damaged()

    def _likely_first(self) -> Iterator[Version]:
        """The champion, then the other versions, newest first; each is read when it is asked for.

        A run whose artifacts exist most often made the champion, so it reads one manifest.
        """
        champion = last(self.history())
        if champion is not None and (version := self._version(champion)) is not None:
            yield version
        for name in reversed(self._version_names()):
            if name != champion and (version := self._version(name)) is not None:
                yield version

    def _version(self, name: str) -> Version | None:
        """A version; None if it is missing or damaged."""
        manifest = self._manifest(name)
        return Version(name, self.url(name), manifest) if isinstance(manifest, dict) else None

    def _manifest(self, name: str) -> dict[str, Any] | str | None:
        """Manifest of a version, or its fault; None without one."""
        try:
            return read_record(self.fs, f"{self.root}/{name}/{MANIFEST}")
        except ValueError as error:
            return str(error)

    def _manifests(self) -> Iterator[tuple[str, dict[str, Any] | str]]:
        """(version, manifest or fault message), oldest first."""
        for name in self._version_names():
            manifest = self._manifest(name)
            if manifest is not None:
                yield name, manifest

    def _version_names(self) -> list[str]:
        names = (name for name in subfolders(self.fs, self.root) if re.fullmatch(r"v\d+", name))
        return sorted(names, key=lambda name: int(name[1:]))

    def _next_name(self, artifact: Artifact) -> str:
        """The name after the last version.

        An interrupted copy without a manifest is reused, but not beside files of another model.
        """
        used = [name for name in self._version_names() if self.has(name)]
        used += [move["version"] for move in self.history()]
        number = max((int(name[1:]) for name in used), default=0) + 1
        while self._has_other_files(f"v{number}", artifact):
            number += 1
        return f"v{number}"

    def _has_other_files(self, name: str, artifact: Artifact) -> bool:
        root = f"{self.root}/{name}"
        own = {entry.path for entry in artifact.files} | {REPORT}
        found = [str(entry["name"])[len(root) + 1 :] for entry in files(self.fs, root)]
        return any(path not in own and not path.endswith(".tmp") for path in found)

    def _add(self, artifact: Artifact, name: str, lock: Lock) -> Version:
        """Copy every file, the manifest last, which makes the folder a version."""
        root = f"{self.root}/{name}"
        self._delete_temporary(root)
        copied = [self._copy(artifact, entry, root, lock) for entry in artifact.files]
        self._add_report(artifact, root, lock)
        manifest = {**artifact.manifest, "files": stamped(self.fs, root, copied)}
        lock.check()
        if not create(self.fs, f"{root}/{MANIFEST}", encode_record(manifest)):
            raise Refused(f"{self.name} {name}: another publisher made it: publish again")
        return Version(name, self.url(name), manifest)

    def _mend(self, version: Version, artifact: Artifact, lock: Lock) -> bool:
        """Copy damaged files again; False if the artifact has been rebuilt with other bytes."""
        root = f"{self.root}/{version.name}"
        self._delete_temporary(root)
        for entry in version.manifest["files"]:
            fault = file_fault(self.fs, root, entry)
            if fault is not None:
                log.warning("registry %s/%s: %s; copied again", self.name, version.name, fault)
                if version.manifest["digest"] != artifact.digest:
                    return False
                self._copy(artifact, entry, root, lock)
        if version.manifest["digest"] == artifact.digest:  # it may have been registered without
            self._add_report(artifact, root, lock)
        return True

    def _add_report(self, artifact: Artifact, root: str, lock: Lock) -> None:
        """Copy the artifact's report, unless it has none or the version has one."""
        held = artifact.store.fs.exists(f"{artifact.path}/{REPORT}")
        if held and not self.fs.exists(f"{root}/{REPORT}"):
            write_atomic(self.fs, f"{root}/{REPORT}", artifact.read(REPORT), lock.check)

    def _delete_temporary(self, root: str) -> None:
        """Delete what a killed publisher left on a local disk: a signature would name it."""
        for entry in files(self.fs, root) if self.store.is_local else ():
            if name_of(entry).endswith(".tmp"):
                self.fs.rm_file(entry["name"])

    def _copy(self, artifact: Artifact, entry: FileEntry, root: str, lock: Lock) -> FileEntry:
        source = artifact.url(entry.path)
        target = f"{root}/{entry.path}"
        if self.store.is_local or entry.size > SMALL:
            etag = copy_checked(source, entry.sha256, self.fs, target, lock.check)
            return replace(entry, etag=etag)
        lock.write(target, artifact.read(entry.path))
        return replace(entry, etag=None)


def _newest_first(moves: Moves) -> list[str]:
    """The champions that no rollback has removed, each once; the first is the present one."""
    return list(dict.fromkeys(reversed(not_rolled_back(moves))))


def _restorable(moves: Moves, readable: Container[str]) -> list[str]:
    """The champion and the one that a rollback restores; a damaged one counts as neither."""
    return [name for name in _newest_first(moves) if name in readable][:2]
