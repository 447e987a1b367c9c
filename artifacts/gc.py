"""Garbage collection: mark what runs and published models need, delete the rest after a day.

<store>/runs/<run>.json                what a run used
<store>/registries/<digest>.json       URL of a registry that holds models of this store
<store>/gc.lock                        held while `kiln gc` deletes

The store is needed by recent runs, living builders and published models.

A collection deletes under the lock that every run waits for once it has recorded what it needs. So
either the run's record is seen here, or the run sees the store as it is after the deletion. An I/O
error ends the collection, since what cannot be read may be needed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import yaml

from artifacts import filesystems
from artifacts.compare_and_swap import read, remove, remove_checked, swap
from artifacts.filesystems import Entry, checksum, name_of, size_of
from artifacts.lock import LockLost, hold, is_owned, owner_in_words, seize, wait_until_free
from artifacts.records import TICK, digest_json, encode_record, read_record, write_record
from artifacts.store import LOCK, LOCKS, MANIFEST, SHARDS, Artifact, Store, is_key
from configs.errors import Refused

RUNS = "runs"
REGISTRIES = "registries"
COLLECTION = "gc.lock"
log = logging.getLogger("kiln")


def record_run(store: Store, run: str, facts: dict[str, Any]) -> None:
    """Remember the artifacts that a run needs, beside those that it needed before.

    Args:
        facts: those of the run; `stages` has a list of keys per stage.

    A collection that did not see the record has ended when this returns: what the run then finds in
    the store stays.

    Raises Refused if its record is damaged, and as the filesystem does.
    """
    path = f"{store.root}/{RUNS}/{run}.json"
    recorded = False
    while not recorded:
        known = _read(store, path)
        if known is not None:
            facts = {**known, **facts, "stages": _united(known["stages"], facts["stages"])}
        _write(store, path, facts)
        wait_until_free(store.fs, f"{store.root}/{COLLECTION}", _log_collection)
        # An expired record was garbage until then.
        recorded = read_record(store.fs, path) is not None


def _united(known: dict[str, list[str]], more: dict[str, list[str]]) -> dict[str, list[str]]:
    """The keys of both, per stage."""
    merged = {stage: known.get(stage, []) + keys for stage, keys in more.items()}
    return known | {stage: list(dict.fromkeys(keys)) for stage, keys in merged.items()}


def _write(store: Store, path: str, facts: dict[str, Any]) -> None:
    if store.is_local:
        write_record(store.fs, path, facts)
        return
    data = encode_record(facts)
    while not swap(store.fs, path, read(store.fs, path), data):
        pass  # an earlier request of ours arrived late


def _log_collection(owner: dict[str, Any]) -> None:
    log.info("`kiln gc` deletes files (%s); waiting", owner_in_words(owner))


@dataclass(frozen=True)
class RunRecord:
    """What a run used."""

    path: str
    at: float  # when its last stage began, in seconds since 1970 by the store's own clock
    keys: set[tuple[str, str]]  # (stage, key) of its artifacts
    recipe: str | None = None  # name; a run of `generate` has none
    model: str | None = None  # which a run of `generate` drew with


def runs(store: Store) -> Iterator[RunRecord]:
    """The record of every run.

    Raises Refused if a record is damaged, and as the filesystem does.
    """
    listed = filesystems.entries(store.fs, f"{store.root}/{RUNS}")
    record_files = {entry["name"]: entry for entry in listed if entry["name"].endswith(".json")}
    records = filesystems.ask_at_once(store.fs, partial(_read, store), record_files)
    for (path, entry), record in zip(record_files.items(), records, strict=True):
        if record is not None:
            keys = {(stage, key) for stage, keys in record["stages"].items() for key in keys}
            model = record.get("model")
            yield RunRecord(path, filesystems.modified(entry), keys, _recipe_name(record), model)


def _recipe_name(record: dict[str, Any]) -> str | None:
    """`name` in a record's dump of the recipe; the rest, which is long, is not parsed."""
    named = re.search(r"^name:.*(?:\n(?: .*)?$)*", str(record.get("recipe", "")), re.MULTILINE)
    return None if named is None else _parsed_name(named[0])


@cache  # thousands of records name a few recipes
def _parsed_name(line: str) -> str:
    return str(yaml.safe_load(line)["name"])


def _read(store: Store, path: str) -> dict[str, Any] | None:
    try:
        record = read_record(store.fs, path)
        for keys in record["stages"].values() if record else ():
            if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
                raise TypeError("the keys of a stage are a list of strings")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Refused(f"{path} is damaged: delete it if its run is no longer needed") from None
    return record


