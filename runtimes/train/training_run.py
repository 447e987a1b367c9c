"""The work of a run between its steps: checkpoints, measurements, rollback.

The host computes the learning rate: the rate is data, not part of a program. A run resumes from its
newest checkpoint, which has weights, optimizer state and history, but no state of the loader or of
a random number generator. data/bucketed_sample_order.py computes a step's samples from the step's
number, and objective/random_draws.py draws by counter.

A run publishes trained components or adapters, and the history:

<out>/unet/config.json, diffusion_pytorch_model.safetensors    method full: trained components
<out>/text_encoder/config.json, model.safetensors
<out>/pytorch_lora_weights.safetensors                         method lora, diffusers' format
<out>/scheduler/scheduler_config.json                          if it differs from the base's
<out>/history.jsonl                                            one line per step

A profiler traces selected steps, to `<work>/profile`. Training continues while a background thread
commits a checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts.records import FileEntry
from artifacts.safetensors import Arrays, Sink, read_arrays, write_arrays, writing
from configs.errors import Away, Failed, Refused
from configs.secrets import one_line
from configs.settings.train import Train
from configs.settings.train_parts import Profile
from runtimes.adapters.lora import LORA_WEIGHTS, metadata, to_file_names, to_state_names
from runtimes.contract import Runtime, State, StepBatch, StoredRows
from runtimes.data.loader import Holdout, batch_number
from runtimes.objective.noise_schedule import SCHEDULER_FILE, trained_scheduler_config
from runtimes.optimizer_state import published
from runtimes.pipeline_folder.folder import Base, trained_config
from runtimes.pipeline_folder.weights import DENOISER_WEIGHTS, TEXT_WEIGHTS
from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Ranks, Stop
from runtimes.train.checkpoints import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    is_unreachable,
    with_retries,
)
from runtimes.train.recorder import DivergenceEvent, Recorder
from runtimes.train.trackers import Trackers
from runtimes.train.validation import CheckpointRanking, Measurements, Samples, is_due


def learning_rate(step: int, settings: Train) -> float:
    """The learning rate of a step (from 0): linear warm-up to the peak, then the chosen decay.

    Step `lr_warmup_steps - 1` is the first at the peak `learning_rate`. The decay would reach
    `lr_min_ratio * learning_rate` at step `steps`, the step after the last.
    """
    if step < settings.lr_warmup_steps:
        return settings.learning_rate * (step + 1) / settings.lr_warmup_steps
    done = (step - settings.lr_warmup_steps) / max(1, settings.steps - settings.lr_warmup_steps)
    factor = _decay(min(done, 1.0), settings)
    return settings.learning_rate * (settings.lr_min_ratio + (1 - settings.lr_min_ratio) * factor)


def _decay(done: float, settings: Train) -> float:
    """The decay factor in [0, 1] after the fraction `done` of the steps since warm-up.

    Cosine with warm restarts: SGDR, arXiv 1608.03983. The other shapes are diffusers'.
    """
    match settings.lr_scheduler:
        case "constant":
            return 1.0
        case "linear":
            return 1 - done
        case "polynomial":
            return float((1 - done) ** settings.lr_power)
        case "cosine":
            return _cosine(done)
        case "cosine_with_restarts":
            return _cosine(done * settings.lr_num_cycles % 1 if done < 1 else 1.0)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def own_checkpoint(checkpoints: Checkpoints, job: TrainJob, settings: Train) -> Checkpoint | None:
    """The newest checkpoint of this run within its steps. Raises Refused as check_same_run."""
    saved = checkpoints.latest()
    if saved is not None:
        check_same_run(saved, job, settings)
        if saved.step > settings.steps:  # this run once had more steps
            if settings.best_checkpoint is not None:
                raise Refused(
                    f"{job.work} holds a run of {saved.step} steps, and its best checkpoint within "
                    f"{settings.steps} may be deleted: choose another work folder"
                )
            return checkpoints.latest(settings.steps + 1)
    return saved


def restore(
    saved: Checkpoint, runtime: Runtime, recorder: Recorder, skipped: Sequence[int]
) -> tuple[int, list[int]]:
    """Restore the runtime's state and the history.

    Args:
        skipped: numbers of the batches that this process has skipped so far.

    Returns:
        The number of completed steps, and the numbers of all skipped batches.
    """
    runtime.restore(saved.state, saved.step)
    recorder.begin(saved.history)
    return saved.step, sorted({*skipped, *saved.facts["skipped"]})


def start_from_adapters(url: str, runtime: Runtime) -> None:
    """Load the adapters of a file (in f32) as the weights of step 0, with zero moments.

    Raises:
        Refused: the file is damaged, or its adapters are of another model or rank.
    """
    fs, path = url_to_fs(url)
    try:
        adapters = to_state_names(read_arrays(fs, path))
    except (OSError, ValueError) as error:
        if is_unreachable(fs, error):
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


def check_same_run(saved: Checkpoint, job: TrainJob, settings: Train) -> None:
    """Raise Refused if the checkpoint was written with settings that change the weights.

    `steps` may change unless the weights of a step depend on them.
    """
    now = settings.key_settings()
    before = Train(**saved.facts["train"]).key_settings()
    now["denoiser_config"] = job.denoiser_config  # the content: its path may change
    before["denoiser_config"] = saved.facts.get("denoiser_config")
    if settings.method == "lora" and settings.lora.dropout:
        # Dropout masks depend on the rank, so the number of processes must not change.
        now["processes"] = Ranks.here().world
        before["processes"] = saved.facts["processes"]
    if not settings.weights_depend_on_steps:
        now["steps"] = before["steps"]
    for name in sorted(now):
        if before.get(name) != now[name]:
            raise Refused(
                f"{job.work} holds a run with train.{name}={before.get(name)}, this one has "
                f"{now[name]}: choose another work folder"
            )


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
    return with_retries(fs, lambda: _write(fs, root, job, base, state, history), failure)


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
        for component, arrays in by_component(trained | state.get("constants", {})).items():
            own = trained_config(base.denoiser, settings, job.denoiser_config)
            stem = DENOISER_WEIGHTS
            if component.startswith("text_encoder"):
                own = base.config(component)
                stem = TEXT_WEIGHTS
            # _name_or_path is a local path of the machine that trained the base.
            config = {name: value for name, value in own.items() if name != "_name_or_path"}
            with write(f"{component}/config.json") as sink:
                sink.write(_json(config))
            with write(f"{component}/{stem}.safetensors") as sink:
                write_arrays(sink, arrays)
    scheduler = trained_scheduler_config(base.scheduler, settings)
    if scheduler is not None:
        with write(f"scheduler/{SCHEDULER_FILE}") as sink:
            sink.write(_json(scheduler))
    with write("history.jsonl") as sink:
        sink.write("".join(f"{line}\n" for line in history).encode())
    return sorted(files, key=lambda file: file.path)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def by_component(arrays: Arrays) -> dict[str, Arrays]:
    """Arrays with State's names, grouped by pipeline component, with names inside it."""
    components: dict[str, Arrays] = {}
    for name, array in arrays.items():
        component, _, rest = name.partition(".")
        components.setdefault(component, {})[rest] = array
    return components


