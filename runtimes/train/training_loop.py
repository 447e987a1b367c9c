"""The training loop, shared by all runtimes: resume, run the steps, write the result.

The host computes the learning rate: the rate is data, not part of a program. A run resumes from its
newest checkpoint, which has weights, optimizer state and history, but no state of the loader or of
a random number generator. data/sample_order.py computes a step's samples from the step's
number, and objective/random_draws.py draws by counter.

A run publishes trained components or adapters, and the history:

<out>/unet/config.json, diffusion_pytorch_model.safetensors    method full: trained components
<out>/text_encoder/config.json, model.safetensors
<out>/controlnet/config.json, diffusion_...safetensors         method controlnet
<out>/pytorch_lora_weights.safetensors                         method lora, diffusers' format
<out>/scheduler/scheduler_config.json                          if it differs from the base's
<out>/history.jsonl                                            one line per step
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from pydantic import ValidationError

from artifacts.latent_shards import Latents, LatentScale
from artifacts.records import FileEntry
from artifacts.safetensors import Arrays, Sink, read_arrays, write_arrays, writing
from configs.errors import Failed, Refused
from configs.settings.train import Train
from runtimes.adapters.lora_files import LORA_WEIGHTS, metadata, to_file_names, to_state_names
from runtimes.contract import Runtime, State, StepBatch, StoredRows
from runtimes.data import loader as batches
from runtimes.families.inpainting_aesthetics import ExtraInputs
from runtimes.learning_rate import learning_rate
from runtimes.objective import noise_schedule
from runtimes.objective.training_objective import Objective
from runtimes.optimizer_state import published
from runtimes.pipeline_folder.folder import Base, trained_config
from runtimes.pipeline_folder.weights import DENOISER_WEIGHTS, TEXT_WEIGHTS
from runtimes.process.job import Events, SilentEvents, TrainJob
from runtimes.process.launcher import Ranks, Stop
from runtimes.registry import open_runtime, prepare
from runtimes.train import checkpoints, validation
from runtimes.train.divergence import DivergenceEvent, advice, event_of_ranks
from runtimes.train.history import Recorder
from runtimes.train.throughput import Profiling
from runtimes.train.trackers import Trackers, check_wandb, open_trackers

#: Held-out samples that a process keeps in memory: only its first measurement reads shards.
#: 64 samples of FLUX.1 at 1024 x 1024, with 512 tokens each, have 320 MiB.
HELD_OUT_BYTES = 2**30


def train(job: TrainJob, events: Events, stop: Stop) -> bool:
    """Run a training job until its last step or a stop request.

    Returns:
        True when the run is complete; False after a stop request, with all steps checkpointed.

    Raises:
        Refused: the job's settings, model or latents do not allow it.
        Failed: the loss is not finite, or far above its recent mean.
        CheckpointError, Away: the checkpoint at a stop request failed; later steps are lost.
    """
    settings = read_train_settings(job)
    latents = batches.open_job_latents(job.latents)
    check_wandb(settings.wandb)
    base = Base.of(job)
    loader, holdout = make_batches(job, base, settings, latents)
    if not Ranks.here().first:
        events = SilentEvents()
    prepare(job)
    runtime = open_runtime(job.runtime)  # imports are slow, so cheap checks run first
    trackers = open_trackers(job.work, settings) if Ranks.here().first else Trackers([])
    done = False
    try:
        runtime.load(job, base)
        with TrainingRun(job, base, settings, runtime, holdout, trackers, events, stop) as run:
            run.resume()
            stop.defer()
            done = run.train(loader)
    finally:
        trackers.close(done)
    return done


class TrainingRun:
    """The state of a training run. All ranks must call its methods in the same order.

    Attributes:
        step: number of completed optimizer steps.
        skipped: numbers (from 0) of the batches that divergence has excluded.
    """

    def __init__(
        self,
        job: TrainJob,
        base: Base,
        settings: Train,
        runtime: Runtime,
        holdout: batches.Holdout | None,
        trackers: Trackers,
        events: Events,
        stop: Stop,
    ) -> None:
        self._job = job
        self._base = base
        self._settings = settings
        self._runtime = runtime
        self._trackers = trackers
        self._events = events
        self._stop = stop
        self._first = Ranks.here().first
        self._checkpoints = checkpoints.Checkpoints(
            job.work,
            settings.checkpoints_total_limit,
            best=settings.kept_best,
            shard_bytes=settings.checkpoint_shard_bytes,
            writers=runtime.writers,
            check=job.check_lock,
        )
        self._saver = checkpoints.Saver(trackers.flush, events)
        self._profiling = Profiling(settings.profile, job.work, runtime)
        self._ranking = validation.CheckpointRanking(settings)
        self._recorder = Recorder(settings, runtime, trackers, events)
        samples = validation.Samples(job, runtime, events, trackers, writes=self._first)
        self._measurements = validation.Measurements(
            settings, runtime, holdout, samples, self._ranking, self._recorder, events, stop
        )
        self._stops_early = False
        self.step = 0
        self.skipped: list[int] = []
        self._checkpointed_step = 0  # step of the newest checkpoint, committed or being written

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        """End the trace and wait for the checkpoint writer."""
        try:
            self._profiling.close()
        finally:
            self._saver.close()

    def resume(self) -> None:
        """Continue from the newest valid checkpoint, or start at step 0.

        Raises:
            Refused: the checkpoint was written with other settings, or the job's adapters are
                of another model.
        """
        saved = checkpoints.own_checkpoint(self._checkpoints, self._job, self._settings)
        if saved is not None:
            self._restore(saved)
        elif self._job.adapters is not None:
            start_from_adapters(self._job.adapters, self._runtime)
        self._trackers.rewind(self.step)
        self._events.emit(
            "start",
            runtime=self._job.runtime,
            device=self._runtime.device,
            versions=self._runtime.versions,
            step=self.step,
            total=self._settings.steps,
        )

    def train(self, loader: batches.Loader) -> bool:
        """Train to the last step or an early stop; False after a stop request.

        Raises:
            CheckpointError, Away: the store did not accept the checkpoint at a stop request.
            Failed: the run has diverged and may not roll back.
        """
        if self.step:
            self._measure_missing()
        elif self._settings.divergence.action == "skip":  # a rollback needs a first checkpoint
            with self._recorder.paused():
                self._start_checkpoint()
        while not self._done:  # once more after each rollback
            with loader.prefetch(
                self.step,
                self._settings.steps,
                self._settings.prefetch,
                lambda: self._stop.requested,
                self.skipped,
                self._runtime.put,
            ) as prefetched:
                if not self._advance(prefetched):
                    self._checkpoint_and_exit()
                    return False
        self._finish()
        return True

    def _advance(self, prefetched: batches.Prefetch) -> bool:
        """Train until the run is done or a rollback; False after a stop request."""
        ready = iter(prefetched)
        while not self._done:
            batch = next(ready, None)  # None if this rank has a stop request
            if self._runtime.any_rank(self._stop.requested or batch is None) or batch is None:
                return False
            self._train_step(batch)
            if not self._after_step(prefetched.waited):
                break
        return True

    @property
    def _done(self) -> bool:
        """Whether the last step, or an early stop, is reached and scored."""
        ended = self._stops_early or self.step >= self._settings.steps
        return ended and not self._measurements.interrupted

    def _train_step(self, batch: StepBatch) -> None:
        """Run one optimizer step on `batch`."""
        if self._profiling.changes(self.step):
            with self._recorder.paused():
                self._profiling.before(self.step)
        rate = learning_rate(self.step, self._settings)
        before = batches.batch_number(self.step - 1, self.skipped) if self.step else -1
        skipped = list(range(before + 1, batches.batch_number(self.step, self.skipped)))
        self._recorder.add(batch, self._runtime.step(batch, rate), rate, skipped)
        self.step += 1

    def _after_step(self, waited: float) -> bool:
        """Report, measure and write a checkpoint if due; False after a rollback.

        Args:
            waited: total seconds that the loop has waited for the loader.

        Raises:
            Failed: the run has diverged and may not roll back.
        """
        settings = self._settings
        measurements = self._measurements
        ends = self.step == settings.steps or self._ranking.is_candidate(self.step)
        report = validation.is_due(self.step, settings.logging_steps) or ends
        loss = measurements.holdout_loss_due(self.step)
        sample = measurements.samples_due(self.step)
        save = validation.is_due(self.step, settings.checkpointing_steps)
        if not (report or loss or save or sample):
            return True
        self._recorder.synchronize()
        if (event := self._divergence_event()) is not None:
            self._roll_back(event)
            return False
        if report:
            self._recorder.report(waited)
        with self._recorder.paused():
            if loss:
                measurements.measure_holdout_loss(self.step)
            scored = sample and self._ranking.needs_samples(self.step)
            if scored:  # first, so that the checkpoint's history has the score
                measurements.sample(self.step)
            if save and self.step > self._checkpointed_step:
                self._start_checkpoint()
            if sample and not scored:
                measurements.sample(self.step)
        self._check_early_stop()
        return True

    def _checkpoint_and_exit(self) -> None:
        """Commit a checkpoint of the current step, unless the run has diverged."""
        self._recorder.synchronize()
        if self._divergence_event() is None and self.step > self._checkpointed_step:
            self._start_checkpoint()
        error = self._saver.wait()
        self._runtime.shutdown()
        if error is not None:
            raise error

    def _finish(self) -> None:
        """Write the chosen weights and the history to the job's `out` folder."""
        self._profiling.close()  # the trace may include the last step
        self._saver.wait()
        chosen = self._restore_best()
        state = self._runtime.state(published(self._runtime.state_shapes()))
        self._runtime.shutdown()
        if not self._first:
            return
        files = write_result(self._job, self._base, state, self._recorder.history)
        self._events.emit(
            "result",
            files=[file.as_dict() for file in files],
            step=self.step,
            chosen_step=chosen,
            chosen_because=self._ranking.reason(chosen, self._recorder.history),
            stopped_early=self._stops_early,
            samples_seen=self.step * self._settings.global_batch_size,
            images_per_second=self._recorder.throughput.images_per_second,
        )

    def _measure_missing(self) -> None:
        """Make the measurements that are due at the restored step but missing."""
        with self._recorder.paused():
            if self._measurements.lacks_holdout_loss(self.step):
                self._measurements.measure_holdout_loss(self.step)
            if self._measurements.lacks_samples(self.step):
                self._measurements.sample(self.step)
        self._check_early_stop()

    def _check_early_stop(self) -> None:
        if self._ranking.is_candidate(self.step):
            stops = self._ranking.is_exhausted(self._recorder.history)
            self._stops_early = bool(self._runtime.broadcast(int(stops)))

    def _restore_best(self) -> int:
        """Restore the best checkpoint by the rule, if any; returns its step."""
        if self._settings.best_checkpoint is None:
            return self.step
        order = self._ranking.best_first(self._recorder.history)
        if self.step in order:  # the last step's weights are in memory
            order = order[: order.index(self.step)]
        best = self._checkpoints.first_valid(order)
        if best is None:
            return self.step
        self._runtime.restore(best.state, best.step)
        return best.step

    def _start_checkpoint(self) -> None:
        """Copy this rank's part of the state to the host; the saver writes it in the background."""
        since = time.perf_counter()
        self._saver.wait()  # the host may lack memory for a second copy
        shapes = self._runtime.state_shapes()
        state = self._runtime.state(self._checkpoints.owners(shapes))
        self._checkpointed_step = self.step
        facts = {
            "runtime": self._job.runtime,
            "versions": self._runtime.versions,
            "seed": self._settings.seed,
            "scalars": self._runtime.scalars(),
            "samples_seen": self.step * self._settings.global_batch_size,
            "skipped": list(self.skipped),
            "train": self._settings.model_dump(mode="json"),
            "denoiser_config": self._job.denoiser_config,
            "processes": Ranks.here().world,
        }
        history = list(self._recorder.history)
        save = partial(
            self._checkpoints.save,
            *(self.step, state, history, facts),
            shapes=shapes,
            best_first=self._ranking.best_first(history),
            prune=not self._recorder.divergence.is_suspicious,
        )
        self._saver.start(self.step, since, save)

    def _divergence_event(self) -> DivergenceEvent | None:
        """The divergence that requires a rollback, agreed by all ranks. Raises Failed."""
        own = self._recorder.divergence.event
        return event_of_ranks(own, self._runtime, self._settings, self.skipped)

    def _roll_back(self, event: DivergenceEvent) -> None:
        """Restore the checkpoint before the event's step and skip that step's batch."""
        self._profiling.close()
        self._saver.wait()
        saved = self._checkpoints.latest(event.step)
        if saved is None:
            raise Failed(
                f"{event.words}, and no checkpoint before it is left: {advice(self._settings)}"
            )
        number = batches.batch_number(event.step - 1, self.skipped)
        self.skipped.append(number)
        self._restore(saved)
        if self._first:
            self._checkpoints.discard_after(self.step)
        self._trackers.rewind(self.step)
        message = f"{event.words}: back to step {self.step}, batch {number} is left out"
        self._events.emit("warning", message=message)
        self._events.emit("back", step=self.step, left_out=number)
        if self.step:  # a stop may have interrupted the measurement before this checkpoint
            self._measure_missing()

    def _restore(self, saved: checkpoints.Checkpoint) -> None:
        """Restore the runtime's state and the history."""
        self._runtime.restore(saved.state, saved.step)
        self._runtime.restore_scalars(saved.facts.get("scalars", {}))
        self._recorder.begin(saved.history)
        self.step = saved.step
        self.skipped = sorted({*self.skipped, *saved.facts["skipped"]})
        self._checkpointed_step = self.step


