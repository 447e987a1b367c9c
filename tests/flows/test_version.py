"""`kiln --version`, and what a release needs."""

import re
import subprocess
import tomllib

import pytest
from kiln_command import ROOT
from typer.testing import CliRunner

from flows.cli import app
from tasks import code_version
from tasks.code_version import CODE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def shown() -> str:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("commit", ["1a2b3c-dirty", None])
def test_version_has_the_commit_of_a_checkout_and_the_digest_of_an_images_code(
    commit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_version, "git_commit", lambda: commit)
    behind = "" if commit is None else f"{commit}, "
    assert shown() == f"kiln {PROJECT['version']} ({behind}code {CODE})\n"


def test_commit_is_that_of_git() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() in shown()


def test_no_registry_accepts_the_package() -> None:
    assert "Private :: Do Not Upload" in PROJECT["classifiers"]


def test_every_release_has_its_changes() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    done = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True)
    assert {tag.removeprefix("v") for tag in done.stdout.split()} <= set(headings)
    assert headings[0] == "Unreleased"
