"""`kiln doctor` checks the Prefect server of runs."""

import json
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from typing import Any

import pytest
from loopback_server import LoopbackServer, refusing
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from configs.load_recipe import load_recipe
from flows import doctor
from flows import doctor as flows_doctor
from flows.doctor import examine
from flows.run_in_terminal import Refused, check_server
from runtimes.contract import Probe
from runtimes.registry import RUNTIMES

pytestmark = pytest.mark.slow

Here = Callable[..., str]  # of conftest.py


class Healthy(BaseHTTPRequestHandler):
    wanted: str | None = None  # the header of who may ask; None: anybody

    def do_GET(self) -> None:
        known = self.wanted in (None, self.headers["Authorization"])
        self.send_response((200 if self.path == "/api/health" else 404) if known else 401)
        self.end_headers()
        self.wfile.write(b"true")


@pytest.fixture
def address() -> Iterator[str]:
    """Address of a loopback server that answers as a healthy Prefect server."""
    with LoopbackServer(Healthy) as server:
        yield server.host


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The probed runtimes; no interpreter is started."""
    names: list[str] = []

    def probe(name: str) -> Probe:
        names.append(name)
        return Probe(available=name == "torch", devices=["cpu"], reason="not asked")

    monkeypatch.setattr(doctor, "probe_runtime", probe)
    return names


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    examine(None, (), as_json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("asked")
def test_a_server_that_answers(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{address}/api")
    found = findings(capsys)
    assert found["prefect_api"] == f"http://{address}/api (answers)"
    assert not [problem for problem in found["problems"] if "Prefect" in problem]


@pytest.mark.parametrize("word", ["team:secret", "team:other"])
@pytest.mark.usefixtures("asked")
def test_a_server_that_asks_for_a_password(
    word: str, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = f"Basic {b64encode(b'team:secret').decode()}"
    monkeypatch.setattr(Healthy, "wanted", wanted)
    monkeypatch.setenv("PREFECT_API_URL", f"http://{address}/api")
    with temporary_settings({PREFECT_API_AUTH_STRING: word}):
        state = findings(capsys)["prefect_api"]
    answers = "answers" if word == "team:secret" else "does not answer"
    assert state == f"http://{address}/api ({answers})"


def test_a_closed_port_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pauses of httpcore before its further attempts."""
    pauses, real, caller = list[int](), time.sleep, threading.get_ident()

    def sleep(seconds: float) -> None:
        pauses.append(threading.get_ident())  # threads of Prefect sleep, too
        real(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    with refusing() as host:
        check_server_away(f"http://{host}/api")
    assert caller not in pauses


def check_server_away(url: str) -> None:
    with pytest.raises(Refused, match="refused"):
        check_server(url)


@pytest.mark.usefixtures("asked")
def test_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with refusing() as host:
        monkeypatch.setenv("PREFECT_API_URL", f"http://me:secret@{host}/api")
        assert not examine(None, (), as_json=False)
    said = capsys.readouterr().out
    assert f"prefect server: http://{host}/api (does not answer)" in said
    assert "problem: no Prefect server answers at PREFECT_API_URL=" in said
    assert "secret" not in said


@pytest.mark.parametrize("path", ["", "/with blank"])
@pytest.mark.usefixtures("asked")
def test_a_port_of_another_protocol_is_one_line(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                connection.sendall(b"SSH-2.0-other\r\n")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}{path}"
        monkeypatch.setenv("PREFECT_API_URL", url)
        (said,) = [line for line in findings(capsys)["problems"] if "Prefect server" in line]
    assert said.startswith("no Prefect server answers at") and "\n" not in said


@pytest.mark.usefixtures("asked")
def test_a_damaged_profile_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged() -> str:
        raise KeyError("no such profile")

    monkeypatch.setattr(doctor, "configured_server", damaged)
    assert "prefect server failed: KeyError" in findings(capsys)["problems"][0]


@pytest.mark.extended
def test_the_server_of_a_profile_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with refusing() as host:
        url = f"http://{host}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            assert not examine(None, (), as_json=False)
    assert f"prefect server: {url} (does not answer)" in capsys.readouterr().out


def test_other_hosts_are_reported(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    examine(None, (), as_json=False)
    said = capsys.readouterr().out
    assert sorted(asked) == sorted(RUNTIMES)
    assert "\nascend: none; deploy/ascend" in said
    assert "\ngaudi: none; deploy/gaudi" in said


@pytest.mark.usefixtures("asked")
def test_software_without_its_chip_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.detect_hardware, "cann_version", lambda: "8.1")
    examine(None, (), as_json=False)
    assert "ascend: 0 NPUs, cann 8.1; no driver" in capsys.readouterr().out


@pytest.mark.usefixtures("asked")
def test_without_a_server_a_run_starts_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert findings(capsys)["prefect_api"] == "embedded, during a run"


def test_the_exit_code_reports_a_missing_part(
    here: Here, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here("doctor").splitlines()[-1] == "ready"
    trap = {"pytest": ("", "is a trap here")}
    for module in (doctor, flows_doctor):
        monkeypatch.setattr(module, "TRAPS", trap)
    said = here("doctor", code=1).splitlines()
    assert said[-2].startswith(f"problem: pytest {version('pytest')} is a trap here: ")
    assert said[-1] == "not ready"


@pytest.mark.extended
@pytest.mark.slow
def test_every_runtime_answers_from_its_own_environment(here: Here) -> None:
    found = json.loads(here("doctor", "--json"))["runtimes"]
    assert [
        name for name in found if found[name]["available"] != bool(found[name]["devices"])
    ] == []
    assert found["torch"]["available"] and "cpu" in found["torch"]["devices"][0]
    for name in ("xla", "mindspore"):
        assert found[name]["available"] or name in found[name]["reason"].lower()


def test_only_a_run_of_this_machine_will_train_on_its_cpu() -> None:
    probe = Probe(True, ["cpu"])
    (here,) = doctor._trains_on_cpu(probe, load_recipe("digits"))
    assert "will train on the CPU" in here.what
    elsewhere = load_recipe("digits", {"train.hosts": 2, "slurm.partition": "gpu"})
    assert [*doctor._trains_on_cpu(probe, elsewhere)] == []
