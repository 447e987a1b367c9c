"""Runs of one recipe at the same time, killed and paused: each artifact is that of a quiet run."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, command, environment, is_running, processes_below

pytestmark = pytest.mark.soak
PATIENCE = 900  # seconds, for a machine that does much else
PAUSE = 5.0  # seconds, more than the expiry of tests/chaos/short_locks
EXACT = ("download", "encode", "train", "evaluate")


class Run:
    """`kiln run digits`, again and again until it succeeds."""

    def __init__(self, folder: Path, api: str, overrides: dict[str, Any]) -> None:
        self._folder, self._api, self._overrides = folder, api, overrides
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self.log = self._folder / f"log-{self.starts}"
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                command("run", "digits", "--json", overrides=self._overrides),
                env={
                    **environment(self._folder, self._api),
                    "PYTHONPATH": f"{ROOT / 'tests/chaos/short_locks'}:{ROOT}",
                },
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def is_done(self) -> bool:
        """Whether it has succeeded; after a failure it is started again."""
        if self.process.poll() not in (None, 0):
            self._start()
        return self.process.poll() == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def pause(self) -> None:
        """Stop it and all its children for longer than its locks live."""
        processes = [self.process.pid, *processes_below(self.process.pid)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(PAUSE if number == signal.SIGSTOP else 0)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.log.read_text().splitlines()[-1])
        return found


def test_runs_of_one_recipe_killed_and_paused_equal_a_quiet_one(
    published: Path,
    tmp_path: Path,
    small: dict[str, Any],
    here: Callable[..., str],
    api: str,
    chance: random.Random,
) -> None:
    store, runs = Path(small["store"]), []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        runs.append(Run(tmp_path / name, api, small))

    def records() -> int:
        return sum(1 for _ in store.glob("*/**/*.json"))

    def busy() -> list[Run]:
        return [run for run in runs if not run.is_done()]

    until, happened = time.monotonic() + PATIENCE, []
    faults = ["killed", "paused"] * 3
    chance.shuffle(faults)
    for fault in faults:
        seen, more = records(), chance.randint(1, 6)
        while busy() and records() < seen + more:
            assert time.monotonic() < until, [run.log.read_text() for run in runs]
            time.sleep(0.05)
        victim = chance.choice(runs)
        if is_running(victim.process.pid):
            victim.kill() if fault == "killed" else victim.pause()
            happened.append(fault)
    while busy():
        assert time.monotonic() < until, [run.log.read_text() for run in runs]
        time.sleep(0.1)
    assert len(happened) >= 4

    quiet = json.loads((published / "report.json").read_bytes())
    for run in runs:
        report = run.report()
        assert report["metrics"] == quiet["metrics"]
        for stage in EXACT:
            assert digest(report, stage) == digest(quiet, stage), stage
    assert "damaged" not in here("verify", "--store", str(store))
    here("gc", "--delete", "--hours", "0", "--store", str(store))
    listed = json.loads(here("ls", "--json", "--store", str(store)))
    assert sorted(row["stage"] for row in listed["artifacts"]) == sorted([*EXACT, "publish"])
    assert [model["version"] for model in listed["models"]] == ["v1"]


def digest(report: dict[str, Any], stage: str) -> str:
    manifest = Path(report["stages"][stage]["uri"], "manifest.json")
    return str(json.loads(manifest.read_bytes())["digest"])
