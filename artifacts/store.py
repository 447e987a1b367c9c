"""The store: content-addressed artifacts and shards, each wholly there or not there at all.

<store>/<stage>/<key>/manifest.json       the artifact exists exactly when this file does
<store>/<stage>/<key>/...                 its own files
<store>/<stage>/shards/<key>.json         a shard exists exactly when this file does
<store>/<stage>/shards/<key>.<sha256>.*   its files, shared by every artifact that names them
<store>/<stage>/locks/<k>/<key>.json      owner of a shard that is being built; k: key[:3]

A shard's file has its own sha256 in its name: a shard that is built again, with other bytes,
changes nothing that an artifact names. An artifact's key is a digest of all that determines its
contents.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts import filesystems, records
from artifacts.compare_and_swap import create, read, remove, remove_checked, swap
from artifacts.lock import Lock, hold, is_alive
from configs.errors import Refused
from configs.secrets import one_line, unchained, without_credentials, without_secrets


@dataclass(frozen=True)
class KeyParts:
    """What an artifact's key is made of: anything else may change without a rebuild."""

    stage: str
    version: int
    settings: dict[str, Any]
    inputs: dict[str, str]  # name -> digest

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def key(self) -> str:
        return records.digest_json(self.as_dict())


MANIFEST = "manifest.json"
LOCK = "lock.json"
SHARDS = "shards"
LOCKS = "locks"
#: Folders of a store that are no stages.
NO_STAGES = {"compiled", "models", "plans", "registries", "registry", "runs"}
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class Artifact:
    """A committed artifact: where it is, and its manifest."""

    store: Store = field(repr=False)
    stage: str
    key: str
    manifest: dict[str, Any] = field(repr=False)

    @property
    def uri(self) -> str:
        """URL of the artifact's folder."""
        return self.store.url_of(f"{self.stage}/{self.key}")

    @property
    def path(self) -> str:
        """Path of the artifact's folder on the store's filesystem."""
        return f"{self.store.root}/{self.stage}/{self.key}"

    @property
    def digest(self) -> str:
        """sha256 over path, size and sha256 of every file: what downstream keys are made of."""
        return str(self.manifest["digest"])

    @property
    def files(self) -> list[records.FileEntry]:
        """Its files, paths relative to the artifact's folder (shards begin with `../shards/`)."""
        return list(self.manifest["files"])

    @property
    def summary(self) -> dict[str, Any]:
        """Counts and metrics that the stage reported."""
        return dict(self.manifest["summary"])

    def url(self, path: str) -> str:
        """URL of one of its files."""
        if path.startswith("../"):
            return self.store.url_of(f"{self.stage}/{path[3:]}")
        return f"{self.uri}/{path}"

    def read(self, path: str) -> bytes:
        """The bytes of one of its files. Raises Damaged if they are not those committed."""
        committed = next((e.sha256 for e in self.manifest["files"] if e.path == path), None)
        if committed is None:
            return bytes(self.store.fs.cat_file(f"{self.path}/{path}"))
        return records.read_checked(self.store.fs, self.path, path, committed)


