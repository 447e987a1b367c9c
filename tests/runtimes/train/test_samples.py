"""Sample pictures that fail cost no step, unless other processes wait for this one to draw."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import MakeJob
from numpy.typing import NDArray
from training import RecordedEvents

from runtimes.contract import ImagesNotFinite, WeightsLost
from runtimes.process.job import SilentEvents, TrainJob
from runtimes.train import validation
from runtimes.train.trackers import Trackers
from runtimes.train.validation import Samples


class Draws:
    """A device that has the memory for pictures, or has not."""

    error: Exception = RuntimeError("out of memory")

    def __init__(self, enough: bool, together: bool) -> None:
        self.enough, self.samples_collectively = enough, together

    def sample(
        self, prompts: Sequence[str], sampler: dict[str, Any], controls: Sequence[Any]
    ) -> NDArray[np.uint8]:
        if not self.enough:
            raise self.error
        return np.zeros((1, 8, 8, 3), np.uint8)


def draw(job: TrainJob, runtime: Draws, first: bool = True) -> list[str]:
    """What it warned of."""
    heard = RecordedEvents()
    trackers = Trackers([])
    Samples(job, runtime, heard, trackers, writes=first).draw(3)  # type: ignore[arg-type]
    return [event["message"] for event in heard.of("warning")]


def test_pictures_that_cannot_be_drawn(make_job: MakeJob) -> None:
    alone = draw(make_job(), Draws(False, together=False))
    assert alone == ["no sample pictures at step 3: RuntimeError: out of memory"]
    with pytest.raises(RuntimeError, match="out of memory"):
        draw(make_job(), Draws(False, together=True))


def test_pictures_that_are_not_finite_end_no_training(make_job: MakeJob) -> None:
    """Nor on ranks that draw together: each has drawn to the end."""
    runtime = Draws(False, together=True)
    runtime.error = ImagesNotFinite("not finite")
    assert draw(make_job(), runtime) == [
        "no sample pictures at step 3: ImagesNotFinite: not finite"
    ]


def test_other_ranks_draw_only_if_all_must(make_job: MakeJob) -> None:
    assert draw(make_job(), Draws(False, together=False), first=False) == []
    with pytest.raises(RuntimeError, match="out of memory"):
        draw(make_job(), Draws(False, together=True), first=False)


def test_mixed_weights_are_not_trained_on(make_job: MakeJob) -> None:
    runtime = Draws(False, together=False)
    runtime.error = WeightsLost("mixed")
    with pytest.raises(WeightsLost):
        draw(make_job(), runtime)


@pytest.mark.parametrize("together", [False, True])
def test_pictures_that_cannot_be_written(make_job: MakeJob, together: bool) -> None:
    job = make_job()
    Path(job.work).mkdir(parents=True)
    Path(job.work, "samples").write_text("in the way")
    (message,) = draw(job, Draws(True, together))
    assert message.startswith("no sample pictures at step 3: ")


def test_scores_that_never_come_cost_a_warning(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "WAIT_SECONDS", -1.0)
    heard = RecordedEvents()
    drawn = Samples(make_job(), Draws(True, False), heard, Trackers([]), writes=True)  # type: ignore[arg-type]
    assert drawn.scores(3, lambda: False) == {}
    (warning,) = heard.of("warning")
    assert warning["message"].startswith(
        "no scores of the sample pictures at step 3: FileNotFoundError"
    )
    assert drawn.scores(3, lambda: True) is None, "a stop request leaves the choice open"


def test_a_picture_drawn_again_has_no_old_scores(make_job: MakeJob, tmp_path: Path) -> None:
    job, silent = make_job(), SilentEvents()
    old = Path(job.work, "samples/step-00000003.json")
    old.parent.mkdir(parents=True)
    old.write_text('{"digit": 0.1}')
    drawn = Samples(job, Draws(True, False), silent, Trackers([]), writes=True)  # type: ignore[arg-type]
    assert drawn.draw(3) and not old.exists()
