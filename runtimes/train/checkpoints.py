"""Checkpoints that every runtime reads: safetensors with diffusers' names, committed by a manifest.

<work>/checkpoints/step-00000100/weights.safetensors     fp32 weights
.../exp_avg.safetensors, exp_avg_sq.safetensors           AdamW's moments, or another state
.../ema.safetensors                                       with train.ema_decay
.../ema-00001-of-00003.safetensors, ...                   a group above the shard size
.../state.json                                            step, seed, settings, versions, scalars
.../history.jsonl                                         one line per step
.../manifest.json                                         written last: the commit

Each rank writes some of the files, with a few threads that also compute their sha256. A resume
reads the headers, and then the rows of each array that a rank needs. Errors tell damage from a
store that does not respond.
"""

from __future__ import annotations

import heapq
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any, TypeVar

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts import records
from artifacts.errors import is_forbidden, is_of_client, may_pass, retrying
from artifacts.filesystems import delete_tree, entries, name_of, subfolders
from artifacts.lock import LockLost
from artifacts.safetensors import StoredArray, read_arrays, write_arrays, writing
from configs.errors import Away, Refused
from configs.settings.train import Train
from runtimes.contract import OneWriter, Owners, State, StateShapes, Writers
from runtimes.optimizer_state import shapes_of
from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Ranks

#: Threads of each rank. One thread computes the sha256 of about 1 GB/s.
THREADS = 8
_FILE = re.compile(r"(?P<group>.+?)(-\d{5}-of-\d{5})?\.safetensors")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ArrayFile:
    """A safetensors file of arrays of one group."""

    path: str  # in the checkpoint's folder; shards have diffusers' names
    group: str
    names: tuple[str, ...]
    size: int  # bytes of the arrays


def array_files(shapes: StateShapes, most: int) -> list[ArrayFile]:
    """The files of a state; they do not depend on the number of ranks.

    Args:
        most: bytes of a file, except for a single larger array.
    """
    files = []
    for group in sorted(shapes):
        parts: list[list[str]] = [[]]
        sizes = [0]
        for name in sorted(shapes[group]):
            size = 4 * prod(shapes[group][name])
            if parts[-1] and sizes[-1] + size > most:
                parts.append([])
                sizes.append(0)
            parts[-1].append(name)
            sizes[-1] += size
        for number, (names, size) in enumerate(zip(parts, sizes, strict=True), 1):
            suffix = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            files.append(ArrayFile(f"{group}{suffix}.safetensors", group, tuple(names), size))
    return files


def files_by_rank(files: list[ArrayFile], world: int) -> list[list[ArrayFile]]:
    """The files that each rank writes: the largest first, to the rank with the fewest bytes."""
    by_rank: list[list[ArrayFile]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for file in sorted(files, key=lambda file: (-file.size, file.path)):
        load, rank = heapq.heappop(loads)
        by_rank[rank].append(file)
        heapq.heappush(loads, (load + file.size, rank))
    return by_rank


def open_arrays(
    fs: AbstractFileSystem, path: str, files: Sequence[records.FileEntry]
) -> dict[str, dict[str, StoredArray]]:
    """The arrays of a checkpoint's folder, by group and name. Only headers are read."""
    matches = [match for entry in files if (match := _FILE.fullmatch(entry.path))]
    opened = _in_threads(lambda match: read_arrays(fs, f"{path}/{match[0]}"), matches)
    state: dict[str, dict[str, StoredArray]] = {}
    for match, arrays in zip(matches, opened, strict=True):
        state.setdefault(match["group"], {}).update(arrays)
    return state


def _in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The results of `work` for all items; the first error cancels what has not begun."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-file") as pool:
        return list(pool.map(work, items))


log = logging.getLogger("kiln")


class CheckpointError(OSError):
    """Checkpoints could not be written or read; `errno` is that of the failed operation, if known.

    Checkpoints that are not named in the message are intact.
    """

    def __str__(self) -> str:
        return str(self.strerror)


