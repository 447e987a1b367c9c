"""The list of planted faults goes with the code and the tests that it names."""

import ast
from functools import cache

import pytest
from faults.planted import ROOT, Fault, NotThere, read_faults

FAULTS = read_faults()


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def defined_in(file: str) -> set[str]:
    body = ast.parse(source(file)).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.fault for fault in FAULTS])
def test_a_fault_has_its_line_and_its_tests(fault: Fault) -> None:
    planted = fault.planted(source(fault.file))
    assert planted != source(fault.file)
    compile(planted, fault.file, "exec")  # a fault is no syntax error
    assert fault.caught_by
    for test in fault.caught_by:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in defined_in(file)


def test_there_are_many_and_all_over() -> None:
    assert len(FAULTS) >= 60
    assert len({fault.fault for fault in FAULTS}) == len(FAULTS)
    assert {"artifacts", "configs", "tasks", "runtimes", "flows", "demo"} <= {
        fault.file.partition("/")[0] for fault in FAULTS
    }


@pytest.mark.parametrize(
    ("line", "within"), [("return", None), ("a = 1", None), ("a = 1", "three"), ("b", "one")]
)
def test_a_fault_whose_line_is_not_unique_is_an_error(line: str, within: str | None) -> None:
    code = "def one():\n    a = 1\n\n\ndef two():\n    a = 1\n"
    with pytest.raises(NotThere):
        Fault("", "x.py", line, "", (), within).planted(code)


def test_a_fault_stands_where_its_line_stood() -> None:
    code = "def one():\n    a = 1\n\n\ndef two():\n    a = 1\n    b = 2\n"
    planted = Fault("", "x.py", "a = 1", "c = 3\nd = 4", (), "two").planted(code)
    assert planted == code.replace("two():\n    a = 1\n", "two():\n    c = 3\n    d = 4\n")
