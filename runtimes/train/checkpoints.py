"""Checkpoints that every runtime reads: safetensors with diffusers' names, committed by a manifest.

<work>/checkpoints/step-00000100/weights.safetensors     fp32 weights
.../exp_avg.safetensors, exp_avg_sq.safetensors           AdamW's moments
.../ema.safetensors                                       with train.ema_decay
.../ema-00001-of-00003.safetensors, ...                   a group above the shard size
.../state.json                                            step, seed, settings, versions
.../history.jsonl                                         one line per step
.../manifest.json                                         written last: the commit
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts.commit import FileEntry, first_fault, read_record, write_record
from artifacts.remote_clients import is_of_client
from artifacts.safetensors import Arrays, read_arrays, write_arrays, writing
from runtimes.contract import State

MANIFEST = "manifest.json"
_FILE = re.compile(r"(?P<group>.+?)(-\d{5}-of-\d{5})?\.safetensors")
log = logging.getLogger("kiln")


class CheckpointError(OSError):
    """An error with a message for the user; `errno` is that of the failed operation, if known."""

    def __str__(self) -> str:
        return str(self.strerror)


class CheckpointNotWritten(CheckpointError):
    """A checkpoint could not be written; older checkpoints are intact."""


class CheckpointsUnreachable(CheckpointError):
    """A remote store did not respond; its checkpoints may be intact."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps."""

    step: int
    state: State
    history: list[str]  # JSON lines, one per step
    facts: dict[str, Any]  # state.json


def split(group: str, arrays: Arrays, shard_bytes: int) -> list[tuple[str, Arrays]]:
    """The files of a group of arrays, as (name, arrays), with diffusers' names for shards.

    A file holds at most `shard_bytes`, except for a single larger array.
    """
    parts: list[Arrays] = [{}]
    room = shard_bytes
    for name in sorted(arrays):
        if parts[-1] and arrays[name].nbytes > room:
            parts.append({})
            room = shard_bytes
        parts[-1][name] = arrays[name]
        room -= arrays[name].nbytes
    if len(parts) == 1:
        return [(f"{group}.safetensors", arrays)]
    count = len(parts)
    return [(f"{group}-{n:05d}-of-{count:05d}.safetensors", p) for n, p in enumerate(parts, 1)]


