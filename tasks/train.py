"""The train stage: latent shards in, fine-tuned weights out, by a runtime in its own process.

A finished run is continued with more steps: its newest and its best checkpoint are copied. Before
any stage runs, a recipe's training targets are checked against its base's files, and settings of
guidance that the model ignores are refused. The events of the training process are its progress,
its log lines, and the facts of its run.
"""

from __future__ import annotations

import fractions
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from artifacts.errors import refusals
from artifacts.filesystems import entries, matching, name_of, subfolders
from artifacts.latent_shards import Latents, open_latents
from artifacts.models import digest_model, digest_model_file, resolve_file, resolve_model
from artifacts.records import FileEntry, digest_bytes, write_atomic
from artifacts.safetensors import Arrays, write_arrays, writing
from artifacts.store import MANIFEST, Artifact, Draft, Store
from configs.checks import Finding, note
from configs.errors import Refused, naming
from configs.secrets import without_secrets
from configs.settings.evaluate import Evaluate
from configs.settings.generate import Generate
from configs.settings.recipe import Recipe, StageName
from configs.settings.sources import samples_per_epoch
from configs.settings.train import Train
from configs.settings.train_parts import Lora
from runtimes.adapters import read_layouts
from runtimes.adapters.lora import Adapter, choose_layers, layers_of
from runtimes.adapters.lora_files import to_kohya
from runtimes.families import all_families
from runtimes.families.family import Family
from runtimes.pipeline_folder.folder import Base, replacement_config, trained_config
from runtimes.pipeline_folder.weights import weight_shapes
from runtimes.process.job import TrainJob
from runtimes.train.validation import CheckpointRanking, scores_path
from tasks.build_or_reuse import Stage
from tasks.child_process import Event, run_job
from tasks.code_version import runtime_facts
from tasks.control_pictures import ControlPictures, sources_with_pictures
from tasks.evaluate.draw import sampler_settings
from tasks.evaluate.metrics import SampleScorer, sample_metrics, sample_prompts
from tasks.hosts.attempts import run_on_hosts
from tasks.hosts.choose import Hosts
from tasks.panels import Chart, Facts, Panel, PicturePanel, Strip, Table, human
from tasks.panels_charts import loss_chart, trials_chart
from tasks.progress import Progress, show_in_prefect

#: Settings without effect on the weights of a step, unless Train.weights_depend_on_steps.
STEPS = ("steps", "epochs")
log = logging.getLogger("kiln")


def copy_checkpoint(draft: Draft, settings: Train) -> None:
    """Copy the newest checkpoint, within the steps, of finished runs that differ in steps alone.

    With a rule for the best checkpoint, copy the best, too. A newest checkpoint does not count if
    its best is deleted. A draft with checkpoints of its own keeps them. The weights of a step must
    not depend on the number of steps.
    """
    fs = draft.store.fs
    ours = draft.parts
    if _checkpoint_folders(fs, draft.path):
        return
    folders: dict[int, str] = {}
    for artifact in _artifacts(draft.store, ours.stage):
        theirs = {name: artifact.manifest.get(name) for name in ours.as_dict()}
        if _without_steps(theirs) == _without_steps(ours.as_dict()):
            folders |= _checkpoint_folders(fs, artifact.path)
    for step in sorted((step for step in folders if step <= settings.steps), reverse=True):
        try:
            best = _best_of(fs, folders[step], settings) or step
        except (FileNotFoundError, KeyError, ValueError) as error:  # gc may delete it now
            log.warning("%s: checkpoint %s is skipped: %s", ours.stage, folders[step], error)
            continue
        if best not in folders:
            continue
        log.info("%s: continuing a run of other steps from its step %d", ours.stage, step)
        with suppress(FileNotFoundError):  # `kiln gc` deletes checkpoints of finished runs
            for copied in sorted({best, step}):  # the newest last: a resume from it needs the best
                _copy_folder(fs, folders[copied], f"{draft.path}/checkpoints")
        return


