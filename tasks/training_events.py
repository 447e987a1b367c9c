"""Events of a training process: progress, log lines, and the facts of its run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

from artifacts.filesystems import matching
from artifacts.records import FileEntry, write_atomic
from runtimes.train.measurements import scores_path
from tasks.child_process import Event
from tasks.panels import Chart, Panel, PicturePanel, Table, human
from tasks.panels_charts import loss_chart
from tasks.progress import Progress
from tasks.show_in_prefect import show_in_prefect

#: Figures of the last progress event in the manifest; null if unknown.
FIGURES = ("images_per_second", "data_wait", "memory_bytes", "tflops", "mfu")
#: Facts of the chosen checkpoint in the summary, with `train.best_checkpoint`.
CHOSEN = ("chosen_step", "chosen_because", "stopped_early")
#: Scores of samples, by name; the PNG has all samples of a step side by side.
Score = Callable[[bytes], dict[str, float]]
log = logging.getLogger("kiln")


@dataclass
class Watch:
    """Converts the events of a training process to progress, log lines and facts of the run."""

    progress: Progress
    fs: AbstractFileSystem
    score: Score | None  # None: the job has no prompts, so nothing is drawn
    facts: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> of its samples
    files: list[FileEntry] = field(default_factory=list)  # written by the process
    chosen: dict[str, Any] = field(default_factory=dict)  # by train.best_checkpoint

    def __call__(self, event: Event) -> None:
        """Call `_on_KIND`, if there is one, for an event of that kind."""
        if (handler := getattr(self, f"_on_{event['event']}", None)) is not None:
            handler(event)

    def _on_start(self, event: Event) -> None:
        self.facts |= {"device": event["device"], "resumed_from": event["step"]}
        if event["step"]:
            log.info("train: resuming from step %d", event["step"])

    def _on_progress(self, event: Event) -> None:
        self.facts |= {name: event[name] for name in FIGURES}
        self.history.append(event)
        self.progress(event["step"], event["total"], _progress_text(event))

    def _on_result(self, event: Event) -> None:
        self.files = [FileEntry(**file) for file in event["files"]]
        self.facts["images_per_second"] = event["images_per_second"]
        if event.get("chosen_because"):
            self.chosen = {name: event[name] for name in CHOSEN}
            step, why = event["chosen_step"], event["chosen_because"]
            log.info("train: the weights are those of step %d, %s", step, why)

    def _on_sample(self, event: Event) -> None:
        heading = f"{self.progress.stage}: step {event['step']}"
        self._score(event["step"], event["path"])
        show_in_prefect(self.progress.key, heading, partial(self._panels, event["path"]))

    def _on_validation(self, event: Event) -> None:
        log.info("train: held-out loss %.4f at step %d", event["loss"], event["step"])
        if self.history and self.history[-1]["step"] == event["step"]:
            self.history[-1] = {**self.history[-1], "validation_loss": event["loss"]}

    def _on_back(self, event: Event) -> None:
        self.history = [line for line in self.history if line["step"] <= event["step"]]
        self.scores = {n: kept for n, kept in self.scores.items() if n <= event["step"]}

    def all_scores(self, folder: str) -> list[dict[str, Any]]:
        """Scores of all samples in a folder, including those from before a resume."""
        for path in matching(self.fs, folder, "step-*.png"):
            step = int(Path(path).stem.removeprefix("step-"))
            if step not in self.scores:
                self._score(step, path)
        return self._score_lines()

    def _score_lines(self) -> list[dict[str, Any]]:
        return [{"step": step, **self.scores[step]} for step in sorted(self.scores)]

    def _score(self, step: int, path: str) -> None:
        assert self.score is not None
        try:
            found = self.score(bytes(self.fs.cat_file(path)))
        except Exception as error:  # a score must not stop a run; the evaluation reports the error
            log.warning("train: no scores of the pictures at step %d: %s", step, error)
            found = {}
        else:
            self.scores[step] = found
            text = ", ".join(f"{name} {human(value)}" for name, value in found.items())
            log.info("train: samples of step %d: %s", step, text)
        try:  # train.best_checkpoint may wait for it
            write_atomic(self.fs, scores_path(path), json.dumps(found).encode())
        except Exception as error:  # clients of remote stores define their own exception types
            log.warning("train: the scores of step %d could not be written: %s", step, error)

    def _panels(self, path: str) -> list[Panel]:
        return [
            Chart("Loss", loss_chart(self.history)),
            PicturePanel("Samples while training", bytes(self.fs.cat_file(path))),
            Table("Scores of the samples", self._score_lines()),
        ]


def _progress_text(event: Event) -> str:
    left = int(event["eta_seconds"])
    minutes, seconds = divmod(left, 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    return f"loss {event['loss']:.4f} · {event['images_per_second']:.1f} images/s · {clock} left"
