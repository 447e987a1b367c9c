"""A Dask cluster of Slurm jobs, for the stages download, describe, caption and encode:

    .venv/bin/python deploy/slurm/dask_cluster.py --jobs 8 --workers 4 --memory 16GB

Run it where jobs are submitted, in a checkout that all hosts share. It prints the options of
`kiln run`, keeps that number of jobs (a job that ends or is cancelled is replaced), and cancels
them when it is interrupted. One job per GPU, for encode:

    dask_cluster.py --jobs 8 --memory 64GB --partition gpu --option=--gpus-per-node=1

Dask has no passwords: use a trusted network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from dask_jobqueue import SLURMCluster

import tasks.beam.pipeline  # noqa: F401  (the scheduler reads its objects; this import prints nothing)
from tasks.hosts.engine import passed_environment


def main(words: list[str]) -> int:
    """Keep the cluster until SIGINT or SIGTERM; the exit code is 2 without Slurm."""
    wanted = parse(words)
    if shutil.which("sbatch") is None:
        print("dask_cluster: no sbatch here: run it where jobs are submitted", file=sys.stderr)
        return 2
    # A job gets all variables of this process, so it keeps none with secrets.
    passed = passed_environment(("SLURM_CONF", *wanted.environment))
    os.environ.clear()
    os.environ.update(passed)
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # also in the threads of Dask
    with make_cluster(wanted) as cluster:
        cluster.adapt(minimum_jobs=wanted.jobs, maximum_jobs=wanted.jobs)
        address = cluster.scheduler_address
        print(f"-o beam.runner=DaskRunner -o beam.dask_client_address={address}", flush=True)
        signal.sigwait(signals)
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """The options. Exits with 2 and a message if one is wrong."""
    parser = argparse.ArgumentParser(prog="dask_cluster.py")
    parser.add_argument("--jobs", type=int, required=True, help="Slurm jobs to keep")
    parser.add_argument("--workers", type=int, default=1, help="workers of a job, one core each")
    parser.add_argument("--memory", required=True, help="memory of a job, such as 16GB")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--time", default="24:00:00", help="time limit of a job")
    parser.add_argument("--host", help="address of this machine that the hosts reach")
    parser.add_argument("--port", type=int, default=8786)
    parser.add_argument("--logs", type=Path, default=Path("slurm-logs"), help="folder of logs")
    parser.add_argument("--option", action="append", default=[], help="further option of sbatch")
    parser.add_argument(
        "--environment", action="append", default=[], help="variable for workers: AWS_PROFILE"
    )
    wanted = parser.parse_args(words)
    if min(wanted.jobs, wanted.workers) < 1:
        parser.error("--jobs and --workers are positive")
    return wanted


def make_cluster(wanted: argparse.Namespace) -> SLURMCluster:
    """A cluster with its scheduler in this process, and no job yet."""
    return SLURMCluster(
        job_name="kiln-dask",
        cores=wanted.workers,
        processes=wanted.workers,  # one thread each: download has an event loop of its own
        memory=wanted.memory,
        queue=wanted.partition,
        account=wanted.account,
        walltime=wanted.time,
        log_directory=str(wanted.logs),
        job_extra_directives=wanted.option,
        worker_extra_args=["--preload", "tasks.beam.pipeline", "--no-dashboard"],
        scheduler_options={"host": wanted.host, "port": wanted.port, "dashboard": False},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