def read_train_settings(job: TrainJob) -> Train:
    """The job's validated train settings. Raises Refused, naming the first wrong setting."""
    try:
        settings = Train(**job.train)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, ("train", *first["loc"])))
        raise Refused(f"{name}: {first['msg']}") from None
    if (settings.denoiser_config is None) != (job.denoiser_config is None):
        raise Refused("train.denoiser_config: the job must contain its content")
    rule = settings.best_checkpoint
    if rule is not None and rule.by_samples and not job.sample_prompts:
        raise Refused(f"train.best_checkpoint: metric {rule.metric} requires sample prompts")
    return settings


def make_batches(
    job: TrainJob, base: Base, settings: Train, latents: Latents
) -> tuple[batches.Loader, batches.Holdout | None]:
    """This rank's loader of training batches, and the held-out batches; None if they are off.

    Args:
        latents: those to train on; `job.holdout` replaces them for the held-out loss.

    Raises:
        Refused: the latents do not fit the model, or have no held-out samples.
    """
    ranks = Ranks.here()
    family = base.family
    config = trained_config(base.denoiser, settings, job.denoiser_config)
    multiple = family.latent_multiple(config)
    shift = noise_schedule.ResolutionShift.from_config(base.scheduler, multiple)
    scale = partial(LatentScale.from_info, draws=family.draws_latents)
    objective = Objective.of(settings, base.schedule(settings), scale(latents.info), shift)
    read = partial(
        batches.BatchReader,
        family=family,
        text_encoders=settings.train_text_encoder or job.text_dtype is not None,
        extras=replace(ExtraInputs.from_config(config), control=settings.method == "controlnet"),
        cache_bytes=settings.cache_bytes,
        guidance_scale=settings.guidance_scale,
        masked_loss=settings.masked_loss,
    )
    loader = batches.Loader(
        read(
            latents,
            objective=objective,
            mixture=job.mixture or None,
            reference_dropout_rate=settings.reference_dropout_rate,
        ),
        batch_size=settings.global_batch_size,
        seed=settings.seed,
        window=settings.shuffle_window,
        rank=ranks.rank,
        world=ranks.world,
    )
    if not settings.holdout_loss.every_n_steps:
        return loader, None
    held_out = latents if job.holdout is None else batches.open_job_latents(job.holdout)
    measured = replace(objective.held_out(validation.SEED), scale=scale(held_out.info))
    return loader, batches.Holdout(
        read(held_out, objective=measured, keep_bytes=HELD_OUT_BYTES),
        samples=settings.holdout_loss.samples,
        draws=settings.holdout_loss.draws,
        batch_size=settings.micro_batch(ranks.world),  # it fits in memory during training
        regularised={name for name, source in job.mixture.items() if source["regularisation"]},
    )