@dataclass
class Draft:
    """An artifact being built: files are added, then `commit` makes it exist.

    Every method that writes raises LockLost, and changes nothing, if `lock` was lost.
    """

    store: Store
    parts: KeyParts
    lock: Lock | None = None
    files: dict[str, records.FileEntry] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path of the artifact's folder on the store's filesystem."""
        return f"{self.store.root}/{self.parts.stage}/{self.parts.key}"

    @property
    def uri(self) -> str:
        """URL of the artifact's folder."""
        return self.store.url_of(f"{self.parts.stage}/{self.parts.key}")

    def discard_damaged(self) -> None:
        """Delete the manifest of a damaged artifact: its files are about to be written again.

        A builder that is killed would otherwise leave files that are newer than their manifest.
        """
        path = f"{self.path}/{MANIFEST}"
        # A local manifest that cannot be read misleads nobody; `commit` replaces it.
        with suppress(OSError) if self.store.is_local else nullcontext():
            remove_checked(self.store.fs, path, self._check)

    def write(self, path: str, data: bytes, **meta: Any) -> None:
        """Write one of its own files."""
        etag = self._replace(f"{self.path}/{path}", data)
        sha256 = records.digest_bytes(data)
        self.files[path] = records.FileEntry(path, len(data), sha256, meta, etag)

    def upload(self, local: str, path: str, **meta: Any) -> None:
        """Copy a local file in as one of its own files."""
        target = f"{self.path}/{path}"
        if self.store.is_local or os.path.getsize(local) > records.SMALL:
            etag = records.put_atomic(self.store.fs, local, target, self._check)
        else:
            with open(local, "rb") as stream:
                etag = self._replace(target, stream.read())
        self.files[path] = replace(records.hash_local(local, path, meta), etag=etag)

    def add(self, file: records.FileEntry) -> None:
        """Name a file that another process wrote to the artifact's folder.

        Args:
            file: with size and sha256 of the bytes that were written.

        Raises:
            Damaged: the folder has other bytes.
            LockLost: they are another builder's.
        """
        if self.store.is_local:
            filesystems.sync_tree(self.path, file.path)
        place = f"{self.path}/{file.path}"
        # First: a change while it is read is then seen.
        etag, _ = records.present_stamp(self.store.fs, place)
        stored = records.hash_file(self.store.fs, self.path, file.path)
        if stored.content() != file.content():
            if self.lock is not None:
                self.lock.renew()
                self.lock.check()
            raise records.Damaged(
                f"{place} is damaged: its sha256 differs from that of what was written; run again"
            )
        self.files[file.path] = replace(file, etag=etag)

    def read(self, path: str) -> bytes:
        """The bytes of one of its files. Raises Damaged if they are not those that were written."""
        return records.read_checked(self.store.fs, self.path, path, self.files[path].sha256)

    def add_shard(self, shard: Shard) -> None:
        """Name a shard's files; the shard stays where it is, shared.

        Its facts go to the entry of its last file.
        """
        for entry in shard.files:
            path = f"../{SHARDS}/{entry.path}"
            meta = shard.meta if entry is shard.files[-1] else {}
            self.files[path] = replace(entry, path=path, meta=meta)

    def commit(self, summary: dict[str, Any], run: dict[str, Any]) -> Artifact:
        """Write the manifest, which makes the artifact exist."""
        entries = (self.files[path] for path in sorted(self.files))
        files = records.stamped(self.store.fs, self.path, entries)
        manifest = {
            "format": records.FORMAT,
            "key": self.parts.key,
            **self.parts.as_dict(),
            "digest": records.digest_files(files),
            "files": files,
            "summary": summary,
            "run": run,
        }
        path = f"{self.path}/{MANIFEST}"
        data = records.encode_record(manifest)
        self._check()
        if not create(self.store.fs, path, data):
            # A damaged manifest, or that of a builder that took the lock over.
            if self.lock is not None:
                self.lock.renew()
            self._replace(path, data)
        self._check()  # a manifest that was created late, after a pause, is no commit
        return Artifact(self.store, self.parts.stage, self.parts.key, manifest)

    def _replace(self, path: str, data: bytes) -> str | None:
        if self.lock is None or self.store.is_local:
            return records.write_atomic(self.store.fs, path, data, self._check)
        self.lock.write(path, data)
        return None

    def _check(self) -> None:
        if self.lock is not None:
            self.lock.check()


@dataclass(frozen=True)
class Shard:
    """A committed shard: its key, its files (paths inside the shards folder), and its facts."""

    key: str
    files: list[records.FileEntry]
    meta: dict[str, Any]
    is_new: bool = field(default=False, compare=False)  # built by this call of commit_shard


def is_key(name: str) -> bool:
    """Whether a folder's name is a key: a store may be among folders of others."""
    return re.fullmatch("[0-9a-f]{64}", name) is not None


