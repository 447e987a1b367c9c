"""Training, side by side with diffusers' own scripts: `python -m bench.train --help`.

docs/benchmarks.md says what each row times, and what it gave where.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROUNDS = 5
STEPS = 40
WRONG_INPUT = 2
THREADS = "OMP_NUM_THREADS"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line's options."""
    from bench.train_mindspore import MINDSPORE_ROWS
    from bench.train_rows import ROWS

    parser = argparse.ArgumentParser(
        prog="python -m bench.train",
        description="Time our training against diffusers' example scripts.",
        epilog=f"Rows: {', '.join(ROWS)}; of mindspore: {', '.join(MINDSPORE_ROWS)}. {THREADS} "
        "sets both sides' threads.",
    )
    parser.add_argument(
        "--runtime",
        choices=("torch", "mindspore"),
        default="torch",
        help="torch against diffusers' scripts, mindspore against mindone's own training step, "
        "which needs no script (default: %(default)s)",
    )
    parser.add_argument(
        "--diffusers-examples",
        type=Path,
        metavar="FOLDER",
        help="with train_text_to_image_sdxl.py and train_text_to_image_lora_sdxl.py; rows that "
        "need them are left out without it",
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter of the environment that those scripts run in (default: this one)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="timed steps a round on the tiny model (default: %(default)s); a quarter of them on "
        "the middle-sized one, five times as many in the whole run",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help=f"rounds of each comparison (default: %(default)s; fewer than {ROUNDS} only to try)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*ROWS, *MINDSPORE_ROWS], metavar="ROW", help="these rows only"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line there too")
    options = parser.parse_args(arguments)
    known = MINDSPORE_ROWS if options.runtime == "mindspore" else ROWS
    if wrong := [name for name in options.only or () if name not in known]:
        parser.error(f"{', '.join(wrong)}: not a row of --runtime {options.runtime}")
    return options


def main(arguments: list[str]) -> int:
    """Run the rows asked for; 1 if one of them failed, 2 if the peer cannot be run at all."""
    os.environ.setdefault(THREADS, str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    options = parse(arguments)
    from bench import report
    from bench.peer import Peer, PeerFailed
    from bench.steps import Context
    from bench.train_mindspore import MINDSPORE_ROWS
    from bench.train_rows import ROWS

    facts = {"machine": report.machine(int(os.environ[THREADS])), "versions": report.versions()}
    peer = None
    if options.diffusers_examples is not None:
        peer = Peer(options.diffusers_examples.resolve(), options.peer_python)
        try:
            facts["peer_versions"] = peer.versions()
        except (OSError, PeerFailed) as error:
            report.say(f"error: --peer-python {options.peer_python}: {error}")
            return WRONG_INPUT
    if options.runtime != "torch":
        from runtimes.registry import probe_runtime

        facts["runtime_versions"] = probe_runtime(options.runtime).versions
    rows = []
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder:
        context = Context(Path(folder), peer, options.rounds, options.steps)
        known = MINDSPORE_ROWS if options.runtime == "mindspore" else ROWS
        for name in options.only or known:
            report.say(f"{name} ...")
            rows.append(context.row(name, known[name]))
    report.publish("train", rows, facts, options.json)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
