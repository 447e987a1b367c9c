"""Limits of a runtime's process."""

import resource

import pytest

from runtimes.detect_hardware import raise_open_file_limit


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("soft", "most"), [(256, 10_240), (10_240, 10_240), (50_000, 50_000)])
def test_of_endlessly_many_files_as_many_may_be_open_as_macos_allows(
    soft: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, resource.RLIM_INFINITY)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert raise_open_file_limit() == most
    assert limits[-1] == (most, resource.RLIM_INFINITY)