def record_registry(store: Store, registry: Store) -> None:
    """Remember that a registry holds models of this store, so that their lineage is kept."""
    path = f"{store.root}/{REGISTRIES}/{digest_json(registry.url)}.json"
    if registry.url != store.url_of("registry") and not store.fs.exists(path):
        write_record(store.fs, path, {"url": registry.url})


def registries(store: Store) -> Iterator[tuple[str, str]]:
    """(path of the record, URL) of every registry outside the store that holds its models."""
    for path in filesystems.matching(store.fs, f"{store.root}/{REGISTRIES}", "*.json"):
        try:
            record = read_record(store.fs, path)
            url = None if record is None else str(record["url"])
        except (KeyError, ValueError):
            raise Refused(f"{path} is damaged: write the registry's URL again") from None
        if url is not None:
            yield path, url


DAY = 86400.0
#: Name of the parent from which a training continued. Finished weights do not need it; otherwise,
#: a champion that is retrained every week would keep the weights of all those before it.
CONTINUED = "start"
Key = tuple[str, str]  # (stage, key)


@dataclass(frozen=True)
class Marks:
    """The needed artifacts."""

    artifacts: dict[Key, Artifact]  # finished
    unfinished: set[Key]  # recent runs may resume theirs; living builders hold theirs
    expired: frozenset[str] = frozenset()  # paths of the records of runs that need nothing

    def __contains__(self, key: Key) -> bool:
        return key in self.artifacts or key in self.unfinished

    @property
    def busy(self) -> set[str]:
        """Stages with an unfinished artifact, which may name any shard of its stage."""
        return {stage for stage, _ in self.unfinished}


def mark(store: Store, published: Iterable[dict[str, Any]], days: float) -> Marks:
    """What runs of the last `days`, living builders and published models need.

    Args:
        published: manifests of every version in every registry.

    Raises:
        Refused: a record is damaged, so what it needs is unknown.
    """
    now = filesystems.present_time(store.fs, store.root)
    held = {key for key in store.artifact_keys() if is_held(store, key, now)}
    roots = set(held)
    expired = set()
    for run in list(runs(store)):
        if now - run.at <= days * DAY or run.keys & held:  # a run can take longer than `days`
            roots |= run.keys
        else:
            expired.add(run.path)
    for manifest in published:
        roots |= {("publish", manifest["key"]), *_parents(manifest)}
    needed = needed_by(store, roots)
    return Marks(needed, held | (roots - needed.keys()), frozenset(expired))


def needed_by(store: Store, roots: Iterable[Key]) -> dict[Key, Artifact]:
    """The artifacts of `roots` and their ancestors, without CONTINUED ancestors and files.

    Raises:
        Refused: a manifest is damaged, so its parents are unknown.
    """
    needed: dict[Key, Artifact] = {}
    pending = list(roots)
    while pending:
        stage, key = pending.pop()
        if (stage, key) in needed:
            continue
        artifact = _load(store, (stage, key), "parents", with_files=False)
        if artifact is not None:
            needed[stage, key] = artifact
            pending += _parents(artifact.manifest)
    return needed


def _load(store: Store, key: Key, unknown: str, *, with_files: bool = True) -> Artifact | None:
    try:
        return store.load(*key, with_files=with_files)
    except ValueError as error:
        raise Refused(
            f"{error}; its {unknown} are unknown: "
            "rebuild it, or move it away if another program wrote it"
        ) from None


def is_held(store: Store, key: Key, now: float) -> bool:
    """Whether a builder holds an artifact's lock; a day without a heartbeat means no owner."""
    folder = f"{store.root}/{'/'.join(key)}"
    locks = (e for e in filesystems.entries(store.fs, folder) if name_of(e).startswith(LOCK))
    is_recent = any(now - filesystems.modified(entry) < DAY for entry in locks)
    return is_recent and is_owned(store.fs, f"{folder}/{LOCK}")


def _parents(manifest: dict[str, Any]) -> list[Key]:
    parents = manifest["run"].get("parents", {})
    return [(p["stage"], p["key"]) for name, p in parents.items() if name != CONTINUED]


