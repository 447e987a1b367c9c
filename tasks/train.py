"""The train stage: latent shards in, fine-tuned weights out, by a runtime in its own process."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

from artifacts.latents import open_latents
from artifacts.models import digest_model
from artifacts.store import Artifact, Draft, KeyParts
from configs.schema import Recipe
from configs.training import key_settings
from runtimes.families import detect_family
from runtimes.pipeline_folder.describe import read_config
from runtimes.process.job import TrainJob
from tasks.evaluate.pictures import SAMPLER_SETTINGS
from tasks.panels import Facts, Panel, Picture, Table, human
from tasks.process import Event, run_job
from tasks.progress import Progress
from tasks.show import show_in_prefect
from tasks.stage import runtime_facts
from tasks.tpu import launch

STAGE = "train"
VERSION = 1
#: What is kept of the progress that a run makes; those not known are null.
FIGURES = ("images_per_second", "data_wait", "memory_bytes", "tflops", "mfu")
#: What pictures while training are worth, by name; a PNG has all of a step side by side.
Score = Callable[[bytes], dict[str, float]]
log = logging.getLogger("kiln")


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that change the trained weights.

    Not among them is how the run is carried out, which may change at a resume; nor the runtime.
    """
    settings = key_settings(recipe.train)
    if (config := _denoiser_config(recipe)) is not None:  # what it says, wherever it lies
        settings["denoiser_config"] = config
    return settings


def key_parts(recipe: Recipe, latents: Artifact, model_folder: Path) -> KeyParts:
    """What the trained weights depend on: settings, latents, and the weights that are tuned."""
    family = detect_family(model_folder)
    texts = family.clip_encoders if recipe.train.train_text_encoder else ()
    base = digest_model(model_folder, (family.denoiser, "scheduler", *texts))
    inputs = {"latents": latents.digest, "base": base}
    return KeyParts(STAGE, VERSION, settings_for_key(recipe), inputs)


def _denoiser_config(recipe: Recipe) -> dict[str, Any] | None:
    path = recipe.train.denoiser_config
    return None if path is None else read_config(Path(path))


def build(
    recipe: Recipe,
    latents: Artifact,
    model_folder: Path,
    vae_folder: Path | None,
    sample_prompts: tuple[str, ...],
    score: Score,
    draft: Draft,
    progress: Progress,
) -> dict[str, Any]:
    """Train in the draft's folder, resuming from checkpoints that an earlier run left there."""
    job = TrainJob(
        runtime=recipe.runtime,
        model=str(model_folder),
        vae=None if vae_folder is None else str(vae_folder),
        latents=latents.uri,
        train=recipe.train.with_steps(_count(latents)).model_dump(mode="json"),
        work=draft.uri,
        out=draft.uri,
        sample_prompts=sample_prompts,
        sampler=recipe.evaluate.model_dump(mode="json", include=SAMPLER_SETTINGS | {"batch_size"}),
        denoiser_config=_denoiser_config(recipe),
        compiled=draft.store.compiled_url,
    )
    watched = _Watch(progress, draft.store.fs, score)
    grace = recipe.train.grace_seconds
    if recipe.tpu is None:
        run_job(job, watched, grace_seconds=grace)
    else:
        launch.run_on_slice(recipe.tpu, job, watched, store=draft.store, grace_seconds=grace)
    for path in watched.files:
        draft.add(path)
    history = _history(draft.store.fs.cat_file(f"{draft.path}/history.jsonl"))
    here = recipe.tpu is None
    run = (runtime_facts(recipe.runtime) if here else {"runtime": recipe.runtime}) | watched.facts
    if scores := watched.all_scores(f"{draft.path}/samples"):
        run["sample_scores"] = scores
    return _summary(recipe, history) | {"run": run}


def _count(latents: Artifact) -> int:
    """Training samples of a latents artifact; a mirrored copy is no other sample."""
    groups = (ref.groups for ref in open_latents(latents.uri).shards)
    return sum(n for shard in groups for name, n in shard.items() if name.startswith("train/"))


