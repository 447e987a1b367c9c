"""Run `kiln` as its users do: a process, its exit code, its lines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def command(*words: str, overrides: dict[str, Any] | None = None) -> list[str]:
    """The command line of `kiln` with overrides."""
    extra = [w for k, v in (overrides or {}).items() for w in ("-o", f"{k}={json.dumps(v)}")]
    return [sys.executable, "-m", "flows.cli", *words, *extra]


def environment(tmp_path: Path, api: str | None = None) -> dict[str, str]:
    """An environment with Prefect's files and our cache below `tmp_path`.

    Args:
        api: URL of the Prefect server to use; each run starts its own without.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "KILN_"))}
    return {
        **env,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "KILN_CACHE": str(tmp_path / "cache"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        **({} if api is None else {"PREFECT_API_URL": api}),
    }


def kiln(
    tmp_path: Path,
    *words: str,
    overrides: dict[str, Any] | None = None,
    code: int = 0,
    api: str | None = None,
) -> str:
    """Run `kiln`, expect its exit code, and return what it printed."""
    done = subprocess.run(
        command(*words, overrides=overrides),
        env=environment(tmp_path, api),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def run_json(
    tmp_path: Path, recipe: str, overrides: dict[str, Any], api: str | None = None
) -> dict[str, Any]:
    """`kiln run RECIPE --json`: the report on its last line."""
    out = kiln(tmp_path, "run", recipe, "--json", overrides=overrides, api=api)
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def processes_below(pid: int) -> dict[int, str]:
    """Command lines of the processes that a process has started, and those that they have."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        born = {int(own): args for own, parent, args in rows if int(parent) in parents}
        found |= born
        parents = set(born)
    return found


def jobs_of(pid: int) -> list[int]:
    """The processes of a runtime that a process has started itself, in order."""
    rows = _processes()
    return sorted(own for own, parent, args in rows if parent == pid and "-m runtimes" in args)


def _processes() -> list[tuple[int, int, str]]:
    """Pid, parent and command line, uncut, of every process."""
    told = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True)
    rows = (line.split(None, 2) for line in told.stdout.splitlines()[1:])
    return [(int(pid), int(parent), args) for pid, parent, args in rows]


def is_running(pid: int) -> bool:
    """Whether a process is there; one that has ended and is not yet waited for is not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")
