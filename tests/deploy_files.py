"""Files of deploy/: their folder, the instructions of Dockerfiles, and scripts that are run."""

import os
import subprocess
from pathlib import Path

from kiln_command import ROOT

DEPLOY = ROOT / "deploy"
WAIT = "deploy/wait_for_checkpoints.sh"  # below ROOT, as pages name it


def parses(shell: str) -> bool:
    return subprocess.run(["bash", "-n"], input=shell.encode(), capture_output=True).returncode == 0


def run(script: Path, *words: str, programs: Path) -> list[str]:
    """Run a script from another folder; the lines of its output."""
    done = subprocess.run(
        [script, *words],
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        cwd=script.parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def instructions(name: str) -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction of a Dockerfile."""
    text = (DEPLOY / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    split = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return [(keyword, rest.strip()) for keyword, _, rest in split]


def owned(name: str) -> set[str]:
    """Folders of an image that belong to its user."""
    (setup,) = (rest for keyword, rest in instructions(name) if "install --directory" in rest)
    return set(setup.rpartition("install --directory --owner=kiln ")[2].split())