CHECKPOINTS = "checkpoints"
#: A file that artifacts/filesystems.py names, and deletes unless its process is killed.
LEFTOVER = re.compile(r".*\.[0-9a-f]{32}\.tmp|\.probe-[0-9a-f]{32}", re.DOTALL)
#: Things that are deleted before waiting runs continue.
BATCH = 20
#: Seconds for waiting runs to continue: each looks at the lock every half second.
PAUSE = 1.0
#: Stages that read no staged model. A run that the gate rejected never finishes its publication.
WITHOUT_MODELS = {"publish", "verdict", "retrain"}
RunFacts = tuple[str, int, float, str | None]  # name, size, time stamp and checksum of a record


@dataclass(frozen=True)
class Garbage:
    """Deletable files of one artifact, shard, compiled program or staged model."""

    stage: str
    key: str
    kind: str  # artifact | unfinished | checkpoints | shard | compiled | model | run | leftover
    paths: list[str]  # files, and folders to delete recursively
    size: int  # bytes
    record: str | None = None  # path of the file that makes it exist; it is deleted first


class Collector:
    """Finds and deletes the garbage of a store.

    Args:
        mark: marks what is needed at the time of the call.
        days: compiled programs and staged models that have not been used for so long are garbage.
        min_age: seconds for which garbage must not have changed.
    """

    def __init__(
        self, store: Store, mark: Callable[[], Marks], *, days: float, min_age: float
    ) -> None:
        self._store = store
        self._mark = mark
        self._days = days
        self._min_age = min_age
        self._now = filesystems.present_time(store.fs, store.root)
        self._runs: set[RunFacts] = set()
        self._busy: set[str] = set()  # stages whose shards stay
        self._named: set[tuple[str, str, str]] = set()  # (stage, key, digest): its shards are known
        self.kept_bytes = 0  # of the finished artifacts that `garbage` leaves out
        self._mark_after(self._run_records())  # a run that comes between is seen later

    @property
    def needed(self) -> int:
        """The number of finished artifacts that stay because they are needed."""
        return len(self._marks.artifacts)

    def garbage(self) -> Iterator[Garbage]:
        """Everything that is not needed, artifacts before shards. Raises Refused."""
        named: dict[str, set[str]] = {}  # stage -> names of shard files that an artifact names
        for stage, key in list(self._store.artifact_keys()):
            held = self._files(f"{stage}/{key}")
            if not _is_of_a_store(held, key):
                continue  # another program's, and so may be `shards` and `locks` beside it
            names = named.setdefault(stage, set())
            if (stage, key) not in self._marks and self._is_old(held):
                yield from self._folder(stage, key, held)
            else:
                names |= self._names(stage, key, names)
                yield from self._within(stage, key, held)
        for stage in sorted(named.keys() - self._busy):
            yield from self._shards(stage, named[stage])
        for stage in sorted(named):  # a lock without a heartbeat for a day has no owner
            for entry in self._files(f"{stage}/{LOCKS}"):
                if self._is_old([entry], DAY):
                    yield _garbage(stage, name_of(entry), "leftover", [entry])
        for folder in ("", RUNS, REGISTRIES, *(f"{stage}/{SHARDS}" for stage in named)):
            yield from self._leftovers(folder, self._entries(folder))
        for entry in self._entries("registry"):
            folder = f"registry/{name_of(entry)}"
            yield from self._leftovers(folder, self._entries(folder))
        for file in self._files("compiled"):
            if self._is_old([file], self._days * DAY):
                yield _garbage("compiled", name_of(file), "compiled", [file])
        if not self._models_in_use:
            yield from self._models()
        for entry in self._entries(RUNS):  # the lineage of a published model is in its manifest
            if entry["name"] in self._marks.expired and self._is_old([entry]):
                yield _garbage(RUNS, name_of(entry).removesuffix(".json"), "run", [entry])

    def delete(self, items: Iterable[Garbage]) -> Iterator[Garbage]:
        """Delete items, and yield each that was deleted: what is needed by now stays."""
        pending = iter(items)
        recorded = False
        batches = iter(lambda: list(islice(pending, BATCH)), [])
        for number, batch in enumerate(batches):
            recorded |= self._refresh()  # a long marking delays no run
            if recorded and number > 0:
                time.sleep(PAUSE)  # for a run that waits since the last batch
            with hold(self._store.fs, f"{self._store.root}/{COLLECTION}") as collection:
                recorded = self._refresh()  # from now on, a run that records itself waits
                deleted = [item for item in batch if self._deleted(item, collection.check)]
            yield from deleted  # without the lock: the caller prints, and may wait for a reader

    def _folder(self, stage: str, key: str, held: list[Entry]) -> Iterator[Garbage]:
        """An artifact, finished or not; its lock stays for a day, others may be about to use it."""
        folder = f"{self._store.root}/{stage}/{key}"
        size = size_of(held)
        present = {name_of(entry): entry["name"] for entry in self._entries(f"{stage}/{key}")}
        own = [path for name, path in present.items() if not name.startswith((LOCK, MANIFEST))]
        if not any(name.startswith(LOCK) for name in present):  # the manifest may not be ours
            _load(self._store, (stage, key), "shards")
        if MANIFEST in present:
            yield Garbage(stage, key, "artifact", own, size, f"{folder}/{MANIFEST}")
        elif own:
            yield Garbage(stage, key, "unfinished", own, size)
        elif self._is_old(held, DAY):
            yield Garbage(stage, key, "unfinished", [folder], size)

    def _names(self, stage: str, key: str, known: set[str]) -> set[str]:
        """Names of the shard files of an artifact that stays.

        Args:
            known: those of others, whose bytes are counted.
        """
        artifact = _load(self._store, (stage, key), "shards")
        if artifact is None:
            self._busy.add(stage)
            return set()
        self._named.add((stage, key, artifact.digest))
        sizes = {entry.path: entry.size for entry in artifact.files}
        shards = {path: path.rpartition("/")[2] for path in sizes if path.startswith("../")}
        self.kept_bytes += sum(n for path, n in sizes.items() if shards.get(path) not in known)
        return set(shards.values())

    def _within(self, stage: str, key: str, held: list[Entry]) -> Iterator[Garbage]:
        """Checkpoints of a finished training run, useful only if its result is damaged."""
        place = f"/{key}/{CHECKPOINTS}/"
        resumable = [file for file in held if place in file["name"]]
        if resumable and (stage, key) in self._marks.artifacts and self._is_old(resumable):
            folder = f"{self._store.root}/{stage}/{key}/{CHECKPOINTS}"
            yield Garbage(stage, key, "checkpoints", [folder], size_of(resumable))
        yield from self._leftovers(stage, [f for f in held if place not in f["name"]])

    def _shards(self, stage: str, named: set[str]) -> Iterator[Garbage]:
        groups: dict[str, dict[str, Entry]] = {}
        for entry in self._entries(f"{stage}/{SHARDS}"):
            name = name_of(entry)
            if not _is_leftover(entry):
                groups.setdefault(name.partition(".")[0], {})[name] = entry
        for key, group in sorted(groups.items()):
            record = group.pop(f"{key}.json", None)
            unnamed = {name: entry for name, entry in group.items() if name not in named}
            if record is not None and len(unnamed) < len(group):
                # An artifact names files of this shard; a shard built again has others beside.
                present = self._recorded(record["name"])
                unnamed = {name: entry for name, entry in unnamed.items() if name not in present}
                record = None
            outdated = [*unnamed.values(), *([record] if record else [])]
            if outdated and self._is_old(outdated):
                path = record["name"] if record else None
                yield _garbage(stage, key, "shard", [*unnamed.values()], path)

    def _recorded(self, path: str) -> set[str]:
        try:
            record = read_record(self._store.fs, path)
        except ValueError as error:
            raise Refused(f"{error}: delete it, and the shard is built again") from None
        return {entry.path for entry in (record or {"files": []})["files"]}

    def _models(self) -> Iterator[Garbage]:
        """Base models copied for other machines; the record beside each says that it is whole."""
        present = {name_of(entry): entry for entry in self._entries("models")}
        for name, entry in sorted(present.items()):
            if entry["type"] == "directory" and is_key(name):
                copied = self._files(f"models/{name}")
                record = present.get(f"{name}.json")
                age = self._min_age if record is None else self._days * DAY
                if self._is_old([*copied, *([record] if record else [])], age):
                    path = record["name"] if record else None
                    yield Garbage("models", name, "model", [entry["name"]], size_of(copied), path)

    def _leftovers(self, stage: str, entries: Iterable[Entry]) -> Iterator[Garbage]:
        """Temporary files of killed processes; no write takes a day."""
        for entry in entries:
            if _is_leftover(entry) and self._is_old([entry], DAY):
                yield _garbage(stage.partition("/")[0], name_of(entry), "leftover", [entry])

    def _entries(self, path: str) -> list[Entry]:
        return filesystems.entries(self._store.fs, f"{self._store.root}/{path}")

    def _files(self, path: str) -> list[Entry]:
        return list(filesystems.files(self._store.fs, f"{self._store.root}/{path}"))

    def _is_old(self, held: Iterable[Entry], age: float | None = None) -> bool:
        least = self._min_age if age is None else age
        return all(self._now - filesystems.modified(entry) >= least for entry in held)

    @contextmanager
    def _alone(self, item: Garbage) -> Iterator[Callable[[], None] | None]:
        """Hold an artifact's lock; None if a builder holds it, or the artifact has changed.

        Gives a function that raises LockLost once a builder took the lock over.
        """
        if item.kind not in ("artifact", "unfinished", "checkpoints"):
            yield lambda: None
            return
        place = f"{item.stage}/{item.key}"
        path = f"{self._store.root}/{place}/{LOCK}"
        seen = read(self._store.fs, path)
        held = is_held(self._store, (item.stage, item.key), self._now)
        if held or not (item.kind == "checkpoints" or self._is_old(self._files(place))):
            yield None
            return
        with seize(self._store.fs, path, seen) as lock:
            yield None if lock is None else lock.check

    def _deleted(self, item: Garbage, check: Callable[[], None]) -> bool:
        """Delete an item; False if it is needed by now, or if a lock was lost."""
        deleted = False
        with suppress(LockLost), self._alone(item) as check_builder:
            if check_builder is not None and not self._is_needed(item):
                deleted = self._remove(item, check, check_builder)
        if not deleted:
            self._busy.add(item.stage)
        return deleted

    def _remove(self, item: Garbage, *checks: Callable[[], None]) -> bool:
        """Delete an item's record, then its files. Raises LockLost as `checks`."""

        def check() -> None:
            for condition in checks:
                condition()

        fs = self._store.fs
        if item.record is not None and not remove_checked(fs, item.record, check):
            return False  # another process is at it
        locks = f"{self._store.root}/{item.stage}/{LOCKS}/"
        if item.kind == "leftover" and item.paths[0].startswith(locks):
            return self._remove_lock(item.paths[0])
        for path in item.paths:
            check()  # what a builder has written since is not ours to delete
            with suppress(FileNotFoundError):
                filesystems.delete_tree(fs, path)
        if item.kind == "run":
            self._runs = {run for run in self._runs if run[0] != f"{item.key}.json"}
        return True

    def _remove_lock(self, path: str) -> bool:
        """Delete a shard's lock; False if a builder has taken it since: in a bucket it is one file.

        The age is that of the state that is deleted, or of a later one.
        """
        fs = self._store.fs
        with suppress(FileNotFoundError):
            old = remove(fs, path, lambda _: self._is_old([filesystems.file_info(fs, path)], DAY))
            return old is not None
        return False

    def _refresh(self) -> bool:
        """Mark again if a run has recorded something since, and return whether it has."""
        records = self._run_records()
        recorded = records != self._runs
        if recorded:
            self._mark_after(records)
        needed = {(a.stage, a.key, a.digest) for a in self._marks.artifacts.values()}
        self._busy |= {stage for stage, _, _ in needed - self._named}
        return recorded

    def _is_needed(self, item: Garbage) -> bool:
        if item.kind in ("artifact", "unfinished"):
            return (item.stage, item.key) in self._marks
        if item.kind == "run":
            return item.paths[0] not in self._marks.expired
        return (item.kind == "shard" and item.stage in self._busy) or (
            item.kind == "model" and self._models_in_use
        )

    @property
    def _models_in_use(self) -> bool:
        """Whether a stage is unfinished that may read a staged model."""
        return bool(self._busy - WITHOUT_MODELS)

    def _run_records(self) -> set[RunFacts]:
        """Each run's record, with what changes when it is written again."""
        return {
            (name_of(e), int(e["size"] or 0), filesystems.modified(e), checksum(e))
            for e in self._entries(RUNS)
        }

    def _mark_after(self, records: set[RunFacts]) -> None:
        time.sleep(TICK)  # a record that is written after the marking has another time stamp
        self._runs, self._marks = records, self._mark()
        self._busy |= self._marks.busy


def _garbage(
    stage: str, key: str, kind: str, listing: list[Entry], record: str | None = None
) -> Garbage:
    return Garbage(stage, key, kind, [entry["name"] for entry in listing], size_of(listing), record)


def _is_of_a_store(held: Iterable[Entry], key: str) -> bool:
    """Whether the files in a folder with a key as its name belong to an artifact, finished or not.

    Every builder leaves its lock.
    """
    own = (file for file in held if file["name"].endswith(f"/{key}/{name_of(file)}"))
    return any(name_of(file).startswith((LOCK, MANIFEST)) for file in own)


def _is_leftover(entry: Entry) -> bool:
    return LEFTOVER.fullmatch(name_of(entry)) is not None