log = logging.getLogger("kiln")


class Profiling:
    """Traces `steps` steps, the first at index `start` (from 0).

    A run that resumes after `start` has no trace.
    """

    def __init__(self, settings: Profile, work: str, runtime: Runtime) -> None:
        self._start = settings.start
        self._end = settings.start + settings.steps
        self._work = work
        self._runtime = runtime
        self._tracing = ExitStack()

    def changes(self, step: int) -> bool:
        """Whether a trace starts or ends before this step."""
        return self._start < self._end and step in (self._start, self._end)

    def before(self, step: int) -> None:
        """Start or end the trace, if it is due before this step."""
        if step == self._end:
            self.close()
        elif step == self._start:
            folder = self._tracing.enter_context(_trace_folder(self._work))
            self._tracing.enter_context(self._runtime.profile(folder))

    def close(self) -> None:
        """End the active trace, if any."""
        self._tracing.close()


@contextmanager
def _trace_folder(work: str) -> Iterator[str]:
    """A local folder for the trace; at exit its files are in `<work>/profile`.

    A remote store that does not accept them costs the trace, but not the training.
    """
    fs, root = url_to_fs(work)
    target = f"{root.rstrip('/')}/profile"
    if isinstance(fs, LocalFileSystem):
        fs.makedirs(target, exist_ok=True)
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="kiln-profile-") as folder:
        yield folder
        try:
            _upload(Path(folder), fs, target)
        except Exception as error:  # clients of remote stores define their own exception types
            log.warning("the profiler trace could not be stored: %s", one_line(error))


