"""From a fresh server: deploy all, start a worker, run the demo's deployment; cancel a run.

No resolver sees the version traps in requirements/README.md: this test does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, environment

pytestmark = pytest.mark.slow
PREFECT = [str(Path(sys.executable).parent / "prefect"), "--no-prompt"]


class Server:
    """A real Prefect server on loopback, and a worker on it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.env = {
            **environment(folder),
            "PREFECT_API_URL": self.api,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        }
        self.folder = folder
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        child = subprocess.Popen(
            [*PREFECT, *words],
            env=self.env,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.children.append(child)

    def cli(self, *words: str) -> str:
        done = subprocess.run(
            [*PREFECT, *words], env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.api}{path}", data=data, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def wait(self, what: str, ready: Any, seconds: float) -> Any:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if found := ready():
                    return found
            except OSError:
                pass
            time.sleep(0.5)
        logs = "\n".join(p.read_text()[-3000:] for p in self.folder.glob("*.log"))
        raise AssertionError(f"{what}: not within {seconds} s\n{logs}")

    def run(self, deployment: str, overrides: dict[str, Any]) -> str:
        out = self.cli("deployment", "run", deployment, "-p", f"overrides={json.dumps(overrides)}")
        return next(word for word in out.split() if word.count("-") == 4 and len(word) == 36)

    def state(self, run: str) -> str:
        return str(self.ask(f"/flow_runs/{run}")["state"]["name"])

    def stop(self) -> None:
        for child in reversed(self.children):
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                if child.poll() is not None:
                    break
                os.killpg(child.pid, number)
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    continue


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("prefect"))
    try:
        found.start("server", "server", "start", "--host", "127.0.0.1", "--port", str(found.port))
        found.wait("server", lambda: found.ask("/health"), 120)
        found.cli("work-pool", "create", "kiln", "--type", "process")
        found.cli("deploy", "--all", "--prefect-file", "deploy/prefect.yaml")
        found.start("worker", "worker", "start", "--pool", "kiln")
        yield found
    finally:
        found.stop()


def test_the_demos_deployment_ends_completed_and_shows_itself(
    server: Server, small: dict[str, Any]
) -> None:
    run = server.run("finetune/digits", small)
    server.wait("run", lambda: server.state(run) in ("Completed", "Failed", "Crashed"), 300)
    assert server.state(run) == "Completed"
    found = server.ask(
        "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}, "limit": 100}
    )
    shown = {a["key"]: a["data"] for a in found if a["type"] == "markdown"}
    assert {"download", "encode", "train", "evaluate", "publish", "model"} <= set(shown)
    for stage in ("download", "train", "evaluate", "publish"):
        assert "](data:image/png;base64," in shown[stage], stage
    assert {"train-progress", "download-progress"} <= {a["key"] for a in found}
    tasks = server.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    stages = ["download", "encode", "evaluate", "publish", "train"]
    assert sorted(t["name"] for t in tasks) == stages
    again = server.run("finetune/digits", small)
    server.wait("run", lambda: server.state(again) in ("Completed", "Failed", "Crashed"), 120)
    tasks = server.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [again]}}})
    assert {t["state"]["name"] for t in tasks} == {"Cached"}


def test_a_scheduled_run_appears(server: Server) -> None:
    deployment = server.ask("/deployments/name/finetune/retrain-digits")

    def scheduled() -> Any:
        runs = {"deployments": {"id": {"any_": [deployment["id"]]}}}
        return server.ask("/flow_runs/filter", runs)

    found = server.wait("scheduled run", scheduled, 90)
    assert {run["state"]["type"] for run in found} == {"SCHEDULED"}


def test_a_wrong_recipe_fails_before_any_stage(server: Server, small: dict[str, Any]) -> None:
    run = server.run("finetune/digits", {**small, "train.stepz": 3})
    server.wait("run", lambda: server.state(run) in ("Completed", "Failed", "Crashed"), 120)
    state = server.ask(f"/flow_runs/{run}")["state"]
    assert state["name"] == "Failed"
    assert "did you mean train.steps?" in state["message"]
    assert server.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}}) == []


def test_a_cancelled_run_stops_within_its_grace_period_and_keeps_a_checkpoint(
    server: Server, small: dict[str, Any]
) -> None:
    endless = {**small, "train.steps": 100_000, "train.checkpoint_every": 100_000}
    run = server.run("finetune/digits", endless)
    store = Path(str(small["store"]))

    def training() -> bool:
        shown = server.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return any(a["key"] == "train-progress" for a in shown)

    server.wait("training", training, 180)
    server.cli("flow-run", "cancel", run)
    server.wait("cancelled", lambda: server.state(run) == "Cancelled", 90)
    assert list(store.glob("train/*/checkpoints/step-*/manifest.json"))
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert not [
        line for line in listed.splitlines() if "-m runtimes" in line and store.name in line
    ]
