"""Job files that people write, for a training on several machines."""

import json
import re
from pathlib import Path

import pytest
from kiln_command import ROOT

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.process.job import TrainJob, read_job


def test_fields_with_a_default_may_be_absent(tmp_path: Path) -> None:
    needed = {"runtime": "torch", "model": "m", "latents": "l", "work": "w", "out": "o"}
    path = tmp_path / "JOB.json"
    path.write_text(json.dumps({**needed, "train": {}}), encoding="utf-8")
    assert read_job(path) == TrainJob(**needed, train={})


def test_the_example_of_the_page_is_a_job(tmp_path: Path) -> None:
    page = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
    path = tmp_path / "JOB.json"
    path.write_text(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    job = read_job(path)
    assert isinstance(job, TrainJob) and Train(**job.train).method == "lora"


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
