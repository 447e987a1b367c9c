"""Settings of Prefect hold for our commands, whatever imports Prefect first."""

import subprocess
import sys
from pathlib import Path

from kiln_command import ROOT, environment

PROGRAM = """
from pathlib import Path
from flows import runner

def show(*_, **__):
    from prefect.settings import get_current_settings
    print(get_current_settings().server.ephemeral.startup_timeout_seconds)
    raise SystemExit(0)

runner._start_server = show
runner.run("finetune", as_json=False, recipe="digits", overrides={})
"""


def test_a_slow_machine_has_time_to_start_prefects_own_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(tmp_path, None),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "120", done.stderr