def _upload(folder: Path, fs: AbstractFileSystem, target: str) -> None:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        fs.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
        fs.put_file(str(path), f"{target}/{name}")


#: Commits a checkpoint; returns its path and its size in bytes.
Save = Callable[[], tuple[str, int]]


class Saver:
    """Writes one checkpoint at a time. A failed write loses that checkpoint but not the run.

    All writers save the same checkpoints, in the same order.
    """

    def __init__(self, trackers: Trackers, events: Events) -> None:
        self._trackers = trackers
        self._events = events
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[CheckpointError | Away | None] | None = None

    def start(self, step: int, since: float, save: Save) -> None:
        """Start the write of a step's checkpoint after the previous write has ended.

        Args:
            since: perf_counter at which the loop paused for this checkpoint.
            save: writes copies of the state, so that training can continue.
        """
        self.wait()
        blocked = time.perf_counter() - since
        self._writing = self._thread.submit(self._write, step, since, blocked, save)

    def wait(self) -> CheckpointError | Away | None:
        """Wait for the current write; the error of the last write, if it failed."""
        return None if self._writing is None else self._writing.result()

    def close(self) -> None:
        """Wait for the current write and end the thread."""
        self._thread.shutdown()

    def _write(
        self, step: int, since: float, blocked: float, save: Save
    ) -> CheckpointError | Away | None:
        self._trackers.flush()  # a resume from this checkpoint does not repeat the points before it
        try:
            path, size = save()
        except (CheckpointError, Away) as error:
            self._events.emit("warning", message=str(error))
            # Tracebacks keep the state in memory: this error's, and that of its cause.
            error.__context__ = None
            return error.with_traceback(None)
        self._events.emit(
            "checkpoint",
            step=step,
            path=path,
            seconds=round(time.perf_counter() - since, 3),
            blocked=round(blocked, 3),
            bytes=size,
        )
        return None


