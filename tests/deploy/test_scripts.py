"""Scripts that start a runtime or set up a machine: syntax, and the commands that they give."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from deploy_files import DEPLOY, parses, run, write_program
from kiln_command import ROOT

SCRIPTS = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.glob("**/*.sh"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with only the scripts."""
    for name in SCRIPTS:
        path = tmp_path / "checkout/deploy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((DEPLOY / name).read_bytes())
        path.chmod(0o755)
    (tmp_path / "job.json").write_text("{}")
    return tmp_path / "checkout"


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_parses_is_executable_and_stops_at_an_error(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert parses(text)
    assert "\nset -euo pipefail\n" in text
    assert os.access(DEPLOY / name, os.X_OK)


@pytest.mark.parametrize("words", [["xla"], ["jax"], []])
def test_tpu_setup_leaves_to_make_what_is_old(checkout: Path, words: list[str]) -> None:
    (checkout / ".venv-xla").mkdir()
    (checkout / ".venv-xla/tpu").touch()  # an earlier release's
    write_program(checkout / "bin/make", '#!/bin/sh\necho make "$@"\n')
    write_program(checkout / "bin/python3.11", "#!/bin/sh\n")  # has ensurepip
    commands = run(checkout / "deploy/tpu/setup.sh", *words, programs=checkout / "bin")
    (runtime,) = words or ["xla"]
    assert commands == [f"make setup-{runtime}-tpu PYTHON=python3.11"]


@pytest.mark.parametrize(("changed", "code"), [(None, 0), ("xla", 1), ("xla-tpu", 1), ("torch", 0)])
def test_make_renews_the_environment_of_a_tpu_if_its_lists_change(
    tmp_path: Path, changed: str | None, code: int
) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    stamps = [".venv-uv/stamp", ".venv-xla/list.stamp", ".venv-xla/stamp", ".venv-xla/tpu.stamp"]
    for stamp in stamps:
        (tmp_path / stamp).parent.mkdir(exist_ok=True)
        (tmp_path / stamp).touch()
    new = [] if changed is None else [f"--what-if=requirements/{changed}.txt"]
    query = ["make", "--question", *new, stamps[-1]]
    assert subprocess.run(query, cwd=tmp_path, capture_output=True).returncode == code


def worker(checkout: Path, *words: str, endpoints: str = "a:b:10.0.0.1,a:b:10.0.0.2") -> list[str]:
    """What the second worker's script prints; its Python prints the agent's command line."""
    metadata = f'case "$*" in *number) printf 1 ;; *) printf {endpoints} ;; esac'
    write_program(checkout / "bin/curl", f"#!/bin/sh\n{metadata}\n")
    for folder in (".venv", ".venv-xla"):
        write_program(checkout / folder / "bin/python", f'#!/bin/sh\necho {folder} "$@"\n')
    return run(checkout / "deploy/tpu/worker.sh", *words, programs=checkout / "bin")


@pytest.mark.parametrize(("runtime", "folder"), [("jax", ".venv"), ("xla", ".venv-xla")])
def test_a_slices_worker_runs_the_agent_of_its_runtime(
    checkout: Path, runtime: str, folder: str
) -> None:
    job = "gs://bucket/run/jobs/1a.json"
    said = worker(checkout, runtime, job, "2", "30")
    assert said == [
        f"{folder} -P -u -m runtimes.process.host_agent {job} --hosts 2 --host 1 "
        "--address 10.0.0.1:8476 --grace 30 --watch-stdin"
    ]


def test_a_worker_whose_command_is_repeated_stops_the_first_start(checkout: Path) -> None:
    """As gcloud does when a connection is cut."""
    words = ("jax", "gs://bucket/run/jobs/1a.json", "2", "30")
    worker(checkout, *words)
    assert [json.loads(line) for line in worker(checkout, *words)] == [
        {"host": 1, "event": "exit", "code": 143}
    ]


def test_a_slice_of_other_workers_than_the_recipe_says_is_wrong_input(checkout: Path) -> None:
    said = worker(checkout, "jax", "gs://bucket/run/jobs/1a.json", "4", "30")
    error, ended = map(json.loads, said)
    assert error["wrong_input"] and "has 2 hosts, not 4: set 2" in error["message"]
    assert ended == {"host": 1, "event": "exit", "code": 2}


def test_libtpu_of_runtime_jax_is_that_of_the_plans() -> None:
    (libtpu,) = (ROOT / "requirements/jax-tpu.txt").read_text(encoding="utf-8").split()
    assert libtpu == (ROOT / "requirements/plan.txt").read_text(encoding="utf-8").strip()
