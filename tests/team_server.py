"""A team's Prefect server: web server and background services apart, on PostgreSQL and Redis.

Commands and settings are those of deploy/server/compose.yaml, with programs of Debian's packages.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kiln_command import processes_below
from loopback_server import free_port
from prefect_server import TIMEOUT, Server

REDIS_PASSWORD = "of-tests"
INSTALL = "apt-get install postgresql redis-server"


def missing_programs() -> str:
    """Debian's packages that this machine lacks, as a reason to skip; empty if none."""
    missing = [
        name
        for name, found in (("PostgreSQL", _postgresql_bin()), ("Redis", _redis_program()))
        if found is None
    ]
    return f"no {' and '.join(missing)} here: {INSTALL}" if missing else ""


class TeamServer(Server):
    """PostgreSQL, Redis, Prefect's web server and its background services, and workers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._stopping = ExitStack()  # what has started, even if the rest does not
        self.postgresql = PostgreSQL()
        self._stopping.callback(self.postgresql.remove)
        self.redis = Redis(folder / "redis")
        broker, docket = (self.redis.url(number) for number in (0, 1))
        self.env |= {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": self.postgresql.url,
            "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",
            "PREFECT_SERVER_EVENTS_MESSAGING_BROKER": "prefect_redis.messaging",
            "PREFECT_SERVER_EVENTS_MESSAGING_CACHE": "prefect_redis.messaging",
            "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "prefect_redis.ordering",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect_redis.lease_storage",
            "PREFECT_REDIS_MESSAGING_URL": broker,
            "PREFECT_SERVER_DOCKET_URL": docket,
        }
        self.named: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self, name: str, *command: str) -> None:
        """Start a process; its log goes on if it was started before."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.named[name] = subprocess.Popen(
                command,
                env=self.env,
                cwd=Path(__file__).parents[1],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.children.append(self.named[name])

    def serve(self) -> None:
        """Start all and wait until the server and its database respond."""
        self.postgresql.start()
        self._stopping.callback(self.postgresql.stop)
        self.redis.start()
        self._stopping.callback(self.redis.stop)
        self.cli("server", "database", "upgrade", "-y")
        self.serve_prefect()

    def serve_prefect(self) -> None:
        """Start web server and background services, and wait until the web server is ready."""
        port = self.api.rpartition(":")[2].removesuffix("/api")
        address = ("--host", "127.0.0.1", "--port", port)
        self.start("server", "server", "start", *address, "--no-services")
        self.start("background", "server", "services", "start")
        self.wait("server", self.is_ready, TIMEOUT)

    def is_ready(self) -> bool:
        """Whether the server answers, and its database does."""
        done = subprocess.run(
            ["curl", "-sf", "-m", "5", f"{self.api}/ready"], stdout=subprocess.DEVNULL
        )
        return done.returncode == 0

    def stop_prefect(self) -> None:
        """Stop web server and background services, as a container engine does."""
        for name in ("server", "background"):
            self.named[name].terminate()
        for name in ("server", "background"):
            try:
                self.named[name].wait(15)
            except subprocess.TimeoutExpired:
                self.named[name].kill()
                self.named[name].wait()

    def work(self, pool: str) -> None:
        """Start a worker of a pool."""
        self.start(f"worker-{pool}", "worker", "start", "--pool", pool)

    def kill_worker(self, pool: str) -> list[int]:
        """End a worker and all that it runs by SIGKILL, as a machine that is switched off.

        Returns the pids of what it ran.
        """
        return self._kill(f"worker-{pool}")

    def _kill(self, name: str) -> list[int]:
        child = self.named[name]
        below = list(processes_below(child.pid))
        for pid in (child.pid, *below):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()
        return below

    def stop(self) -> None:
        """Stop all; the workers go first, with what they run, held processes included."""
        for name in self.named:
            if name.startswith("worker-"):
                self._kill(name)
        super().stop()
        self._stopping.close()


class PostgreSQL:
    """A new cluster of Debian's package `postgresql`, below /tmp for the length of its socket."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="kiln-postgresql-"))
        # PostgreSQL refuses to run as root.
        self._user: dict[str, Any] = {}
        if not os.getuid():
            shutil.chown(self.home, "postgres", "postgres")
            self._user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        self._port = free_port()
        self.url = f"postgresql+asyncpg://prefect@127.0.0.1:{self._port}/postgres"
        self._run("initdb", "-A", "trust", "-U", "prefect", "-D", str(self.home / "data"))

    def start(self) -> None:
        words = f"-p {self._port} -k {self.home} -c listen_addresses=127.0.0.1"
        self._control("start", "-w", "-l", str(self.home / "log"), "-o", words)

    def stop(self) -> None:
        """Stop it as `systemctl stop postgresql` does: connections are closed."""
        if (self.home / "data/postmaster.pid").exists():
            self._control("stop", "-m", "fast")

    def remove(self) -> None:
        shutil.rmtree(self.home)

    def _control(self, *words: str) -> None:
        self._run("pg_ctl", "-D", str(self.home / "data"), *words)

    def _run(self, program: str, *words: str) -> None:
        found = _postgresql_bin()
        assert found is not None
        command = [str(found / program), *words]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, check=True, cwd=self.home, timeout=60, **quiet, **self._user)


class Redis:
    """Redis of Debian's package `redis-server`, with a password and an append-only file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._port = folder, free_port()

    def url(self, number: int) -> str:
        return f"redis://:{REDIS_PASSWORD}@127.0.0.1:{self._port}/{number}"

    def start(self) -> None:
        program = _redis_program()
        assert program is not None
        words = ["--port", str(self._port), "--appendonly", "yes", "--requirepass", REDIS_PASSWORD]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, *words, "--bind", "127.0.0.1"], cwd=self._folder, stdout=log
            )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def _postgresql_bin() -> Path | None:
    programs = Path("/usr/lib/postgresql").glob("*/bin/initdb")  # clients have a folder, too
    found = max(programs, key=lambda path: float(path.parts[-3]), default=None)
    return None if found is None else found.parent


def _redis_program() -> str | None:
    return shutil.which("redis-server")


class Stopwatch:
    """Measures how long a recovery takes, and prints it."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.seconds: dict[str, float] = {}

    def until(self, what: str, wait: Callable[[], Any], since: float) -> None:
        wait()
        self.seconds[what] = round(time.monotonic() - since, 1)
        print(f"{what}: {self.seconds[what]} s", flush=True)
