"""`kiln run` at a terminal: a progress bar, and Ctrl-C, which leaves no process."""

import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import termios
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from kiln_command import ROOT, command, environment, is_running, processes_below
from terminal import Terminal
from waiting import wait_until

pytestmark = pytest.mark.slow
PATIENCE = 600  # seconds, for a machine that does much else
# The bar of training at two different steps: its first drawing may be at any step.
MOVED = r"(?s)train +[━╸╺]+ +(\d+)/1(?=.*train +[━╸╺]+ +(?!\1/)[1-9]\d*/1)"


def start(folder: Path, overrides: dict[str, Any], terminal: Terminal) -> subprocess.Popen[bytes]:
    """Start `kiln run digits` as a shell at that terminal."""
    return subprocess.Popen(
        command("run", "digits", overrides=overrides),
        env={**environment(folder), "TERM": "xterm-256color"},
        cwd=ROOT,
        stdin=terminal.end,
        stdout=terminal.end,
        stderr=terminal.end,
        start_new_session=True,
        preexec_fn=_at_its_terminal,
    )


def _at_its_terminal() -> None:
    """A terminal whose Ctrl-C reaches this process, which background runs ignore by default."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def last_state(database: Path) -> str:
    """The state of the server's latest flow run."""
    with closing(sqlite3.connect(database)) as opened:
        query = "SELECT state_type FROM flow_run ORDER BY created DESC LIMIT 1"
        return str(opened.execute(query).fetchone()[0])


@pytest.mark.extended
def test_an_interrupted_run_leaves_a_checkpoint_and_no_process(
    published: Path, smallest: dict[str, Any], tmp_path: Path
) -> None:
    """A second run with an own server; most stages are reused."""
    folder = Path(shutil.copytree(published, tmp_path / "again", symlinks=True))
    endless = {"train.steps": 100_000, "train.checkpointing_steps": 100_000}
    endless |= {"train.sample_every_n_steps": 0, "train.logging_steps": 1}
    overrides = {**smallest, **endless, "store": str(folder / "store")}
    with Terminal() as terminal:
        run = start(folder, overrides, terminal)
        try:
            terminal.wait(MOVED, lambda: run.poll() is None, PATIENCE)
            below = processes_below(run.pid)
            terminal.press(b"\x03")
            assert run.wait(PATIENCE) == 130
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            raise
        terminal.close()
    assert [args for args in below.values() if "-m runtimes" in args]
    assert [args for args in below.values() if "prefect.server" in args]
    wait_until(lambda: not any(map(is_running, below)), PATIENCE, says=lambda: below)
    text = terminal.text
    assert "starting Prefect (its own server, for this run)" in text
    assert "download: reused" in text and "encode: reused" in text
    assert text.rstrip().splitlines()[-1] == ("kiln: interrupted; run the same command to resume")
    assert "Traceback" not in text
    assert terminal.seen.count("\x1b[?25l") == terminal.seen.count("\x1b[?25h") > 0  # the cursor
    assert last_state(folder / "prefect/prefect.db") == "CRASHED"  # its server was told so
    (unfinished,) = [
        path
        for path in folder.glob("store/train/*/checkpoints")
        if not (path.parent / "manifest.json").exists()  # as that of the run before
    ]
    (checkpoint,) = unfinished.glob("step-*/manifest.json")
    assert int(checkpoint.parent.name.removeprefix("step-")) > 0


@pytest.mark.extended
def test_the_last_line_of_a_run_is_its_result(
    smallest: dict[str, Any], tmp_path: Path, api: str
) -> None:
    """DuckDB's bindings would add thirty lines after a download."""
    overrides = {**smallest, "store": str(tmp_path / "store")}
    done = subprocess.run(
        command("run", "digits", "--until", "download", overrides=overrides),
        env=environment(tmp_path, api),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("download  built: ")
