"""Settings of Prefect hold for our commands, whatever imports Prefect first."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import yaml
from kiln_command import ROOT, environment, is_running, processes_below, python
from loopback_server import LoopbackServer

from flows import run_in_terminal
from flows.command_errors import wrong_prefect_setting

pytestmark = pytest.mark.slow
PATIENCE = 180  # seconds, for a machine that does much else

PROGRAM = """
from pathlib import Path
from flows import run_in_terminal

def show(*_, **__):
    from prefect.settings import get_current_settings
    print(get_current_settings().server.ephemeral.startup_timeout_seconds)
    raise SystemExit(0)

run_in_terminal.start_server = run_in_terminal.check_server = show
run_in_terminal.run("finetune", as_json=False, recipe="digits", overrides={})
"""
PROFILE = """
active = "team"
[profiles.team]
PREFECT_API_URL = "http://127.0.0.1:9/api"
"""


def test_the_own_servers_process_is_that_of_prefects_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.server.api import server

    started: list[tuple[set[str], dict[str, str]]] = []

    def start(args: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        started.append((set(args), env))
        return SimpleNamespace(pid=0)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(run_in_terminal, "_end_after_us", lambda pid: None)
    monkeypatch.setattr(server.SubprocessASGIServer, "_instances", {})
    run_in_terminal._serve(8123)
    server.SubprocessASGIServer(8123)._run_uvicorn_command()
    ours, theirs = started
    assert ours == theirs


@pytest.mark.parametrize("profile", ["", PROFILE], ids=["no profile", "profile"])
def test_a_slow_machine_has_time_to_start_prefects_own_server(tmp_path: Path, profile: str) -> None:
    """The settings of our commands count, also where a profile names the server."""
    (tmp_path / "profiles.toml").write_text(profile, encoding="utf-8")
    profiles = {"PREFECT_PROFILES_PATH": str(tmp_path / "profiles.toml")} if profile else {}
    done = python("-c", PROGRAM, env=environment(tmp_path) | profiles)
    assert done.stdout.splitlines()[-1] == "120", done.stderr


#: A client that asks once, in a process that is prepared by a statement.
ASK = """
{prepare}
from prefect.client.orchestration import get_client
from prefect.settings import get_current_settings

with get_client(sync_client=True) as client:
    client.hello()
passed_on = get_current_settings().to_environment_variables(exclude_unset=True)
print(passed_on["PREFECT_CLIENT_RETRY_EXTRA_CODES"])
"""
BY_KILN = "from flows import run_in_terminal\nrun_in_terminal._prepare_prefect()"


#: A run with its own server, which comes to nothing.
SERVING = """
import time
from flows import run_in_terminal
run_in_terminal._prepare_prefect()
run_in_terminal.start_server()
print("ready", flush=True)
time.sleep(600)
"""


#: The start of a server, until its process would start.
STARTING = """
import sys
from flows import run_in_terminal
from flows.command_errors import wrong_prefect_setting

def serve(port):
    print("prefect.server.api.server" in sys.modules)
    raise SystemExit

run_in_terminal._serve = serve
run_in_terminal._prepare_prefect()
run_in_terminal.start_server()
"""


def test_a_server_starts_before_its_module_is_imported_here(tmp_path: Path) -> None:
    """The import takes 2 s of CPU time, which the server needs for the same import."""
    done = python("-c", STARTING, env=environment(tmp_path))
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_no_server(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", SERVING]
    with subprocess.Popen(
        command, env=environment(tmp_path), cwd=ROOT, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == b"ready\n"
        below = processes_below(run.pid)
        sessions = {os.getsid(pid) for pid, words in below.items() if "prefect.server" in words}
        ours = os.getsid(run.pid)
        run.send_signal(number)
    assert sessions and ours not in sessions  # signals to our group do not reach the server
    until = time.monotonic() + PATIENCE
    while left := [pid for pid in below if is_running(pid)]:
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(below)
        time.sleep(0.1)


@pytest.mark.parametrize("command", [["run", "digits"], ["doctor"]], ids=["run", "doctor"])
def test_a_prefect_home_that_cannot_be_written_is_one_line(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "prefect"
    env = environment(tmp_path) | {"PREFECT_HOME": str(home)}
    done = python("-m", "flows.cli", *command, env=env)
    assert done.returncode == (1 if command == ["doctor"] else 2), "doctor lists it"
    said = f"Prefect's own server cannot write {home} (Not a directory): set PREFECT_HOME"
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("prefect.toml", b"a = = 1"),
        ("prefect.toml", b"a = '\xff'"),
        ("pyproject.toml", b"[tool"),
        ("pyproject.toml", None),
        ("home/profiles.toml", None),
    ],
)
def test_a_file_that_prefect_cannot_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: bytes | None
) -> None:
    """None is a folder of that name."""
    from prefect.context import root_settings_context

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises((OSError, ValueError)) as raised:
        root_settings_context()
    wrong = wrong_prefect_setting(raised.value)
    assert wrong is not None and wrong.startswith(f"{path}: Prefect cannot read it (")
    assert wrong.endswith("): correct or remove it")


def in_folder(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`kiln` in a folder, with Prefect's files in that of HOME."""
    env = environment(folder) | {"HOME": str(folder), "PYTHONPATH": str(ROOT), **more}
    del env["PREFECT_HOME"]
    return python("-m", "flows.cli", *words, env=env, cwd=folder)


