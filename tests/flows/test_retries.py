"""Transient failures of a stage are retried, permanent ones are not."""

import errno
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import (
    EndpointConnectionError,
    NoCredentialsError,
    UnauthorizedSSOTokenError,
)
from prefect_server import Server
from toy_recipes import base_of

from artifacts.store import Draft, KeyParts, Store
from configs.errors import Away, Refused
from configs.load_recipe import Trial, load_recipe
from configs.settings.recipe import STAGES
from tasks.build_or_reuse import StageResult
from tasks.evaluate.inputs import MeasuringModels

PASSING = [
    *(Away("away"), ConnectionError("reset"), TimeoutError("too long")),
    EndpointConnectionError(endpoint_url="http://127.0.0.1:9"),
    *(NoCredentialsError(), Away("away"), Away("away")),
]
FULL = OSError(errno.ENOSPC, "full")  # a Away by the time that Prefect sees it


class Stage:
    """The task `encode` in an own flow; it raises the errors in order, then builds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from flows.run import Run
        from tasks.encode.stage import EncodeStage

        recipe = load_recipe("digits", {"store": str(folder / "store")})
        self.store = Store(recipe.store)
        self.given = Run(recipe, self.store, base_of(recipe), MeasuringModels(folder), "a-run")
        draft = self.store.draft(KeyParts("download", 1, {}, {}))
        images = draft.commit({}, {})
        self.images = StageResult("download", images.key, images.uri, images.digest, "built", 0.0)
        self.errors: list[Exception] = []
        self.tries = 0
        self.waits = [0.0]  # seconds before a retry
        self.run = ""
        parts = KeyParts("encode", 1, {}, {})
        monkeypatch.setattr(EncodeStage, "parts", parts)
        monkeypatch.setattr(EncodeStage, "build", self.build)
        monkeypatch.setattr(EncodeStage, "show", lambda artifact: [])

    def build(self, draft: Draft, **_: Any) -> dict[str, Any]:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        draft.write("file", b"content")
        counts = {"samples": 1, "holdout": 0, "copies_left_out": 0}
        return counts | {"bad": {}, "caption_tokens": {}, "cut": {}}

    def __call__(self, *errors: Exception) -> str:
        """The outcome and the number of attempts."""
        from prefect import flow
        from prefect.context import FlowRunContext

        from flows.finetune import encode

        self.errors, self.tries = list(errors), 0
        at_once: Any = encode.with_options(retry_delay_seconds=self.waits)

        @flow(name="of-one-stage")
        def of_one_stage() -> str:
            context = FlowRunContext.get()
            assert context is not None and context.flow_run is not None
            self.run = str(context.flow_run.id)
            return str(at_once(self.given, self.images).result().outcome)

        return of_one_stage()

    def recorded(self, folder: Path, api: str) -> Any:
        """The server's record of the ended task."""
        server = Server(folder, api)

        def ask() -> Any:
            ended = [t for t in server.task_runs(self.run) if t["state"]["type"] == "COMPLETED"]
            return ended and ended[0]

        return server.wait("the task's record", ask, 60)