class TrainingRun:
    """The state of a training run. All ranks must call its methods in the same order.

    Attributes:
        step: number of completed optimizer steps.
        done: whether the last step, or an early stop, is reached and scored.
        skipped: numbers (from 0) of the batches that divergence has excluded.
    """

    def __init__(
        self,
        job: TrainJob,
        base: Base,
        settings: Train,
        runtime: Runtime,
        holdout: Holdout | None,
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
        self._first = Ranks.here().first
        self._checkpoints = Checkpoints(
            job.work,
            settings.checkpoints_total_limit,
            best=settings.kept_best,
            shard_bytes=settings.checkpoint_shard_bytes,
            writers=runtime.writers,
            check=job.check_lock,
        )
        self._saver = Saver(trackers, events)
        self._profiling = Profiling(settings.profile, job.work, runtime)
        self._ranking = CheckpointRanking(settings)
        self._recorder = Recorder(settings, runtime, trackers, events)
        samples = Samples(job, runtime, events, trackers, writes=self._first)
        self._measurements = Measurements(
            settings, runtime, holdout, samples, self._ranking, self._recorder, events, stop
        )
        self._stops_early = False
        self.step = 0
        self.skipped: list[int] = []
        self._checkpointed_step = 0  # step of the newest checkpoint, committed or being written

    def resume(self) -> None:
        """Continue from the newest valid checkpoint, or start at step 0.

        Raises:
            Refused: the checkpoint was written with other settings, or the job's adapters are
                of another model.
        """
        saved = own_checkpoint(self._checkpoints, self._job, self._settings)
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

    @property
    def done(self) -> bool:
        ended = self._stops_early or self.step >= self._settings.steps
        return ended and not self._measurements.interrupted

    def catch_up(self) -> None:
        """Make the measurements that are due at the resumed step but missing."""
        if self.step == 0:
            if self._settings.divergence.action == "skip":  # a rollback needs a first checkpoint
                self._paused(self._start_checkpoint)
            return
        self._measure_missing()

    def _measure_missing(self) -> None:
        if self._measurements.lacks_holdout_loss(self.step):
            self._paused(self._measure_holdout_loss)
        if self._measurements.lacks_samples(self.step):
            self._paused(self._sample)
        self._check_early_stop()

    def train_step(self, batch: StepBatch) -> None:
        """Run one optimizer step on `batch`."""
        if self._profiling.changes(self.step):
            self._paused(lambda: self._profiling.before(self.step))
        rate = learning_rate(self.step, self._settings)
        self._recorder.add(batch, self._runtime.step(batch, rate), rate, self._newly_skipped())
        self.step += 1

    def after_step(self, waited: float) -> bool:
        """Report, measure and write a checkpoint if due; False after a rollback.

        Args:
            waited: total seconds that the loop has waited for the loader.

        Raises:
            Failed: the run has diverged and may not roll back.
        """
        settings = self._settings
        ends = self.step == settings.steps or self._ranking.is_candidate(self.step)
        report = is_due(self.step, settings.logging_steps) or ends
        loss = self._measurements.holdout_loss_due(self.step)
        sample = self._measurements.samples_due(self.step)
        save = is_due(self.step, settings.checkpointing_steps)
        if not (report or loss or save or sample):
            return True
        self._recorder.synchronize()
        if (event := self._divergence_event()) is not None:
            self._roll_back(event)
            return False
        if report:
            self._recorder.report(waited)
        if loss:
            self._paused(self._measure_holdout_loss)
        scored = sample and self._ranking.needs_samples(self.step)
        if scored:  # first, so that the checkpoint's history has the score
            self._paused(self._sample)
        if save:
            self._paused(self._checkpoint_if_new)
        if sample and not scored:
            self._paused(self._sample)
        self._check_early_stop()
        return True

    def checkpoint_and_exit(self) -> None:
        """Commit a checkpoint of the current step, unless the run has diverged.

        Raises:
            CheckpointError, Away: the store did not accept the checkpoint.
            Failed: the run has diverged and may not roll back.
        """
        self._recorder.synchronize()
        if self._divergence_event() is None:
            self._checkpoint_if_new()
        error = self._saver.wait()
        self._runtime.shutdown()
        if error is not None:
            raise error

    def finish(self) -> None:
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
            images_per_second=self._recorder.images_per_second,
        )

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        """End the trace and wait for the checkpoint writer."""
        try:
            self._profiling.close()
        finally:
            self._saver.close()

    def _paused(self, work: Callable[[], None]) -> None:
        """Run `work` and exclude its duration from the reported rates."""
        self._recorder.synchronize()  # steps that still run on the device count as training time
        since = time.perf_counter()
        work()
        self._recorder.exclude_since(since)

    def _newly_skipped(self) -> list[int]:
        """Numbers of the skipped batches between the batches of the previous step and this step."""
        before = batch_number(self.step - 1, self.skipped) if self.step else -1
        return list(range(before + 1, batch_number(self.step, self.skipped)))

    def _measure_holdout_loss(self) -> None:
        self._measurements.measure_holdout_loss(self.step)

    def _sample(self) -> None:
        self._measurements.sample(self.step)

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

    def _checkpoint_if_new(self) -> None:
        if self.step > self._checkpointed_step:
            self._start_checkpoint()

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
        """The divergence that requires a rollback, agreed by all ranks; None without one.

        Raises:
            Failed: the settings demand a stop, or `max_skips` batches are already skipped.
        """
        own_event = self._recorder.divergence.event
        step = self._runtime.broadcast(0 if own_event is None else own_event.step)
        if not step:
            return None
        event = own_event or DivergenceEvent(step, f"the loss has gone wrong at step {step}")
        policy = self._settings.divergence
        if policy.action == "stop":
            raise Failed(f"{event.words}: {self.advice}")
        if len(self.skipped) >= policy.max_skips:
            limit = f"{policy.max_skips} batches have been left out already"
            raise Failed(f"{event.words}, and {limit}: {self.advice}")
        return event

    @property
    def advice(self) -> str:
        """What may prevent a divergence."""
        lower = "lower train.learning_rate"
        if self._settings.mixed_precision == "no":
            return lower
        return f"{lower}, or set train.mixed_precision to no"

    def _roll_back(self, event: DivergenceEvent) -> None:
        """Restore the checkpoint before the event's step and skip that step's batch."""
        self._profiling.close()
        self._saver.wait()
        saved = self._checkpoints.latest(event.step)
        if saved is None:
            raise Failed(f"{event.words}, and no checkpoint before it is left: {self.advice}")
        number = batch_number(event.step - 1, self.skipped)
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

    def _restore(self, saved: Checkpoint) -> None:
        self.step, self.skipped = restore(saved, self._runtime, self._recorder, self.skipped)
        self._checkpointed_step = self.step