def failure_of(fs: AbstractFileSystem, error: Exception, message: str) -> CheckpointError | Away:
    """The error to raise for a failed operation, with a message for the user."""
    if not isinstance(fs, LocalFileSystem) and may_pass(error):
        return Away(message)
    return CheckpointError(getattr(error, "errno", None), message)


def reason_of(error: Exception) -> str:
    """The message of an error for the user."""
    if isinstance(error, Away):
        return str(error)
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def is_unreachable(fs: AbstractFileSystem, error: Exception) -> bool:
    """Whether a remote store failed to respond: the checkpoint itself may be intact."""
    if isinstance(fs, LocalFileSystem) or isinstance(error, FileNotFoundError):
        return False
    return isinstance(error, OSError) or is_of_client(error)


def with_retries(fs: AbstractFileSystem, work: Callable[[], Result], failure: str) -> Result:
    """The result of `work`; a remote store that does not respond is tried again.

    Args:
        failure: what could not be done, for the log.
    """
    return retrying(
        work,
        passes=lambda error: is_unreachable(fs, error) and not is_forbidden(error),
        words=lambda error: f"{failure}: {reason_of(error)}",
    )


MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps."""

    step: int
    state: dict[str, dict[str, StoredArray]]
    history: list[str]  # JSON lines, one per step
    facts: dict[str, Any]  # state.json


class Checkpoints:
    """The checkpoints of one run, below a folder at any fsspec URL.

    Args:
        keep: number of newest checkpoints to keep.
        best: number of the best checkpoints to keep as well.
        shard_bytes: maximum bytes per file of arrays; a larger array has its own file.
        writers: the ranks that write, hash and read files together.
        check: raises LockLost if another builder owns the folder; called before each change.
    """

    def __init__(
        self,
        work: str,
        keep: int,
        *,
        best: int = 0,
        shard_bytes: int = 10**9,
        writers: Writers | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        # A cached listing lacks the files that other hosts have written since.
        self._fs, root = url_to_fs(work, use_listings_cache=False)
        self._root = f"{root.rstrip('/')}/checkpoints"
        self._keep = keep
        self._best = best
        self._shard_bytes = shard_bytes
        self._writers = writers or OneWriter()
        self._check = check

    def latest(self, before: int | None = None) -> Checkpoint | None:
        """The newest checkpoint with valid checksums, of a step below `before`.

        A damaged checkpoint is skipped with a warning. Each writer verifies some of the files, and
        all of them get the same checkpoint: a collective of the writers.

        Raises:
            CheckpointError, Away: a resume from an older checkpoint would discard steps of the
                newest checkpoint.
        """

        return self._first_valid(
            lambda committed: (n for n in reversed(committed) if before is None or n < before)
        )

    def first_valid(self, steps: Sequence[int]) -> Checkpoint | None:
        """The first of these steps whose checkpoint has valid checksums; as `latest`.

        A remote store that does not respond is tried again: a finished run must not fail.

        Args:
            steps: those of rank 0 count.
        """
        failure = f"the checkpoints in {self._root} could not be read"
        return self._first_valid(lambda committed: (n for n in steps if n in committed), failure)

    def _first_valid(
        self, choose: Callable[[list[int]], Iterable[int]], failure: str | None = None
    ) -> Checkpoint | None:
        """The first valid checkpoint of the steps that `choose` selects from the committed ones.

        Args:
            failure: words for the log, if a store that does not respond is tried again. A try is
                inside the collectives: one rank alone must not call them again.
        """

        def reached(work: Callable[[], Result]) -> Result:
            try:
                return work() if failure is None else with_retries(self._fs, work, failure)
            except Exception as error:
                if not (isinstance(error, OSError) or is_unreachable(self._fs, error)):
                    raise
                message = f"the checkpoints in {self._root} cannot be read: {reason_of(error)}"
                raise failure_of(self._fs, error, message) from error

        steps = iter(choose(reached(self._steps)) if self._first else ())
        while (step := int(self._gather(next(steps, -1))[0])) >= 0:
            saved = reached(partial(self._read_if_valid, step))
            if all(self._gather(saved is not None)):
                return saved
        return None

    def _gather(self, value: Any) -> list[Any]:
        """Every writer's `value`, as JSON, by rank. Collective."""
        return [json.loads(text) for text in self._writers.gather(json.dumps(value).encode())]

    def _read_if_valid(self, step: int) -> Checkpoint | None:
        try:
            return self.read(step, verify=True)
        except (ValueError, OSError, KeyError, TypeError) as error:
            unrelated = getattr(error, "errno", None) in records.UNRELATED_ERRORS
            if unrelated or is_unreachable(self._fs, error):
                raise
            log.warning("checkpoint %s is skipped: %s", self._path(step), error)
        return None

    def owners(self, shapes: StateShapes) -> Owners:
        """The rank that writes each array of a state with these shapes."""
        ranks: dict[str, dict[str, int]] = {}
        for rank, own in enumerate(self._files_by_rank(shapes)):
            for file in own:
                ranks.setdefault(file.group, {}).update(dict.fromkeys(file.names, rank))
        return ranks

    def _files_by_rank(self, shapes: StateShapes) -> list[list[ArrayFile]]:
        return files_by_rank(array_files(shapes, self._shard_bytes), self._writers.world)

    def save(
        self,
        step: int,
        state: State,
        history: list[str],
        facts: dict[str, Any],
        *,
        shapes: StateShapes | None = None,
        best_first: Sequence[int] = (),
        prune: bool = True,
    ) -> tuple[str, int]:
        """Commit a checkpoint, then delete the checkpoints that the limits exclude.

        A collective of the writers. Rank 0 commits once every rank has written its files.

        Args:
            state: the arrays that this rank owns, see `owners`.
            shapes: shapes of the arrays of all ranks; None: `state` is complete.
            facts: content of `state.json`.
            best_first: steps of checkpoints, the best first; the first `best` are kept.
            prune: whether to delete older checkpoints.

        Returns:
            The checkpoint's path and its size in bytes.

        Raises:
            CheckpointError: for example, the disk is full. Away: a remote store did not respond.
                The message names the last good checkpoint.
            LockLost: another builder owns the folder; its checkpoints stay as they are.
        """
        path = self._path(step)
        own = self._files_by_rank(shapes or shapes_of(state))[self._writers.rank]
        try:
            # A killed run may have left a partial checkpoint.
            self._together(lambda: self._discard(path) if self._first else None)
            written = self._together(lambda: self._write_part(path, own, state))
            files = sorted(
                (records.FileEntry(**f) for part in written for f in part), key=lambda f: f.path
            )
            if self._first:
                self._commit(path, files, history, {"step": step, **facts})
        except Exception as error:  # clients of remote stores define their own exception types
            self._raise_if_lost()
            message = self._failure_message(path, error)
            raise failure_of(self._fs, error, message) from None
        try:
            if prune and self._first:
                self._prune(step, best_first)
        except Exception as error:
            log.warning("old checkpoints could not be deleted: %s", error)
        return path, sum(entry.size for entry in files)

    @property
    def _first(self) -> bool:
        return self._writers.rank == 0

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Every writer's result of `work`, as JSON, once all have finished it.

        Raises:
            CheckpointError, Away: a writer failed.
        """
        try:
            self._check()
            report = {"result": work()}
        except Exception as error:  # the other ranks wait for the report
            failure = failure_of(self._fs, error, reason_of(error))
            report = {"error": [getattr(failure, "errno", None), str(failure)]}
            report["away"] = isinstance(failure, Away)
        reports = self._gather(report)
        for answer in reports:
            if "error" in answer:
                number, reason = answer["error"]
                raise Away(reason) if answer["away"] else CheckpointError(number, reason)
        return [answer["result"] for answer in reports]

    def _raise_if_lost(self) -> None:
        """Raise LockLost, on every rank, if a rank failed because the lock is lost."""
        try:
            self._check()
        except LockLost:
            raise
        except Exception as error:  # the store is away: the checkpoint is lost, not the run
            log.debug("the lock cannot be read: %s", error)

    def _write_part(self, path: str, files: list[ArrayFile], state: State) -> list[dict[str, Any]]:
        """Write this rank's files; a file in a bucket has the bucket's checksum."""

        def write(file: ArrayFile) -> dict[str, Any]:
            entries: list[records.FileEntry] = []
            with writing(self._fs, path, file.path, entries, self._check) as sink:
                write_arrays(sink, {name: state[file.group][name] for name in file.names})
            if not isinstance(self._fs, LocalFileSystem):
                entries = records.stamped(self._fs, path, entries)
            return entries[0].as_dict()

        return _in_threads(write, files)

    def _commit(
        self, path: str, files: list[records.FileEntry], history: list[str], facts: dict[str, Any]
    ) -> None:
        if isinstance(self._fs, LocalFileSystem):
            for entry in files:
                if not self._fs.exists(f"{path}/{entry.path}"):
                    reason = f"{entry.path} is on another machine: use a shared store"
                    raise CheckpointError(None, reason)
        with writing(self._fs, path, "history.jsonl", files, self._check) as sink:
            sink.write("".join(f"{line}\n" for line in history).encode())
        with writing(self._fs, path, "state.json", files, self._check) as sink:
            sink.write(json.dumps(facts, indent=1).encode())
        self._check()
        records.write_record(self._fs, f"{path}/{MANIFEST}", {"files": files})

    def _failure_message(self, path: str, error: Exception) -> str:
        kept = "there is none before it"
        try:
            if self._first:
                self._discard(path)  # frees the space of the partial checkpoint
            if steps := self._steps():
                kept = f"the last good one is of step {steps[-1]}"
        except Exception:
            kept = "its partial files cannot be deleted"
        return f"checkpoint {path} could not be written: {reason_of(error)}; {kept}"

    def read(self, step: int, *, verify: bool = False) -> Checkpoint:
        """The checkpoint of a step.

        Args:
            verify: whether to compare this rank's share of the files with the manifest: by a
                bucket's checksum, else by the sha256.

        Raises:
            ValueError, OSError, KeyError, TypeError: it is damaged. Without `verify` some damage
                remains undetected.
        """
        path = self._path(step)
        record = records.read_record(self._fs, f"{path}/{MANIFEST}")
        if record is None:
            raise ValueError("it was not committed")
        if verify:
            own = record["files"][self._writers.rank :: self._writers.world]
            for fault in _in_threads(lambda entry: records.file_fault(self._fs, path, entry), own):
                if fault is not None:
                    raise ValueError(fault)
        return Checkpoint(
            step=step,
            state=open_arrays(self._fs, path, record["files"]),
            history=self._fs.cat_file(f"{path}/history.jsonl").decode().splitlines(),
            facts=records.parse_json(self._fs.cat_file(f"{path}/state.json")),
        )

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        for later in self._folders():
            if later > step:
                self._discard(self._path(later))

    def _prune(self, newest: int, best_first: Sequence[int]) -> None:
        committed = [step for step in self._steps() if step <= newest]
        best = (step for step in best_first if step in committed and self._has_manifest(step))
        kept = {*committed[-self._keep :], *islice(best, self._best)}
        for step in self._folders():  # also partial checkpoints of a killed run
            if step < newest and step not in kept:
                self._discard(self._path(step))

    def _has_manifest(self, step: int) -> bool:
        """Whether a committed checkpoint's manifest is intact."""
        try:
            return records.read_record(self._fs, f"{self._path(step)}/{MANIFEST}") is not None
        except ValueError:
            return False

    def _discard(self, path: str) -> None:
        """Delete a checkpoint, its manifest first: a partial deletion must not look committed."""
        self._check()
        if self._fs.exists(f"{path}/{MANIFEST}"):
            self._fs.rm_file(f"{path}/{MANIFEST}")
        if self._fs.exists(path):
            delete_tree(self._fs, path)

    def _path(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _steps(self) -> list[int]:
        """Steps of all committed checkpoints, oldest first. Raises as the filesystem does."""
        return [
            step
            for step in self._folders()
            if MANIFEST in map(name_of, entries(self._fs, self._path(step)))
        ]

    def _folders(self) -> list[int]:
        names = (re.fullmatch(r"step-(\d+)", name) for name in subfolders(self._fs, self._root))
        return sorted(int(match[1]) for match in names if match)


def own_checkpoint(checkpoints: Checkpoints, job: TrainJob, settings: Train) -> Checkpoint | None:
    """The newest checkpoint of this run within its steps. Raises Refused as check_same_run."""
    saved = checkpoints.latest()
    if saved is not None:
        check_same_run(saved, job, settings)
        if saved.step > settings.steps:  # this run once had more steps
            if settings.best_checkpoint is not None:
                raise Refused(
                    f"{job.work} holds a run of {saved.step} steps, and its best checkpoint within "
                    f"{settings.steps} may be deleted: choose another work folder"
                )
            return checkpoints.latest(settings.steps + 1)
    return saved


def check_same_run(saved: Checkpoint, job: TrainJob, settings: Train) -> None:
    """Raise Refused if the checkpoint was written with settings that change the weights.

    `steps` may change unless the weights of a step depend on them.
    """
    now = settings.key_settings()
    before = Train(**saved.facts["train"]).key_settings()
    now["denoiser_config"] = job.denoiser_config  # the content: its path may change
    before["denoiser_config"] = saved.facts.get("denoiser_config")
    if settings.method == "lora" and settings.lora.dropout:
        # Dropout masks depend on the rank, so the number of processes must not change.
        now["processes"] = Ranks.here().world
        before["processes"] = saved.facts["processes"]
    if not settings.weights_depend_on_steps:
        now["steps"] = before["steps"]
    for name in sorted(now):
        if before.get(name) != now[name]:
            raise Refused(
                f"{job.work} holds a run with train.{name}={before.get(name)}, this one has "
                f"{now[name]}: choose another work folder"
            )


#: Commits a checkpoint; returns its path and its size in bytes.
Save = Callable[[], tuple[str, int]]


class Saver:
    """Writes one checkpoint at a time. A failed write loses that checkpoint but not the run.

    All writers save the same checkpoints, in the same order. Training continues while a background
    thread commits a checkpoint.

    Args:
        flush: called before each write: a resume repeats no point of a tracker before it.
    """

    def __init__(self, flush: Callable[[], None], events: Events) -> None:
        self._flush = flush
        self._events = events
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[CheckpointError | Away | None] | None = None

    def start(self, step: int, since: float, save: Save) -> None:
        """Start the write of a step's checkpoint after the previous write has ended.

        Args:
            since: perf_counter at which the loop paused for this checkpoint.
            save: writes copies of the state, so that training can continue.
        """
        self.wait()
        blocked = time.perf_counter() - since
        self._writing = self._thread.submit(self._write, step, since, blocked, save)

    def wait(self) -> CheckpointError | Away | None:
        """Wait for the current write; the error of the last write, if it failed."""
        return None if self._writing is None else self._writing.result()

    def close(self) -> None:
        """Wait for the current write and end the thread."""
        self._thread.shutdown()

    def _write(
        self, step: int, since: float, blocked: float, save: Save
    ) -> CheckpointError | Away | None:
        self._flush()
        try:
            path, size = save()
        except (CheckpointError, Away) as error:
            self._events.emit("warning", message=str(error))
            # Tracebacks keep the state in memory: this error's, and that of its cause.
            error.__context__ = None
            return error.with_traceback(None)
        self._events.emit(
            "checkpoint",
            step=step,
            path=path,
            seconds=round(time.perf_counter() - since, 3),
            blocked=round(blocked, 3),
            bytes=size,
        )
        return None
