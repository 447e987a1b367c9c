"""A stage that fails for what may pass is tried again; one that fails for good is not."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server import Server

from artifacts.store import Draft, KeyParts, Store
from tasks.stage import TransientError

pytestmark = pytest.mark.slow
PASSING = [TransientError("away"), ConnectionError("reset"), TimeoutError("too long")]
FULL = OSError(errno.ENOSPC, "full")  # a TransientError by the time that Prefect sees it


class Stage:
    """A stage in a flow of its own, which raises errors one after another before it is built."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(str(folder / "store"))
        self.parts = KeyParts("encode", 1, {}, {})
        self.errors: list[Exception] = []
        self.tries = 0
        self.run = ""

    def build(self, draft: Draft) -> dict[str, Any]:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        draft.write("file", b"content")
        return {}

    def __call__(self, *errors: Exception) -> str:
        """Whether it was built or reused, after how many tries."""
        from prefect import flow
        from prefect.context import FlowRunContext

        from flows.stages import run_stage

        self.errors, self.tries = list(errors), 0

        @flow(name="of-one-stage")
        def of_one_stage() -> str:
            context = FlowRunContext.get()
            assert context is not None and context.flow_run is not None
            self.run = str(context.flow_run.id)
            return run_stage(self.store, self.parts, self.build, {}, lambda artifact: [])[0].outcome

        return of_one_stage()


@pytest.fixture
def stage(
    at_home: Callable[..., None], api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    at_home(api)
    import flows.stages

    monkeypatch.setattr(flows.stages, "RETRY_AFTER", (0, 0))
    return Stage(tmp_path)


@pytest.mark.parametrize("error", [*PASSING, FULL], ids=lambda error: type(error).__name__)
def test_what_fails_twice_for_what_may_pass_is_built_at_the_third_try(
    stage: Stage, error: Exception
) -> None:
    assert stage(error, error) == "built"
    assert stage.tries == 3
    assert stage() == "reused" and stage.tries == 0


def test_the_server_knows_of_every_try(stage: Stage, tmp_path: Path, api: str) -> None:
    stage(TransientError("away"))
    server = Server(tmp_path, api)

    def recorded() -> Any:
        asked = {"flow_runs": {"id": {"any_": [stage.run]}}}
        (task,) = server.ask("/task_runs/filter", asked)
        return task["state"]["type"] == "COMPLETED" and task

    task = server.wait("the task's record", recorded, 60)
    assert (task["name"], task["run_count"]) == ("encode", 2)


def test_what_fails_a_third_time_fails(stage: Stage) -> None:
    with pytest.raises(TransientError, match="away"):
        stage(*[TransientError("away")] * 3)
    assert stage.tries == 3


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("wrong input")])
def test_what_fails_for_good_is_not_tried_again(stage: Stage, error: Exception) -> None:
    with pytest.raises(RuntimeError, match=str(error)):  # StageFailed, of wrong input
        stage(error)
    assert stage.tries == 1
