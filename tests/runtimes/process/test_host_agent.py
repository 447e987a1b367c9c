"""A host's agent: its lines, its exit code, and how it ends what it has started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_agents import Agent

pytestmark = pytest.mark.slow
#: The agent, whose first rank is the program in the job's file.
PROGRAM = """
import os, sys
from runtimes.process import host_agent
host_agent._kind = lambda job: "train"
host_agent._command = lambda kind, job: [sys.executable, "-u", str(job)]
code = host_agent.main(sys.argv[1:])
os._exit(code)
"""
SPEAKS = """
import json, os, sys
events = os.fdopen(int(os.environ["KILN_EVENT_FD"]), "w")
for kind in ("start", "progress", "warning", "error", "result"):
    print(json.dumps({"event": kind, "step": 3}), file=events)
events.write('{"event": "progr')  # it dies in the middle of a line
print("a line", flush=True)
print("an error \\udcff of its own", file=sys.stderr)
sys.exit(7)
"""
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), sys.exit(143)))
print("ready", flush=True)
time.sleep(60)
"""
#: Its child holds the output open.
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("ready", flush=True)
while True:
    time.sleep(60)
"""
Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(program, *options)`: the agent of one of two hosts."""
    agents: list[Agent] = []

    def agent_of(program: str, *options: str, host: int = 0, scheme: str = "") -> Agent:
        path = tmp_path / f"{len(agents)}.py"
        path.write_text(program)
        place = ["--hosts", "2", "--host", str(host), "--address", "first:29500"]
        command = [sys.executable, "-c", PROGRAM, f"{scheme}{path}", *place, *options]
        agents.append(Agent(command))
        return agents[-1]

    yield agent_of
    for agent in agents:
        agent.close()


def test_host_0_tells_all_and_another_host_its_errors_and_warnings(start: Start) -> None:
    for host, heard in ((0, "start progress warning error result"), (1, "warning error")):
        agent = start(SPEAKS, host=host)
        assert agent.end() == 7
        assert all(line["host"] == host for line in agent.lines)
        first, last = agent.lines[0], agent.lines[-1]
        assert first["event"] == "host" and first["pid"] == agent.process.pid
        assert last == {"host": host, "event": "exit", "code": 7}
        own = [line for line in agent.lines if line.get("step") == 3]
        assert [line["event"] for line in own] == heard.split()
        said = sorted(line["text"] for line in agent.said("line"))
        assert said == ["a line", "an error \\udcff of its own"]


def test_it_speaks_each_second(start: Start) -> None:
    agent = start(WAITS)
    agent.wait_for("line")
    count = len(agent.said("alive"))
    time.sleep(2.5)
    times = [line["time"] for line in agent.said("alive")]
    assert len(times) - count in (2, 3)
    assert abs(times[-1] - time.time()) < 3


def test_the_ranks_get_torchrun_s_variables_and_no_rank(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")  # of another launcher, around the agent
    agent = start("import json, os; print(json.dumps(dict(os.environ)))", host=1)
    assert agent.end() == 0
    found = json.loads(agent.said("line")[0]["text"])
    expected = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    assert expected.items() <= found.items() and "RANK" not in found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once(start: Start, number: int) -> None:
    agent = start(DEAF, "--grace", "1")
    agent.wait_for("line", text="ready")
    asked = time.monotonic()
    agent.process.send_signal(number)
    agent.wait_for("line", text="asked")
    agent.process.send_signal(number)
    assert agent.end(20) == 128 + signal.SIGKILL
    assert time.monotonic() - asked >= 1.0
    assert len([line for line in agent.said("line") if line["text"] == "asked"]) == 1
    assert agent.lines[-1] == {"host": 0, "event": "exit", "code": -signal.SIGKILL}
    assert agent.processes() == [], "the children of a killed rank are killed with it"


def test_one_that_imports_is_stopped_as_one_that_trains(start: Start) -> None:
    agent = start("print('ready', flush=True); import time; time.sleep(60)")
    agent.wait_for("line")
    agent.process.terminate()
    assert agent.end(20) == 143
    assert agent.lines[-1]["code"] == 143


@pytest.mark.parametrize("watches", [True, False])
def test_the_end_of_standard_input_requests_a_stop_if_it_is_watched(
    start: Start, watches: bool
) -> None:
    agent = start(WAITS, *["--watch-stdin"][:watches])
    agent.wait_for("line")
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    if watches:
        assert agent.end(20) == 143
        assert [line["text"] for line in agent.said("line")] == ["ready", "asked"]
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            agent.process.wait(1.5)


def test_a_reader_that_has_gone_is_a_stop_request(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    read, write = os.pipe()
    place = ["--hosts", "2", "--host", "0", "--address", "first:29500"]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "waits.py"), *place]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=write)
    os.close(write)
    assert b'"host"' in os.read(read, 4096)
    os.close(read)
    assert process.wait(20) == 143


def test_a_job_in_a_store_is_read_there(start: Start) -> None:
    agent = start("print(__file__)", scheme="file://")
    assert agent.end() == 0
    copied = Path(agent.said("line")[0]["text"])
    assert copied.name == "job.json" and not copied.exists()


def test_a_job_that_cannot_be_read_is_an_error_of_its_host(start: Start) -> None:
    agent = start("", host=1, scheme="file:///gone")
    assert agent.end() == 1
    (error,) = agent.said("error")
    assert error["host"] == 1 and "cannot be read" in error["message"]
    assert agent.lines[-1]["code"] == 1


def test_a_store_that_a_host_lacks_is_wrong_input(start: Start) -> None:
    agent = start("", host=1, scheme="/gone")
    assert agent.end() == 1
    (error,) = agent.said("error")
    assert error["wrong_input"] and "set store to a URL, or a disk of all hosts" in error["message"]


@pytest.mark.parametrize("wrong", [["--host", "2"], ["--address", "first"]])
def test_a_wrong_place_is_refused(start: Start, wrong: list[str]) -> None:
    assert start("", *wrong).end() == 2
