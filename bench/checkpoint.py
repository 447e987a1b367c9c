"""Rates of checkpoints: `python -m bench.checkpoint [FOLDER] [--gigabytes N] [--processes 1 2]`.

A state of about N GB is copied, written and read as in a run, without a model, by one process and
by several. Together they need memory for twice the state. The system's page cache is emptied before
a read. GB are 10^9 bytes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from bench.report import Row, finish, option_parser, spread
from runtimes.contract import StateShapes
from runtimes.optimizer_state import owned_copies, read_state_arrays
from runtimes.process.collectives import HostCollectives, free_port, join
from runtimes.process.launcher import Ranks
from runtimes.train.checkpoints import Checkpoints

ROUNDS = 5
GROUPS = ("weights", "exp_avg", "exp_avg_sq", "ema")
SHAPE = (1280, 2560)  # a linear layer of SDXL
ARRAY_BYTES = 4 * math.prod(SHAPE)  # 13 MB
RANK = "bench.checkpoint rank"


def measure(folder: str, gigabytes: float, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Measure as one of the ranks; all ranks wait after each phase.

    Returns:
        Bytes of the state, and seconds of each phase and round.
    """
    ranks = Ranks.here()
    if ranks.world > 1:
        join(ranks)
    collectives = HostCollectives(ranks.world)
    checkpoints = Checkpoints(folder, 1, writers=collectives.writers())
    count = max(1, round(gigabytes * 1e9 / ARRAY_BYTES / len(GROUPS)))
    names = [f"unet.{n}.weight" for n in range(count)]
    shapes: StateShapes = {group: dict.fromkeys(names, SHAPE) for group in GROUPS}
    owners = checkpoints.owners(shapes)
    array = np.random.default_rng(ranks.rank).standard_normal(SHAPE, np.float32)
    # An array of its own for each name: the processor's cache would hold a single array.
    groups = {
        group: {
            name: array.copy() if owners[group][name] == ranks.rank else array for name in names
        }
        for group in GROUPS
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", "write", "verify", "read")}

    def end(phase: str, since: float) -> None:
        collectives.any(False)
        seconds[phase].append(time.perf_counter() - since)

    for step in range(1, rounds + 1):
        since = time.perf_counter()
        state = owned_copies(groups, owners, ranks.rank, np.array)
        end("copy", since)
        since = time.perf_counter()
        checkpoints.save(step, state, [], {}, shapes=shapes)
        end("write", since)
        del state
        _empty_page_cache(folder)
        collectives.any(False)
        since = time.perf_counter()
        saved = checkpoints.latest()
        assert saved is not None
        end("verify", since)
        _empty_page_cache(folder)
        collectives.any(False)
        since = time.perf_counter()
        for _ in read_state_arrays(saved.state, shapes):
            pass
        end("read", since)
    if dist.is_initialized():  # gloo's threads would abort the interpreter's exit
        dist.destroy_process_group()
    return len(GROUPS) * count * ARRAY_BYTES, seconds


def _empty_page_cache(folder: str) -> None:
    for path in Path(folder).rglob("*.safetensors"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row(folder: str, gigabytes: float, rounds: int, processes: int) -> Row:
    """Rates in GB/s of a run of some processes."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), RANK: "1"}
    shared["WORLD_SIZE"] = str(processes)
    command = [sys.executable, "-m", "bench.checkpoint", folder, "--gigabytes", str(gigabytes)]
    command += ["--rounds", str(rounds)]
    children = [
        subprocess.Popen(
            command, env={**os.environ, **shared, "RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(processes)
    ]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        return Row(f"{processes} processes", failed="a process failed")
    written, seconds = json.loads(outputs[0].splitlines()[-1])
    figures = {
        f"{phase}_gb_per_second": spread([written / 1e9 / value for value in values])
        for phase, values in seconds.items()
    }
    return Row(f"{processes} processes", figures={"gigabytes": written / 1e9, **figures})


def main(arguments: Sequence[str]) -> int:
    """Measure, as the parent of the ranks or as a rank."""
    parser = option_parser("checkpoint", __doc__, ROUNDS)
    parser.add_argument("folder", nargs="?", help="on the disk to measure; default: a new one")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args(arguments)
    if RANK in os.environ:
        print(json.dumps(measure(options.folder, options.gigabytes, options.rounds)))
        return 0
    rows = []
    for count in options.processes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows.append(row(folder, options.gigabytes, options.rounds, count))
    return finish("checkpoint", rows, options, ("kilnworks", "torch", "numpy"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
