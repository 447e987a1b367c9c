"""`kiln run`: a whole run, what a second run reuses, and what damage rebuilds."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, command, environment, kiln, run_json

from runtimes.registry import probe_runtime

pytestmark = pytest.mark.slow
STAGES = ["download", "encode", "train", "evaluate", "publish"]
Overrides = dict[str, Any]


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {name: stage["outcome"] for name, stage in report["stages"].items()}


def expect(*built: str) -> dict[str, str]:
    return {name: "built" if name in built else "reused" for name in STAGES}


def weights(report: dict[str, Any]) -> bytes:
    folder = Path(report["stages"]["train"]["uri"])
    return (folder / "unet/diffusion_pytorch_model.safetensors").read_bytes()


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_is_published_and_everything_about_it_is_reused(
    tmp_path: Path, small: Overrides
) -> None:
    first = run_json(tmp_path, "digits", small)
    assert first["status"] == "published"
    assert outcomes(first) == expect(*STAGES)
    model = Path(first["model"])
    assert model.name == "v1"
    card = (model / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "holdout\\_loss" in card
    html = (model / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") >= 4
    assert all(f'id="{stage}"' in html for stage in STAGES)
    trained = Path(first["stages"]["train"]["uri"]) / "manifest.json"
    scores = json.loads(trained.read_text(encoding="utf-8"))["run"]["sample_scores"]
    assert [(*line,) for line in scores] == [("step", "clip_score", "digit", "style")] * 2
    assert [line["step"] for line in scores] == [3, 6]

    second = run_json(tmp_path, "digits", small)
    assert outcomes(second) == expect()
    assert second["model"] == first["model"]

    (tmp_path / "prefect").rename(tmp_path / "old-prefect")  # a new, empty Prefect database
    assert outcomes(run_json(tmp_path, "digits", small)) == expect()

    faster = run_json(tmp_path, "digits", {**small, "train.learning_rate": 2e-3})
    assert faster["champion"]["version"] == "v2" and faster["champion"]["why"] == "published"
    assert outcomes(faster) == expect("train", "evaluate", "publish")
    assert Path(faster["model"]).name == "v2"

    harder = {
        **small,
        "train.learning_rate": 2e-3,
        "publish.gate": ["holdout_loss < champion * 0.1"],
    }
    assert "refused by the gate" in kiln(
        tmp_path, "run", "digits", "--json", overrides=harder, code=3
    )

    store = str(small["store"])
    listed = json.loads(kiln(tmp_path, "ls", "--store", store, "--json"))
    assert [(m["version"], m["champion"]) for m in listed["models"]] == [
        ("v1", False),
        ("v2", True),
    ]
    assert "v1 is the champion again" in kiln(tmp_path, "rollback", "digits", "--store", store)
    back = kiln(tmp_path, "run", "digits", overrides={**small, "train.learning_rate": 2e-3})
    assert f"published: {faster['model']}; the champion is v1 (rolled back)" in back
    assert "v2 is the champion" in kiln(tmp_path, "promote", "digits", "v2", "--store", store)
    shown = kiln(
        tmp_path, "show", "publish/" + faster["stages"]["publish"]["key"], "--store", store
    )
    for stage in ("evaluation", "model", "latents", "images", "source"):
        assert f"  {stage} " in shown
    assert "damaged" not in kiln(tmp_path, "verify", "--store", store)
    assert "would be deleted" in kiln(tmp_path, "gc", "--store", store)


def test_damage_rebuilds_just_what_was_damaged(tmp_path: Path, small: Overrides, api: str) -> None:
    first = run_json(tmp_path, "digits", small, api)
    store = Path(str(small["store"]))
    for stage, pattern in {
        "download": "shards/*.tar",
        "encode": "shards/*.safetensors",
        "train": "*/unet/*.safetensors",
        "evaluate": "*/metrics.json",
        "publish": "*/vae/*.safetensors",
    }.items():
        victim = sorted((store / stage).glob(pattern))[0]
        before = {p: p.stat().st_mtime_ns for p in (store / stage).glob("shards/*")}
        damage(victim)
        report = run_json(tmp_path, "digits", small, api)
        assert outcomes(report) == expect(stage), stage
        assert weights(report) == weights(first)
        rebuilt = {
            p.name.partition(".")[0] for p, at in before.items() if p.stat().st_mtime_ns != at
        }
        assert rebuilt <= {victim.name.partition(".")[0]}, stage
    manifest = Path(first["stages"]["encode"]["uri"]) / "manifest.json"
    manifest.unlink()
    assert outcomes(run_json(tmp_path, "digits", small, api)) == expect("encode")


def test_a_model_the_gate_refuses_is_not_published(
    tmp_path: Path, small: Overrides, api: str
) -> None:
    strict = {**small, "publish.gate": ["digit/new >= 1.1"]}
    out = kiln(tmp_path, "run", "digits", "--json", overrides=strict, code=3, api=api)
    assert "refused by the gate" in out
    assert not (Path(str(small["store"])) / "registry").exists()


def test_a_run_on_mindspore_is_published(tmp_path: Path, small: Overrides, api: str) -> None:
    """By its own environment from encoding to drawing, in the process of each stage."""
    found = probe_runtime("mindspore")
    if not found.available:
        pytest.skip(found.reason)
    report = run_json(tmp_path, "digits", {**small, "runtime": "mindspore"}, api)
    assert report["status"] == "published"
    assert outcomes(report) == expect(*STAGES)
    samples = Path(report["stages"]["train"]["uri"])
    assert "mindspore" in (samples / "manifest.json").read_text(encoding="utf-8")


def test_killed_anywhere_the_next_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, small: Overrides, api: str
) -> None:
    longer = {**small, "train.steps": 40, "train.checkpoint_every": 3}
    whole = run_json(tmp_path, "digits", {**longer, "store": str(tmp_path / "whole")}, api)
    chance = random.Random(0)
    for victim in ("training", "flow", "training"):
        child = subprocess.Popen(
            command("run", "digits", "--json", overrides=longer),
            env=environment(tmp_path, api),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _kill(child, victim, Path(str(small["store"])), chance.uniform(0.0, 2.0))
    report = run_json(tmp_path, "digits", longer, api)
    assert weights(report) == weights(whole)
    assert report["stages"]["train"]["key"] == whole["stages"]["train"]["key"]


def _kill(child: subprocess.Popen[bytes], victim: str, store: Path, after: float) -> None:
    """kill -9 the flow, or its training process, some time after that has started."""
    until = time.monotonic() + 120
    while child.poll() is None and time.monotonic() < until:
        if training := _training_processes(child.pid):
            time.sleep(after)
            os.kill(child.pid if victim == "flow" else training[0], signal.SIGKILL)
            break
        time.sleep(0.05)
    child.wait(120)


def _training_processes(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and "-m runtimes" in args]
