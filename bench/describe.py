"""Rates of describing pictures: `python -m bench.describe [--quick] [--only ROW...]`.

Rows:

* `devices`: the stage with a stand-in describer of a fixed time per batch, on 1, 2 and 4 devices;
* `duplicates`: tiles of photographs and their copies, as files, are hashed and grouped on one core;
  so does imagededup's PHash, with its own limit of 10 bits, where it is installed. The package
  scikit-image has the photographs;
* `hashes`, `embeddings`: 10 M made-up hashes and 1 M embeddings are grouped, on all cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from artifacts.store import Store
from bench import devices, duplicates
from bench.report import Meter, Rounds, Row, attempt, finish, option_parser
from bench.stand_in_encoder import NAME, registered
from tasks.describe.describers import Spec
from tasks.describe.tables import table_key
from tasks.describe.worker import DescribingPlan, describe_request
from tasks.devices.commit_shards import CommitShards, commit_shards
from tasks.devices.processes import DevicePool
from tasks.devices.shards import ShardTask

ROUNDS = 5


@dataclass(frozen=True)
class Size:
    """The work of one device in a round."""

    shards: int = 4
    pictures: int = 32  # per shard
    side: int = 256  # of the pictures, in pixels
    batch: int = 8
    seconds: float = 1.0  # per batch of the stand-in


QUICK = Size(1, 4, 64, 2, 0.01)


def main(arguments: Sequence[str]) -> int:
    """Run the rows; 1 if one failed."""
    parser = option_parser("describe", __doc__, ROUNDS)
    parser.add_argument("--quick", action="store_true", help="few small pictures in one round")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help="default: all")
    options = parser.parse_args(arguments)
    with registered(), TemporaryDirectory(prefix="kiln-bench-") as folder:
        rounds = Rounds(Path(folder), 1 if options.quick else options.rounds)
        rows = [
            attempt(name, partial(ROWS[name], rounds, name, quick=options.quick))
            for name in options.only or ROWS
        ]
    return finish("describe", rows, options)


def devices_row(rounds: Rounds, name: str, *, quick: bool) -> Row:
    """`scaling_N`: rate on N devices, divided by N times the rate on one; 1 is linear."""
    size = QUICK if quick else Size()
    spec = Spec(NAME, {"seconds": size.seconds}, {})
    plan = DescribingPlan({spec.digest: spec}, 10**8, size.batch, "cpu")
    pools = {count: devices.stand_in_pool(plan, count) for count in devices.COUNTS}
    tars = {
        count: devices.write_tars(
            rounds.folder / f"images{count}", count * size.shards, size.pictures, size.side
        )
        for count in devices.COUNTS
    }

    def rate(count: int, folder: Path) -> float:
        tasks = [_task(tar, sha256, spec.digest, size.pictures) for tar, sha256 in tars[count]]
        return _rate(folder, tasks, pools[count], plan)

    return devices.scaling_row(rounds, name, rate, size.batch / size.seconds)


def _task(tar: str, sha256: str, describer: str, pictures: int) -> ShardTask:
    key = table_key(sha256, describer)
    tables = {describer: {"key": key, "earlier": []}}
    return ShardTask((key,), describe_request(tar, sha256, sha256, tables), pictures)


def _rate(
    folder: Path, tasks: Sequence[ShardTask], pool: DevicePool, plan: DescribingPlan
) -> float:
    """Pictures per second from image shards to committed tables in a new store."""
    store = Store(str(folder / "store"))
    dofn = CommitShards(store.url, f"{store.root}/reports", plan, pool.devices)
    dofn.open(lambda: pool)
    since = Meter()
    shards = commit_shards(tasks, store, dofn, {}, lambda done, total, text: None)
    return sum(shard.meta["described"] for shard in shards) / since.elapsed()[0]


ROWS: dict[str, Callable[..., Row]] = {
    "devices": devices_row,
    "duplicates": duplicates.compared_row,
    "hashes": duplicates.grouping_row,
    "embeddings": duplicates.grouping_row,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