def _best_of(fs: AbstractFileSystem, folder: str, settings: Train) -> int | None:
    """The best step up to a checkpoint, by the rule; None without a rule or a score."""
    if settings.best_checkpoint is None:
        return None
    with refusals():
        history = fs.cat_file(f"{folder}/history.jsonl").decode().splitlines()
    return next(iter(CheckpointRanking(settings).best_first(history)), None)


def _copy_folder(fs: AbstractFileSystem, source: str, parent: str) -> None:
    folder = f"{parent}/{source.rpartition('/')[2]}"
    fs.makedirs(folder, exist_ok=True)
    names = (str(path).rpartition("/")[2] for path in fs.ls(source, detail=False))
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):  # the manifest commits
        fs.cp_file(f"{source}/{name}", f"{folder}/{name}")


def _artifacts(store: Store, stage: str) -> Iterator[Artifact]:
    """The artifacts of a stage with a readable manifest."""
    for key in subfolders(store.fs, f"{store.root}/{stage}"):
        with suppress(ValueError):
            if (artifact := store.load(stage, key)) is not None:
                yield artifact


def _checkpoint_folders(fs: AbstractFileSystem, path: str) -> dict[int, str]:
    """Folders of the committed checkpoints in a run's folder, by step."""
    names = subfolders(fs, f"{path}/checkpoints")
    steps = {int(m[1]): m[0] for name in names if (m := re.fullmatch(r"step-(\d+)", name))}
    folders = {step: f"{path}/checkpoints/{name}" for step, name in steps.items()}
    return {n: f for n, f in folders.items() if MANIFEST in map(name_of, entries(fs, f))}


def _without_steps(parts: dict[str, Any]) -> dict[str, Any]:
    settings = dict(parts["settings"] or {})
    return {**parts, "settings": {n: v for n, v in settings.items() if n not in STEPS}}


def check_guidance(settings: Evaluate | Generate, base: Base, prefix: str = "") -> None:
    """Raise Refused if the model ignores `guidance_scale` or `true_cfg_scale`.

    Args:
        base: the model.
        prefix: what precedes the names of settings, such as `evaluate.`.
    """
    family = base.family
    if settings.true_cfg_scale != 1 and not family.guidance_input:
        raise Refused(
            f"{prefix}true_cfg_scale: it is for flux, not {family.name}: set guidance_scale"
        )
    scale = settings.guidance_scale
    if scale is None or scale <= 1 or not ignores_guidance(base):
        return
    if not family.guidance_input:
        raise Refused(f"{prefix}guidance_scale: this model is distilled and ignores it: set 1")
    raise Refused(
        f"{prefix}guidance_scale: this model takes no guidance scale: set 1 "
        "(true_cfg_scale is that of classifier-free guidance)"
    )


def ignores_guidance(base: Base) -> bool:
    """Whether a pipeline draws the same with every `guidance_scale`."""
    family = base.family
    return base.is_distilled or (family.guidance_input and not family.takes_guidance(base.denoiser))


def check(recipe: Recipe, base: Base) -> None:
    """Raise Refused if the base lacks a target layer or cannot become the asked denoiser."""
    settings = recipe.train
    family = base.family
    if settings.method == "lora":
        _adapted_layers(settings.lora, base)
        read_adapter_files(settings, base)
    if settings.method == "controlnet":
        if family.control is None:
            known = ", ".join(f.name for f in all_families().values() if f.control is not None)
            raise Refused(
                f"controlnet is for {known}, not {family.name}: set full or lora",
                setting="train.method",
            )
        control_shapes(settings, base)
    if settings.guidance_scale != 1 and not family.takes_guidance(base.denoiser):
        raise Refused("train.guidance_scale: the base takes no guidance scale: set 1")
    if settings.train_text_encoder and not family.clip:
        raise Refused(
            f"a model of family {family.name} has no CLIP encoder, and "
            "others are not trained: set false",
            setting="train.train_text_encoder",
        )
    if recipe.encode.text == "token_ids" and (encoder := family.frozen_text) is not None:
        raise Refused(
            f"token_ids lets each step run the text encoders, and {family.name}'s "
            f"{encoder.component} is a language model, which no step runs: set embeddings",
            setting="encode.text",
        )
    if base.reads_unusually and (family.frozen_text is not None or not family.clip):
        longer = base.chunks > 1
        raise Refused(
            f"family {family.name} reads captions as its pipeline does, at their own limit: set "
            f"{'77' if longer else 'text'}",
            setting="encode.max_tokens" if longer else "encode.captions.emphasis",
        )
    if recipe.encode.text_precision is not None and not base.has_frozen_text:
        raise Refused(
            f"this model of family {family.name} has neither a T5 nor a language model, and CLIP "
            "keeps encode.dtype: set null",
            setting="encode.text_precision",
        )
    check_guidance(recipe.evaluate, base, "evaluate.")
    replacement = replacement_config(settings)
    trained_config(base.denoiser, settings, replacement)
    if replacement is not None:
        import torch

        from runtimes.torch_models.loading import random_init_denoiser

        with torch.device("meta"):  # without weights
            random_init_denoiser(replacement, seed=0)