@pytest.fixture
def stage(
    at_home: Callable[..., None], api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    at_home(api)
    return Stage(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [*PASSING, FULL, Away("full")], ids=lambda error: type(error).__name__
)
def test_a_transient_failure_is_retried_twice_and_then_built(
    stage: Stage, error: Exception
) -> None:
    assert stage(error, error) == "built"
    assert stage.tries == 3
    assert stage() == "reused" and stage.tries == 0


@pytest.mark.slow
def test_the_server_records_every_attempt_and_the_reuse(
    stage: Stage, tmp_path: Path, api: str
) -> None:
    stage(Away("away"))
    task = stage.recorded(tmp_path, api)
    assert (task["name"], task["run_count"]) == ("encode", 2)
    assert task["state"]["name"] == "Completed" and task["tags"] == ["accelerator"]
    stage()
    assert stage.recorded(tmp_path, api)["state"]["name"] == "Reused"


@pytest.mark.slow
def test_the_log_says_why_and_when_a_stage_is_tried_again(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal shows our log alone, and would stand still for up to a quarter of an hour."""
    stage.waits = [0.01, 0.02]
    show_prefects_lines(monkeypatch, False)
    stage(Away("the store is full"), Away("the store is away"))
    said = [record.getMessage() for record in caplog.records if "next try" in record.getMessage()]
    assert said == [
        "the store is full; the next try of encode is in about 0.01 s",
        "the store is away; the next try of encode is in about 0.02 s",
    ]


def show_prefects_lines(monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    logger = logging.getLogger("prefect.task_runs")
    monkeypatch.setattr(logger, "isEnabledFor", lambda level: shown)


@pytest.mark.parametrize("is_worker", [True, False])
def test_a_retry_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_worker: bool
) -> None:
    """On a worker, Prefect has a line of its own."""
    from flows.task_limits import should_retry

    def away() -> None:
        raise Away("away")

    task: Any = SimpleNamespace(retry_delay_seconds=[1.0])
    run, state = SimpleNamespace(run_count=1, name="encode"), SimpleNamespace(result=away)
    show_prefects_lines(monkeypatch, is_worker)
    assert should_retry(task, run, state)  # type: ignore[arg-type]
    assert len(caplog.messages) == (0 if is_worker else 1)


@pytest.mark.slow
def test_a_stage_fails_after_its_last_retry(stage: Stage) -> None:
    with pytest.raises(Away, match="away"):
        stage(*[Away("away")] * 9)
    assert stage.tries == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("a bug"), "a bug"),
        (Refused("of ours"), "encode: of ours"),
        (PermissionError(errno.EACCES, "closed"), "no permission"),
        (UnauthorizedSSOTokenError(), "no valid credentials for .*: log in"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_permanent_failures_are_not_retried(stage: Stage, error: Exception, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):  # Failed, of wrong input
        stage(error)
    assert stage.tries == 1


def away_once(found: Any) -> Callable[..., Any]:
    """A function whose store is away at its first call."""
    errors: list[Exception] = [Away("the store cannot be used now")]

    def read(*_: Any) -> Any:
        if errors:
            raise errors.pop()
        return found

    return read


def test_what_a_flow_reads_between_its_stages_is_tried_again(
    waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow has no retries, and the stages before it may have taken days."""
    from flows import retrain, sweep

    once = SimpleNamespace(max_pictures=None)
    recipe = SimpleNamespace(sweep=None, place=None, evaluate=once, caption=None)
    here: Any = SimpleNamespace(store=None, recipe=recipe)
    latents = SimpleNamespace(summary={})
    one: Any = SimpleNamespace(load=lambda *_: latents, latents="")
    monkeypatch.setattr("flows.retrain.new_samples", away_once(3))
    assert retrain._has_new_samples(here, one, one) and waited == [10.0]
    state = SimpleNamespace(result=lambda: one)
    monkeypatch.setattr(sweep, "run_task", lambda *_, **__: state)
    monkeypatch.setattr(sweep, "report_of", lambda _: {"metrics": {}, "stages": {}})
    monkeypatch.setattr(sweep.compare_sweep_trials, "tuned_metrics", lambda *_: {})
    monkeypatch.setattr(sweep.compare_sweep_trials, "read_curve", away_once([(1, 0.5)]))
    outcome, *_ = sweep._try(1, Trial({}, here.recipe), here, [(None, [one, one])])
    assert (outcome["status"], outcome["curve"]) == ("measured", [(1, 0.5)])
    assert waited == [10.0, 10.0]


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_backs_off_and_has_a_time_limit(name: str) -> None:
    from prefect.cache_policies import NO_CACHE

    from flows import finetune
    from flows.task_limits import should_retry

    task: Any = getattr(finetune, name)
    delays = task.retry_delay_seconds
    assert len(delays) == task.retries >= 3
    assert all(later == 2 * sooner for sooner, later in pairwise(delays))
    assert task.retry_jitter_factor and task.retry_condition_fn is should_retry
    assert task.timeout_seconds and task.tags
    assert task.cache_policy is NO_CACHE  # the store alone says what is reused
