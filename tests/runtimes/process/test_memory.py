"""Limits of a runtime's process."""

import resource

from runtimes.process.memory import raise_open_file_limit


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
