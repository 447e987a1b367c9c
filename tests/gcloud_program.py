"""A program that stands in for gcloud: its slice's workers are folders of this machine.

What ssh is asked to do is really done there, with the runtime's environment of this machine.
"""

import os
import stat
import sys
from pathlib import Path

import pytest

from runtimes.process.collectives import free_port
from runtimes.registry import interpreter
from tasks.hosts.gcloud import code_home, pack_code

GCLOUD = '''#!{python}
"""Stands in for gcloud: one slice, whose workers' homes are folders."""
import os, shutil, subprocess, sys, threading, time
from pathlib import Path

world = Path({world!r})
with (world / "told").open("a") as told:
    print(*sys.argv[1:], file=told)
state = world / "state"
homes = [world / f"home-{{number}}" for number in range({hosts})]
verb, rest = sys.argv[4], sys.argv[5:]
if verb == "create":
    (owner,) = [r.rpartition("=")[2] for r in rest if r.startswith("--labels=")] or [""]
    for home in homes:
        shutil.copytree(world / "image", home, symlinks=True)
    state.write_text("READY\\t" + owner)
elif verb == "describe":
    if not state.exists():
        sys.exit("ERROR: NOT_FOUND: no such slice")
    print(state.read_text())
elif verb == "delete":
    if not state.exists():
        sys.exit("ERROR: NOT_FOUND: no such slice")
    state.unlink()
    for home in homes:
        shutil.rmtree(home)
elif verb == "scp":
    for home in homes:
        shutil.copy(rest[0], home / [r for r in rest if ":" in r][-1].partition(":")[2])
elif verb == "ssh":
    command = [r for r in rest if r.startswith("--command=")][0].partition("=")[2]
    path = str(world / "bin") + ":" + os.environ["PATH"]
    children = []
    for number, home in enumerate(homes):
        environment = dict(os.environ, HOME=str(home), PATH=path, WORKER=str(number))
        children.append(subprocess.Popen(["bash", "-c", command], cwd=home, env=environment))

    def take_away():
        while any(child.poll() is None for child in children):
            checkpoints = list(world.glob("run/checkpoints/step-*/manifest.json"))
            spot = world / "spot"  # how often the slice is taken away
            left = int(spot.read_text() or 1) if spot.exists() else 0
            if left and checkpoints:
                spot.write_text(str(left - 1)) if left > 1 else spot.unlink()
                state.write_text(state.read_text().replace("READY", "PREEMPTED"))
                for child in children:
                    subprocess.run(["pkill", "-KILL", "-P", str(child.pid)])  # the rank
                    child.kill()
                return
            time.sleep(0.01)

    if "worker.sh" in command:
        threading.Thread(target=take_away, daemon=True).start()
    sys.exit(any([child.wait() for child in children]) and 255)
'''
#: By which make knows that an environment is set up.
STAMPS = {
    "xla": ("-uv/stamp", "-xla/list.stamp", "-xla/stamp", "-xla/tpu.stamp"),
    "jax": ("-uv/stamp", "/torch.stamp", "/base.stamp", "/stamp", "/jax-tpu.stamp"),
}
#: What a worker is told about itself.
CURL = """#!/bin/sh
case "$*" in
  *agent-worker-number) printf $WORKER ;;
  *worker-network-endpoints) printf '{endpoints}' ;;
  *) exit 22 ;;
esac
"""


def make_world(folder: Path, monkeypatch: pytest.MonkeyPatch, hosts: int = 1) -> Path:
    """A cloud in a folder; its slices come with this machine's environments for `jax` and `xla`.

    Args:
        hosts: workers of a slice.
    """
    world = folder / "world"
    home = world / "image" / code_home(pack_code())
    for runtime, environment in (("xla", ".venv-xla"), ("jax", ".venv")):
        _write_program(home / environment / "bin/python", _exec(interpreter(runtime)))
        for stamp in STAMPS[runtime]:
            (home / f".venv{stamp}").parent.mkdir(exist_ok=True)
            (home / f".venv{stamp}").touch()
    _write_program(world / "bin/python3.11", _exec(sys.executable))
    program = GCLOUD.format(python=sys.executable, world=str(world), hosts=hosts)
    _write_program(world / "gcloud/gcloud", program)
    endpoints = ",".join(["unknown:unknown:127.0.0.1"] * hosts)
    _write_program(world / "bin/curl", CURL.format(endpoints=endpoints))
    monkeypatch.setenv("PATH", f"{world / 'gcloud'}:{os.environ['PATH']}")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return world


def told(world: Path) -> list[str]:
    """The verbs that gcloud was told, in order."""
    return [line.split()[3] for line in (world / "told").read_text().splitlines()]


def _exec(python: str) -> str:
    return f'#!/bin/sh\nexec {python} "$@"\n'


def _write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