def control_start(settings: Train) -> Path | None:
    """The local folder of `train.controlnet.start`, if it is set. Raises Refused, Away."""
    start = settings.controlnet.start
    if settings.method != "controlnet" or start is None:
        return None
    with naming("train.controlnet.start"):
        return resolve_model(start)


def control_shapes(settings: Train, base: Base) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of the ControlNet in training. Raises Refused."""
    from runtimes.torch_models.control_network import check_control  # diffusers takes seconds

    with naming("train.controlnet"):
        return check_control(base, settings, control_start(settings))


def notes_of_kohya(settings: Train, base: Base) -> Iterator[Finding]:
    """Adapters without a place in kohya's layout: diffusers' layout has all of them."""
    if settings.method != "lora":
        return
    outputs = _adapted_layers(settings.lora, base)
    if why := without_kohya(base.family, base.denoiser, outputs, dora=settings.lora.dora):
        yield note(f"train.lora: no file in kohya's layout will be published: {why}")


def notes_of_distillation(settings: Train, base: Base) -> Iterator[Finding]:
    """A base that draws in few steps, which training undoes."""
    has_assistant = settings.method == "lora" and settings.lora.assistant is not None
    if base.draws_in_few_steps and not has_assistant:
        yield note(
            "model.path: this base is distilled to draw in few steps, which training undoes: train "
            "on its undistilled sibling (and draw on this one by evaluate.model), or set "
            "train.lora.assistant"
        )


def adapted_shapes(settings: Train, base: Base) -> dict[str, tuple[int, ...]]:
    """Component and layer with an adapter -> shape of the weight."""
    family = base.family
    shapes = dict[str, tuple[int, ...]]()
    texts = family.clip_encoders if settings.train_text_encoder else ()
    for part in (family.denoiser, *texts):
        stored = weight_shapes(base.part(part))
        chosen = choose_layers(part, layers_of(stored), settings.lora, family.attention_layers)
        shapes |= {f"{part}.{name}": stored[f"{name}.weight"] for name in chosen}
    return shapes


def _adapted_layers(lora: Lora, base: Base) -> dict[str, int]:
    """Layer of the denoiser with an adapter -> number of its outputs. Raises Refused."""
    family = base.family
    shapes = weight_shapes(base.denoiser_folder)
    layers = layers_of(shapes)
    chosen = choose_layers(family.denoiser, layers, lora, family.attention_layers)
    return {name: shapes[f"{name}.weight"][0] for name in chosen}


def without_kohya(
    family: Family, config: Mapping[str, Any], outputs: Mapping[str, int], *, dora: bool
) -> str | None:
    """Why adapters of these layers cannot be a file in kohya's layout; None if they can.

    Args:
        config: the denoiser's.
        outputs: layer of the denoiser -> number of its outputs.
    """
    if family.kohya is None:
        return f"it does not support {family.name}"

    def least(out: int) -> Adapter:
        magnitude = np.zeros(out, np.float32) if dora else None
        return Adapter(np.zeros((1, 1), np.float32), np.zeros((out, 1), np.float32), magnitude, 1.0)

    adapters = {family.denoiser: {name: least(out) for name, out in outputs.items()}}
    try:
        to_kohya(adapters, family.kohya, config)
    except ValueError as error:
        return str(error)
    return None


#: Figures of the last progress event in the manifest; null if unknown.
FIGURES = ("images_per_second", "data_wait", "memory_bytes", "tflops", "mfu")
#: Facts of the chosen checkpoint in the summary, with `train.best_checkpoint`.
CHOSEN = ("chosen_step", "chosen_because", "stopped_early")
#: Scores of samples, by name; the PNG has all samples of a step side by side.
Score = Callable[[bytes], dict[str, float]]


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
    versions: dict[str, str] = field(default_factory=dict)  # package -> that of rank 0

    def __call__(self, event: Event) -> None:
        """Call `_on_KIND`, if it exists, for an event of that kind."""
        if (handler := getattr(self, f"_on_{event['event']}", None)) is not None:
            handler(event)

    def _on_start(self, event: Event) -> None:
        self.facts |= {"device": event["device"], "resumed_from": event["step"]}
        self.versions = event["versions"]
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
            text = "train: the weights are those of step %d, %s"
            log.info(text, event["chosen_step"], event["chosen_because"])

    def _on_sample(self, event: Event) -> None:
        heading = f"{self.progress.stage}: step {event['step']}"
        self._score(event["step"], event["path"])
        show_in_prefect(self.progress.key, heading, partial(self._panels, event["path"]))

    def _on_validation(self, event: Event) -> None:
        log.info("train: held-out loss %.4f at step %d", event["loss"], event["step"])
        if self.history and self.history[-1]["step"] == event["step"]:
            by_source = {f"validation_loss/{name}": n for name, n in event["by_source"].items()}
            self.history[-1] |= {"validation_loss": event["loss"], **by_source}

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
            scores = self.score(bytes(self.fs.cat_file(path)))
        except Exception as error:  # a score must not stop a run; the evaluation reports the error
            log.warning("train: no scores of the pictures at step %d: %s", step, error)
            scores = {}
        else:
            self.scores[step] = scores
            text = ", ".join(f"{name} {human(value)}" for name, value in scores.items())
            log.info("train: samples of step %d: %s", step, text)
        try:  # train.best_checkpoint may wait for it
            write_atomic(self.fs, scores_path(path), json.dumps(scores).encode())
        except Exception as error:  # clients of remote stores define their own exception types
            log.warning("train: the scores of step %d could not be written: %s", step, error)

    def _panels(self, path: str) -> list[Panel]:
        return [
            Chart("Loss", loss_chart(self.history)),
            PicturePanel("Samples while training", bytes(self.fs.cat_file(path))),
            Table("Scores of the samples", self._score_lines()),
        ]


def _progress_text(event: Event) -> str:
    minutes, seconds = divmod(int(event["eta_seconds"]), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    return f"loss {event['loss']:.4f} · {event['images_per_second']:.1f} images/s · {clock} left"


STAGE: StageName = "train"
VERSION = 3
SAMPLES_SHOWN = 24


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that affect the trained weights.

    The runtime and the settings of the execution are excluded: a resume may change them.
    """
    settings = recipe.train.key_settings()
    if recipe.sources:
        settings["sources"] = recipe.mixture
    if (config := replacement_config(recipe.train)) is not None:  # the content, not the path
        settings["denoiser_config"] = config
    rule = recipe.train.best_checkpoint
    if rule is not None and rule.by_samples:  # these settings affect the scores
        settings["best_checkpoint"] |= {
            **sampler_settings(recipe.evaluate),
            "scores": sample_metrics(recipe.evaluate.judges),
            "prompts": [*sample_prompts(recipe.evaluate)],
        }
    return settings


