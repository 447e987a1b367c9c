"""Imports go in one direction: flows → tasks → demo → runtimes → artifacts → configs."""

import subprocess
import sys

import chips
import pytest
from kiln_command import ROOT, python

from runtimes.registry import interpreter

LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]


def test_imports_follow_the_layers() -> None:
    done = subprocess.run(LINT, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cli_imports_neither_prefect_nor_torch() -> None:
    code = (
        "import sys; from flows import cli\n"
        "heavy = {'prefect', 'torch', 'apache_beam', 'img2dataset', 'diffusers', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.slow
def test_downloads_import_no_pytorch() -> None:
    """The package img2dataset does; its resizer needs none."""
    code = (
        "import sys\n"
        "from tasks.download.download_on_beam import DownloadShard\n"
        "from tasks.download.decode import img2dataset_resizer\n"
        "img2dataset_resizer()\n"
        "print(sorted({'torch', 'webdataset', 'wandb'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["xla", "mindspore"])
def test_encoders_import_in_environments_of_runtimes(runtime: str) -> None:
    """These lack what downloads and reads tables."""
    chips.require(runtime)
    code = "import tasks.encode.encoders, tasks.devices.host_shards"
    subprocess.run([interpreter(runtime), "-P", "-c", code], check=True)
