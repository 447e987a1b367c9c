"""The registry: numbered versions of a model, and a `champion` alias with atomic updates.

<registry>/<name>/v1/            a published model's folder; complete once it has manifest.json
<registry>/<name>/champion       the alias: a symlink if local, else an object with the name
<registry>/<name>/history.json   every change of the alias, oldest first
"""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts import lock
from artifacts.commit import first_fault, read_record, write_atomic
from artifacts.store import MANIFEST, Artifact, Store

CHAMPION = "champion"
ROLLED_BACK = "rolled back"
log = logging.getLogger("kiln")


class RegistryError(ValueError):
    """A model or version is missing or damaged; the message lists the existing versions."""


@dataclass(frozen=True)
class Version:
    """A published version."""

    name: str  # v1, v2, ...
    uri: str
    manifest: dict[str, Any]


class Registry:
    """The versions of one model name in a registry. Raises StoreError for an invalid URL."""

    def __init__(self, url: str, name: str) -> None:
        self.fs: AbstractFileSystem
        store = Store(url)
        self.fs = store.fs
        self.name = name
        self.root = f"{store.root}/{name}"

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def url(self, version: str) -> str:
        """URL of a version's folder; a plain path if local."""
        full = f"{self.root}/{version}"
        return full if self.is_local else str(self.fs.unstrip_protocol(full))

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
        """The alias's version; None without an alias. Raises RegistryError if it is damaged."""
        name = self._read_alias()
        if name is None:
            return None
        found = next((v for v in self.versions() if v.name == name), None)
        if found is None:
            raise RegistryError(
                f"{self.name}: the champion {name} is damaged: restore it, or promote another"
            )
        return found

    def publish(self, artifact: Artifact) -> Version:
        """Copy a publish artifact to the next version, or return its existing version.

        A damaged copy of the artifact is replaced under its version name.
        """
        with lock.hold(self.fs, f"{self.root}/lock.json"):
            same = [v for v in self.versions() if v.manifest["key"] == artifact.key]
            whole = [v for v in same if self._is_whole(v)]
            if whole:
                return whole[0]
            name = same[0].name if same else self._next_name()
            self._copy(artifact, name)
        manifest = read_record(self.fs, f"{self.root}/{name}/{MANIFEST}")
        assert manifest is not None, "_copy has written it"
        return Version(name, self.url(name), manifest)

    def promote(self, version: str, why: str = "promoted") -> Version:
        """Make a version the champion. Raises RegistryError if it does not exist."""
        found = self.version(version)
        with lock.hold(self.fs, f"{self.root}/lock.json"):
            if self._read_alias() != version:
                self._move(version, why)
        return found

    def version(self, name: str) -> Version:
        """The version with a name such as v2. Raises RegistryError if it does not exist."""
        known = {v.name: v for v in self.versions()}
        if name not in known:
            names = ", ".join(known) or "none"
            raise RegistryError(f"{self.name} {name}: no such version (there are: {names})")
        return known[name]

    def rollback(self) -> Version:
        """Restore the previous champion; repeated calls go further back.

        Raises:
            RegistryError: there is no champion or no earlier one.
        """
        known = {v.name: v for v in self.versions()}
        if self._read_alias() is None:  # before the lock, which would create the folder
            raise RegistryError(f"{self.name}: there is no champion to roll back from")
        with lock.hold(self.fs, f"{self.root}/lock.json"):
            current = self._read_alias()
            earlier = [n for n in _champion_stack(self.history()) if n != current and n in known]
            if not earlier:
                raise RegistryError(
                    f"{self.name}: {current} is the first champion; nothing is before it"
                )
            self._move(earlier[-1], ROLLED_BACK)
        return known[earlier[-1]]

    def was_champion(self, version: str) -> bool:
        """Whether a version is or was the champion."""
        return any(move["version"] == version for move in self.history())

    def last_move(self) -> dict[str, Any] | None:
        """The last change of the alias: {version, why, at}; None without a champion."""
        moves = self.history()
        return moves[-1] if moves else None

    def history(self) -> list[dict[str, Any]]:
        """Changes of the alias, oldest first. Raises RegistryError if the file is damaged.

        The history is written before the alias, so a last entry that the alias does not match
        belongs to an interrupted change and is omitted.
        """
        try:
            moves = json.loads(self.fs.cat_file(f"{self.root}/history.json"))
            names = [move["version"] for move in moves]
        except FileNotFoundError:
            return []
        except (KeyError, TypeError, ValueError):
            raise RegistryError(f"{self.root}/history.json is damaged: restore it") from None
        made = names[-1:] == [self._read_alias()]
        return list(moves if made else moves[:-1])

    def _manifests(self) -> Iterator[tuple[str, dict[str, Any] | str]]:
        """(version, manifest or fault message), oldest first."""
        for name in self._version_names():
            try:
                manifest = read_record(self.fs, f"{self.root}/{name}/{MANIFEST}")
            except ValueError as error:
                yield name, str(error)
            else:
                if manifest is not None:
                    yield name, manifest

    def _version_names(self) -> list[str]:
        try:
            entries = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        names = [entry.rstrip("/").rpartition("/")[2] for entry in entries]
        return sorted((n for n in names if re.fullmatch(r"v\d+", n)), key=lambda n: int(n[1:]))

    def _is_whole(self, version: Version) -> bool:
        fault = first_fault(self.fs, f"{self.root}/{version.name}", version.manifest["files"])
        if fault is not None:
            log.warning("registry %s/%s: %s; copied again", self.name, version.name, fault)
        return fault is None

    def _next_name(self) -> str:
        """The name after the last version; an interrupted copy without a manifest is reused."""
        names = self._version_names()
        used = [n for n in names if self.fs.exists(f"{self.root}/{n}/{MANIFEST}")]
        used += [move["version"] for move in self.history()]
        return f"v{max((int(name[1:]) for name in used), default=0) + 1}"

    def _copy(self, artifact: Artifact, name: str) -> None:
        """Copy every file, the manifest last, which makes the folder a version."""
        paths = [entry.path for entry in artifact.files]
        extra = [p for p in ("report.html",) if artifact.store.fs.exists(f"{artifact.path}/{p}")]
        for path in [*paths, *extra]:
            target = f"{self.root}/{name}/{path}"
            self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            with (
                artifact.store.fs.open(f"{artifact.path}/{path}", "rb") as source,
                self.fs.open(target, "wb") as sink,
            ):
                while chunk := source.read(2**22):
                    sink.write(chunk)
            if self.is_local and artifact.store.is_local:  # the manifest's stamps are of these
                found = os.stat(f"{artifact.path}/{path}")
                os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        write_atomic(self.fs, f"{self.root}/{name}/{MANIFEST}", artifact.read(MANIFEST))

    def _read_alias(self) -> str | None:
        path = f"{self.root}/{CHAMPION}"
        try:
            if self.is_local:
                return os.readlink(path)
            return str(self.fs.cat_file(path).decode())
        except FileNotFoundError:
            return None

    def _write_alias(self, version: str) -> None:
        path = f"{self.root}/{CHAMPION}"
        if not self.is_local:
            self.fs.pipe_file(path, version.encode())
            return
        temporary = f"{path}.{uuid.uuid4().hex}"
        os.symlink(version, temporary)
        os.replace(temporary, path)

    def _move(self, version: str, why: str) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        moves = [*self.history(), {"version": version, "why": why, "at": at}]
        write_atomic(self.fs, f"{self.root}/history.json", json.dumps(moves, indent=1).encode())
        self._write_alias(version)


def _champion_stack(moves: list[dict[str, Any]]) -> list[str]:
    """The champions that no rollback has removed, oldest first."""
    stack: list[str] = []
    for move in moves:
        if move["why"] == ROLLED_BACK and move["version"] in stack:
            while stack[-1] != move["version"]:
                stack.pop()
        else:
            stack.append(move["version"])
    return stack
