"""Checks before a run: what they raise, and what they yield."""

import pytest

from configs.checks import Check, Finding, collect, enter
from configs.errors import Refused

CORES = Finding("problem", "one core", "take two", "train.device")


def test_a_problem_that_a_check_yields_ends_a_run_as_one_that_it_raises() -> None:
    check = Check("cores", lambda: [CORES])
    for remote in (True, False):
        with pytest.raises(Refused, match=r"^train\.device: one core: take two$"):
            enter([check], remote=remote)
    assert [*collect([check])] == [CORES]