@dataclass(frozen=True)
class TrainStage(Stage):
    """Latents, as trained weights of a base."""

    recipe: Recipe
    latents: Artifact
    base: Base
    clip: Path | None  # folder of the CLIP model that scores samples; None: none are drawn
    start: Artifact | None = None  # whose weights training continues from; None: the base's
    holdout: Artifact | None = None  # latents with the held-out samples; None: `latents`

    name = STAGE
    version = VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the weights, with facts of the base's family."""
        family = self.base.family
        settings = settings_for_key(self.recipe) | family.key_facts
        train = self.recipe.train
        if train.method == "lora" and train.lora.base_precision and family.unquantized:
            settings["unquantized"] = [*family.unquantized]
        return settings

    @property
    def inputs(self) -> dict[str, str]:
        """Latents, the weights of the base in training, and the start.

        The CLIP model or the held-out samples count if they choose the checkpoint.
        """
        settings = self.recipe.train
        inputs = {"latents": self.latents.digest, "base": digest_base(settings, self.base)}
        if self.start is not None:
            inputs["start"] = self.start.digest
        rule = settings.best_checkpoint
        if rule is not None and rule.by_samples:
            assert self.clip is not None  # samples are drawn
            inputs["clip"] = digest_model(self.clip)
        elif rule is not None and self.holdout is not None:
            inputs["holdout"] = self.holdout.digest
        for name, path in self.adapter_files.items():
            inputs[f"lora_{name}"] = digest_model_file(path)
            config = path.with_name(read_layouts.PEFT_CONFIG)  # it may have their alpha
            if config.is_file():
                inputs[f"lora_{name}_config"] = digest_model_file(config)
        if (folder := control_start(settings)) is not None:
            inputs["controlnet"] = digest_model(folder)
        if self.recipe.encode.text_dtype is not None and not settings.train_text_encoder:
            encoders = self.base.family.clip_encoders
            inputs["text_encoders"] = digest_model(self.base.folder, encoders)
        return inputs

    @cached_property
    def adapter_files(self) -> dict[str, Path]:
        """`start` and `assistant` of `train.lora` -> local file, where they are set."""
        return adapter_files(self.recipe.train)

    @property
    def parents(self) -> dict[str, Artifact]:
        """The latents."""
        return {"latents": self.latents}

    def build(
        self, draft: Draft, progress: Progress, adapters: str | None = None
    ) -> dict[str, Any]:
        """Train in the draft's folder.

        Training resumes from a checkpoint there, or of a run that differs only in its steps.

        Args:
            adapters: URL of the LoRA file with the weights of step 0; None: new adapters.
        """
        recipe = self.recipe
        latents = open_latents(self.latents.uri)
        settings = settings_for(recipe.train, epoch_samples(recipe, latents))
        if not settings.weights_depend_on_steps:
            copy_checkpoint(draft, settings)
        prompts = () if self.clip is None else sample_prompts(recipe.evaluate)
        judges = recipe.evaluate.judges
        score = None if self.clip is None else SampleScorer(judges, self.clip, prompts)
        given = self._write_adapters(draft)
        controls = self._write_controls(draft, prompts if recipe.train.sample_every_n_steps else ())
        job = TrainJob(
            runtime=recipe.runtime,
            **self.base.job_fields,
            latents=self.latents.uri,
            train=settings.model_dump(mode="json"),
            work=draft.uri,
            out=draft.uri,
            sample_prompts=prompts,
            sampler=sampler_settings(recipe.evaluate, "batch_size"),
            denoiser_config=replacement_config(recipe.train),
            compiled=draft.store.compiled_url,
            adapters=adapters or given.get("start"),
            assistant=given.get("assistant"),
            holdout=None if self.holdout is None else self.holdout.uri,
            text_dtype=recipe.encode.text_dtype,
            mixture=recipe.mixture,
            control_start=self._control_start(),
            sample_controls=controls,
            claim=None if draft.lock is None else draft.lock.claim,
        )
        watch = Watch(progress, draft.store.fs, score)
        hosts = Hosts.of(recipe, STAGE)
        if hosts is not None:
            engine = hosts.engine(job.work, draft.store)
            run_on_hosts(
                engine, job, watch, agents=hosts.agents, store=draft.store, cluster=hosts.cluster
            )
        else:
            run_job(job, watch, grace_seconds=recipe.train.grace_seconds)
        for url in {*given.values(), *controls}:
            draft.store.fs.rm(url_to_fs(url)[1])
        for file in watch.files:
            draft.add(file)
        history = _history(draft.read("history.jsonl"))
        if hosts is None:
            run = runtime_facts(recipe.runtime) | watch.facts
        else:  # whose hosts have an environment of their own
            run = {"runtime": recipe.runtime, "versions": watch.versions} | watch.facts
            run |= {"cluster": engine.name, "hosts": hosts.count}
            run["processes"] = recipe.train.processes  # of each host
        if scores := watch.all_scores(f"{draft.path}/samples"):
            run["sample_scores"] = scores
        summary = _summary(history, watch.chosen, settings.global_batch_size)
        return summary | {"copies_left_out": len(latents.left_out), "run": run}

    def _write_adapters(self, draft: Draft) -> dict[str, str]:
        """`start` and `assistant` -> URL of their adapters, where the training process reads."""
        urls = dict[str, str]()
        for name, arrays in read_adapter_files(self.recipe.train, self.base).items():
            path = f"{name}.safetensors"
            with writing(draft.store.fs, draft.path, path, []) as sink:
                write_arrays(sink, arrays)
            urls[name] = f"{draft.uri}/{path}"
        return urls

    def _control_start(self) -> str | None:
        """The folder of the ControlNet that training starts from: the champion's, if it has one."""
        folder = control_start(self.recipe.train)
        if self.start is not None and self.recipe.train.method == "controlnet":
            folder = self.base.folder / "controlnet"  # of retrain's starting_model
        return None if folder is None else str(folder)

    def _write_controls(self, draft: Draft, prompts: Sequence[str]) -> tuple[str, ...]:
        """URLs of the control pictures of samples, where the training process reads them."""
        if self.recipe.train.method != "controlnet" or not prompts:
            return ()
        pictures = sources_with_pictures(self.holdout or self.latents)
        factor = self.base.encoders["size_step"]
        urls = []
        for data in ControlPictures.read(pictures, self.recipe, factor).of(prompts):
            path = f"control-{digest_bytes(data)[:16]}.png"
            draft.store.fs.pipe_file(f"{draft.path}/{path}", data)
            urls.append(f"{draft.uri}/{path}")
        return tuple(urls)

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """The loss curve, the samples over training, and the figures of the run."""
        history = _history(artifact.read("history.jsonl"))
        run = artifact.manifest["run"]
        kept = ("runtime", "cluster", "hosts", "processes", "device", *FIGURES, "seconds")
        facts = {name: run[name] for name in kept if run.get(name) is not None}
        facts = {name.replace("_", " "): v for name, v in (artifact.summary | facts).items()}
        facts["TensorBoard"] = f"{artifact.uri}/tensorboard"
        chosen = artifact.summary.get("chosen_step")
        panels: list[Panel] = [Facts("Run", facts), Chart("Loss", loss_chart(history, chosen))]
        if curves := _losses_of_sources(history):
            panels.append(Chart("Held-out loss of each source", trials_chart(curves)))
        if samples := _samples(artifact, chosen):
            panels.append(Strip("Samples while training", samples))
        if scores := run.get("sample_scores"):
            panels.append(Table("Scores of the samples", scores))
        return panels


