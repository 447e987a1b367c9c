"""A real Prefect server on loopback, shared by the test processes."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kiln_command import ROOT, environment
from loopback_server import free_port

PREFECT = [str(Path(sys.executable).parent / "prefect"), "--no-prompt"]
TIMEOUT = 600  # timeout in seconds, for a busy machine
#: Work pools of deploy/prefect.yaml, by kind of machine.
POOLS = ("cpu", "gpu", "tpu", "ascend", "gaudi")
#: Names of the last states of our runs.
ENDS = ("Completed", "Rejected", "Unchanged", "Waiting", "Cancelled", "Failed", "Crashed")
ENDS += ("Awaiting approval", "Promoted")
#: Files in the folder of a shared server: its URL, and the lock files of users and of the start.
API, USERS, STARTING = "api", "users", "starting"


class Server:
    """A Prefect server, its command line, and other Prefect processes such as a worker.

    Args:
        folder: folder of Prefect's files and the processes' logs.
        api: URL of a running server; None: a new one.
    """

    def __init__(self, folder: Path, api: str | None = None) -> None:
        self.api = api or f"http://127.0.0.1:{free_port()}/api"
        self.env = {
            **environment(folder),
            "PREFECT_API_URL": self.api,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            # The default is a minute, too long for a test of schedules.
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "10",
        }
        self.folder = folder
        self.children: list[subprocess.Popen[bytes]] = []

    def serve(self) -> None:
        """Start the server and wait until it responds."""
        port = self.api.rpartition(":")[2].removesuffix("/api")
        self.start("server", "server", "start", "--host", "127.0.0.1", "--port", port)
        self.wait("server", lambda: self.ask("/health"), TIMEOUT)

    def serve_by_make(self) -> None:
        """Start the server by `make ui`, in the environment of the tests, and wait for it."""
        port = self.api.rpartition(":")[2].removesuffix("/api")
        # `make` would repair an environment that a test must not touch.
        skipped = ["--old-file", "setup", f"VENV={sys.prefix}"]
        self.spawn("server", "make", *skipped, "ui", f"PORT={port}")
        self.wait("server", lambda: self.ask("/health"), TIMEOUT)

    def start(self, name: str, *words: str) -> None:
        """Start a command of `prefect`."""
        self.spawn(name, *PREFECT, *words)

    def spawn(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        child = subprocess.Popen(
            command, env=self.env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        self.children.append(child)

    def cli(self, *words: str) -> str:
        done = subprocess.run(
            [*PREFECT, *words],
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """The JSON answer to a request; None if it is empty.

        A request is repeated for a busy server, so it must be safe to send twice.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.api}{path}", data, headers, method=method)
        until = time.monotonic() + TIMEOUT
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read() or "null")
            except urllib.error.HTTPError as error:
                if error.code != 503:  # a locked database; Prefect's client also retries
                    raise
                failure: Exception = error
            except TimeoutError as error:  # a stalled machine
                failure = error
            if time.monotonic() > until:
                raise AssertionError(f"{path}: {failure} for {TIMEOUT} s\n{self.logs()}")
            time.sleep(0.2)

    def update(self, path: str, body: dict[str, Any]) -> None:
        self.ask(path, body, "PATCH")

    def wait(self, what: str, ready: Any, seconds: float) -> Any:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if found := ready():
                    return found
            except OSError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"{what}: timeout after {seconds} s\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(p.read_text()[-3000:] for p in self.folder.glob("*.log"))

    def run(self, deployment: str, overrides: dict[str, Any], **more: Any) -> str:
        """Schedule a run, as `prefect deployment run` does; the flow run's id."""
        number = self.ask(f"/deployments/name/{deployment}")["id"]
        parameters = {"overrides": overrides, **more}
        body = {
            "parameters": parameters,
            "state": {"type": "SCHEDULED"},
            "idempotency_key": str(uuid.uuid4()),
        }
        return str(self.ask(f"/deployments/{number}/create_flow_run", body)["id"])

    def state(self, run: str) -> str:
        return str(self.ask(f"/flow_runs/{run}")["state"]["name"])

    def ended(self, run: str, seconds: float = TIMEOUT) -> str:
        """Wait for the end of a run; the name of its state."""
        self.wait("the end of a run", lambda: self.state(run) in ENDS, seconds)
        return self.state(run)

    def shown(self, run: str) -> dict[str, Any]:
        """Data of a run's artifacts, by key."""
        asked = {"artifacts": {"flow_run_id": {"any_": [run]}}}
        return {one["key"]: one["data"] for one in self.ask("/artifacts/filter", asked)}

    def task_runs(self, run: str) -> list[Any]:
        """A run's tasks that have a state: the server adds a task before its first one."""
        found = self.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return [task for task in found if task["state"]]

    def tasks(self, run: str) -> dict[str, str]:
        """State names of a run's tasks, by task name."""
        return {task["name"]: task["state"]["name"] for task in self.task_runs(run)}

    def edges(self, run: str) -> set[tuple[str, str]]:
        """Edges of a run's graph in the UI: (task, task that uses its result)."""
        found = self.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        names = {task["id"]: task["name"] for task in found}
        return {
            (names[source["id"]], task["name"])
            for task in found
            for inputs in task["task_inputs"].values()
            for source in inputs
            if source["input_type"] == "task_run"
        }

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


@contextmanager
def deployed(folder: Path, api: str) -> Iterator[Server]:
    """A worker of a running server, with all deployments of deploy/prefect.yaml."""
    server = Server(folder, api)
    try:
        for pool in POOLS:
            server.cli("work-pool", "create", pool, "--type", "process", "--overwrite")
        server.cli("deploy", "--all", "--prefect-file", "deploy/prefect.yaml")
        server.start("worker", "worker", "start", "--pool", "cpu")
        yield server
    finally:
        server.stop()


@contextmanager
def shared_server(folder: Path) -> Iterator[str]:
    """URL of the server that all processes with this folder share; it stops with the last one.

    Each process holds a shared lock, which the kernel releases also if the process is killed.
    """
    folder.mkdir(exist_ok=True)
    keeper = None
    with (folder / USERS).open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with (folder / STARTING).open("a") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            if not (folder / API).exists():
                keeper = _start_keeper(folder)
        yield (folder / API).read_text()
    if keeper is not None:
        keeper.wait()  # until the last process releases its lock


def _start_keeper(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that owns the server, in a session of its own, safe from Ctrl-C."""
    with (folder / "keeper.log").open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while not (folder / API).exists():
        assert keeper.poll() is None, (folder / "keeper.log").read_text()
        time.sleep(0.1)
    return keeper


def _keep(folder: Path) -> None:
    """Run the server while any process holds the lock."""
    server = Server(folder)
    with (folder / USERS).open("a") as users:
        try:
            server.serve()
            (folder / f"{API}.new").write_text(server.api)
            (folder / f"{API}.new").rename(folder / API)
            fcntl.flock(users, fcntl.LOCK_EX)
            (folder / API).unlink()  # later processes start another server
        finally:
            server.stop()


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