class Checkpoints:
    """The checkpoints of one run, below a folder at any fsspec URL.

    Args:
        keep: number of newest checkpoints to keep.
        best: number of checkpoints with the lowest `validation_loss` to keep as well.
        shard_bytes: maximum bytes per file of arrays; a larger array has its own file.
    """

    def __init__(
        self, work: str, keep: int, *, best: int = 0, shard_bytes: int = 5 * 10**9
    ) -> None:
        self._fs, root = url_to_fs(work)
        self._root = f"{root.rstrip('/')}/checkpoints"
        self._keep = keep
        self._best = best
        self._shard_bytes = shard_bytes

    def latest(self, before: int | None = None) -> Checkpoint | None:
        """The newest checkpoint with valid checksums, of a step below `before`.

        A damaged checkpoint is skipped with a warning.

        Raises:
            CheckpointsUnreachable: a resume from an older checkpoint would discard the newest
                one's steps.
        """
        try:
            return self._latest(before)
        except Exception as error:
            if not _is_unreachable(self._fs, error):
                raise
            message = f"the checkpoints in {self._root} cannot be read: {_reason(error)}"
            raise CheckpointsUnreachable(getattr(error, "errno", None), message) from error

    def _latest(self, before: int | None) -> Checkpoint | None:
        for step in reversed(self._steps()):
            if before is not None and step >= before:
                continue
            try:
                return self.read(step, verify=True)
            except (ValueError, OSError, KeyError, TypeError) as error:
                if _is_unreachable(self._fs, error):
                    raise
                log.warning("checkpoint %s is skipped: %s", self._path(step), error)
        return None

    def save(
        self,
        step: int,
        state: State,
        history: list[str],
        facts: dict[str, Any],
        *,
        prune: bool = True,
    ) -> tuple[str, int]:
        """Commit a checkpoint, then delete the checkpoints that the limits exclude.

        Args:
            facts: content of `state.json`; `validation_loss` ranks the checkpoint for `best`.
            prune: whether to delete older checkpoints.

        Returns:
            The checkpoint's path and its size in bytes.

        Raises:
            CheckpointNotWritten: for example, the disk is full, or a remote store did not respond.
                The message names the last good checkpoint.
        """
        path, files = self._path(step), list[FileEntry]()
        try:
            self._discard(path)  # a killed run may have left a partial checkpoint
            for group, arrays in state.items():
                for name, part in split(group, arrays, self._shard_bytes):
                    with writing(self._fs, path, name, files) as sink:
                        write_arrays(sink, part)
            with writing(self._fs, path, "history.jsonl", files) as sink:
                sink.write("".join(f"{line}\n" for line in history).encode())
            with writing(self._fs, path, "state.json", files) as sink:
                sink.write(json.dumps({"step": step, **facts}, indent=1).encode())
            loss = facts.get("validation_loss")
            record = {"files": files, "validation_loss": loss}
            write_record(self._fs, f"{path}/{MANIFEST}", record)
        except Exception as error:  # clients of remote stores define their own exception types
            number = getattr(error, "errno", None)
            raise CheckpointNotWritten(number, self._failure_message(path, error)) from None
        try:
            if prune:
                self._prune(step)
        except Exception as error:
            log.warning("old checkpoints could not be deleted: %s", error)
        return path, sum(entry.size for entry in files)

    def _failure_message(self, path: str, error: Exception) -> str:
        kept = "there is none before it"
        try:
            self._discard(path)  # frees the space of the partial checkpoint
            if steps := self._steps():
                kept = f"the last good one is of step {steps[-1]}"
        except Exception:
            kept = "its partial files cannot be deleted"
        return f"checkpoint {path} could not be written: {_reason(error)}; {kept}"

    def read(self, step: int, *, verify: bool = False) -> Checkpoint:
        """The checkpoint of a step.

        Raises:
            ValueError, OSError, KeyError, TypeError: it is damaged. Without `verify` some damage
                remains undetected.
        """
        path = self._path(step)
        record = read_record(self._fs, f"{path}/{MANIFEST}")
        if record is None:
            raise ValueError("it was not committed")
        fault = first_fault(self._fs, path, record["files"]) if verify else None
        if fault is not None:
            raise ValueError(fault)
        state: State = {}
        for entry in record["files"]:
            if match := _FILE.fullmatch(entry.path):
                arrays = read_arrays(self._fs, f"{path}/{entry.path}")
                state.setdefault(match["group"], {}).update(arrays)
        return Checkpoint(
            step=step,
            state=state,
            history=self._fs.cat_file(f"{path}/history.jsonl").decode().splitlines(),
            facts=json.loads(self._fs.cat_file(f"{path}/state.json")),
        )

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        for later in self._folders("step-*"):
            if later > step:
                self._discard(self._path(later))

    def _prune(self, newest: int) -> None:
        committed = [step for step in self._steps() if step <= newest]
        kept = {*committed[-self._keep :], *self._best_of(committed)}
        for step in self._folders("step-*"):  # also partial checkpoints of a killed run
            if step < newest and step not in kept:
                self._discard(self._path(step))

    def _best_of(self, steps: list[int]) -> list[int]:
        """The steps with the lowest validation loss; the later step wins a tie."""
        if not self._best:
            return []
        losses = {step: self._validation_loss(step) for step in steps}
        known = [(loss, -step) for step, loss in losses.items() if loss is not None]
        return [-step for _, step in sorted(known)[: self._best]]

    def _validation_loss(self, step: int) -> float | None:
        try:
            record = read_record(self._fs, f"{self._path(step)}/{MANIFEST}")
        except ValueError:
            return None
        return None if record is None else record.get("validation_loss")

    def _discard(self, path: str) -> None:
        """Delete a checkpoint, its manifest first: a partial deletion must not look committed."""
        if self._fs.exists(f"{path}/{MANIFEST}"):
            self._fs.rm_file(f"{path}/{MANIFEST}")
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    def _path(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _steps(self) -> list[int]:
        """Steps of all committed checkpoints, oldest first."""
        return self._folders(f"step-*/{MANIFEST}")

    def _folders(self, pattern: str) -> list[int]:
        found = self._fs.glob(f"{self._root}/{pattern}")
        steps = [re.search(r"/step-(\d+)(/[^/]*)?$", path.rstrip("/")) for path in found]
        return sorted(int(match[1]) for match in steps if match)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def _is_unreachable(fs: AbstractFileSystem, error: Exception) -> bool:
    """Whether a remote store failed to respond: the checkpoint itself may be intact."""
    if isinstance(fs, LocalFileSystem) or isinstance(error, FileNotFoundError):
        return False
    return isinstance(error, OSError) or is_of_client(error)
