"""Runtimes' processes take our code from where it is installed, not from the working directory."""

import json
import re
from pathlib import Path

import pytest
from chips import standing_in
from jobs import MakeJob
from kiln_command import ROOT

from runtimes.process.job import EncodeJob
from runtimes.registry import RUNTIMES, _query, has_own_environment, interpreter
from tasks.child_process import run_job
from tasks.devices.processes import DeviceProcess
from tasks.encode.crop_to_bucket import TransformSettings
from tasks.encode.encoders import EncodingPlan

SQUARE = TransformSettings(32, False, 64, 2.0, "center", False, 0, 0.0, 10**6)
#: Modules of ours, and two that we import, by whose names a user's project may have its own.
TAKEN = ("artifacts", "configs", "demo", "flows", "runtimes", "tasks", "numpy", "json")
#: Runtimes that are asked in `make soak` alone: one start shows what all of them do.
OTHERS = [pytest.param(name, marks=pytest.mark.soak) for name in RUNTIMES if name != "torch"]
#: A module of ours as the program of a process.
STARTED = re.compile(r"""-m(?:"?,? ?"?)(?:runtimes\b|module,)""")
#: `ask` (runtimes/process/questions.py) adds -P, and is itself asked in a test below.
SAFE = re.compile(r"""-P(?:", "| )(?:-u(?:", "| ))?-m|\bask\("-m""")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has modules by our names that raise when they are imported."""
    for name in TAKEN:
        (tmp_path / "mine" / name).mkdir(parents=True)
        words = f"raise ImportError('{name} of the working directory')\n"
        (tmp_path / "mine" / name / "__init__.py").write_text(words)
        (tmp_path / "mine" / f"{name}.py").write_text(words)
    monkeypatch.chdir(tmp_path / "mine")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_job_trains_where_the_working_directory_has_modules_by_our_names(
    hostile: None, make_job: MakeJob, processes: int
) -> None:
    job = make_job(steps=1, global_batch_size=2, processes=processes)
    run_job(job)
    (line,) = (Path(job.out) / "history.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1


@pytest.mark.soak
def test_an_encoder_process_starts_where_the_working_directory_has_modules_by_our_names(
    hostile: None, tiny_sd: Path
) -> None:
    process = DeviceProcess(EncodingPlan(EncodeJob("torch", str(tiny_sd), device="cpu"), SQUARE))
    process.wait()
    assert process.process.close() == 0


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", *OTHERS])
def test_a_probe_answers_where_the_working_directory_has_modules_by_our_names(
    hostile: None, runtime: str
) -> None:
    """Asked in another process, as where a runtime has an environment of its own."""
    if has_own_environment(runtime) and not Path(interpreter(runtime)).is_file():
        pytest.skip(f"make setup-{runtime}")
    with standing_in(runtime):
        found = _query(interpreter(runtime), "--probe", runtime)
    assert found["available"], found


def test_every_process_of_a_runtime_is_started_safely() -> None:
    """Those that the tests above start, and those that take a TPU's compiler or two hosts."""
    code = [path for name in TAKEN for path in (ROOT / name).glob("**/*.py")]
    started = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*code, *(ROOT / "deploy").glob("**/*.sh")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if STARTED.search(line)
    ]
    assert len(started) >= 8
    assert [line for line in started if not SAFE.search(line)] == []
