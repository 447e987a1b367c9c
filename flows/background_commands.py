"""`kiln` commands in processes of their own, which outlast the process that started them.

A command has a folder in the cache with its words, its process and what it printed. So a crash or
a stray line of a command harms nobody, and a later process can follow it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from artifacts.models import cache_folder
from configs.errors import Refused

#: Number of the newest lines of a command's log that show its progress.
LINES = 5
#: Time limit in seconds of a command that was asked to end, before it counts as running on.
END_SECONDS = 30.0


def _folder() -> Path:
    return cache_folder() / "commands"


@dataclass(frozen=True)
class Command:
    """A command that was started, in this process or before."""

    id: str

    @property
    def folder(self) -> Path:
        """Its words and process (`command.json`), `stdout` and `stderr`."""
        return _folder() / self.id

    @property
    def facts(self) -> dict[str, Any]:
        """Words, working folder, process and time of its start."""
        facts: dict[str, Any] = json.loads((self.folder / "command.json").read_text("utf-8"))
        return facts

    def process(self) -> psutil.Process | None:
        """Its process; None if it has ended. A number is given again, with another time."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.facts["pid"])
            is_ours = process.create_time() == self.facts["created"]
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def log(self) -> list[str]:
        """The lines of stderr: progress, warnings, and last an error."""
        return (self.folder / "stderr").read_text("utf-8", "replace").splitlines()

    def result(self) -> dict[str, Any] | None:
        """The JSON object on the last line of stdout; None if there is none."""
        last = (self.folder / "stdout").read_text("utf-8", "replace").strip().rpartition("\n")[2]
        with suppress(json.JSONDecodeError):
            if isinstance(result := json.loads(last), dict):
                return result
        return None

    def error(self) -> str:
        """Why it has no result: the program's error in one line."""
        said = self.log()
        if not said:
            return "the command was killed"
        if said[-1].startswith("kiln: "):
            return said[-1].removeprefix("kiln: ")
        return f"{said[-1]} (a bug, or a kill: {self.folder}/stderr has the log)"

    def stop(self) -> bool:
        """Ask it to end, as SIGTERM does: a run resumes later. Returns whether it has ended."""
        process = self.process()
        if process is not None:
            process.terminate()
            psutil.wait_procs([process], END_SECONDS)
        return self.process() is None


def start(words: Sequence[str]) -> Command:
    """Start `kiln` with words, in this working folder and a session of its own."""
    command = Command(f"{words[0]}-{uuid.uuid4().hex[:8]}")
    command.folder.mkdir(parents=True)
    with (
        (command.folder / "stdout").open("wb") as out,
        (command.folder / "stderr").open("wb") as err,
    ):
        child = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    facts = {
        "words": list(words),
        "working_folder": str(Path.cwd()),
        "pid": child.pid,
        "created": psutil.Process(child.pid).create_time(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    (command.folder / "command.json").write_text(json.dumps(facts), encoding="utf-8")
    return command


def find(name: str) -> Command:
    """The command of an id. Raises Refused."""
    command = Command(name)
    if name in (known := [one.id for one in started()]):
        return command
    raise Refused(f"id {name!r} is unknown: {', '.join(known[:5]) or 'nothing was started'}")


def started() -> list[Command]:
    """The commands that were started, newest first."""
    files = _folder().glob("*/command.json")
    newest = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    return [Command(file.parent.name) for file in newest]
