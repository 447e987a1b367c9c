"""Runs of one recipe at the same time, killed and paused: each artifact is that of a quiet run."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from kiln_command import ROOT, command, environment, is_running, processes_below
from store_servers import UrlOf

from artifacts.store import Store

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


@pytest.mark.parametrize("kind", ["local", "s3", "gs"])
def test_runs_of_one_recipe_killed_and_paused_equal_a_quiet_one(
    kind: str,
    url_of: UrlOf,
    published: Path,
    tmp_path: Path,
    smallest: dict[str, Any],
    here: Callable[..., str],
    api: str,
    chance: random.Random,
) -> None:
    store, runs = Store(url_of(kind)), []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        runs.append(Run(tmp_path / name, api, {**smallest, "store": store.url}))

    def records() -> int:
        return sum(path.endswith(".json") for path in store.fs.find(store.root))

    def busy() -> list[Run]:
        return [run for run in runs if not run.is_done()]

    until, happened = time.monotonic() + PATIENCE, []
    faults = ["killed", "paused"] * 3 if store.is_local else ["killed"] * 2
    chance.shuffle(faults)
    for victim, fault in zip(cycle(runs), faults, strict=False):
        seen, more = records(), chance.randint(1, 6)
        while busy() and records() < seen + more:
            assert time.monotonic() < until, [run.log.read_text() for run in runs]
            time.sleep(0.05 if store.is_local else 0.5)  # a listing of a bucket takes longer
        if is_running(victim.process.pid):
            victim.kill() if fault == "killed" else victim.pause()
            happened.append(fault)
    while busy():
        assert time.monotonic() < until, [run.log.read_text() for run in runs]
        time.sleep(0.1)
    assert len(happened) >= min(4, len(faults))

    quiet = json.loads((published / "report.json").read_bytes())
    made = Store(str(published / "store"))
    for run in runs:
        report = run.report()
        assert report["metrics"] == quiet["metrics"]
        for stage in EXACT:
            assert digest(store, report, stage) == digest(made, quiet, stage), stage
    assert "damaged" not in here("verify", "--store", store.url)
    here("gc", "--delete", "--hours", "0", "--store", store.url)
    listed = json.loads(here("ls", "--json", "--store", store.url))
    # A plan is encrypted with the key of the run's cache, and each run has a cache of its own.
    plans = ["plan"] * len(runs)
    assert sorted(row["stage"] for row in listed["artifacts"]) == sorted(
        [*plans, *EXACT, "publish"]
    )
    assert [model["version"] for model in listed["models"]] == ["v1"]


def digest(store: Store, report: dict[str, Any], stage: str) -> str:
    artifact = store.load(stage, report["stages"][stage]["key"])
    assert artifact is not None
    return artifact.digest
