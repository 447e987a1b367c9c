"""Settings of Prefect hold for our commands, whatever imports Prefect first."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from kiln_command import ROOT, environment

pytestmark = pytest.mark.slow

PROGRAM = """
from pathlib import Path
from flows import runner

def show(*_, **__):
    from prefect.settings import get_current_settings
    print(get_current_settings().server.ephemeral.startup_timeout_seconds)
    raise SystemExit(0)

runner._start_server = runner.check_server = show
runner.{command}as_json=False, recipe="digits", overrides={{}})
"""
PROFILE = """
active = "team"
[profiles.team]
PREFECT_API_URL = "http://127.0.0.1:9/api"
"""


@pytest.mark.parametrize(
    ("command", "profile"), [('run("finetune", ', ""), ("watch(", PROFILE)], ids=["run", "watch"]
)
def test_a_slow_machine_has_time_to_start_prefects_own_server(
    tmp_path: Path, command: str, profile: str
) -> None:
    """The settings of our commands count, also where a profile names the server."""
    (tmp_path / "profiles.toml").write_text(profile, encoding="utf-8")
    profiles = {"PREFECT_PROFILES_PATH": str(tmp_path / "profiles.toml")} if profile else {}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(command=command)],
        env=environment(tmp_path, None) | profiles,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
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
BY_KILN = "from flows import runner\nrunner._prepare_prefect()"


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

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def away() -> Iterator[str]:
    handler = type("AwayOnce", (Away,), {"asked": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/api"
    server.shutdown()
    server.server_close()
    assert handler.asked.count("/api/hello") == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("where", "given", "codes"),
    [
        ("a worker in the checkout", {}, "500"),
        ("kiln in any folder", {}, "500"),
        ("kiln in any folder", {"PREFECT_CLIENT_RETRY_EXTRA_CODES": "504"}, "500,504"),
    ],
)
def test_a_lost_database_is_asked_again_by_worker_flow_and_command(
    where: str, given: dict[str, str], codes: str, away: str, tmp_path: Path
) -> None:
    """The last line is what a worker passes on to its runs: all settings that are set."""
    in_checkout = where == "a worker in the checkout"
    more = given | {"PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(prepare="" if in_checkout else BY_KILN)],
        env=environment(tmp_path, away) | more,
        cwd=ROOT if in_checkout else tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ",".join(sorted(done.stdout.splitlines()[-1].split(","))) == codes


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
