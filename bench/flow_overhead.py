"""Overhead of a flow whose artifacts all exist, per stage: `python -m bench.flow_overhead`.

The four rows are a store of few and of many artifacts, with Prefect's server on SQLite and on
PostgreSQL. A run builds the artifacts of the recipe `digits` at toy size once. Then flows run in
one process per row, which counts processor time: the wall time of a busy machine says little. The
first flow of a process is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.fill_store import fill
from bench.report import Row, log, machine, publish, spread, versions

ARTIFACTS = (10, 10_000)
DATABASES = ("sqlite", "postgresql")
TOY: dict[str, Any] = {
    "source.count": 60,
    "source.rehearsal": 0,
    "download.shard_size": 20,
    "train.steps": 6,
    "train.global_batch_size": 4,
    "train.sample_every_n_steps": 3,
    "evaluate.num_inference_steps": 2,
    "evaluate.prompts.new.images_per_prompt": 2,
    "evaluate.prompts.old.images_per_prompt": 1,
    "evaluate.bootstrap": 10,
    "evaluate.holdout_samples": 4,
    "publish.gate": [],
    "publish.smoke_test": False,
}
TIMEOUT = 600  # seconds, for a busy machine


def main(arguments: Sequence[str]) -> int:
    """Measure all rows; with `--flows`, run the flows of one row."""
    parser = argparse.ArgumentParser(prog="python -m bench.flow_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--artifacts", type=int, nargs="+", default=ARTIFACTS)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=DATABASES)
    parser.add_argument("--flows", metavar="STORE", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="file for the JSON line")
    options = parser.parse_args(arguments)
    if options.flows:
        print(json.dumps(time_flows(options.flows, options.rounds)))
        return 0
    facts = {"machine": machine(os.cpu_count() or 1), "versions": versions(("prefect", "asyncpg"))}
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder:
        rows = list(_rows(Path(folder), options))
    publish("flow_overhead", rows, facts, options.json)
    return 0


def time_flows(store: str, rounds: int) -> dict[str, Any]:
    """Processor and wall seconds of each reused flow and of its tasks, in this process."""
    from flows import finetune

    found: dict[str, list[float]] = {}

    def timed(name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            since = time.process_time()
            wall = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                found.setdefault(f"{name}_cpu", []).append(time.process_time() - since)
                found.setdefault(f"{name}_wall", []).append(time.perf_counter() - wall)

        return call

    for name in ("download", "encode", "train", "evaluate", "publish"):
        stage = getattr(finetune, name)
        stage.fn = timed(name, stage.fn)
    flow = timed("flow", finetune.finetune)
    for _ in range(1 + rounds):
        report = flow(recipe="digits", overrides={**TOY, "store": store})
        if any(stage["outcome"] != "reused" for stage in report["stages"].values()):
            raise RuntimeError("a stage was not reused")
    return {name: values[1:] for name, values in found.items()}


def _rows(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    for database in options.databases:
        with _server(folder / database, database) as (api, processes):
            for artifacts in sorted(options.artifacts):  # a store is made of a smaller one
                store = _store(folder, artifacts, api)
                log(f"{database}, {artifacts} artifacts")
                before = _cpu_seconds(processes)
                found = _in_a_process(store, options.rounds, api)
                used = _cpu_seconds(processes) - before
                figures: dict[str, Any] = {name: spread(found[name]) for name in sorted(found)}
                figures["server_cpu"] = used / (1 + options.rounds)
                figures["load_average"] = os.getloadavg()[0]
                yield Row(f"{database}_{artifacts}_artifacts", figures=figures)


def _store(folder: Path, artifacts: int, api: str) -> Path:
    """A store of a run at toy size with as many artifacts."""
    store = folder / f"store-{artifacts}"
    if store.exists():
        return store
    overrides = [word for k, v in TOY.items() for word in ("-o", f"{k}={json.dumps(v)}")]
    run = [sys.executable, "-m", "flows.cli", "run", "digits", "-o", f"store={store}", *overrides]
    if found := next(folder.glob("store-*"), None):
        shutil.copytree(found, store, symlinks=True)  # its files keep their time stamps
    else:
        subprocess.run(run, check=True, env={**os.environ, "PREFECT_API_URL": api}, stdout=2)
    fill(store, artifacts)
    return store


def _in_a_process(store: Path, rounds: int, api: str) -> dict[str, list[float]]:
    words = ["--flows", str(store), "--rounds", str(rounds)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.flow_overhead", *words],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PREFECT_API_URL": api, "PREFECT_LOGGING_LEVEL": "CRITICAL"},
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def _server(folder: Path, database: str) -> Iterator[tuple[str, list[psutil.Process]]]:
    """URL of a Prefect server with an empty database, and the processes of both."""
    folder.mkdir()
    port = _free_port()
    env = {**os.environ, "PREFECT_HOME": str(folder), "PREFECT_API_URL": ""}
    processes = []
    with ExitStack() as stack:
        if database == "postgresql":
            home = Path(tempfile.mkdtemp(prefix="kiln-postgresql-"))
            stack.callback(shutil.rmtree, home)
            env["PREFECT_API_DATABASE_CONNECTION_URL"], postgres = _start_postgresql(home)
            stack.callback(_stop, postgres)
            processes.append(psutil.Process(postgres.pid))
        words = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
        with (folder / "server.log").open("wb") as out:
            command = [sys.executable, "-m", "prefect", *words]
            server = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        stack.callback(_stop, server)
        processes.append(psutil.Process(server.pid))
        api = f"http://127.0.0.1:{port}/api"
        _wait(api, server)
        yield api, processes


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start_postgresql(home: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a new cluster of Debian's package `postgresql`; its URL and its process."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        raise SystemExit("error: no PostgreSQL here: apt-get install postgresql")
    # PostgreSQL refuses to run as root.
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if not os.getuid() else {}
    if user:
        shutil.chown(home, "postgres", "postgres")
    port = _free_port()
    data = str(home / "data")
    given: dict[str, Any] = {**user, "cwd": home, "stdout": subprocess.DEVNULL}
    make = [str(programs[-1] / "initdb"), "-A", "trust", "-U", "prefect", "-D", data]
    subprocess.run(make, check=True, **given)
    options = ["-D", data, "-p", str(port), "-k", str(home), "-c", "listen_addresses=127.0.0.1"]
    started = subprocess.Popen([str(programs[-1] / "postgres"), *options], stderr=2, **given)
    url = f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    return url, started


def _wait(api: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{api}/health", timeout=10):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("error: Prefect's server does not answer")


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Processor seconds of processes and of all their children, ended ones included."""
    total = 0.0
    for process in processes:
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has ended, and counts below
                times = one.cpu_times()
                total += times.user + times.system
        times = process.cpu_times()
        total += times.children_user + times.children_system
    return total


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
