"""Let faults happen to processes that share a store, and check that nothing is lost or wrong.

    python tests/chaos/run.py --faults 510
    KILN_TEST_SEED=7 python tests/chaos/run.py --faults 60 --stores s3

The same seed gives the same schedule of faults. What a process does at the moment of a fault also
depends on the machine, so a finding can need several runs to come again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path


def main() -> int:
    import store_servers  # noqa: F401 (it sets variables that clients read when they are imported)
    from chaos.report import run_all

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=510, help="faults on all stores")
    parser.add_argument("--stores", default="local,s3,gcs", help="local, s3, gcs")
    parser.add_argument("--seed", default=os.environ.get("KILN_TEST_SEED", "0"))
    args = parser.parse_args()
    logging.disable()
    return int(bool(run_all(args.stores.split(","), args.faults, args.seed)))


if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:1] = [str(tests), str(tests.parent)]  # modules have the names that pytest gives them
    sys.exit(main())
