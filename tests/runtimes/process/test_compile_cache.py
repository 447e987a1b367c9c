"""Compiled programs are kept in the store, and brought to whoever takes over."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from runtimes.process.compile_cache import CompileCache

URL = "memory://programs"


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "one machine"))
    yield
    MemoryFileSystem.store.clear()


def test_without_a_store_none_are_kept() -> None:
    compiled = CompileCache(None, "xla-1")
    assert compiled.path is None
    compiled.upload()


def test_a_local_store_is_used_in_place(tmp_path: Path) -> None:
    assert CompileCache(str(tmp_path), "xla-1").path == tmp_path / "xla-1"


def test_another_machine_finds_what_one_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = CompileCache(URL, "xla-1")
    assert first.path is not None
    (first.path / "17").write_bytes(b"program")
    (first.path / ".half").write_bytes(b"no pro")
    first.upload()
    first.upload()

    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "another"))
    found = CompileCache(URL, "xla-1").path
    assert found is not None and found != first.path
    assert [(p.name, p.read_bytes()) for p in found.iterdir()] == [("17", b"program")]
    assert not list(CompileCache(URL, "xla-2").path.iterdir())  # type: ignore[union-attr]


def test_one_cut_short_is_fetched_again() -> None:
    first = CompileCache(URL, "xla-1")
    assert first.path is not None
    (first.path / "17").write_bytes(b"program")
    first.upload()
    (first.path / "17").write_bytes(b"pro")
    assert (CompileCache(URL, "xla-1").path / "17").read_bytes() == b"program"  # type: ignore[operator]


def test_a_store_that_fails_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = CompileCache(URL, "xla-1")
    assert compiled.path is not None
    (compiled.path / "17").write_bytes(b"program")
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.WARNING, "kiln"):
        compiled.upload()
    assert "not kept in the store" in caplog.text
