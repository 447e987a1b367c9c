"""The registry: numbered versions of a model, one of them the champion.

<registry>/<name>/v1/            a published model's folder; complete once it has manifest.json

A name with a team is two folders, `vision/digits`.

A publication takes the next number, writes the files, then the manifest. It deletes what a
killed publication left under another number, and publishes a damaged version anew. The champion,
and candidates that await approval, are those of the alias' history (champion_alias.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

from artifacts import records
from artifacts.compare_and_swap import create, remove
from artifacts.filesystems import delete_tree, entries, name_of, subfolders
from artifacts.gc import record_registry
from artifacts.lock import Lock, hold
from artifacts.store import LOCK, MANIFEST, Artifact, Store
from configs.errors import Away, Refused
from configs.explain_errors import hint_of
from tasks.build_or_reuse import REPORT
from tasks.publish.champion_alias import (
    CANDIDATE,
    CHAMPION,
    HISTORY,
    MODEL,
    ROLLED_BACK,
    ChampionAlias,
    Entry,
    History,
    in_days,
)

log = logging.getLogger("kiln")
VERSION = r"v\d+"  # pattern of its name


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


class Registry:
    """The versions of one model name in a registry. Raises Refused for an invalid URL."""

    def __init__(self, url: str, name: str) -> None:
        self.store = Store(url)
        self.fs = self.store.fs
        self.name = name
        self.root = f"{self.store.root}/{name}"
        self.alias = ChampionAlias(self.fs, self.root)

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
        name = self.history().champion
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
        self,
        version: str,
        why: str = "promoted",
        *,
        expected: str | EllipsisType | None = ...,
        by: str | None = None,
    ) -> Version:
        """Make a version the champion.

        Args:
            expected: the present champion's version, None for none; default: whichever it is.
            by: the person that promotes it; None: a run.

        Raises:
            Refused: the version does not exist.
            Away: with `expected`, the version was deleted, or the champion is neither `expected`
                nor this version already, as after a promotion whose answer was lost. Another
                publication compares, or copies, anew.
            AliasNotWritten: it is the champion, but the alias could not be written.
        """

        def chosen(history: History) -> Version:
            if expected is ...:
                return self.version(version)
            return self._compared(version, expected, history)

        return self._move(chosen, why, by)

    def propose(
        self, version: Version, days: float, *, expected: str | None, bound: bool, **facts: Any
    ) -> tuple[Entry, bool]:
        """Let a version await a person's approval, instead of the candidate that waits now.

        Args:
            days: from now until it expires.
            expected: the champion that it was compared with; None: none.
            bound: whether its verdict holds for this champion alone.
            facts: of the candidate, for whom approves it.

        Returns the candidate, and whether it is new. It is not if it waits already, or if a person
        rejected its model.

        Raises:
            Away: as of `promote`.
        """
        proposed: list[tuple[Entry, bool]] = []

        def propose(history: History, stamp: dict[str, str]) -> History:
            waiting = history.waiting
            known = waiting if waiting and waiting["version"] == version.name else None
            if (known := history.rejection(version.model) or known) is not None:
                proposed.append((known, False))
                return history
            self._compared(version.name, expected, history)
            about = {"version": version.name, MODEL: version.model, "champion": expected}
            candidate = about | {"bound": bound, "until": in_days(days), **facts, **stamp}
            proposed.append((candidate, True))
            return replace(history, candidates=[*history.candidates, candidate])

        self.alias.change(propose)
        return proposed[-1]

    def approve(self, which: str, by: str, why: str) -> Version:
        """Make a candidate the champion; `which` is `candidate` or its version.

        Raises:
            Refused: it does not wait, or its gate compared it with another champion.
            AliasNotWritten: it is the champion, but the alias could not be written.
        """

        def awaiting(history: History) -> Version:
            return self.version(history.awaiting(which)["version"])

        return self._move(awaiting, f"approved: {why}" if why else "approved", by)

    def reject(self, which: str, by: str, why: str) -> str:
        """End the wait of a candidate, whose model is not offered again; returns its version.

        Raises:
            Refused: it does not wait, or there is no reason.
        """
        if not why.strip():
            raise Refused(f"{self.name}: a rejection needs a reason: the history names it")

        def reject(history: History, stamp: dict[str, str]) -> History:
            decided = history.awaiting(which) | {"rejected": {"by": by, "why": why, **stamp}}
            return replace(history, candidates=[*history.candidates[:-1], decided])

        return str(self.alias.change(reject).candidates[-1]["version"])  # the newest one waits

    def _compared(self, version: str, expected: str | None, history: History) -> Version:
        """A version whose gate compared it with a champion. Raises Away as `promote` does."""
        if history.champion not in (expected, version):
            champion = history.champion or "none"
            raise Away(f"{self.name}: the champion is {champion}, not {expected}: run again")
        try:
            return self.version(version)  # each time: `keep` may have deleted it
        except Refused as error:
            raise Away(f"{error}: run again") from None

    def _move(
        self, choose: Callable[[History], Version], why: str, by: str | None = None
    ) -> Version:
        chosen: list[Version] = []

        def named(history: History) -> tuple[str, str]:
            chosen.append(version := choose(history))
            return version.name, version.model

        self.alias.move(named, why, by)
        return chosen[-1]

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

        def earlier(history: History) -> Version:
            if not history.moves:
                raise Refused(f"{self.name}: there is no champion to roll back from")
            current, *before = history.newest_first()
            version = next(filter(None, map(self._version, before)), None)
            if version is None:
                raise Refused(f"{self.name}: no champion before {current} is kept")
            return version

        return self._move(earlier, ROLLED_BACK)

    def candidate(self) -> Version | None:
        """The version that awaits approval, else the newest one unless it was promoted or rejected.

        A promoted version is or was the champion.
        """
        history = self.history()
        if history.waiting is not None:
            return self._version(history.waiting["version"])
        newest = next(reversed(self.versions()), None)
        if newest is None or self.was_champion(newest.name) or history.rejection(newest.model):
            return None
        return newest

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
        """Delete all but the newest `count` versions, champion, predecessor, waiting candidate.

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
        if name in self.history().needed(readable):
            return False
        root = f"{self.root}/{name}"
        lock.check()
        manifest = remove(self.fs, f"{root}/{MANIFEST}")
        # A promotion that found the manifest is among the moves, or looks for it again.
        if name in self.alias.settle().needed(readable):
            if manifest is not None:
                create(self.fs, f"{root}/{MANIFEST}", manifest)
            return False
        delete_tree(self.fs, root)
        return True

    def mend_alias(self) -> None:
        """Write the alias if it is not the champion, as after a store's error in a promotion."""
        if self.history().champion is not None:
            self.alias.follow()

    def was_champion(self, name: str) -> bool:
        """Whether a version is or was the champion, also as another version of the same model.

        A copy of the current champion does not count: it was published to replace damaged files.
        """
        moves = self.history().moves
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
        if all(move[MODEL] != model for move in self.history().moves):
            return None
        return next((v for v in reversed(self.versions()) if v.model == model), None)

    def last_move(self) -> Entry | None:
        """The last change of the champion: {version, why, at}; None without a champion."""
        return next(reversed(self.history().moves), None)

    def history(self) -> History:
        """Changes of the champion, and the candidates. Raises Refused if they are damaged."""
        return self.alias.history()

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
        used = [*names, *self.history().versions]
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
