"""The list of planted faults goes with the code and the tests that it names."""

import ast
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults.planted import BASE, LIST, ROOT, Fault, NotThere, faults_of_change, read_faults

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


def committed(root: Path, hour: int, files: dict[str, str]) -> str:
    """Commit files at an hour of a day; the commit."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    at = f"2026-01-01T{hour:02}:00:00Z"
    names = {
        f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    variables = {**names, "GIT_AUTHOR_DATE": at, "GIT_COMMITTER_DATE": at}

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=root, env={**os.environ, **variables}, stdout=-1, check=True
        )
        return done.stdout.decode().strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "x")
    return git("rev-parse", "HEAD")


def row(number: int, **fields: Any) -> dict[str, Any]:
    tests = [f"tests/test_{number}.py::test_it"]
    named = {"fault": f"fault {number}", "file": f"{number}.py", "line": "a", "instead": "b"}
    return {**named, "caught_by": tests, **fields}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty faults, of which a session of two commits changed a file, a test and a row."""
    monkeypatch.delenv(BASE, raising=False)
    rows = [row(number) for number in range(20)]
    files = {f"{number}.py": "a" for number in range(20)}
    files |= {f"tests/test_{number}.py": "" for number in range(20)}
    committed(tmp_path, 1, {"0.py": "earlier", str(LIST): ""})
    committed(tmp_path, 2, {**files, str(LIST): yaml.safe_dump(rows)})
    committed(tmp_path, 6, {"3.py": "a\n"})
    rows[11] = row(11, instead="c")
    committed(tmp_path, 8, {"tests/test_7.py": "a = 1", str(LIST): yaml.safe_dump(rows)})
    return tmp_path


def chosen(root: Path) -> list[int]:
    faults = read_faults((root / LIST).read_text(encoding="utf-8"))
    return [int(fault.fault.removeprefix("fault ")) for fault in faults_of_change(faults, root)]


def test_a_change_plants_the_faults_of_its_files_tests_and_rows_and_an_eighth(
    repository: Path,
) -> None:
    concerned, others = chosen(repository)[:3], chosen(repository)[3:]
    assert concerned == [3, 7, 11]
    assert len(others) in (2, 3) and not {3, 7, 11} & {*others}  # an eighth of 17


def test_some_commits_plant_every_fault(repository: Path) -> None:
    """The commit's digest selects the eighth: a push may have any number of commits."""
    planted = set(chosen(repository))
    for number in range(40):
        committed(repository, 8, {"other.py": str(number)})
        planted |= set(chosen(repository))
    assert planted == set(range(20))


def test_a_large_change_plants_a_part_of_its_faults(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = chosen(repository)
    monkeypatch.setattr("faults.planted.MOST", 3)  # of 5 or 6
    assert chosen(repository) in (whole[::2], whole[1::2])


def test_a_change_may_begin_at_a_named_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BASE, "HEAD~1")
    assert chosen(repository)[:2] == [7, 11]


def test_a_clone_without_the_commit_before_plants_all_faults(
    repository: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth=2", repository.as_uri(), clone], check=True)
    assert chosen(clone) == list(range(20))
