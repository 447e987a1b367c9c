"""The registry: numbered versions of a model, one of them the champion, and its history.

<registry>/<name>/v1/            a published model's folder; complete once it has manifest.json
<registry>/<name>/history.json   every change of the champion, oldest first; the last holds
<registry>/<name>/champion       follows it: a symlink if local, else an object with the name

A name with a team is two folders, `vision/digits`.

A publication takes the next number, writes the files, then the manifest. It deletes what a
killed publication left under another number, and publishes a damaged version anew. The history
changes by compare-and-swap (artifacts/compare_and_swap.py), so no change is lost; the alias
follows.
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

from artifacts import records
from artifacts.compare_and_swap import VersionedContent, create, read, remove, swap
from artifacts.filesystems import delete_tree, entries, name_of, subfolders
from artifacts.gc import record_registry
from artifacts.lock import Lock, hold
from artifacts.store import LOCK, MANIFEST, Artifact, Store
from configs.errors import Away, Failed, Refused
from configs.explain_errors import hint_of
from configs.secrets import one_line
from tasks.build_or_reuse import REPORT

log = logging.getLogger("kiln")
CHAMPION = "champion"  # an alias, also a file's name
CANDIDATE = "candidate"
HISTORY = "history.json"
VERSION = r"v\d+"  # pattern of its name
ROLLED_BACK = "rolled back"
MODEL = "key_without_champion"  # of a move
Moves = list[dict[str, Any]]  # {version, key_without_champion, why, at, token}, oldest first


class AliasNotWritten(Failed):
    """The champion has changed, but its alias could not follow."""


@dataclass(frozen=True)
class Version:
    """A published version."""

    name: str  # v1, v2, ...
    uri: str
    manifest: dict[str, Any]

    @property
    def model(self) -> str:
        """Its key, whichever champion its gate compared it with."""
        return _key_without_champion(self.manifest["settings"], self.manifest["inputs"])


def _key_without_champion(settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    others = {name: value for name, value in inputs.items() if name != CHAMPION}
    return records.digest_json([settings, others])


def registry_url(store: str, registry: str | None) -> str:
    """URL of a registry: `registry` if given, else the folder of that name in the store."""
    return registry or Store(store).url_of("registry")


def model_names(place: Store) -> list[str]:
    """Names of the models in a registry, of teams too. Raises as the filesystem does.

    A folder is a model's if it has a history or versions. One that is named like a team has the
    team's models besides.
    """
    names = []
    for first in subfolders(place.fs, place.root):
        inside = subfolders(place.fs, f"{place.root}/{first}")
        of_team = [f"{first}/{name}" for name in inside if not _is_of_model(name)]
        names += [name for name in (first, *of_team) if _is_model(place, name)]
    return names


def _is_model(place: Store, name: str) -> bool:
    return any(map(_is_of_model, map(name_of, entries(place.fs, f"{place.root}/{name}"))))


def _is_of_model(name: str) -> bool:
    """Whether a file or folder in a model's folder is its champion, its history or a version."""
    return re.fullmatch(rf"{CHAMPION}|{re.escape(HISTORY)}.*|{VERSION}", name) is not None