class Store:
    """Artifacts below one fsspec URL.

    Raises Refused for a URL that cannot be used, such as that of a server that is not there.
    """

    def __init__(self, url: str) -> None:
        self.fs: AbstractFileSystem
        if not url.strip():
            raise Refused("store: it has no name: give a folder or a URL")
        try:
            # Listings that a client remembers say nothing of what others have done since.
            known = without_credentials(unchained(url), is_stored=True)
            self.fs, root = url_to_fs(known, use_listings_cache=False)
        except (ImportError, ValueError, OSError) as error:  # some clients connect or open at once
            raise Refused(f"store {without_secrets(url)}: {one_line(error)}") from None
        self.root = root.rstrip("/")

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def url(self) -> str:
        """The store's own URL: a plain path when local."""
        return self.root if self.is_local else str(self.fs.unstrip_protocol(self.root))

    @property
    def compiled_url(self) -> str:
        """URL of the folder for programs that runtimes have compiled."""
        return self.url_of("compiled")

    def url_of(self, path: str) -> str:
        """URL of a path below the store: a plain path when local."""
        return f"{self.url}/{path}"

    def shard_url(self, stage: str, path: str) -> str:
        """URL of a shard's file, by its path in the stage's folder of shards."""
        return self.url_of(f"{stage}/{SHARDS}/{path}")

    def check_writable(self) -> None:
        """Raise OSError unless files can be written and deleted, Refused without conditions.

        Some servers that speak S3 ignore the conditions of a write: locks would exclude nobody.
        A bucket that does not exist is a Refused, too: nobody creates a misspelt bucket.
        """
        probe = filesystems.new_probe(self.fs, self.root)
        try:
            filesystems.make_folder_of(self.fs, probe)
            create(self.fs, probe, b"kiln")
            ignored = "If-None-Match" if create(self.fs, probe, b"twice") else None
            if not isinstance(self.fs, LocalFileSystem):
                seen = read(self.fs, probe)
                swap(self.fs, probe, seen, b"new")
                if swap(self.fs, probe, seen, b"late") is not None:
                    ignored = ignored or "If-Match"
        except Refused as error:
            raise Refused(f"store {self.url}: {error}") from None
        except FileNotFoundError:
            if not filesystems.protocols(self.fs) & {"gs", "s3"}:
                raise
            raise Refused(
                f"store {self.url}: its bucket does not exist: correct the name, or create it"
            ) from None
        self.fs.rm_file(probe)
        if ignored:
            raise Refused(f"store {self.url}: it ignores the conditions of writes ({ignored})")

    def load(self, stage: str, key: str, *, with_files: bool = True) -> Artifact | None:
        """The artifact as its manifest says, files unchecked. ValueError if that is damaged.

        Args:
            with_files: whether the manifest has its files; without them it is small.
        """
        path = f"{self.root}/{stage}/{key}/{MANIFEST}"
        manifest = records.read_record(self.fs, path, with_files=with_files)
        if manifest and (manifest.get("stage"), manifest.get("key")) != (stage, key):
            raise ValueError(f"{path} is of another artifact")
        if manifest and not (manifest.get("digest") and isinstance(manifest.get("summary"), dict)):
            raise ValueError(f"{path} has no digest or no summary")
        return None if manifest is None else Artifact(self, stage, key, manifest)

    def fault(self, artifact: Artifact, *, deep: bool = False) -> str | None:
        """Say in words what is wrong with an artifact, or None; `deep` hashes every file.

        Otherwise a file is hashed only if its size or stamp is not as it was committed.
        """
        return records.first_fault(self.fs, artifact.path, artifact.files, deep=deep)

    def find(self, stage: str, key: str) -> Artifact | None:
        """The artifact if it is there and whole; a damaged artifact is a miss, with a warning."""
        try:
            artifact = self.load(stage, key)
            fault = None if artifact is None else self.fault(artifact)
        except ValueError as error:
            artifact = None
            fault = str(error)
        if fault is not None:
            log.warning("%s %s: %s; it will be rebuilt", stage, key[:12], fault)
            return None
        return artifact

    def draft(self, parts: KeyParts, lock: Lock | None = None) -> Draft:
        """Start an artifact; what an interrupted builder left in its folder stays, to resume."""
        return Draft(self, parts, lock)

    def lock(
        self,
        stage: str,
        key: str,
        on_wait: Callable[[dict[str, Any]], None] = lambda owner: None,
        facts: Mapping[str, Any] | None = None,
    ) -> AbstractContextManager[Lock]:
        """Be the only builder of a key. Arguments as of `hold`."""
        return hold(self.fs, self._lock_path(stage, key), on_wait=on_wait, facts=facts)

    def is_being_built(self, stage: str, key: str) -> bool:
        """Whether a living process builds a key. It waits for a heartbeat, at most 30 s."""
        return is_alive(self.fs, self._lock_path(stage, key))

    def _lock_path(self, stage: str, key: str) -> str:
        return f"{self.root}/{stage}/{key}/{LOCK}"

    def shard_lock(
        self, stage: str, key: str, on_wait: Callable[[dict[str, Any]], None] = lambda owner: None
    ) -> AbstractContextManager[Lock]:
        """Be the only builder of a shard."""
        # Each request lists the folder of its lock on a local disk: few locks share one.
        path = f"{self.root}/{stage}/{LOCKS}/{key[:3]}/{key}.json"
        return hold(self.fs, path, on_wait=on_wait)

    def shards_path(self, stage: str) -> str:
        """Path of a stage's shards on the store's filesystem."""
        return f"{self.root}/{stage}/{SHARDS}"

    def shard(self, stage: str, key: str, *, discard: bool = False) -> Shard | None:
        """The shard if it is there and whole; a damaged shard is a miss, with a warning.

        Args:
            discard: whether to delete the record of a damaged shard.
        """
        root = self.shards_path(stage)
        path = f"{root}/{key}.json"
        record = None
        try:
            record = records.read_record(self.fs, path)
            if record and not isinstance(record.get("meta"), dict):
                raise ValueError("its record has no facts")
            fault = None if record is None else records.first_fault(self.fs, root, record["files"])
        except ValueError as error:
            fault = str(error)
        if fault is not None:
            log.warning("%s shard %s: %s; it will be rebuilt", stage, key[:12], fault)
            if discard:
                self._discard(path, record)
            return None
        return None if record is None else Shard(key, record["files"], record["meta"])

    def _discard(self, path: str, record: dict[str, Any] | None) -> None:
        """Delete a damaged shard's record, unless another run has deleted or replaced it.

        Args:
            record: what was read; None if the record itself is damaged.
        """

        def is_same(data: bytes) -> bool:
            try:
                return records.decode_record(data, path) == record
            except records.Damaged:
                return record is None

        try:
            remove(self.fs, path, is_same)
        except OSError:
            if not self.is_local:
                raise
            self.fs.rm_file(path)  # a disk does not give its bytes

    def committed_shards(self, stage: str, keys: Iterable[str]) -> Iterator[Shard | None]:
        """Each shard as its record says, in order; None if it has none. Files are not checked.

        Raises ValueError if a record is damaged.
        """
        root = self.shards_path(stage)

        def committed(key: str) -> Shard | None:
            record = records.read_record(self.fs, f"{root}/{key}.json")
            return None if record is None else Shard(key, record["files"], record["meta"])

        return filesystems.ask_at_once(self.fs, committed, keys)

    def commit_shard(
        self, stage: str, key: str, local: dict[str, str], meta: dict[str, Any]
    ) -> Shard:
        """Copy local files in as `<key>.<sha256><suffix>` ({suffix: local path}); commit the shard.

        `meta` goes to the record.
        """
        root = self.shards_path(stage)
        files = []
        for suffix, path in sorted(local.items()):
            entry = records.hash_local(path, "")
            files.append(self._put_shard(root, path, f"{key}.{entry.sha256}{suffix}", entry))
        files = records.stamped(self.fs, root, files)
        record = {"format": records.FORMAT, "files": files, "meta": meta}
        records.write_record(self.fs, f"{root}/{key}.json", record)
        return Shard(key, files, meta, is_new=True)

    def _put_shard(
        self, root: str, local: str, name: str, entry: records.FileEntry
    ) -> records.FileEntry:
        if self.is_local:
            with suppress(OSError):  # missing, or not to be read
                stored = records.hash_file(self.fs, root, name)
                if stored.sha256 == entry.sha256:
                    return stored  # others have recorded its time stamp
        etag = records.put_atomic(self.fs, local, f"{root}/{name}")
        return replace(entry, path=name, etag=etag)

    def artifacts(self) -> Iterator[Artifact]:
        """Every artifact with a readable manifest, stage by stage."""
        return (artifact for _, _, artifact in self._walk() if isinstance(artifact, Artifact))

    def unreadable(self) -> Iterator[tuple[str, str, str]]:
        """(stage, key, what is wrong) of every artifact whose manifest is damaged."""
        return ((stage, key, f) for stage, key, f in self._walk() if isinstance(f, str))

    def artifact_keys(self) -> Iterator[tuple[str, str]]:
        """(stage, key) of every artifact's folder, finished or not. Raises as the filesystem."""
        for stage in filesystems.subfolders(self.fs, self.root):
            if stage not in NO_STAGES:
                for key in filesystems.subfolders(self.fs, f"{self.root}/{stage}"):
                    if is_key(key):
                        yield stage, key

    def _walk(self) -> Iterator[tuple[str, str, Artifact | str | None]]:
        for stage, key in self.artifact_keys():
            try:
                yield stage, key, self.load(stage, key)
            except ValueError as error:
                yield stage, key, str(error)
