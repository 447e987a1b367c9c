"""A worker or pod that is stopped ends after the checkpoint of its training."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_files import DEPLOY, WAIT, instructions, write_program
from kiln_command import ROOT
from waiting import wait_until

from configs.load_recipe import load_recipe

PATIENCE = 60  # seconds, for a machine that does much else


def stopped(program: subprocess.Popen[Any], folder: Path) -> int:
    """The exit code of a program that gets SIGTERM once its training has started."""
    wait_until((folder / "started").exists, PATIENCE, alive=lambda: program.poll() is None)
    program.terminate()
    return program.wait(PATIENCE)


#: Stands in for Prefect, whose worker ends itself by SIGINT on SIGTERM: a shell must not ignore it.
#: Its end is that of the training's standard input.
PREFECT = f"""#!{sys.executable}
import signal, subprocess, sys
heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7 if heard else "SIGINT is ignored"))
train = ["python", "-P", "-m", "runtimes", "job.json"]
subprocess.Popen(train, stdin=subprocess.PIPE, start_new_session=True).wait()
"""
#: Stands in for a training: at the end of its input it writes a checkpoint; a signal would end it.
TRAINING = "#!/bin/bash\ntouch started\ncat >/dev/null\nsleep 2\ntouch saved\n"


@pytest.mark.slow
def test_a_stopped_worker_ends_after_the_checkpoint_of_its_training(tmp_path: Path) -> None:
    write_program(tmp_path / "bin/prefect", PREFECT)
    write_program(tmp_path / "bin/python", TRAINING)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    command = ["bash", ROOT / WAIT, "prefect", "worker", "start"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # as a container starts
    worker = subprocess.Popen(command, cwd=tmp_path, env=env, preexec_fn=heard)
    assert stopped(worker, tmp_path) == 7
    assert (tmp_path / "saved").exists()


def test_every_worker_and_every_pod_waits_for_checkpoints() -> None:
    compose = yaml.safe_load((DEPLOY / "server/compose.yaml").read_text(encoding="utf-8"))
    services = [one.get("entrypoint", []) for one in compose["services"].values()]
    assert [one[0] for one in services if "prefect" in one] == [WAIT]
    unit = (DEPLOY / "systemd/kiln-worker@.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    assert start == f"/srv/kiln/kiln/{WAIT}" and "\nKillMode=mixed\n" in unit
    for path in (DEPLOY / "kubernetes").glob("*_job_template.json"):
        manifest = json.loads(path.read_text(encoding="utf-8"))["job_configuration"]["job_manifest"]
        (pod,) = manifest["spec"]["template"]["spec"]["containers"]
        assert pod["command"] == [f"/kiln/{WAIT}"], path.name


def docker_runs() -> list[list[str]]:
    """Words of each `docker run` in the pages."""
    pages = [ROOT / "README.md", *DEPLOY.glob("**/*.md"), *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    return [line.split() for line in re.findall(r"docker run ([^`\n]+)", text)]


def test_a_container_of_the_pages_keeps_its_caches_and_has_time_for_a_checkpoint() -> None:
    runs = [words for words in docker_runs() if "doctor" not in words]
    assert runs
    grace = load_recipe("digits").train.grace_seconds
    for words in runs:
        assert "kiln-cache:/cache" in words, words
        assert float(words[words.index("--stop-timeout") + 1]) > grace, words
        if "--detach" in words:
            assert words[words.index("--restart") + 1] == "unless-stopped", words
            assert WAIT in words, words
        else:
            assert "kiln:/kiln/store" in words, words


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd/kiln-worker@.service").read_text(encoding="utf-8")
    unit = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit, flags=re.MULTILINE)
    path = tmp_path / "kiln-worker@ascend.service"
    path.write_text(re.sub("^User=.*", "User=root", unit, flags=re.MULTILINE))
    drop_in = tmp_path / f"{path.name}.d/cann.conf"
    drop_in.parent.mkdir()
    for more in ("", ascend_drop_in()):
        drop_in.write_text(more)
        done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
        about = [line for line in done.stderr.splitlines() if "kiln-worker" in line]
        assert about == []


def ascend_drop_in() -> str:
    text = (DEPLOY / "ascend/README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```\n(\[Service\]\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(found)


def test_a_worker_of_an_ascend_machine_has_the_environment_of_cann() -> None:
    entry = dict(instructions("ascend/Dockerfile"))["ENTRYPOINT"]
    (source,) = re.findall(r"source \S+ && exec ", entry)
    _, reset, start = ascend_drop_in().splitlines()
    words = f"{WAIT} .venv/bin/prefect worker start --pool ascend"
    assert (reset, start) == ("ExecStart=", f"ExecStart=/bin/bash -c '{source}{words}'")
