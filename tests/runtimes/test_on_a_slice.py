"""A train job on a slice: what comes of it when the slice is taken away.

There is no cloud here. A program named gcloud stands in for it: it keeps a slice's state in a file,
and its one worker is a folder of this machine, in which what ssh is asked to do is really done.
"""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import SETTINGS, MakeJob, outputs
from training import train

from artifacts.store import Store
from configs.errors import Away, Refused
from configs.settings.recipe import Tpu
from runtimes.process.job import write_job
from tasks import tpu as tasks_tpu
from tasks.tpu import code_home, pack_code

pytestmark = pytest.mark.slow

SLICE: dict[str, Any] = {"name": "kiln", "zone": "us-east5-a", "accelerator_type": "v5p-8"}
GCLOUD = '''#!{python}
"""Stands in for gcloud: one slice, whose workers' home is a folder."""
import os, shutil, signal, subprocess, sys, threading, time
from pathlib import Path

world = Path({world!r})
with (world / "told").open("a") as told:
    print(*sys.argv[1:], file=told)
state, home = world / "state", world / "home"
verb, rest = sys.argv[4], sys.argv[5:]
if verb == "create":
    (owner,) = [r.rpartition("=")[2] for r in rest if r.startswith("--labels=")] or [""]
    state.write_text("READY\t" + owner)
    home.mkdir()
    shutil.copytree(world / "image", home, symlinks=True, dirs_exist_ok=True)
elif verb == "describe":
    if not state.exists():
        sys.exit("ERROR: NOT_FOUND: no such slice")
    print(state.read_text())
elif verb == "delete":
    if not state.exists():
        sys.exit("ERROR: NOT_FOUND: no such slice")
    state.unlink()
    shutil.rmtree(home)
elif verb == "scp":
    shutil.copy(rest[0], home / [r for r in rest if ":" in r][-1].partition(":")[2])
elif verb == "ssh":
    command = [r for r in rest if r.startswith("--command=")][0].partition("=")[2]
    path = str(world / "bin") + ":" + os.environ["PATH"]
    environment = dict(os.environ, HOME=str(home), PATH=path)
    child = subprocess.Popen(["bash", "-c", command], cwd=home, env=environment)

    def take_away():
        while child.poll() is None:
            checkpoints = list(world.glob("run/checkpoints/step-*/manifest.json"))
            if (world / "spot").exists() and len(checkpoints) >= 1:
                (world / "spot").unlink()
                state.write_text(state.read_text().replace("READY", "PREEMPTED"))
                subprocess.run(["pkill", "-KILL", "-f", "runtimes " + str(home)])
            time.sleep(0.01)

    if "worker.sh" in command:
        threading.Thread(target=take_away, daemon=True).start()
    sys.exit(child.wait() and 255)
'''
#: By which make knows that an environment is set up.
STAMPS = (".venv-uv/stamp", ".venv-xla/list.stamp", ".venv-xla/stamp", ".venv-xla/tpu.stamp")
#: What a worker is told about itself.
CURL = """#!/bin/sh
case "$*" in
  *agent-worker-number) printf 0 ;;
  *worker-network-endpoints) printf 'unknown:unknown:127.0.0.1' ;;
  *) exit 22 ;;
esac
"""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cloud whose slices come with this environment in place of the runtime's own."""
    world = tmp_path / "world"
    home = world / "image" / code_home(pack_code())
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    write_program(home / ".venv-xla/bin/python", python)
    for stamp in STAMPS:
        (home / stamp).parent.mkdir(exist_ok=True)
        (home / stamp).touch()  # set up
    write_program(world / "bin/python3.11", python)
    write_program(world / "gcloud/gcloud", GCLOUD.format(python=sys.executable, world=str(world)))
    write_program(world / "bin/curl", CURL)
    monkeypatch.setenv("PATH", f"{world / 'gcloud'}:{os.environ['PATH']}")
    return world


def told(world: Path) -> list[str]:
    """The verbs that gcloud was told, in order."""
    return [line.split()[3] for line in (world / "told").read_text().splitlines()]


def run_on_slice(job: Any, tmp_path: Path, **tpu: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    store = Store(str(tmp_path / "store"))
    tasks_tpu.run_on_slice(
        Tpu(**SLICE, **tpu), job, events.append, store=store, grace_seconds=30, poll_seconds=0.1
    )
    return events


@pytest.mark.extended
def test_a_slice_that_is_taken_away_is_made_anew_and_training_goes_on(
    world: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    whole = make_job("whole", **SETTINGS)
    train(whole)
    job = make_job("slice", **SETTINGS)
    (world / "run").symlink_to(job.work)
    (world / "spot").touch()
    events = run_on_slice(job, tmp_path)
    starts = [event["step"] for event in events if event["event"] == "start"]
    assert starts[0] == 0 < starts[1] and len(starts) == 2
    assert told(world).count("create") == 2 and told(world)[-1] == "delete"
    assert outputs(job) == outputs(whole)
    assert not (world / "state").exists()


def test_a_fault_of_the_job_ends_it_and_the_slice(
    world: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("wrong", model=str(tmp_path))
    with pytest.raises(Refused, match="model_index"):
        run_on_slice(job, tmp_path)
    assert told(world).count("create") == 1 and told(world)[-1] == "delete"


@pytest.mark.soak
def test_a_slice_that_is_there_is_used_and_may_be_kept(
    world: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("one", steps=2)
    run_on_slice(job, tmp_path, keep=True)
    run_on_slice(make_job("two", steps=2), tmp_path, keep=True)
    assert told(world).count("create") == 1 and "delete" not in told(world)


@pytest.mark.extended
def test_too_many_preemptions_are_an_error(world: Path, make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("often", **SETTINGS)
    (world / "run").symlink_to(job.work)
    (world / "spot").touch()
    with pytest.raises(Away, match="preempted or cut off too often"):
        run_on_slice(job, tmp_path, restarts=0)


LAUNCH = """
import json, signal, sys
from pathlib import Path
from artifacts.store import Store
from configs.settings.recipe import Tpu
from runtimes.process.job import read_job
from tasks import tpu as gcloud
signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell has us ignore it
tpu, job, store = sys.argv[1:]
gcloud.run_on_slice(
    Tpu(**json.loads(tpu)), read_job(Path(job)), lambda event: print(event["event"], flush=True),
    store=Store(store), grace_seconds=60, poll_seconds=0.1,
)
"""


@pytest.mark.extended
def test_a_run_that_is_interrupted_has_the_slice_checkpoint_and_deletes_it(
    world: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("stopped", **{**SETTINGS, "steps": 100_000, "checkpointing_steps": 50_000})
    write_job(job, tmp_path / "job.json")
    given = (json.dumps(SLICE), str(tmp_path / "job.json"), str(tmp_path / "store"))
    command = [sys.executable, "-c", LAUNCH, *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if line.strip() == "progress":
                launcher.send_signal(signal.SIGINT)
                break
        try:
            launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    steps = [path.name for path in Path(job.work, "checkpoints").glob("step-*")]
    assert len(steps) == 1 and steps[0] != "step-00050000"
    assert told(world)[-1] == "delete" and not (world / "state").exists()
