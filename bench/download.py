"""Compare downloads with img2dataset's: `python -m bench.download [--row NAME] [--rounds N]`.

Both sides fetch the same list from one loopback server, resize to 256 pixels and write shards of
1,000. They alternate. img2dataset runs with its own multiprocessing distributor in two processes,
ours with its default runner in one. Rates start with the first request, CPU time with the command:
it includes imports and, on our side, planning.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.benchmark_inputs import list_recipe
from bench.report import Rounds, Row, finish, log, option_parser, spread

ROUNDS = 5
IMAGE_SIZE = 256  # pixels; img2dataset's default
QUALITY = 90  # of the served JPEGs


@dataclass(frozen=True)
class Workload:
    """A list of pictures, and how both sides fetch it."""

    ratio: str  # name
    kind: str  # folder of the server
    pace: str  # fast or slow
    pictures: int
    threads: int  # of img2dataset, per process
    processes: int = 2  # of img2dataset
    connections: int = 256  # of ours
    shard_size: int = 1000
    image_size: int = IMAGE_SIZE
    resize_mode: str = "keep_ratio"


WORKLOADS = {
    "small": Workload("rate_vs_img2dataset", "small", "fast", 6000, 64),
    # The default mode of img2dataset.
    "small, border": Workload(
        "rate_border_vs_img2dataset", "small", "fast", 6000, 64, resize_mode="border"
    ),
    "large": Workload("rate_large_vs_img2dataset", "large", "fast", 1000, 64, shard_size=250),
    # Connections over the mean answer of 1.25 s bound the rate, so both sides have equally many.
    "slow": Workload("rate_slow_vs_img2dataset", "small", "slow", 6000, 64, connections=128),
    "slow, 256 threads": Workload(
        "rate_slow_vs_256_threads", "small", "slow", 6000, 256, connections=512
    ),
    # As many connections as take less memory than those of img2dataset.
    "slow, equal memory": Workload(
        "rate_slow_equal_memory", "small", "slow", 6000, 64, connections=512
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Compare and print; 1 if a side lacks pictures."""
    parser = option_parser("download", __doc__, ROUNDS)
    parser.add_argument("--row", action="append", choices=WORKLOADS, help="default: all")
    parser.add_argument("--pictures", type=int, help="instead of 6,000 or 1,000")
    parser.add_argument("--quick", action="store_true", help="few small pictures, once")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side:
        job = json.loads(options.job)
        SIDES[options.side](Workload(**job["workload"]), Path(job["list"]), Path(job["out"]), job)
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="kiln-bench-") as scratch,
        photo_server(Path(scratch), is_quick=options.quick) as host,
    ):
        rows = []
        for name in options.row or WORKLOADS:
            chosen = WORKLOADS[name]
            if options.pictures:
                chosen = replace(chosen, pictures=options.pictures)
            if options.quick:
                chosen = replace(chosen, pictures=40, shard_size=20)
            rows.append(
                _row(name, chosen, host, Path(scratch), 1 if options.quick else options.rounds)
            )
    packages = ("kilnworks", "img2dataset", "aiohttp", "opencv-python-headless")
    return finish("download", rows, options, packages)


def _row(name: str, workload: Workload, host: str, scratch: Path, rounds: int) -> Row:
    import pyarrow as pa
    import pyarrow.parquet as pq

    prefix = f"http://{host}/{workload.kind}/{workload.pace}"
    urls = [f"{prefix}/{number}.jpg" for number in range(workload.pictures)]
    listed = scratch / f"{workload.kind}-{workload.pace}.parquet"
    pq.write_table(
        pa.table({"url": urls, "caption": [f"picture {n}" for n in range(len(urls))]}), listed
    )

    def measured(side: str, out: Path) -> dict[str, float]:
        log(f"{name}: {side}")
        return _measured(side, workload, listed, out, host)

    sides = sorted(SIDES)
    results = Rounds(scratch, rounds).alternate(*(partial(measured, side) for side in sides))
    by_side = dict(zip(sides, results, strict=True))
    row = Row(name)
    pairs = list(zip(by_side["ours"], by_side["img2dataset"], strict=True))
    row.ratios[workload.ratio] = spread([b["seconds"] / a["seconds"] for a, b in pairs])["median"]
    for side, runs in by_side.items():
        for figure in ("pictures_per_second", "cpu_ms_per_picture", "peak_mib", "whole_seconds"):
            row.figures[f"{side}_{figure}"] = spread([run[figure] for run in runs])
        counts = [run["pictures"] for run in runs if run["pictures"] != workload.pictures]
        if counts:
            row.failed = f"{side} has {counts[0]:.0f} of {workload.pictures} pictures"
    return row


