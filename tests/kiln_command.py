"""Run the command `kiln` in a process; list processes."""

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
    """Environment variables with Prefect's files and our cache below `tmp_path`.

    Args:
        api: URL of the Prefect server; None: each run starts a server.
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


def python(
    *words: str, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout; its exit code and what it printed."""
    words = (sys.executable, *words)
    return subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=600)


def kiln(
    tmp_path: Path,
    *words: str,
    overrides: dict[str, Any] | None = None,
    code: int = 0,
    api: str | None = None,
    more: dict[str, str] | None = None,
) -> str:
    """Run `kiln` and check its exit code. Returns stdout, or stderr of an expected error.

    Args:
        more: environment variables.
    """
    _, *arguments = command(*words, overrides=overrides)
    done = python(*arguments, env=environment(tmp_path, api) | (more or {}))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def run_json(
    tmp_path: Path,
    recipe: str,
    overrides: dict[str, Any],
    api: str | None = None,
    more: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run `kiln run RECIPE --json`; the report from its last line."""
    out = kiln(tmp_path, "run", recipe, "--json", overrides=overrides, api=api, more=more)
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def processes_below(pid: int) -> dict[int, str]:
    """Command lines of all descendants of a process."""
    rows = _processes()
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = {own: args for own, parent, args in rows if parent in parents}
        found |= children
        parents = set(children)
    return found


def jobs_of(pid: int) -> list[int]:
    """Pids of the runtime processes among the children of a process, in order."""
    rows = _processes()
    return sorted(own for own, parent, args in rows if parent == pid and "-m runtimes" in args)


def _processes() -> list[tuple[int, int, str]]:
    """Pid, parent pid and full command line of every process."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True)
    rows = (line.split(None, 2) for line in listed.stdout.splitlines()[1:])
    return [(int(pid), int(parent), args) for pid, parent, args in rows]


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")
