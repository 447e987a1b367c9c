"""Feed mutated inputs to every reader of what others wrote; print what became of them.

    python tests/fuzz/run.py --inputs 100000
    python tests/fuzz/run.py --inputs 500 --only recipe tar
    KILN_TEST_SEED=0 python tests/fuzz/run.py --only recipe --input 1234    with its traceback

Readers are in the modules beside this one. A reader accepts an input and is right, or raises its
documented error; all else is a fault, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.reader import Outcomes, Reader

#: Bytes that the process may map beyond what it starts with.
MOST_BYTES = 4 * 2**30


def main() -> int:
    from fuzz.all_readers import all_readers

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs of all readers")
    parser.add_argument("--only", nargs="+", default=[""], help="words in names of readers")
    parser.add_argument("--input", type=int, help="one input, with its traceback")
    args = parser.parse_args()
    seed = os.environ.get("KILN_TEST_SEED", "0")
    faulthandler.enable()
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="kiln-fuzz-") as folder:
        found = [r for r in all_readers(Path(folder)) if any(w in r.name for w in args.only)]
        if args.input is not None:
            for reader in found:
                print(reader.name, reader.read(Random(f"{seed} {reader.name} {args.input}")))
            return 0
        _limit_memory()
        return run(found, args.inputs, seed)


def run(found: list[Reader], inputs: int, seed: str) -> int:
    """Print a line per reader, and each distinct fault below it; 1 if there is one."""
    from fuzz.reader import Outcomes, fuzz

    shares, faults, total = sum(reader.share for reader in found), 0, Outcomes()
    print(f"KILN_TEST_SEED={seed}")
    names = ("inputs", "accepted", "refused", "faults", "seconds")
    print(f"{'reader':22} " + " ".join(f"{name:>8}" for name in names))
    for reader in found:
        start, count = time.process_time(), -(-inputs * reader.share // shares)
        one = fuzz(reader, count, seed)
        seconds = time.process_time() - start
        _line(reader.name, one, seconds)
        for place, first in one.faults.items():
            print(f"  {one.counts[place]:6} x {place}\n           {first}")
        total.accepted += one.accepted
        total.refused += one.refused
        total.faulty += one.faulty
        faults += len(one.faults)
    _line("sum", total, time.process_time())
    return int(faults > 0)


def _line(name: str, one: Outcomes, seconds: float) -> None:
    inputs = one.accepted + one.refused + one.faulty
    print(
        f"{name:22} {inputs:8} {one.accepted:8} {one.refused:8} {one.faulty:8} {seconds:8.1f}",
        flush=True,
    )


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:1] = [str(tests), str(tests.parent)]  # modules have the names that pytest gives them
    sys.exit(main())
