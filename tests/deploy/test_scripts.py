"""Scripts that start a runtime or set up a machine: syntax, and the commands that they give."""

import os
import subprocess
from pathlib import Path

import pytest
from deploy_files import DEPLOY, owned, parses, run, write_program
from kiln_command import ROOT

SCRIPTS = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.glob("**/*.sh"))
#: Prints environment variables and arguments, one per line.
PRINT_ARGUMENTS = """#!/bin/sh
echo "PYTHONPATH=$PYTHONPATH"
echo "PT_HPU_LAZY_MODE=$PT_HPU_LAZY_MODE"
for word in "$@"; do echo "$word"; done
"""


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


def test_gaudi_launcher_starts_torchrun(checkout: Path) -> None:
    write_program(checkout / "bin/torchrun", PRINT_ARGUMENTS)
    script = checkout / "deploy/gaudi/launch.sh"
    words = run(script, "job.json", "2", "8", "10.0.0.1", "1", programs=checkout / "bin")
    assert words == [
        f"PYTHONPATH={checkout}",
        "PT_HPU_LAZY_MODE=0",
        "--nnodes=2",
        "--nproc_per_node=8",
        "--node_rank=1",
        "--master_addr=10.0.0.1",
        "--master_port=12345",
        "--no-python",
        *("python3", "-P", "-m", "runtimes", str(checkout.parent / "job.json")),
    ]


def test_ascend_launcher_starts_msrun_of_the_environment(checkout: Path) -> None:
    write_program(checkout / ".venv-mindspore/bin/msrun", PRINT_ARGUMENTS)
    script = checkout / "deploy/ascend/launch.sh"
    words = run(script, "job.json", "16", "8", "10.0.0.1", "1", programs=checkout / "none")
    logs = "--log_dir=outputs/logs/job"  # in a folder that an image's user owns
    assert words[2:] == [
        "--worker_num=16",
        "--local_worker_num=8",
        "--node_rank=1",
        "--master_addr=10.0.0.1",
        "--master_port=8118",
        "--cluster_time_out=600",
        logs,
        "--join=True",
        *("python", "-P", "-m", "runtimes", str(checkout.parent / "job.json")),
    ]
    assert f"/kiln/{logs.partition('=')[2].partition('/')[0]}" in owned("ascend/Dockerfile")


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


def test_libtpu_of_runtime_jax_is_that_of_the_plans() -> None:
    (libtpu,) = (ROOT / "requirements/jax-tpu.txt").read_text(encoding="utf-8").split()
    assert libtpu == (ROOT / "requirements/plan.txt").read_text(encoding="utf-8").strip()