def adapter_files(settings: Train) -> dict[str, Path]:
    """`start` and `assistant` of `train.lora` -> local file. Raises Refused, Away."""
    if settings.method != "lora":
        return {}
    named = {"start": settings.lora.start, "assistant": settings.lora.assistant}
    files = dict[str, Path]()
    for name, place in named.items():
        with naming(f"train.lora.{name}"):
            files |= {} if place is None else {name: resolve_file(place)}
    return files


def read_adapter_files(settings: Train, base: Base) -> dict[str, Arrays]:
    """`start` and `assistant` -> arrays of their adapters. Raises Refused if they do not fit."""
    arrays = dict[str, Arrays]()
    for name, path in adapter_files(settings).items():
        place = without_secrets(str(getattr(settings.lora, name)))
        with naming(f"train.lora.{name}"):
            if name == "start":
                arrays[name] = read_layouts.read_start(path, base, settings, place)
            else:
                arrays[name] = read_layouts.read_assistant(path, base, place)
    return arrays


def digest_base(settings: Train, base: Base) -> str:
    """sha256 (hex) of the base's parts in training, and of its scheduler."""
    texts = base.family.clip_encoders if settings.train_text_encoder else ()
    return digest_model(base.folder, (base.family.denoiser, "scheduler", *texts))


