"""KILN_RUNTIMES and KILN_MUST_RUN select the tests that run, skip and fail."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import chips
import chromium
import pytest
from kiln_command import ROOT

from runtimes import registry
from runtimes.registry import RuntimeSpec


@pytest.fixture(autouse=True)
def _no_selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in (chips.SELECTED, chips.MUST_RUN):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(chips, "cuda_of_pytorch", lambda: None)
    chips._missing.cache_clear()
    yield
    chips._missing.cache_clear()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    """A runtime that cannot be imported."""
    monkeypatch.setitem(registry.RUNTIMES, "xla", RuntimeSpec("runtimes.nowhere", ("json",)))
    return "xla"


def test_broken_runtime_is_skipped_unless_it_must_run(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot be imported" in chips.reason_to_skip(broken)
    monkeypatch.setenv(chips.MUST_RUN, f"torch {broken}")
    assert chips.reason_to_skip(broken) == ""  # its tests run, and fail


def test_unselected_runtime_is_skipped_even_if_it_must_run(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(chips.MUST_RUN, broken)
    monkeypatch.setenv(chips.SELECTED, "torch jax")
    assert chips.reason_to_skip(broken) == "KILN_RUNTIMES is 'torch jax'"
    assert not chips.not_selected("hpu-lazy")  # a variant of torch


def test_must_run_names_devices_separately(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv(chips.MUST_RUN, "torch")
    assert "needs a C++ compiler" in chips.reason_to_skip("hpu-lazy")
    monkeypatch.setenv(chips.MUST_RUN, "torch hpu")
    assert chips.reason_to_skip("hpu-lazy") == ""


def test_unless_required_fails_a_required_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chips.unless_required("libtpu", "there is none") == "there is none"
    monkeypatch.setenv(chips.MUST_RUN, "jax libtpu")
    with pytest.raises(pytest.fail.Exception, match=r"libtpu must run .*: there is none"):
        chips.unless_required("libtpu", "there is none")
    assert chips.unless_required("libtpu", "") == ""


def test_importorskip_fails_for_a_required_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.skip.Exception):
        chips.importorskip("nowhere")
    monkeypatch.setenv(chips.MUST_RUN, "nowhere")
    with pytest.raises(BaseException) as raised:  # BaseException includes a skip
        chips.importorskip("nowhere")
    assert raised.type is ModuleNotFoundError


def test_a_cuda_build_of_pytorch_excludes_the_emulated_hpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chips.MUST_RUN, "torch hpu npu")
    monkeypatch.setattr(chips, "cuda_of_pytorch", lambda: "13.0")
    assert "PyTorch is built for CUDA 13.0" in chips.reason_to_skip("hpu-eager")
    assert chips.reason_to_skip("npu") == chips.reason_to_skip("torch") == ""
    monkeypatch.setattr(chips, "cuda_of_pytorch", lambda: None)
    assert chips.reason_to_skip("hpu-eager") == ""


def test_emulated_device_requires_python_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chips.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Python's headers" in chips.missing_for_emulation("hpu-eager")
    assert chips.missing_for_emulation("torch") == ""
    (tmp_path / "Python.h").touch()
    assert chips.missing_for_emulation("hpu-eager") == ""


def test_a_skipped_page_names_the_command_that_installs_chromium(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chromium, "CHROMIUM", "")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        chromium.require_chromium()
    monkeypatch.setenv(chips.MUST_RUN, "torch chromium")
    with pytest.raises(pytest.fail.Exception, match="chromium must run"):
        chromium.require_chromium(driven=False)
    monkeypatch.setattr(chromium, "CHROMIUM", "/usr/bin/chromium")
    monkeypatch.setattr(chromium, "PLAYWRIGHT", tmp_path / ".venv-browser")
    chromium.require_chromium(driven=False)
    with pytest.raises(pytest.fail.Exception, match="make setup-browser"):
        chromium.require_chromium()


@pytest.mark.parametrize(("words", "required"), [([], False), (["REQUIRE=chromium"], True)])
def test_make_soak_requires_chromium_on_demand(
    tmp_path: Path, words: list[str], required: bool
) -> None:
    show = "show: ; +@echo must run: $$KILN_MUST_RUN\nsoak: show"
    command = ["make", "--dry-run", f"VENV={tmp_path}/none", *words, "--eval", show, "soak"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("must run: ")]
    assert "torch" in line.split() and ("chromium" in line.split()) is required
    assert "apt-get install chromium" in done.stdout, "it says so before the tests"
