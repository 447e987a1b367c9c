"""Forks of the warm interpreter end, are signalled and read their streams as processes do."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_processes import WarmInterpreter, WarmProcess

pytestmark = [pytest.mark.slow, pytest.mark.extended]
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
#: What it has imported, where it is, its words and a variable; then it reads its input.
MODULE = """
import os, sys
print("diffusers" in sys.modules, os.getcwd(), sys.argv[1:], os.environ.get("WORD"), flush=True)
print(sys.stdin.read(), file=sys.stderr, flush=True)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmInterpreter]:
    """An interpreter that finds the module `asked`."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "asked.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        warm = WarmInterpreter(folder / "log")
        yield warm
        warm.close()


def start(interpreter: WarmInterpreter, **variables: str) -> Any:
    command = [sys.executable, "-P", "-u", "-m", "asked", "one", "two"]
    return interpreter.popen(
        command, env={**os.environ, **variables}, start_new_session=True, **PIPES
    )


def test_a_fork_has_its_own_streams_variables_folder_and_exit_code(
    interpreter: WarmInterpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    child = start(interpreter, WORD="given", TRANSFORMERS_VERBOSITY="error")
    assert isinstance(child, WarmProcess) and child.poll() is None
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("said")
    child.stdin.close()
    expected = f"True {tmp_path} ['one', 'two'] given\nsaid\n"
    assert child.stdout.read() == expected
    assert child.wait(60) == child.wait() == 7


def test_the_session_of_a_fork_is_killed_alone(interpreter: WarmInterpreter) -> None:
    child, other = start(interpreter), start(interpreter)
    assert os.getsid(child.pid) == child.pid != os.getsid(other.pid)
    os.killpg(child.pid, signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL and other.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.01)
    other.kill()
    assert other.wait(60) == -signal.SIGKILL


def test_a_variable_that_packages_read_at_import_needs_a_real_process(
    interpreter: WarmInterpreter,
) -> None:
    with start(interpreter, HF_ENDPOINT="http://127.0.0.1:1") as child:
        assert isinstance(child, subprocess.Popen)
        assert child.communicate()[0].decode().startswith("False ")