def start_from_adapters(url: str, runtime: Runtime) -> None:
    """Load the adapters of a file (in f32) as the weights of step 0, with zero moments.

    Raises:
        Refused: the file is damaged, or its adapters are of another model or rank.
    """
    fs, path = url_to_fs(url)
    try:
        adapters = to_state_names(read_arrays(fs, path))
    except (OSError, ValueError) as error:
        if checkpoints.is_unreachable(fs, error):
            raise
        raise Refused(f"{url} is no valid adapter file of Kilnworks: {error}") from None
    state: dict[str, Mapping[str, StoredRows]] = {}
    for group, shapes in runtime.state_shapes().items():
        if group in ("weights", "ema"):
            state[group] = adapters
        elif group != "loss_scale":  # without it, the initial scale stays
            state[group] = {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
    try:
        runtime.restore(state, 0)
    except Refused as error:
        raise Refused(f"{url}: {error}") from None


def write_result(job: TrainJob, base: Base, state: State, history: list[str]) -> list[FileEntry]:
    """Write the trained weights (fp32; the EMA, if any) and the history to `job.out`.

    A remote store that does not respond is tried again: only memory has the last steps' weights.

    Returns:
        The files, sorted by their paths relative to `job.out`. Each sha256 is of the bytes given
        to the store, so later damage is found.

    Raises:
        LockLost: another builder owns the folder; its files stay as they are.
    """
    fs, root = url_to_fs(job.out)
    failure = "the trained weights could not be written"
    return checkpoints.with_retries(
        fs, lambda: _write(fs, root, job, base, state, history), failure
    )


def _write(
    fs: AbstractFileSystem, root: str, job: TrainJob, base: Base, state: State, history: list[str]
) -> list[FileEntry]:
    files: list[FileEntry] = []

    def write(path: str) -> AbstractContextManager[Sink]:
        return writing(fs, root, path, files, job.check_lock)

    settings = Train(**job.train)
    trained = state.get("ema") or state["weights"]
    if settings.method == "lora":
        with write(LORA_WEIGHTS) as sink:
            write_arrays(sink, to_file_names(trained), metadata(trained, settings.lora))
    else:
        components: dict[str, Arrays] = {}
        for name, array in (trained | state.get("constants", {})).items():
            component, _, rest = name.partition(".")
            components.setdefault(component, {})[rest] = array
        for component, arrays in components.items():
            stem = DENOISER_WEIGHTS
            if component == "controlnet":
                own = control_config(job, base, settings)
            elif component == base.family.denoiser:
                own = trained_config(base.denoiser, settings, job.denoiser_config)
            else:
                own = base.config(component)
                stem = TEXT_WEIGHTS
            # _name_or_path is a local path of the machine that trained the base.
            config = {name: value for name, value in own.items() if name != "_name_or_path"}
            with write(f"{component}/config.json") as sink:
                sink.write(_json(config))
            with write(f"{component}/{stem}.safetensors") as sink:
                write_arrays(sink, arrays)
    scheduler = noise_schedule.trained_scheduler_config(base.scheduler, settings)
    if scheduler is not None:
        with write(f"scheduler/{noise_schedule.SCHEDULER_FILE}") as sink:
            sink.write(_json(scheduler))
    with write("history.jsonl") as sink:
        sink.write("".join(f"{line}\n" for line in history).encode())
    return sorted(files, key=lambda file: file.path)


def control_config(job: TrainJob, base: Base, settings: Train) -> dict[str, Any]:
    """The config of the job's ControlNet."""
    from runtimes.torch_models import control_network  # MindSpore's environment lacks it

    start = None if job.control_start is None else Path(job.control_start)
    network = control_network.empty_control(base, settings, start)
    return control_network.published_config(network)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
