"""The work of a run between its steps: checkpoints, measurements, rollback."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from configs.settings.train import Train
from runtimes.contract import Runtime, StepBatch
from runtimes.data.holdout_batches import Holdout
from runtimes.data.loader import batch_number
from runtimes.optimizer_step.training_state_copies import published
from runtimes.process.events import Events
from runtimes.process.job import TrainJob
from runtimes.process.ranks import Ranks
from runtimes.process.signals import Stop
from runtimes.train.background_save import Saver
from runtimes.train.best_checkpoint import CheckpointRanking
from runtimes.train.detect_divergence import Diverged, DivergenceEvent
from runtimes.train.experiment_trackers import Trackers
from runtimes.train.learning_rate import learning_rate
from runtimes.train.measurements import Measurements, is_due
from runtimes.train.profiling import Profiling
from runtimes.train.recorder import Recorder
from runtimes.train.resume import own_checkpoint, restore, start_from_adapters
from runtimes.train.samples import Samples
from runtimes.train.write_and_prune_checkpoints import Checkpoint, Checkpoints
from runtimes.train.write_result import write_result


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
        settings: Train,
        runtime: Runtime,
        holdout: Holdout | None,
        trackers: Trackers,
        events: Events,
        stop: Stop,
    ) -> None:
        self._job = job
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
            WrongInput: the checkpoint was written with other settings, or the job's adapters are
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
            Diverged: the run has diverged and may not roll back.
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
            CheckpointNotWritten: the store did not accept the checkpoint.
            Diverged: the run has diverged and may not roll back.
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
        files = write_result(self._job, state, self._recorder.history)
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
        """Numbers of the skipped batches between the previous step's batch and this one's."""
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
            Diverged: the settings demand a stop, or `max_skips` batches are already skipped.
        """
        found = self._recorder.divergence.event
        step = self._runtime.broadcast(0 if found is None else found.step)
        if not step:
            return None
        event = found or DivergenceEvent(step, f"the loss has gone wrong at step {step}")
        policy = self._settings.divergence
        if policy.action == "stop":
            raise Diverged(f"{event.words}: {self.advice}")
        if len(self.skipped) >= policy.max_skips:
            limit = f"{policy.max_skips} batches have been left out already"
            raise Diverged(f"{event.words}, and {limit}: {self.advice}")
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
            raise Diverged(f"{event.words}, and no checkpoint before it is left: {self.advice}")
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
