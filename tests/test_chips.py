"""Which runtimes' tests are run, skipped and failed, as KILN_RUNTIMES and KILN_MUST_RUN say."""

from collections.abc import Iterator
from pathlib import Path

import chips
import pytest

from runtimes import registry
from runtimes.registry import RuntimeSpec


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in (chips.CHOSEN, chips.MUST_RUN):
        monkeypatch.delenv(variable, raising=False)
    chips._lacking.cache_clear()
    yield
    chips._lacking.cache_clear()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    """A runtime that cannot be imported."""
    monkeypatch.setitem(registry.RUNTIMES, "xla", RuntimeSpec("runtimes.nowhere", ("json",)))
    return "xla"


def test_what_cannot_be_imported_is_skipped_unless_it_must_run(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot be imported" in chips.reason_to_skip(broken)
    monkeypatch.setenv(chips.MUST_RUN, f"torch {broken}")
    assert chips.reason_to_skip(broken) == ""  # its tests fail


def test_a_runtime_that_is_not_chosen_is_skipped_though_it_must_run(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(chips.MUST_RUN, broken)
    monkeypatch.setenv(chips.CHOSEN, "torch jax")
    assert chips.reason_to_skip(broken) == "KILN_RUNTIMES is 'torch jax'"
    assert not chips.not_chosen("hpu-lazy")  # of torch


def test_a_device_must_run_by_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv(chips.MUST_RUN, "torch")
    assert "needs a C++ compiler" in chips.reason_to_skip("hpu-lazy")
    monkeypatch.setenv(chips.MUST_RUN, "torch hpu")
    assert chips.reason_to_skip("hpu-lazy") == ""


def test_what_must_run_fails_where_something_else_is_lacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chips.unless_required("libtpu", "there is none") == "there is none"
    monkeypatch.setenv(chips.MUST_RUN, "jax libtpu")
    with pytest.raises(pytest.fail.Exception, match=r"libtpu must run .*: there is none"):
        chips.unless_required("libtpu", "there is none")
    assert chips.unless_required("libtpu", "") == ""


def test_a_package_that_must_run_is_imported_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.skip.Exception):
        chips.importorskip("nowhere")
    monkeypatch.setenv(chips.MUST_RUN, "nowhere")
    with pytest.raises(BaseException) as raised:  # a skip, too
        chips.importorskip("nowhere")
    assert raised.type is ModuleNotFoundError


def test_an_emulated_device_needs_python_s_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chips.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Python's headers" in chips.why_not("hpu-eager")
    assert chips.why_not("torch") == ""
    (tmp_path / "Python.h").touch()
    assert chips.why_not("hpu-eager") == ""
