"""A runtime's own environment is where it is looked for, run, and asked what there is."""

import sys
from pathlib import Path
from typing import get_args

import pytest

from configs.recipe import RuntimeName
from configs.train import Train
from runtimes import registry
from runtimes.contract import WrongInput
from runtimes.registry import (
    RuntimeSpec,
    check_installed,
    check_settings,
    interpreter,
    probe_runtime,
)


def test_recipes_may_name_what_is_built() -> None:
    assert set(get_args(RuntimeName)) == set(registry.RUNTIMES)


def test_torch_runs_on_our_own_interpreter() -> None:
    check_installed("torch")
    assert interpreter("torch") == sys.executable
    assert probe_runtime("torch").devices[-1].startswith("cpu")


def test_what_is_not_known_says_what_is() -> None:
    known = ", ".join(registry.RUNTIMES)
    assert probe_runtime("abacus").reason == f"runtime 'abacus' is not known here (known: {known})"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        registry.RUNTIMES, "other", RuntimeSpec("runtimes.other", ("json", "nowhere"))
    )
    with pytest.raises(WrongInput, match="needs nowhere, not installed"):
        check_installed("other")
    assert "cannot be imported" in probe_runtime("other").reason


@pytest.mark.slow
def test_another_environment_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere = RuntimeSpec("runtimes.torch", ("torch",), environment="-other")
    monkeypatch.setitem(registry.RUNTIMES, "torch", elsewhere)
    prefix = sys.prefix
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(WrongInput, match="make setup-torch"):
        check_installed("torch")
    assert not probe_runtime("torch").available

    (tmp_path / ".venv-other").symlink_to(prefix)  # where it is our own again
    check_installed("torch")
    assert interpreter("torch") == str(tmp_path / ".venv-other/bin/python")
    found = probe_runtime("torch")
    assert found.available and found.devices[-1].startswith("cpu") and found.versions["torch"]
    check_settings("torch", Train(device="cpu"))
    with pytest.raises(WrongInput, match="device cuda:99: this machine has"):
        check_settings("torch", Train(device="cuda:99"))


def test_each_environment_has_its_own_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / ".venv312-xla/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(WrongInput, match="make setup-xla"):
        interpreter("xla")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv312"))
    assert interpreter("xla") == str(python)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv312-xla"))
    assert interpreter("xla") == sys.executable


def test_settings_that_no_device_here_serves() -> None:
    check_settings("torch", Train(device="cpu"))
    with pytest.raises(WrongInput, match="device cuda:99: this machine has"):
        check_settings("torch", Train(device="cuda:99"))
