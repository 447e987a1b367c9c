"""Compare our training with diffusers' example scripts: `python -m bench.train --help`.

docs/benchmarks.md describes the rows and has results.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.run_diffusers_scripts import add_peer_options, find_peer
from configs.errors import Failed

ROUNDS = 5
STEPS = 40
WRONG_INPUT = 2  # exit code
THREADS = "OMP_NUM_THREADS"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of the command line."""
    from bench.train_mindspore import MINDSPORE_ROWS
    from bench.train_rows import ROWS

    parser = argparse.ArgumentParser(
        prog="python -m bench.train",
        description="Time our training against diffusers' example scripts.",
        epilog=f"Rows: {', '.join(ROWS)}; of mindspore: {', '.join(MINDSPORE_ROWS)}. {THREADS} "
        "sets the number of threads of both sides.",
    )
    parser.add_argument(
        "--runtime",
        choices=("torch", "mindspore"),
        default="torch",
        help="torch: compare with diffusers' scripts; mindspore: compare with mindone's training "
        "step (default: %(default)s)",
    )
    add_peer_options(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="timed steps per round of the tiny model (default: %(default)s); the mid model has a "
        "quarter of them, the whole run five times as many",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help="rounds of each comparison (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*ROWS, *MINDSPORE_ROWS],
        metavar="ROW",
        help="run only these rows",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the JSON line")
    options = parser.parse_args(arguments)
    known = MINDSPORE_ROWS if options.runtime == "mindspore" else ROWS
    if wrong := [name for name in options.only or () if name not in known]:
        parser.error(f"--runtime {options.runtime} has no row {', '.join(wrong)}")
    return options


def main(arguments: list[str]) -> int:
    """Run the selected rows. Returns 1 if a row failed, 2 if --peer-python cannot run."""
    os.environ.setdefault(THREADS, str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    options = parse(arguments)
    from bench import report
    from bench.train_mindspore import MINDSPORE_ROWS
    from bench.train_rows import ROWS
    from bench.training_step_workloads import Context

    facts: dict[str, Any] = {
        "machine": report.machine(int(os.environ[THREADS])),
        "versions": report.versions(),
    }
    try:
        peer = find_peer(options, facts)
    except Failed as error:
        report.log(f"error: {error}")
        return WRONG_INPUT
    if options.runtime != "torch":
        from runtimes.registry import probe_runtime

        facts["runtime_versions"] = probe_runtime(options.runtime).versions
    rows = []
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder:
        context = Context(Path(folder), peer, options.rounds, options.steps)
        known = MINDSPORE_ROWS if options.runtime == "mindspore" else ROWS
        for name in options.only or known:
            report.log(f"{name} ...")
            rows.append(context.row(name, known[name]))
    report.publish("train", rows, facts, options.json)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
