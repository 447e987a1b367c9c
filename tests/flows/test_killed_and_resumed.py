"""After a kill at any point, the next run resumes and equals an uninterrupted one."""

import json
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_training import KILLED, kill_at_record, kill_training
from kiln_command import ROOT, command, environment, is_running, processes_below
from published import folder, manifest
from waiting import wait_until

pytestmark = pytest.mark.slow
Overrides = dict[str, Any]
Here = Callable[..., str]  # of conftest.py, as is the next
RunHere = Callable[..., dict[str, Any]]
#: What each stage writes last of a part of its work, or of all of it.
RECORDS = {
    "download": r"/download/shards/",
    "encode": r"/encode/shards/",
    "train": r"/train/\w+/checkpoints/",
    "evaluate": r"/evaluate/shards/",
    "publish": r"/publish/\w+/manifest",
}
PATIENCE = 600  # seconds, for a machine that does much else


def kill(home: Path, api: str, overrides: Overrides, stage: str, number: int) -> str:
    """Run `digits` and kill the process that is about to write a given record of a stage.

    Returns what the run had said by then.
    """
    words = ["run", "digits", "--json"]
    said = kill_at_record(home, api, words, overrides, RECORDS[stage], number)
    assert (KILLED in said) == (stage == "train"), "training has a process of its own"
    assert not list((Path(overrides["store"]) / stage).glob("*/manifest.json"))
    return said


def written(overrides: Overrides, stage: str) -> dict[Path, int]:
    """Records of a stage's shards, with their time stamps."""
    shards = Path(overrides["store"]) / stage / "shards"
    return {path: path.stat().st_mtime_ns for path in shards.glob("*.json")}


def newest_checkpoint(overrides: Overrides) -> int:
    found = Path(overrides["store"]).glob("train/*/checkpoints/step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


def result(report: dict[str, Any]) -> tuple[bytes, ...]:
    """The files of training."""
    names = ("unet/diffusion_pytorch_model.safetensors", "unet/config.json", "history.jsonl")
    return tuple((folder(report, "train") / name).read_bytes() for name in names)


def resumed_from(report: dict[str, Any]) -> int:
    return int(manifest(report, "train")["run"]["resumed_from"])


def test_killed_in_download_encoding_and_training_a_run_goes_on_from_there(
    published: Path,
    tmp_path: Path,
    small: Overrides,
    here: Here,
    run_here: RunHere,
    api: str,
    chance: random.Random,
) -> None:
    kept: dict[Path, int] = {}
    for stage in ("download", "encode"):
        number = chance.randint(2, 3)  # of three shards
        kill(tmp_path, api, small, stage, number)
        assert len(written(small, stage)) == number - 1
        kept |= written(small, stage)
    number = chance.randint(2, 3)  # of three checkpoints
    kill_training(lambda: here("run", "digits", overrides=small, code=1, api=api), tmp_path, number)
    assert newest_checkpoint(small) == 2 * (number - 1)

    report = run_here("digits", small)
    whole = json.loads((published / "report.json").read_bytes())
    outcomes = [stage["outcome"] for stage in report["stages"].values()]
    assert outcomes == ["reused", "reused", "built", "built", "built"]
    assert kept.items() <= (written(small, "download") | written(small, "encode")).items()
    assert resumed_from(report) == 2 * (number - 1)
    assert result(report) == result(whole)
    assert report["metrics"] == whole["metrics"]


@pytest.mark.soak
def test_a_run_killed_repeatedly_equals_an_uninterrupted_one(
    tmp_path: Path, small: Overrides, run_here: RunHere, api: str, chance: random.Random
) -> None:
    longer = {**small, "train.steps": 60, "train.checkpointing_steps": 3}
    whole = run_here("digits", {**longer, "store": str(tmp_path / "whole")})
    for stage, kills, most in (("download", 3, 2), ("encode", 3, 2), ("train", 4, 3)):
        for _ in range(kills):
            before = len(written(longer, stage)), newest_checkpoint(longer)
            number = chance.randint(1, most if stage == "train" else min(most, 3 - before[0]))
            said = kill(tmp_path, api, longer, stage, number)
            assert len(written(longer, stage)) == before[0] + (stage != "train") * (number - 1)
            if stage == "train":
                assert (f"resuming from step {before[1]}" in said) == (before[1] > 0)
                assert newest_checkpoint(longer) == before[1] + 3 * (number - 1)
    kill_the_flow_alone(tmp_path, api, longer)
    resumes_at = newest_checkpoint(longer)
    assert "resuming from" in kill(tmp_path, api, longer, "evaluate", chance.randint(1, 2))
    kill(tmp_path, api, longer, "publish", 1)
    report = run_here("digits", longer)
    assert resumed_from(report) == resumes_at
    assert result(report) == result(whole)
    assert report["metrics"] == whole["metrics"]


def kill_the_flow_alone(folder: Path, api: str, overrides: Overrides) -> None:
    """After training resumes; its process then writes a checkpoint and exits."""
    before = newest_checkpoint(overrides)
    flow = subprocess.Popen(
        command("run", "digits", overrides=overrides),
        env=environment(folder, api),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: newest_checkpoint(overrides) > before or flow.poll() is not None, PATIENCE)
    (training,) = [p for p, args in processes_below(flow.pid).items() if "-m runtimes" in args]
    flow.kill()
    assert flow.wait(PATIENCE) == -signal.SIGKILL
    wait_until(lambda: not is_running(training), PATIENCE)