class Champions:
    """The history below `root`; its last entry is the champion."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs = fs
        self._alias = f"{root}/{CHAMPION}"
        self._history = f"{root}/{HISTORY}"

    def moves(self) -> Moves:
        """Changes of the champion. Raises Refused if the history is damaged."""
        return self._read()[1]

    def move(self, choose: Callable[[Moves], Version], why: str) -> Version:
        """Make `choose(moves)` the champion, whoever else changes it at the same time.

        Returns the version; what `choose` raises prevents the change.

        Raises:
            AliasNotWritten: the change is made, but the store failed before the alias followed.
        """
        token = uuid.uuid4().hex
        while True:
            state, moves = self._read()
            if token in [move["token"] for move in moves]:  # the answer to the swap was lost
                break
            version = choose(moves)
            if version.name == last(moves):
                break
            at = datetime.now(UTC).isoformat(timespec="seconds")
            change = {MODEL: version.model, "why": why, "at": at, "token": token}
            try:
                if self._swap(state, [*moves, {"version": version.name, **change}]):
                    break
            except Exception:  # any type; the change may be made, and its answer lost
                if all(move["token"] != token for move in self.moves()):
                    raise
                break
        try:
            self.follow()
        except Exception as error:  # stores raise any type
            raise AliasNotWritten(
                f"{version.name} is the champion, but {self._alias} could not be written "
                f"({one_line(error)}): promote {version.name} again"
            ) from error
        return version

    def settle(self) -> Moves:
        """The moves; a `move` that has chosen before and is not among them chooses again."""
        while True:
            state, moves = self._read()
            if self._swap(state, moves, settled=uuid.uuid4().hex):
                return moves

    def _read(self) -> tuple[VersionedContent, Moves]:
        state = read(self._fs, self._history)
        if state.data is None:
            return state, []
        try:
            return state, list(records.decode_record(state.data, self._history)["moves"])
        except (records.Damaged, KeyError, TypeError):
            raise Refused(
                f"{self._history} is damaged: restore it, or delete it and promote a version"
            ) from None

    def _swap(self, state: VersionedContent, moves: Moves, **facts: str) -> bool:
        data = records.encode_record({"format": records.FORMAT, "moves": moves, **facts})
        return swap(self._fs, self._history, state, data) is not None

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
        """Write the alias until it names the last champion: others may write an older name late."""
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
            if champion == last(self.moves()):  # otherwise `seen` may name a later champion
                swap(self._fs, self._alias, seen, champion.encode())


def last(moves: Moves) -> str | None:
    """The champion; None without one."""
    return moves[-1]["version"] if moves else None


def _newest_first(moves: Moves) -> list[str]:
    """The champion and those before it that no rollback has removed, one version of each model."""
    stack: Moves = []
    for move in moves:
        while move["why"] == ROLLED_BACK and stack[-1]["version"] != move["version"]:
            stack.pop()
        stack.append(move)
    newest: dict[str, str] = {}
    for move in reversed(stack):
        newest.setdefault(move[MODEL], move["version"])
    return list(newest.values())


def _needed(moves: Moves, readable: Container[str]) -> set[str]:
    """The champion, its predecessor, and the readable versions that a rollback restores."""
    champions = _newest_first(moves)
    restorable = [name for name in champions if name in readable]
    return {*champions[:2], *restorable[:2]}


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

    def fault(self, version: Version, *, deep: bool = True) -> str | None:
        """The first fault of a version's files; with `deep`, their content is hashed."""
        root = f"{self.root}/{version.name}"
        return records.first_fault(self.fs, root, version.manifest["files"], deep=deep)

    def versions(self) -> list[Version]:
        """Complete versions, oldest first."""
        versions = []
        for name, manifest in self._manifests():
            if isinstance(manifest, str):
                log.warning("registry %s/%s: %s", self.name, name, manifest)
            else:
                versions.append(Version(name, self.url(name), manifest))
        return versions

    def unreadable(self) -> list[tuple[str, str]]:
        """(version, fault) of every version with a damaged manifest."""
        return [(name, fault) for name, fault in self._manifests() if isinstance(fault, str)]

    def champion(self) -> Version | None:
        """The champion; None if there is none. Raises Refused if it is damaged."""
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
        """Copy a publish artifact to the next version, or return the version that it has already.

        A version with damaged files does not count.

        Raises:
            Damaged: the artifact's own files are not those that were committed.
            LockLost: another publisher took over.
        """
        record_registry(artifact.store, self.store)
        with hold(self.fs, f"{self.root}/{LOCK}") as lock:
            version = self._published(artifact)
            if version is None:
                return self._add(artifact, lock)
            if version.manifest["digest"] == artifact.digest:
                self._add_report(artifact, version.name, lock)  # it may have been made without
            return version

    def promote(
        self, version: str, why: str = "promoted", *, expected: str | EllipsisType | None = ...
    ) -> Version:
        """Make a version the champion.

        Args:
            expected: the present champion's version, None for none; default: whichever it is.

        Raises:
            Refused: the version does not exist.
            Away: with `expected`, the version was deleted, or the champion is neither `expected`
                nor this version already, as after a promotion whose answer was lost. Another
                publication compares, or copies, anew.
            AliasNotWritten: it is the champion, but the alias could not be written.
        """

        def chosen(moves: Moves) -> Version:
            champion = last(moves)
            if expected not in (..., champion) and champion != version:
                now = champion or "none"
                raise Away(f"{self.name}: the champion is {now}, not {expected}: run again")
            try:
                return self.version(version)  # each time: `keep` may have deleted it
            except Refused as error:
                if expected is ...:
                    raise
                raise Away(f"{error}: run again") from None

        return self._champions.move(chosen, why)

    def version(self, name: str) -> Version:
        """The version with a name such as v2. Raises Refused if it does not exist."""
        # Any other name is no folder of a version.
        version = self._version(name) if re.fullmatch(VERSION, name) else None
        if version is None:
            names = ", ".join(version.name for version in self.versions())
            if not names:
                models = model_names(self.store) or ["none"]
                hint = hint_of(self.name, models)
                raise Refused(f"{self.name} {name}: no such model in the registry ({hint})")
            raise Refused(f"{self.name} {name}: no such version (there are: {names})")
        return version

    def rollback(self) -> Version:
        """Restore the previous champion; repeated calls go back to the oldest that is kept.

        Raises:
            Refused: there is no champion or no earlier champion.
        """

        def earlier(moves: Moves) -> Version:
            if not moves:
                raise Refused(f"{self.name}: there is no champion to roll back from")
            current, *before = _newest_first(moves)
            version = next(filter(None, map(self._version, before)), None)
            if version is None:
                raise Refused(f"{self.name}: no champion before {current} is kept")
            return version

        return self._champions.move(earlier, ROLLED_BACK)

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
        version = self.candidate() if which == CANDIDATE else self.champion()
        if version is None:
            raise Refused(f"{self.name}: there is no {which or CHAMPION}")
        return version

    def keep(self, count: int) -> list[str]:
        """Delete all but the newest `count` versions, the champion and its predecessor.

        Returns the names of the deleted versions.
        """
        with hold(self.fs, f"{self.root}/{LOCK}") as lock:
            names = [version.name for version in self.versions()]
            return [name for name in names[:-count] if self._delete(name, names, lock)]

    def _delete(self, name: str, readable: Container[str], lock: Lock) -> bool:
        """Delete a version, its manifest first; False if it is needed, or becomes so by now.

        Args:
            readable: the versions whose manifest is whole.
        """
        if name in _needed(self.history(), readable):
            return False
        root = f"{self.root}/{name}"
        lock.check()
        manifest = remove(self.fs, f"{root}/{MANIFEST}")
        # A promotion that found the manifest is among the moves, or looks for it again.
        if name in _needed(self._champions.settle(), readable):
            if manifest is not None:
                create(self.fs, f"{root}/{MANIFEST}", manifest)
            return False
        delete_tree(self.fs, root)
        return True

    def mend_alias(self) -> None:
        """Write the alias if it is not the champion, as after a store's error in a promotion."""
        if self.history():
            self._champions.follow()

    def was_champion(self, name: str) -> bool:
        """Whether a version is or was the champion, also as another version of the same model.

        A copy of the current champion does not count: it was published to replace damaged files.
        """
        moves = self.history()
        if any(move["version"] == name for move in moves):
            return True
        version = self._version(name)
        models = [move[MODEL] for move in moves]
        return version is not None and version.model in models and version.model != models[-1]

    def earlier_champion(
        self, settings: Mapping[str, Any], inputs: Mapping[str, str]
    ) -> Version | None:
        """The newest version of a model that was the champion; None if there is none.

        Args:
            settings: the settings in a publish artifact's key.
            inputs: the inputs in the same key; its champion does not count.
        """
        model = _key_without_champion(settings, inputs)
        if all(move[MODEL] != model for move in self.history()):
            return None
        return next((v for v in reversed(self.versions()) if v.model == model), None)

    def last_move(self) -> dict[str, Any] | None:
        """The last change of the champion: {version, why, at}; None without a champion."""
        return next(reversed(self.history()), None)

    def history(self) -> Moves:
        """Changes of the champion, oldest first. Raises Refused if they are damaged."""
        return self._champions.moves()

    def _published(self, artifact: Artifact) -> Version | None:
        """The newest version of an artifact; None if all are damaged, or there is none."""
        for name in reversed(self._version_names()):
            version = self._version(name)
            if version is None or version.manifest["key"] != artifact.key:
                continue
            fault = self.fault(version, deep=False)
            if fault is None:
                return version
            log.warning("registry %s/%s: %s; published anew", self.name, name, fault)
        return None

    def _version(self, name: str) -> Version | None:
        """A version; None if it is missing or damaged."""
        manifest = self._manifest(name)
        return Version(name, self.url(name), manifest) if isinstance(manifest, dict) else None

    def _manifest(self, name: str) -> dict[str, Any] | str | None:
        """Manifest of a version, or its fault; None without a manifest."""
        try:
            return records.read_record(self.fs, f"{self.root}/{name}/{MANIFEST}")
        except ValueError as error:
            return str(error)

    def _manifests(self) -> Iterator[tuple[str, dict[str, Any] | str]]:
        """(version, manifest or fault message), oldest first."""
        for name in self._version_names():
            manifest = self._manifest(name)
            if manifest is not None:
                yield name, manifest

    def _version_names(self) -> list[str]:
        names = (name for name in subfolders(self.fs, self.root) if re.fullmatch(VERSION, name))
        return sorted(names, key=lambda name: int(name[1:]))

    def _add(self, artifact: Artifact, lock: Lock) -> Version:
        """Copy every file, the manifest last, which makes the folder a version."""
        names = self._version_names()
        used = [*names, *(move["version"] for move in self.history())]
        name = f"v{max((int(name[1:]) for name in used), default=0) + 1}"
        for left in names:  # by a killed publication or deletion
            if self._manifest(left) is None:
                self._delete(left, (), lock)
        root = f"{self.root}/{name}"
        copied = [self._copy(artifact, entry, root, lock) for entry in artifact.files]
        self._add_report(artifact, name, lock)
        manifest = {**artifact.manifest, "files": records.stamped(self.fs, root, copied)}
        lock.check()
        if not create(self.fs, f"{root}/{MANIFEST}", records.encode_record(manifest)):
            raise Refused(f"{self.name} {name}: another publisher made it: publish again")
        return Version(name, self.url(name), manifest)

    def _add_report(self, artifact: Artifact, name: str, lock: Lock) -> None:
        """Copy the artifact's report, unless it has none or the version has a report."""
        path = f"{self.root}/{name}/{REPORT}"
        if artifact.store.fs.exists(f"{artifact.path}/{REPORT}") and not self.fs.exists(path):
            records.write_atomic(self.fs, path, artifact.read(REPORT), lock.check)

    def _copy(
        self, artifact: Artifact, entry: records.FileEntry, root: str, lock: Lock
    ) -> records.FileEntry:
        source = artifact.url(entry.path)
        target = f"{root}/{entry.path}"
        if self.store.is_local or entry.size > records.SMALL:
            etag = records.copy_checked(source, entry.sha256, self.fs, target, lock.check)
            return replace(entry, etag=etag)
        lock.write(target, artifact.read(entry.path))
        return replace(entry, etag=None)
