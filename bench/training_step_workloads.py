"""Comparison of training steps: workloads, their input files, and a row of the table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import benchmark_inputs, run_kilnworks
from bench.report import Rounds, Row, Skip, attempt, finish, log, machine, spread
from bench.run_diffusers_scripts import SCRIPTS, Peer, PeerFailed, PeerTime, find_peer
from runtimes.process.job import TrainJob

WARM_UP = 5  # steps
WRONG_INPUT = 2  # exit code
THREADS = "OMP_NUM_THREADS"
RANK = 16
#: Settings of both sides whose defaults differ.
COMMON: dict[str, Any] = {"learning_rate": 1e-4, "snr_gamma": 5.0}
OURS: dict[str, Any] = {
    **COMMON,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "adam_betas": (0.9, 0.999),
    "ema_decay": None,
    "caption_dropout_rate": 0.0,
    "checkpointing_steps": run_kilnworks.NEVER,
    "sample_every_n_steps": 0,
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {
        "method": "lora",
        "lora": {"rank": RANK, "alpha": RANK, "target_modules": "attention"},
    },
}
PEER_METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"rank": RANK}}


@dataclass(frozen=True)
class Workload:
    """A model, its pictures and batch size."""

    name: str
    write: Callable[[Path], Path]  # writes the pipeline into a folder
    pictures: int
    size: int  # side of the pictures, in pixels
    batch: int
    steps_divisor: int = 1  # timed steps are `--steps` divided by this
    family: str = "sdxl"
    train: Mapping[str, Any] = field(default_factory=dict)  # settings besides OURS
    peer: Mapping[str, Any] = field(default_factory=dict)  # options of the script besides COMMON

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class InputFiles:
    """The files of a workload."""

    model: Path
    images: Path
    latents: str


class Context(Rounds):
    """One call of the benchmark: its options, and input files that are written at first use."""

    def __init__(self, folder: Path, peer: Peer | None, rounds: int, steps: int) -> None:
        super().__init__(folder, rounds)
        self.peer = peer
        self.steps = steps
        self.files = cache(self._write_files)

    def row(self, name: str, make: Callable[[Context, str], Row]) -> Row:
        """A row of the table; an error becomes a failed row."""
        return attempt(name, lambda: make(self, name))

    def peer_with(self, script: str) -> Peer:
        """The peer. Raises Skip if it does not have the script."""
        if self.peer is None:
            raise Skip("requires --diffusers-examples")
        if reason := self.peer.missing(script):
            raise Skip(reason)
        return self.peer

    def _write_files(self, workload: Workload) -> InputFiles:
        folder = self.folder / workload.name
        folder.mkdir()
        model = workload.write(folder / "model")
        images = benchmark_inputs.write_images(folder / "images", workload.pictures, workload.size)
        latents = run_kilnworks.encode(images, model, folder / "store", workload.size)
        return InputFiles(model, images, latents)

    def timed_steps(self, workload: Workload) -> int:
        """Timed steps per round."""
        return max(2, self.steps // workload.steps_divisor)

    def job(self, workload: Workload, method: str, folder: Path, **train: Any) -> TrainJob:
        """Our training job of a workload."""
        files = self.files(workload)
        settings = {
            **OURS,
            "steps": WARM_UP + self.timed_steps(workload),
            "global_batch_size": workload.batch,
            **METHODS[method],
            **workload.train,
            **train,
        }
        return run_kilnworks.make_job(files.model, files.latents, folder, WARM_UP, **settings)


def run_rows(
    bench: str, rows: Mapping[str, Callable[[Context, str], Row]], options: argparse.Namespace
) -> int:
    """Run the chosen rows of a benchmark beside diffusers' scripts, and publish them.

    Returns:
        Exit code: 1 if a row failed, 2 if --peer-python cannot run.
    """
    facts: dict[str, Any] = {"machine": machine(int(os.environ[THREADS]))}
    try:
        peer = find_peer(options, facts)
    except PeerFailed as error:
        log(f"error: {error}")
        return WRONG_INPUT
    with TemporaryDirectory(prefix="kiln-bench-") as folder:
        context = Context(Path(folder), peer, options.rounds, options.steps)
        finished = [context.row(name, rows[name]) for name in options.only or rows]
    return finish(bench, finished, options, **facts)


def step_row(context: Context, name: str, *, workload: Workload, method: str) -> Row:
    """Seconds per step: the script against our loop."""
    script = SCRIPTS[workload.family, method]
    peer = context.peer_with(script)
    files = context.files(workload)

    def theirs(folder: Path) -> tuple[PeerTime, int]:
        options = {
            "resolution": workload.size,
            "train_batch_size": workload.batch,
            # The end of the last step cannot be timed.
            "max_train_steps": WARM_UP + context.timed_steps(workload) + 1,
            **COMMON,
            **PEER_METHODS[method],
            **workload.peer,
        }
        run = peer.run(script, files.model, files.images, folder, **options)
        return PeerTime.from_steps(run.steps, WARM_UP), run.memory_bytes

    def mine(folder: Path) -> run_kilnworks.LoopTime:
        return run_kilnworks.time_loop(context.job(workload, method, folder))

    their, our = context.alternate(theirs, mine)
    row = compare_steps(name, [time for time, _ in their], our)
    row.figures["peer_memory_bytes"] = max(memory for _, memory in their)
    row.figures["unet_parameters"] = benchmark_inputs.count_parameters(files.model)
    return row


def compare_steps(name: str, theirs: list[PeerTime], mine: list[run_kilnworks.LoopTime]) -> Row:
    """The row of a comparison, from the times of all rounds.

    The main ratio excludes the encoding of a script that encodes in the step, because ours is
    precomputed. `_whole_iteration` includes it; `_training_only` also excludes the script's reading
    and decoding of pictures.
    """
    pairs = list(zip(theirs, mine, strict=True))
    kinds = {
        kind: spread([getattr(their, kind) / our.seconds for their, our in pairs])
        for kind in ("precomputed", "training", "iteration")
    }
    ratios = {name: kinds["precomputed"]["median"]}
    ratios[f"{name}_training_only"] = kinds["training"]["median"]
    if any(their.encode for their in theirs):
        ratios[f"{name}_whole_iteration"] = kinds["iteration"]["median"]
    figures: dict[str, Any] = {f"ratio_{kind}": values for kind, values in kinds.items()}
    for kind in (*kinds, "fetch", "encode"):
        figures[f"peer_{kind}_seconds"] = spread([getattr(their, kind) for their in theirs])
    return Row(name, ratios, figures | loop_figures(mine))


def loop_figures(times: list[run_kilnworks.LoopTime]) -> dict[str, Any]:
    """Figures of our side over all rounds."""
    figures: dict[str, Any] = {
        name: spread([getattr(time, name) for time in times])
        for name in ("seconds", "images_per_second", "data_wait")
    }
    figures["memory_bytes"] = max(time.memory_bytes for time in times)
    shares = [time.mfu for time in times if time.mfu is not None]
    return figures | ({"mfu": spread(shares)} if shares else {})