def epoch_samples(recipe: Recipe, latents: Latents) -> int:
    """Training samples of an epoch; of a mixture, by the weights and repeats of its sources."""
    if not recipe.sources:
        return latents.training
    return int(sum(samples_per_epoch(recipe.mixture, latents.training_by_source).values()))


def settings_for(train: Train, samples: int) -> Train:
    """The settings with `epochs` converted to `steps`.

    Raises:
        Refused: the samples are not enough for one step, or for the profiler's trace.
    """
    if train.epochs is None:
        return train
    check_epochs(train, samples)
    settings = train.with_steps(samples)
    for finding in notes_of_warmup(settings):
        log.warning("%s", finding.words)
    return settings


def check_epochs(settings: Train, samples: int, noun: str = "training samples") -> None:
    """Raise Refused if `samples` are not enough for one step, or for the profiler's trace.

    Args:
        samples: those that will be trained on, or more.
    """
    epochs = settings.epochs
    batch = settings.global_batch_size
    profile = settings.profile
    if epochs is None:
        return
    if samples == 0:
        raise Refused("there are no training samples: add pictures, or lower encode.holdout")
    if fractions.Fraction(str(epochs)) * samples < batch:  # as `with_steps`
        raise Refused(
            f"{epochs:g} of {samples:,} {noun} are less than one step of "
            f"global_batch_size {batch}: raise train.epochs",
            setting="train.epochs",
        )
    steps = settings.with_steps(samples).steps
    last = profile.start + profile.steps
    if profile.steps and last > steps:
        raise Refused(
            f"{epochs:g} of {samples:,} {noun} are {steps:,} steps: train.profile "
            f"traces steps {profile.start:,} to {last:,}: lower train.profile.start or "
            "train.profile.steps",
            setting="train.epochs",
        )