@pytest.mark.parametrize(
    ("words", "file", "content", "said"),
    [
        ("run digits --json", "pyproject.toml", b"[tool", "Prefect cannot read it ("),
        ("doctor", ".env", b"A=\xff", "Prefect cannot read it ("),
        ("retrain digits", ".prefect/profiles.toml", b"active = [", "Prefect cannot read it ("),
        ("doctor", ".env", b"PREFECT_LOGGING_LEVEL=NO", "level: Input should be 'DEBUG', 'INFO'"),
        ("doctor", "pyproject.toml", b"[tool.prefect]\nlogging = 5", "Prefect cannot read it ("),
    ],
)
def test_a_folder_in_which_prefect_cannot_start_is_one_line(
    tmp_path: Path, words: str, file: str, content: bytes, said: str
) -> None:
    (tmp_path / ".prefect").mkdir()
    (tmp_path / file).write_bytes(content)
    done = in_folder(tmp_path, *words.split())
    line = f"{tmp_path / file}: {said}"
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"kiln: {line}", done.stderr.find("kiln:"))
    assert told(done) == 1, done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)["error"].startswith(line)


def told(done: subprocess.CompletedProcess[str]) -> int:
    """Lines of an error: a run first prints that it checks the recipe."""
    return sum(not line.startswith("checking ") for line in done.stderr.splitlines())


@pytest.mark.parametrize("words", ["run digits", "doctor"])
def test_a_missing_home_is_one_line(tmp_path: Path, words: str) -> None:
    """Python finds HOME to be `~` where it is not set and the user has no home folder."""
    done = in_folder(tmp_path, *words.split(), HOME="~")
    assert done.returncode == 2 and told(done) == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("kiln: HOME is not set, and this user has no ")


def test_a_command_that_needs_no_prefect_does_not_read_its_files(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=\xff")
    done = in_folder(tmp_path, "recipes", HOME="~")
    assert done.returncode == 0, done.stderr


def test_a_server_that_does_not_answer_in_time_is_one_line(tmp_path: Path) -> None:
    """With no time at all: it starts early, and may answer within a second."""
    env = environment(tmp_path) | {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "0"}
    done = python("-m", "flows.cli", "run", "digits", env=env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kiln: Prefect's own server did not start (")
    assert "Traceback" not in done.stdout + done.stderr


DEAD = "http://127.0.0.1:9"  # no proxy answers there


class Away(BaseHTTPRequestHandler):
    """Answers as Prefect's server does whose database is away, once; then it is back."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.endswith("/hello"):
            self.send_response(500 if self.asked.count(self.path) == 1 else 200)
        else:  # the server's version, and CSRF tokens, which it does not use
            self.send_response(422)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@pytest.fixture
def away() -> Iterator[str]:
    handler = type("AwayOnce", (Away,), {"asked": []})
    with LoopbackServer(handler) as server:
        yield f"{server.url}/api"
    assert handler.asked.count("/api/hello") == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("where", "given", "codes"),
    [
        ("a worker in the checkout", {}, "500"),
        ("kiln in any folder", {}, "500"),
        ("kiln in any folder", {"PREFECT_CLIENT_RETRY_EXTRA_CODES": "504"}, "500,504"),
        ("kiln in any folder", {"PREFECT_CLIENT_RETRY_EXTRA_CODES": ""}, "500"),
    ],
)
def test_a_lost_database_is_asked_again_by_worker_flow_and_command(
    where: str, given: dict[str, str], codes: str, away: str, tmp_path: Path
) -> None:
    """The last line is what a worker passes on to its runs: all settings that are set."""
    in_checkout = where == "a worker in the checkout"
    more = given | {"PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false", "PYTHONPATH": str(ROOT)}
    done = python(
        *("-c", ASK.format(prepare="" if in_checkout else BY_KILN)),
        env=environment(tmp_path, away) | more,
        cwd=ROOT if in_checkout else tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert ",".join(sorted(done.stdout.splitlines()[-1].split(","))) == codes


def test_an_empty_url_names_no_server(
    monkeypatch: pytest.MonkeyPatch, at_home: Callable[..., None]
) -> None:
    at_home("")
    assert run_in_terminal.configured_server() is None
    monkeypatch.setenv("PREFECT_CLIENT_RETRY_EXTRA_CODES", "500")
    run_in_terminal._prepare_prefect()
    assert "PREFECT_API_URL" not in os.environ


@pytest.mark.parametrize(
    ("given", "bypassed"),
    [
        ({"HTTP_PROXY": DEAD}, "127.0.0.1,localhost"),
        ({"all_proxy": DEAD, "NO_PROXY": "corp, .lan"}, "corp,.lan,127.0.0.1,localhost"),
        ({"https_proxy": DEAD, "no_proxy": "localhost"}, "localhost,127.0.0.1"),
        ({"http_proxy": DEAD, "no_proxy": "*"}, "*"),
        ({}, None),
    ],
)
def test_a_proxy_is_not_asked_for_servers_of_this_machine(
    given: dict[str, str], bypassed: str | None
) -> None:
    others = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    once = type("Once", (Away,), {"asked": []})
    with LoopbackServer(once) as server, patch.dict(os.environ, {**others, **given}, clear=True):
        run_in_terminal._prepare_prefect()
        assert os.environ.get("no_proxy") == bypassed
        assert httpx.get(server.url).status_code == 422


def test_prefects_own_images_ask_again_too() -> None:
    """They have no checkout, so their files of deploy/ set it."""
    name = "PREFECT_CLIENT_RETRY_EXTRA_CODES"
    given = {
        path: yaml.safe_load((ROOT / "deploy" / path).read_text(encoding="utf-8"))
        for path in (
            "server/compose.yaml",
            "kubernetes/server.values.yaml",
            "kubernetes/worker.values.yaml",
        )
    }
    compose, server, worker = given.values()
    for service in ("server", "background"):
        assert compose["services"][service]["environment"][name] == "500"
    for listed in (server["global"]["prefect"]["env"], worker["worker"]["extraEnvVars"]):
        assert {"name": name, "value": "500"} in listed