def _summary(recipe: Recipe, history: list[dict[str, Any]]) -> dict[str, Any]:
    tail = [line["loss"] for line in history[-max(1, len(history) // 10) :]]
    validated = [line for line in history if "validation_loss" in line]
    left_out = sum(len(line.get("skipped", ())) for line in history)
    return {
        "steps": len(history),
        "samples_seen": len(history) * recipe.train.global_batch_size,
        "loss_last_tenth": sum(tail) / len(tail),
        **({"validation_loss": validated[-1]["validation_loss"]} if validated else {}),
        **({"batches_left_out": left_out} if left_out else {}),
    }


def show(artifact: Artifact) -> list[Panel]:
    """The loss curve, the last sample pictures, and the figures of the run."""
    history = _history(artifact.read("history.jsonl"))
    run = artifact.manifest["run"]
    kept = ("runtime", "device", *FIGURES, "seconds")
    facts = {name.replace("_", " "): run[name] for name in kept if run.get(name) is not None}
    facts["TensorBoard"] = f"{artifact.uri}/tensorboard"
    panels: list[Panel] = [
        Facts("Run", {**artifact.summary, **facts}),
        Picture("Loss", loss_curve(history)),
    ]
    if (png := _last_sample(artifact)) is not None:
        panels.append(Picture("Samples while training", png))
    if scores := run.get("sample_scores"):
        panels.append(Table("Scores of the samples", scores))
    return panels


def loss_curve(history: list[dict[str, Any]]) -> bytes:
    """A PNG of the loss of every step, its running mean, the held-out loss, the learning rate."""
    from matplotlib.figure import Figure

    steps = [line["step"] for line in history]
    losses = [line["loss"] for line in history]
    figure = Figure(figsize=(7, 3.2), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#c9b8a8", linewidth=0.8, label="loss")
    axes.plot(steps, _running_mean(losses), color="#b5451b", linewidth=1.8, label="running mean")
    if held_out := [line for line in history if "validation_loss" in line]:
        points = [(line["step"], line["validation_loss"]) for line in held_out]
        axes.plot(*zip(*points, strict=True), color="#4a7a3f", marker=".", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    rates = axes.twinx()
    rates.plot(steps, [line["learning_rate"] for line in history], color="#3b6ea5", linewidth=0.8)
    rates.set_ylabel("learning rate", color="#3b6ea5")
    axes.legend(loc="upper right", frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


class _Watch:
    """Turns the process's events into progress, log lines and facts about the run."""

    def __init__(self, progress: Progress, fs: AbstractFileSystem, score: Score) -> None:
        self.fs = fs
        self.progress = progress
        self.score = score
        self.facts: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.scores: dict[int, dict[str, float]] = {}  # of the pictures of a step
        self.files: list[str] = []  # what the run has written

    def __call__(self, event: Event) -> None:
        if event["event"] == "start":
            self.facts["device"] = event["device"]
            self.facts["resumed_from"] = event["step"]
            if event["step"]:
                log.info("train: resuming from step %d", event["step"])
        elif event["event"] == "progress":
            self.facts |= {name: event[name] for name in FIGURES}
            self.history.append(event)
            self.progress(event["step"], event["total"], _in_words(event))
        elif event["event"] == "result":
            self.files = event["files"]
            self.facts["images_per_second"] = event["images_per_second"]
        elif event["event"] == "sample":
            heading = f"{STAGE}: step {event['step']}"
            self._score(event["step"], event["path"])
            show_in_prefect(self.progress.key, heading, partial(self._so_far, event["path"]))
        elif event["event"] == "validation":
            log.info("train: held-out loss %.4f at step %d", event["loss"], event["step"])
            if self.history and self.history[-1]["step"] == event["step"]:
                self.history[-1] = {**self.history[-1], "validation_loss": event["loss"]}
        elif event["event"] == "back":
            self.history = [line for line in self.history if line["step"] <= event["step"]]
            self.scores = {n: kept for n, kept in self.scores.items() if n <= event["step"]}
        elif event["event"] == "checkpoint":
            log.debug("train: checkpoint at step %d", event["step"])

    def all_scores(self, folder: str) -> list[dict[str, Any]]:
        """Those of every step whose pictures are in a folder, also from before a resume."""
        for path in sorted(self.fs.glob(f"{folder}/step-*.png")):
            step = int(Path(path).stem.removeprefix("step-"))
            if step not in self.scores:
                self._score(step, path)
        return self._score_lines()

    def _score_lines(self) -> list[dict[str, Any]]:
        return [{"step": step, **self.scores[step]} for step in sorted(self.scores)]

    def _score(self, step: int, path: str) -> None:
        try:
            found = self.score(bytes(self.fs.cat_file(path)))
        except Exception as error:  # no run ends for a score; the evaluation says what is wrong
            log.warning("train: no scores of the pictures at step %d: %s", step, error)
            return
        self.scores[step] = found
        said = ", ".join(f"{name} {human(value)}" for name, value in found.items())
        log.info("train: step %d draws with %s", step, said)

    def _so_far(self, path: str) -> list[Panel]:
        return [
            Picture("Loss", loss_curve(self.history)),
            Picture("Samples while training", bytes(self.fs.cat_file(path))),
            Table("Scores of the samples", self._score_lines()),
        ]


def _in_words(event: Event) -> str:
    left = int(event["eta_seconds"])
    minutes, seconds = divmod(left, 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    return f"loss {event['loss']:.4f} · {event['images_per_second']:.1f} images/s · {clock} left"


def _history(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line]


def _running_mean(values: list[float], decay: float = 0.95) -> list[float]:
    """Exponential mean corrected for its start (Adam's bias correction)."""
    means, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = decay * mean + (1 - decay) * value
        means.append(mean / (1 - decay**count))
    return means


def _last_sample(artifact: Artifact) -> bytes | None:
    fs, folder = artifact.store.fs, f"{artifact.path}/samples"
    pictures = sorted(fs.glob(f"{folder}/*.png")) if fs.exists(folder) else []
    return bytes(fs.cat_file(pictures[-1])) if pictures else None
