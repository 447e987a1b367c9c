"""What happens beside the steps: resuming, checkpoints, validation, pictures, going back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from configs.training import Train, key_settings
from runtimes.contract import Runtime, StepBatch, WrongInput
from runtimes.data.holdout import Holdout
from runtimes.data.loader import batch_number
from runtimes.process.events import Events
from runtimes.process.job import TrainJob
from runtimes.process.ranks import Ranks
from runtimes.process.signals import Stop
from runtimes.train.boards import Boards
from runtimes.train.checkpoint import Checkpoint, Checkpoints
from runtimes.train.checkpoint_saver import Saver, Snapshot
from runtimes.train.divergence import Diverged, Divergence, Offence
from runtimes.train.learning_rate import learning_rate
from runtimes.train.profiling import Profiling
from runtimes.train.recorder import Recorder
from runtimes.train.result import write_result
from runtimes.train.samples import Samples
from runtimes.train.validation import measure

ADVICE = "lower train.learning_rate, or set train.mixed_precision to no"


class Run:
    """A training run at some step. Every rank has one, and all call the same at the same place.

    Attributes:
        step: steps done.
        skipped: numbers of the batches that are left out.
    """

    def __init__(
        self,
        job: TrainJob,
        settings: Train,
        runtime: Runtime,
        holdout: Holdout | None,
        boards: Boards,
        events: Events,
        stop: Stop,
    ) -> None:
        self._job, self._settings, self._runtime = job, settings, runtime
        self._holdout, self._boards, self._events, self._stop = holdout, boards, events, stop
        self._first = Ranks.here().first
        self._checkpoints = Checkpoints(
            job.work,
            settings.checkpoints_total_limit,
            best=settings.keep_best,
            shard_bytes=settings.checkpoint_shard_bytes,
        )
        self._saver = Saver(self._checkpoints, boards, events)
        self._samples = Samples(job, runtime, events, boards, writes=self._first)
        self._profiling = Profiling(settings.profile, job.work, runtime)
        self._divergence = Divergence(settings.divergence)
        self.step, self.skipped = 0, list[int]()
        self._taken = 0  # step whose state is in a checkpoint, or on its way there

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        peak = self._settings.peak_tflops
        self.recorder = Recorder(
            self._events,
            self._boards,
            self._runtime,
            self._divergence,
            total=self._settings.steps,
            batch_size=self._settings.global_batch_size,
            peak=self._runtime.peak_flops() if peak is None else peak * 1e12,
        )
        saved = self._agree_on()
        if saved is not None:
            self._check_same_run(saved)
            self._go_to(saved)
        self._boards.rewind(self.step)
        self._events.emit(
            "start",
            runtime=self._job.runtime,
            device=self._runtime.device,
            versions=self._runtime.versions,
            step=self.step,
            total=self._settings.steps,
        )

    def catch_up(self) -> None:
        """Do what a run that was stopped at this step had no time for."""
        if self.step == 0:
            if self._settings.divergence.action == "skip":  # which needs one to go back to
                self._aside(self._take)
            return
        if self._due(self._settings.holdout_loss.every_n_steps) and self.recorder.validated is None:
            self._aside(self._validate)
        if self._sampling() and not self._runtime.broadcast(self._samples.drawn(self.step)):
            self._aside(self._sample)

    def train_on(self, batch: StepBatch) -> None:
        """Take a step."""
        if self._profiling.changes(self.step):
            self._aside(lambda: self._profiling.before(self.step))
        rate = learning_rate(self.step, self._settings)
        self.recorder.add(batch, self._runtime.step(batch, rate), rate, self._left_out())
        self.step += 1

    def beside(self, waited: float) -> bool:
        """Do what is due after a step; False if the run went back to an earlier one instead.

        Args:
            waited: the loader's sum of idle seconds.
        """
        every = self._settings
        report = self._due(every.logging_steps) or self.step == every.steps
        validate, save = (
            self._due(every.holdout_loss.every_n_steps),
            self._due(every.checkpointing_steps),
        )
        sample = self._sampling()
        if not (report or validate or save or sample):
            return True
        self.recorder.settle()
        if (offence := self._offence()) is not None:
            self._go_back(offence)
            return False
        if report:
            self.recorder.report(waited)
        if validate:
            self._aside(self._validate)
        if save:
            self._aside(self._checkpoint)
        if sample:
            self._aside(self._sample)
        return True

    def leave(self) -> None:
        """Commit what is done before the process ends. Raises CheckpointNotWritten, Diverged."""
        self.recorder.settle()
        if self._offence() is None:
            self._checkpoint()
        self._runtime.part()
        if (error := self._saver.wait()) is not None:
            raise error

    def finish(self) -> None:
        """Write what was trained."""
        self._profiling.close()  # it may last to the end
        self._saver.wait()
        state = self._runtime.state()
        self._runtime.part()
        if not self._first:
            return
        files = write_result(self._job, state, self.recorder.history)
        self._events.emit(
            "result",
            files=files,
            step=self.step,
            samples_seen=self.step * self._settings.global_batch_size,
            images_per_second=self.recorder.images_per_second,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Wait for what is being written."""
        self._profiling.close()
        self._saver.close()

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _aside(self, do: Callable[[], None]) -> None:
        """Do what is no training, and leave it out of the rates."""
        self.recorder.settle()  # what the device still does is training
        since = time.perf_counter()
        do()
        self.recorder.pause(since)

    def _left_out(self) -> list[int]:
        """Numbers of the batches that are left out just before this step's."""
        before = batch_number(self.step - 1, self.skipped) if self.step else -1
        return list(range(before + 1, batch_number(self.step, self.skipped)))

    def _validate(self) -> None:
        if self._holdout is None:
            return
        found = measure(self._runtime, self._holdout, lambda: self._stop.requested)
        if found is None:
            return
        if not math.isfinite(found.loss):  # the next step's will be no number either
            words = f"the validation loss is {found.loss} at step {self.step}"
            self._events.emit("warning", message=words)
            return
        figures = {"validation_loss": found.loss, "validation_error": found.error}
        self.recorder.amend(**figures)
        self._events.emit("validation", step=self.step, loss=found.loss, error=found.error)
        self._boards.scalars(self.step, figures)

    def _sampling(self) -> bool:
        return self._samples.wanted() and self._due(self._settings.sample_every_n_steps)

    def _sample(self) -> None:
        if not self._runtime.any_rank(self._stop.requested):
            self._samples.draw(self.step)

    def _checkpoint(self) -> None:
        if self.step > self._taken:
            self._take()

    def _take(self) -> None:
        """Copy the state and have the copy committed while the run goes on."""
        since = time.perf_counter()
        self._saver.wait()  # of two copies one would be too many
        state = self._runtime.state()
        self._taken = self.step
        if not self._first:
            return
        facts = {
            "runtime": self._job.runtime,
            "versions": self._runtime.versions,
            "seed": self._settings.seed,
            "samples_seen": self.step * self._settings.global_batch_size,
            "skipped": list(self.skipped),
            "validation_loss": self.recorder.validated,
            "train": self._settings.model_dump(mode="json"),
            "denoiser_config": self._job.denoiser_config,
            "processes": Ranks.here().world,
        }
        history, prune = list(self.recorder.history), not self._divergence.suspects
        self._saver.start(Snapshot(self.step, state, history, facts, since, prune))

    def _offence(self) -> Offence | None:
        """What the run is to go back for, if anything. Raises Diverged if it is to stop for it."""
        found = self._divergence.offence
        step = self._runtime.broadcast(0 if found is None else found.step)
        if not step:
            return None
        offence = found or Offence(step, f"the loss has gone wrong at step {step}")
        policy = self._settings.divergence
        if policy.action == "stop":
            raise Diverged(f"{offence.words}: {ADVICE}")
        if len(self.skipped) >= policy.max_skips:
            words = f"{policy.max_skips} batches have been left out already"
            raise Diverged(f"{offence.words}, and {words}: {ADVICE}")
        return offence

    def _go_back(self, offence: Offence) -> None:
        """Go on from the checkpoint before the offending step, without that step's batch."""
        self._profiling.close()
        self._saver.wait()
        saved = self._agree_on(before=offence.step)
        if saved is None:
            raise Diverged(f"{offence.words}, and no checkpoint before it is left: {ADVICE}")
        number = batch_number(offence.step - 1, self.skipped)
        self.skipped.append(number)
        self._go_to(saved)
        if self._first:
            self._checkpoints.discard_after(self.step)
        self._boards.rewind(self.step)
        words = f"{offence.words}: back to step {self.step}, batch {number} is left out"
        self._events.emit("warning", message=words)
        self._events.emit("back", step=self.step, left_out=number)

    def _agree_on(self, before: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that verifies (of a step below `before`): rank 0 looks for it."""
        found = self._checkpoints.latest(before) if self._first else None
        step = self._runtime.broadcast(-1 if found is None else found.step)
        return self._checkpoints.read(step) if found is None and step >= 0 else found

    def _go_to(self, saved: Checkpoint) -> None:
        self._runtime.restore(saved.state, saved.step)
        self.step = self._taken = saved.step
        self.skipped = sorted({*self.skipped, *saved.facts["skipped"]})
        self.recorder.begin(saved.history)

    def _check_same_run(self, saved: Checkpoint) -> None:
        """Raise WrongInput if it was of other settings. Those that it does not know of had their
        defaults: it may be of an older version."""
        now, before = key_settings(self._settings), _with_defaults(saved.facts["train"])
        now["denoiser_config"] = self._job.denoiser_config  # not its path, which may change
        before["denoiser_config"] = saved.facts.get("denoiser_config")
        if self._settings.method == "lora" and self._settings.lora.dropout:
            now["processes"] = Ranks.here().world  # by whomever they were started
            before["processes"] = saved.facts.get("processes", before["processes"])
        for name in sorted(now):
            if before.get(name) != now[name]:
                raise WrongInput(
                    f"{self._job.work} holds a run with train.{name}={before.get(name)}, this one "
                    f"asks for {now[name]}: give it a work folder of its own"
                )


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Dumped settings, sections too, with what they lack as it is by default."""
    whole = Train().model_dump(mode="json")
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(whole.get(name), dict):
            whole[name] = {**whole[name], **value}
        else:
            whole[name] = value
    return whole
