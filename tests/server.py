"""A real Prefect server on loopback, for as long as the tests need it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from command import ROOT, environment

PREFECT = [str(Path(sys.executable).parent / "prefect"), "--no-prompt"]


class Server:
    """The server, its command line, and processes beside it such as a worker."""

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

    def serve(self) -> None:
        """Start it, and wait until it answers."""
        self.start("server", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        self.wait("server", lambda: self.ask("/health"), 120)

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
