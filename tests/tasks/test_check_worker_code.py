"""A worker with other code or packages than the flow builds no shard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

from configs.errors import Refused
from tasks import code_version
from tasks.beam.pipeline import OnEqualWorkers
from tasks.code_version import versions


class Plain(beam.DoFn):
    def process(self, element: Any) -> Iterator[Any]:
        yield element


def test_equal_workers_are_accepted() -> None:
    assert list(OnEqualWorkers(Plain()).process(1)) == [1]
    assert {"Kilnworks", "torch", "img2dataset", "opencv-python-headless"} <= versions().keys()


@pytest.mark.parametrize(
    ("flows", "words"),
    [
        ({"torch": "1.0"}, r"has torch \S+, the flow 1\.0"),
        ({"Kilnworks": "aaaa"}, r"has Kilnworks \w{12}, the flow aaaa"),
        ({"faiss": "1.9"}, "has faiss None, the flow 1.9"),
    ],
)
def test_a_difference_is_named(flows: dict[str, str], words: str) -> None:
    dofn = OnEqualWorkers(Plain())
    dofn.versions = {**versions(), **flows}
    with pytest.raises(Refused, match=words):
        list(dofn.process(1))


def test_files_of_an_editor_are_no_code(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/a.py").write_text("1")
    digest = code_version.code_digest(tmp_path)
    (tmp_path / "tasks/.#a.py").symlink_to("user@host.1234")  # Emacs' lock
    (tmp_path / "tasks/gone.py").symlink_to("nowhere")
    assert code_version.code_digest(tmp_path) == digest
    (tmp_path / "tasks/a.py").write_text("2")
    assert code_version.code_digest(tmp_path) != digest


def test_the_packages_of_a_runtime_s_own_interpreter_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "lib/python3.12/site-packages/torch_xla-2.9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n")
    monkeypatch.setattr(code_version, "interpreter", lambda name: str(tmp_path / "bin/python"))
    code_version.versions.cache_clear()
    try:
        assert versions("xla") == {**versions(), "torch_xla (xla)": "2.9.0"}
    finally:
        code_version.versions.cache_clear()