def _measured(
    side: str, workload: Workload, listed: Path, out: Path, host: str
) -> dict[str, float]:
    job = {"workload": asdict(workload), "list": str(listed), "out": str(out), "host": host}
    command = [sys.executable, "-m", "bench.download", "--side", side, "--job", json.dumps(job)]
    environment = {**os.environ, "KILN_CACHE": str(out / "cache"), "NO_ALBUMENTATIONS_UPDATE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    since = time.perf_counter()
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = [0.0]
    watcher = threading.Thread(target=_watch_memory, args=(child, peak), daemon=True)
    watcher.start()
    errors = child.communicate()[1].decode()
    whole = time.perf_counter() - since
    with urllib.request.urlopen(f"http://{host}/seconds") as answer:
        seconds = float(answer.read())
    watcher.join()
    if child.returncode:
        raise RuntimeError(f"{side}: {errors[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds,
        "whole_seconds": whole,
        "pictures": _pictures(out),
        "pictures_per_second": workload.pictures / seconds,
        "cpu_ms_per_picture": 1000 * cpu / workload.pictures,
        "peak_mib": peak[0],
    }


def _pictures(out: Path) -> int:
    """Pictures in all tars of a folder."""
    import tarfile

    count = 0
    for file in out.rglob("*.tar"):
        with tarfile.open(file) as tar:
            count += sum(name.endswith(".jpg") for name in tar.getnames())
    return count


def _watch_memory(child: subprocess.Popen[bytes], peak: list[float]) -> None:
    """Proportional memory of the child and its descendants, in MiB, twice a second."""
    while child.poll() is None:
        total = 0
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(child.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):  # it ended
                    total += process.memory_full_info().pss
        peak[0] = max(peak[0], total / 2**20)
        time.sleep(0.5)


def _ours(workload: Workload, listed: Path, out: Path, job: dict[str, Any]) -> None:
    from artifacts.store import Store
    from tasks import download

    settings = {
        "image_size": workload.image_size,
        "resize_mode": workload.resize_mode,
        "max_connections": workload.connections,
        "max_connections_per_host": workload.connections,
        "max_requests_per_host": None,
        "allow_hosts": [job["host"]],
        "shard_size": workload.shard_size,
    }
    recipe = list_recipe(out, path=str(listed), download=settings)
    plan = download.plan(recipe)
    stage = download.DownloadStage(recipe, plan)
    draft = Store(recipe.store).draft(stage.parts)
    draft.commit(stage.build(draft, lambda *_: None), {})


def _img2dataset(workload: Workload, listed: Path, out: Path, job: dict[str, Any]) -> None:
    from img2dataset import download

    download(
        url_list=str(listed),
        input_format="parquet",
        url_col="url",
        caption_col="caption",
        output_folder=str(out / "pictures"),
        output_format="webdataset",
        processes_count=workload.processes,
        thread_count=workload.threads,
        image_size=workload.image_size,
        resize_mode=workload.resize_mode,
        resize_only_if_bigger=True,
        encode_quality=95,
        number_sample_per_shard=workload.shard_size,
        distributor="multiprocessing",
        compute_hash="sha256",
        enable_wandb=False,
    )


SIDES = {"ours": _ours, "img2dataset": _img2dataset}


@contextmanager
def photo_server(folder: Path, *, is_quick: bool) -> Iterator[str]:
    """host:port of a server of small and large pictures, in a process of its own."""
    pictures = folder / "pictures"
    for number in range(4 if is_quick else 64):
        width, height = np.random.default_rng(number).integers(400, 901, 2)
        _write_photo(pictures / "small" / f"{number:03}.jpg", int(width), int(height), number)
    for number in range(1 if is_quick else 8):
        size = (1200, 900) if is_quick else (4000, 3000)
        _write_photo(pictures / "large" / f"{number:03}.jpg", *size, number)
    command = [sys.executable, "-m", "bench.picture_server", str(pictures)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        yield f"127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.stdin.close()
        server.wait()


def _write_photo(file: Path, width: int, height: int, seed: int) -> None:
    """A JPEG with detail at all scales and noise, of about the size of a photograph's."""
    import cv2

    draw = np.random.default_rng(seed)
    picture = np.zeros((height, width, 3), np.float32)
    for cells in (4, 16, 64, 256):
        shape = (max(2, cells * height // width), cells, 3)
        grain = draw.random(shape, np.float32) / cells**0.5
        picture += cv2.resize(grain, (width, height), interpolation=cv2.INTER_CUBIC)
    picture = (picture - picture.min()) / np.ptp(picture)
    picture += draw.normal(0, 0.02, picture.shape).astype(np.float32)
    file.parent.mkdir(parents=True, exist_ok=True)
    levels = (picture.clip(0, 1) * 255).astype(np.uint8)
    file.write_bytes(cv2.imencode(".jpg", levels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
