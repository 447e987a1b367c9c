"""Checkpoints that any runtime reads: safetensors by diffusers' names, committed by a record.

<work>/checkpoints/step-00000100/unet.safetensors        fp32 weights
.../exp_avg.safetensors, exp_avg_sq.safetensors           AdamW's moments
.../ema.safetensors                                       if an average is kept
.../state.json                                            step, seed, settings, versions
.../history.jsonl                                         one line a step
.../manifest.json                                         written last: it exists with this
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs

from artifacts.commit import FileEntry, first_fault, read_record, write_record
from runtimes.base import State
from runtimes.tensors import read_arrays, write_arrays, writing

MANIFEST = "manifest.json"
log = logging.getLogger("kiln")


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; those committed before are untouched.

    `errno` is that of what went wrong, if it had one.
    """

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class Checkpoint:
    """A run as it was after `step` steps."""

    step: int
    state: State
    history: list[str]  # lines of JSON, one a step
    facts: dict[str, Any]  # state.json


class Checkpoints:
    """The checkpoints of one run, below a folder at any fsspec URL.

    Args:
        keep: how many of the newest are kept.
    """

    def __init__(self, work: str, keep: int) -> None:
        self._fs, root = url_to_fs(work)
        self._root, self._keep = f"{root.rstrip('/')}/checkpoints", keep

    def latest(self) -> Checkpoint | None:
        """The newest that verifies; a broken one is skipped with a warning."""
        for step in reversed(self._steps()):
            path = self._path(step)
            try:
                return self._read(step, path)
            except (ValueError, OSError, KeyError, TypeError) as error:
                log.warning("checkpoint %s is skipped: %s", path, error)
        return None

    def save(
        self, step: int, state: State, history: list[str], facts: dict[str, Any]
    ) -> tuple[str, int]:
        """Commit a checkpoint, then delete the oldest. Returns its path and its bytes.

        Raises:
            CheckpointNotWritten: the disk is full, say; the message names the last good one.
        """
        path, files = self._path(step), list[FileEntry]()
        try:
            self._discard(path)  # what a run that was killed left half written
            for group, arrays in state.items():
                with writing(self._fs, path, f"{group}.safetensors", files) as sink:
                    write_arrays(sink, arrays)
            with writing(self._fs, path, "history.jsonl", files) as sink:
                sink.write("".join(f"{line}\n" for line in history).encode())
            with writing(self._fs, path, "state.json", files) as sink:
                sink.write(json.dumps({"step": step, **facts}, indent=1).encode())
            write_record(self._fs, f"{path}/{MANIFEST}", {"files": files})
        except OSError as error:
            raise CheckpointNotWritten(error.errno, self._complaint(path, error)) from None
        try:
            self._prune(step)
        except OSError as error:
            log.warning("old checkpoints could not be deleted: %s", error)
        return path, sum(entry.size for entry in files)

    def _complaint(self, path: str, error: OSError) -> str:
        try:
            self._discard(path)  # makes room again
        except OSError:
            log.warning("%s is half written and cannot be removed", path)
        steps = self._steps()
        kept = f"the last good one is of step {steps[-1]}" if steps else "there is none before it"
        reason = error.strerror or str(error)
        return f"checkpoint {path} could not be written: {reason}; {kept}"

    def _read(self, step: int, path: str) -> Checkpoint:
        record = read_record(self._fs, f"{path}/{MANIFEST}")
        if record is None:
            raise ValueError("it was never finished")
        fault = first_fault(self._fs, path, record["files"])
        if fault is not None:
            raise ValueError(fault)
        groups = [f.path.removesuffix(".safetensors") for f in record["files"]]
        groups = [g for g in groups if "." not in g]
        return Checkpoint(
            step=step,
            state={g: read_arrays(self._fs, f"{path}/{g}.safetensors") for g in groups},
            history=self._fs.cat_file(f"{path}/history.jsonl").decode().splitlines(),
            facts=json.loads(self._fs.cat_file(f"{path}/state.json")),
        )

    def _prune(self, newest: int) -> None:
        committed = [step for step in self._steps() if step <= newest]
        kept = committed[-self._keep :]
        for step in self._folders("step-*"):  # those that a killed run left half written too
            if step < newest and step not in kept:
                self._discard(self._path(step))

    def _discard(self, path: str) -> None:
        """Delete a checkpoint, its record first: half deleted, it must not look whole."""
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
