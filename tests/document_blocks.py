"""Code blocks of documents: their marks, and running them in order as a reader does.

A block runs unless a comment right before it says why not:

    <!-- needs: a GPU -->             something that test machines lack
    <!-- run by: tests/flows/x.py --> another test, or a program of the repository, runs it

A YAML or Python block whose first line is a comment with a file's name is written to that file.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kiln_command import ROOT, environment

BLOCK = re.compile(
    r"^(?:<!-- (needs|run by): (.+?) -->\n+)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
FILE = re.compile(r"# (\S+\.(?:yaml|py))\n")
SHELL = ("", "sh", "bash")
#: make as in a checkout, without remaking the environment that the tests run in.
MAKE = f'make() {{ command make -f {ROOT}/Makefile -o .venv/stamp -o .venv/dev.stamp "$@"; }}\n'


@dataclass(frozen=True)
class Block:
    """A fenced block; `mark` is "needs", "run by" or "", with its reason."""

    mark: str
    reason: str
    language: str
    body: str

    @property
    def is_shell(self) -> bool:
        return self.language in SHELL

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block; none in a listing of files or output."""
        lines = self.body.replace("\\\n", " ").splitlines() if self.is_shell else []
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [Block(*found) for found in BLOCK.findall(text)]


def run(document: str, folder: Path, api: str | None = None) -> str:
    """Run the unmarked blocks of a document in order, in a folder. Returns the output.

    Args:
        api: URL of the Prefect server; None: each run starts a server.
    """
    for name in (".venv", "demo"):  # what pages name in a checkout
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    output = []
    for block in blocks_of(document):
        named = FILE.match(block.body)
        if block.mark:
            continue
        if named is not None and block.language in ("yaml", "python"):
            (folder / named[1]).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            output.append(_run([sys.executable, "-c", block.body], folder, api))
        elif block.is_shell:
            script = f"set -euo pipefail\n{MAKE}{block.body}"
            output.append(_run(["bash", "-c", script], folder, api))
    return "".join(output)


def _run(words: list[str], folder: Path, api: str | None) -> str:
    env = environment(folder, api) | {
        "PATH": f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, f"{words[-1]}\n{done.stdout}{done.stderr}"
    return done.stdout
