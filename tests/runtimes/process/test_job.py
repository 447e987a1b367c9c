"""Job files that people write, for a training on several machines."""

import json
import re
from pathlib import Path

import pytest

from configs.errors import Refused
from runtimes.process.job import TrainJob, read_job


def test_fields_with_a_default_may_be_absent(tmp_path: Path) -> None:
    needed = {"runtime": "torch", "model": "m", "latents": "l", "work": "w", "out": "o"}
    path = tmp_path / "JOB.json"
    path.write_text(json.dumps({**needed, "train": {}}), encoding="utf-8")
    assert read_job(path) == TrainJob(**needed, train={})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"runtime": "torch"}', "required positional arguments: 'model'"),
        ('{"kind": "generate"}', "no field 'drawings'"),
        ('{"runtime": "torch", "modell": "a"}', "unexpected keyword argument 'modell'"),
        ("[]", "has no attribute"),
        ("{", "Expecting property name"),
    ],
)
def test_a_malformed_job_file_is_wrong_input(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "JOB.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Refused, match=f"^{re.escape(str(path))}: .*{words}.*; runtimes/process"):
        read_job(path)
