"""Time of a run that reuses every artifact: `python -m bench.reuse [RECIPE]`.

Run the recipe once before (`make demo`). The benchmark alternates `kiln run RECIPE` and an empty
Prefect flow with as many tasks and a server of its own. The difference is the time of Kilnworks:
checking the recipe and the artifacts, and showing every stage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.report import Row, log, machine, publish, spread, versions

ROUNDS = 5
EMPTY_FLOW = """
from prefect import flow, task

@task
def nothing(): ...

@flow
def empty():
    for _ in range({tasks}):
        nothing()

empty()
"""


def main(arguments: Sequence[str]) -> int:
    """Time both; 1 if a stage was not reused."""
    parser = argparse.ArgumentParser(prog="python -m bench.reuse", description=__doc__)
    parser.add_argument("recipe", nargs="?", default="digits")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    kiln = [sys.executable, "-m", "flows.cli", "run", options.recipe, "--json"]
    report = json.loads(_timed(kiln)[1].splitlines()[-1])  # also warms the disk cache
    if any(stage["outcome"] != "reused" for stage in report["stages"].values()):
        log(f"error: {options.recipe}: not every stage was reused; run the benchmark again")
        return 1
    empty = [sys.executable, "-c", EMPTY_FLOW.format(tasks=len(report["stages"]))]
    seconds: dict[str, list[float]] = {"prefect_alone": [], "reused_run": []}
    for _ in range(options.rounds):
        seconds["prefect_alone"].append(_timed(empty)[0])
        seconds["reused_run"].append(_timed(kiln)[0])
    pairs = zip(seconds["reused_run"], seconds["prefect_alone"], strict=True)
    beyond = [ours - theirs for ours, theirs in pairs]
    figures: dict[str, Any] = {
        f"{name}_seconds": spread(values)
        for name, values in {**seconds, "beyond_prefect": beyond}.items()
    }
    facts = {"machine": machine(os.cpu_count() or 1), "versions": versions(("prefect", "torch"))}
    publish("reuse", [Row(options.recipe, figures=figures)], facts, None)
    return 0


def _timed(command: Sequence[str]) -> tuple[float, str]:
    """Duration of a command in seconds, and its standard output."""
    since = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - since, done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
