"""Each reader of what others wrote accepts what is right, or raises its documented error."""

import os

import pytest
from fuzz.all_readers import all_readers
from fuzz.reader import Outcomes, Reader, fuzz

pytestmark = pytest.mark.slow

SEED = os.environ.get("KILN_TEST_SEED", "0")
#: Inputs of each reader per unit of its share.
FEW, MORE = 15, 120


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> list[Reader]:
    return all_readers(tmp_path_factory.mktemp("fuzz"))


def run(readers: list[Reader], each: int) -> dict[str, Outcomes]:
    return {reader.name: fuzz(reader, each * reader.share, SEED) for reader in readers}


def check(found: dict[str, Outcomes]) -> None:
    faults = {name: one.faults for name, one in found.items() if one.faults}
    assert not faults, faults


def test_a_few_damaged_inputs_are_refused_or_read_right(readers: list[Reader]) -> None:
    found = run(readers, FEW)
    check(found)
    # Of most readers some inputs are accepted, so that what is accepted is checked too.
    assert sum(one.accepted > 0 for one in found.values()) >= len(found) - 4
    assert all(one.refused for name, one in found.items() if name != "captions")


@pytest.mark.soak
def test_more_damaged_inputs_are_refused_or_read_right(readers: list[Reader]) -> None:
    check(run(readers, MORE))


@pytest.mark.parametrize("error", [KeyError("a"), RecursionError(), AssertionError("wrong")])
def test_another_error_is_a_fault(error: Exception) -> None:
    def read(_: object) -> bool:
        raise error

    found = fuzz(Reader("broken", 1, read), 3, SEED)
    assert (found.faulty, len(found.faults)) == (3, 1)


def test_an_input_that_takes_too_long_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.reader.MOST_SECONDS", 0.05)

    def read(_: object) -> bool:
        while True:
            pass

    assert "Hang" in str(fuzz(Reader("slow", 1, read), 1, SEED).faults)
