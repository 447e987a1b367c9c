"""Compare our training with diffusers' example scripts: `python -m bench.train --help`.

docs/benchmarks.md describes the rows and has results.
"""

from __future__ import annotations

import os
import sys

from bench.report import option_parser
from bench.run_diffusers_scripts import add_peer_options

ROUNDS = 5
STEPS = 40


def main(arguments: list[str]) -> int:
    """Run the selected rows. Returns 1 if a row failed, 2 if --peer-python cannot run."""
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    from bench.train_rows import ROWS
    from bench.training_step_workloads import run_rows

    parser = option_parser("train", "Time our training against diffusers' example scripts.", ROUNDS)
    parser.epilog = f"Rows: {', '.join(ROWS)}. OMP_NUM_THREADS is the number of threads of a side."
    add_peer_options(parser, ROWS)
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="timed steps per round of the tiny model (default: %(default)s); the mid model has a "
        "quarter of them, the whole run five times as many",
    )
    return run_rows("train", ROWS, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
