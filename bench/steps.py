"""Comparisons of steps: the inputs of one call of the benchmark, and a row for a model's scale."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import inputs, ours
from bench.peer import SCRIPTS, Peer, PeerTime
from bench.report import Row, spread
from runtimes.process.job import TrainJob

WARM_UP = 5  # steps
RANK = 16
#: What both sides train with, where the scripts' defaults and ours differ.
COMMON: dict[str, Any] = {"learning_rate": 1e-4, "snr_gamma": 5.0}
OURS: dict[str, Any] = {
    **COMMON,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "adam_betas": (0.9, 0.999),
    "ema_decay": None,
    "caption_dropout_rate": 0.0,
    "checkpointing_steps": ours.NEVER,
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
class Scale:
    """A model, and what a step of it is given."""

    name: str
    write: Callable[[Path], Path]  # its pipeline, into a folder
    pictures: int
    size: int  # pixels a side
    batch: int
    part: int = 1  # timed steps are `--steps` divided by this
    family: str = "sdxl"
    train: Mapping[str, Any] = field(default_factory=dict)  # our settings besides OURS
    peer: Mapping[str, Any] = field(default_factory=dict)  # the script's options besides COMMON

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Ready:
    """A scale's inputs on disk."""

    model: Path
    images: Path
    latents: str


class Context:
    """One call of the benchmark: its options, and inputs made when they are first needed."""

    def __init__(self, folder: Path, peer: Peer | None, rounds: int, steps: int) -> None:
        self.folder, self.peer, self.rounds, self.steps = folder, peer, rounds, steps
        self.ready = cache(self._ready)

    def row(self, name: str, make: Callable[[Context, str], Row]) -> Row:
        """A row. One that fails says so, and the others are run nevertheless."""
        try:
            return make(self, name)
        except Exception as error:
            traceback.print_exc()
            return Row(name, failed=f"{type(error).__name__}: {error}")

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder that goes when it is no longer needed."""
        with TemporaryDirectory(dir=self.folder) as folder:
            yield Path(folder)

    def without(self, script: str) -> str:
        """Why a script cannot be run; nothing if it can."""
        return "give --diffusers-examples" if self.peer is None else self.peer.missing(script)

    def in_turns(
        self, theirs: Callable[[Path], Any], mine: Callable[[Path], Any]
    ) -> tuple[list[Any], list[Any]]:
        """Both sides' results of every round; the one that goes first changes."""
        results: tuple[list[Any], list[Any]] = ([], [])
        sides = (theirs, mine)
        for number in range(self.rounds):
            for side in (number % 2, 1 - number % 2):
                with self.scratch() as folder:
                    results[side].append(sides[side](folder))
        return results

    def _ready(self, scale: Scale) -> Ready:
        folder = self.folder / scale.name
        folder.mkdir()
        model = scale.write(folder / "model")
        images = inputs.write_images(folder / "images", scale.pictures, scale.size)
        latents = ours.encode(images, model, folder / "store", scale.size)
        return Ready(model, images, latents)

    def timed_steps(self, scale: Scale) -> int:
        """Steps of a round that count."""
        return max(2, self.steps // scale.part)

    def job(self, scale: Scale, method: str, folder: Path, **train: Any) -> TrainJob:
        """Our job of a scale."""
        ready = self.ready(scale)
        settings = {
            **OURS,
            "steps": WARM_UP + self.timed_steps(scale),
            "global_batch_size": scale.batch,
            **METHODS[method],
            **scale.train,
            **train,
        }
        return ours.make_job(ready.model, ready.latents, folder, WARM_UP, **settings)


def step_row(context: Context, name: str, *, scale: Scale, method: str) -> Row:
    """Seconds a step: the peer's script against our loop."""
    script = SCRIPTS[scale.family, method]
    if reason := context.without(script):
        return Row(name, left_out=reason)
    peer, ready = context.peer, context.ready(scale)
    assert peer is not None

    def theirs(folder: Path) -> tuple[PeerTime, int]:
        options = {
            "resolution": scale.size,
            "train_batch_size": scale.batch,
            # Of the last step no end is seen.
            "max_train_steps": WARM_UP + context.timed_steps(scale) + 1,
            **COMMON,
            **PEER_METHODS[method],
            **scale.peer,
        }
        ended = peer.run(script, ready.model, ready.images, folder, **options)
        return PeerTime.from_steps(ended.steps, WARM_UP), ended.memory_bytes

    def mine(folder: Path) -> ours.LoopTime:
        return ours.time_loop(context.job(scale, method, folder))

    their, our = context.in_turns(theirs, mine)
    row = compare_steps(name, [time for time, _ in their], our)
    row.figures["peer_memory_bytes"] = max(memory for _, memory in their)
    row.figures["unet_parameters"] = inputs.count_parameters(ready.model)
    return row


def compare_steps(name: str, theirs: list[PeerTime], mine: list[ours.LoopTime]) -> Row:
    """The row of a comparison of steps, from every round's times.

    Latents and text embeddings are precomputed on both sides: from a script that encodes in the
    step, that is taken away. Given as well are the ratios with nothing taken away, and with the
    script's reading and decoding of pictures taken away, too.
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
    for part in (*kinds, "fetch", "encode"):
        figures[f"peer_{part}_seconds"] = spread([getattr(their, part) for their in theirs])
    return Row(name, ratios, figures | loop_figures(mine))


def loop_figures(times: list[ours.LoopTime]) -> dict[str, Any]:
    """Our side's figures of all rounds."""
    figures: dict[str, Any] = {
        part: spread([getattr(time, part) for time in times])
        for part in ("seconds", "images_per_second", "data_wait")
    }
    figures["memory_bytes"] = max(time.memory_bytes for time in times)
    shares = [time.mfu for time in times if time.mfu is not None]
    return figures | ({"mfu": spread(shares)} if shares else {})