def notes_of_warmup(settings: Train) -> Iterator[Finding]:
    """A warm-up that does not end; without `steps` it is too early to know."""
    warmup = settings.lr_warmup_steps
    steps = settings.steps
    if settings.epochs is None and warmup > steps:
        yield note(
            f"train.lr_warmup_steps: {warmup} exceed the {steps} steps: the learning rate misses "
            "its peak"
        )


def _summary(history: list[dict[str, Any]], chosen: dict[str, Any], batch: int) -> dict[str, Any]:
    until = history[: chosen.get("chosen_step", len(history))]  # losses of the published weights
    tail = [line["loss"] for line in until[-max(1, len(until) // 10) :]]
    validated = [line for line in until if "validation_loss" in line]
    left_out = sum(len(line.get("skipped", ())) for line in history)
    return {
        "steps": len(history),
        "samples_seen": len(history) * batch,
        "loss_last_tenth": sum(tail) / len(tail),
        **({"validation_loss": validated[-1]["validation_loss"]} if validated else {}),
        **({"batches_left_out": left_out} if left_out else {}),
        **chosen,
    }


def _losses_of_sources(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Source of a mixture -> (step, held-out loss) at each measurement."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in history:
        for name, loss in line.items():
            if name.startswith("validation_loss/"):
                source = name.removeprefix("validation_loss/")
                curves.setdefault(source, []).append((line["step"], loss))
    return curves


def _history(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line]


def _samples(artifact: Artifact, chosen: int | None) -> list[tuple[str, bytes]]:
    """(step, PNG) of some sample pictures: the first, the last, and those of the chosen step."""
    fs = artifact.store.fs
    folder = f"{artifact.path}/samples"
    paths = matching(fs, folder, "*.png")
    steps = [int(Path(path).stem.removeprefix("step-")) for path in paths]
    shown = {round(n * (len(paths) - 1) / (SAMPLES_SHOWN - 1)) for n in range(SAMPLES_SHOWN)}
    if chosen in steps:
        shown.add(steps.index(chosen))
    return [
        (f"step {step}" + (", chosen" if step == chosen else ""), bytes(fs.cat_file(path)))
        for number, (step, path) in enumerate(zip(steps, paths, strict=True))
        if number in shown
    ]
