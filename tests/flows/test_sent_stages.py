"""A stage with a work pool is sent only if its artifact is missing, and never by its own run."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import typer.testing
from prefect import Task
from prefect.client.schemas.objects import State, StateType
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Completed
from prefect.utilities.annotations import quote
from toy_recipes import base_of

from artifacts.errors import StoreRefused, retrying
from artifacts.filesystems import Clock
from artifacts.gc import runs
from artifacts.store import Artifact, Draft, KeyParts, Store
from configs.errors import Away, Failed, Refused
from configs.load_recipe import load_recipe
from configs.settings.data import UrlSource
from configs.settings.recipe import PLACED_STAGES, STAGES
from flows import cli, finetune, send_stage, work_pools
from flows.retrain import continue_from_champion
from flows.run import Run, Sent, checks_of
from tasks.beam.workers import received_recipe
from tasks.build_or_reuse import Stage, StageResult, build_or_reuse
from tasks.download import shard_plan
from tasks.download.shard_plan import DownloadPlan, ShardSpec, Span, plan_key, read_spans
from tasks.evaluate.inputs import MeasuringModels
from tasks.preflight import Doors
from tasks.progress import Progress
from tasks.retrain.champion import Champion

PARTS = KeyParts("train", 1, {}, {})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    given = {"place.train": "gpu", "place.download": "cpu", "store": str(tmp_path)}
    recipe = load_recipe("digits", {**given, "shared_folders": [str(tmp_path)]})
    return Run(recipe, Store(recipe.store), base_of(recipe), MeasuringModels(tmp_path), "a-run")


def build(*_: Any) -> dict[str, Any]:
    raise AssertionError("built here")


def test_a_present_artifact_is_reused_without_sending(run: Run) -> None:
    run.store.draft(PARTS).commit({}, {})
    result = build_or_reuse(run.store, PARTS, build, parents={}, send=build)
    assert result.outcome == "reused"


@pytest.mark.parametrize("outcome", ["built", "reused"])
def test_a_missing_artifact_is_sent_once_and_found_in_the_store(run: Run, outcome: str) -> None:
    """The outcome is that of the pool's run: another run may have built the artifact before it."""
    sent: list[int] = []

    def send() -> str:
        sent.append(1)
        run.store.draft(PARTS).commit({}, {})
        return outcome

    result = build_or_reuse(run.store, PARTS, build, parents={}, send=send)
    assert (result.outcome, sent) == (outcome, [1])


def test_another_artifact_than_that_of_the_sender_is_an_error(run: Run) -> None:
    with pytest.raises(Failed, match="built another artifact: its workers need this version"):
        build_or_reuse(run.store, PARTS, build, parents={}, send=lambda: "built")


def sending(run: Run, stage: str, *before: Artifact) -> Any:
    """The parameters that a stage is sent with; None if it is not sent."""
    found: Any = run.send(KeyParts(stage, 1, {}, {}), Progress(stage), before)
    return found and found.args[4]


def test_a_sent_run_does_not_send_its_stage_again(run: Run) -> None:
    for stage in run.recipe.place.pools():
        recipe = received_recipe(sending(run, stage)["settings"])
        assert sending(replace(run, recipe=recipe), stage) is None
    assert [sending(run, stage) for stage in ("encode", "evaluate", "publish", "plan")] == [
        None
    ] * 4


def test_a_sent_run_builds_the_artifact_of_its_sender_or_none(run: Run) -> None:
    sent = replace(run, sent=Sent("train", PARTS.key, {}))
    assert sent.send(PARTS, Progress("train"), []) is None
    other = KeyParts("train", 1, {"steps": 2}, {})
    differs = sent.send(other, Progress("train"), [])
    with pytest.raises(Failed, match=f"the sender expects {PARTS.key[:12]}"):
        build_or_reuse(run.store, other, build, parents={}, send=differs)


@dataclass(frozen=True)
class Selection(Stage):
    """An artifact of a placed stage that a training needs besides."""

    share: float

    name = "encode"
    version = 1

    @property
    def settings(self) -> dict[str, Any]:
        return {"replay": self.share}

    @property
    def inputs(self) -> dict[str, str]:
        return {}

    def build(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        return {}


def test_what_a_stage_needs_besides_is_built_where_the_stage_is(run: Run) -> None:
    """Neither its own pool nor the sender waits for it."""
    place = run.recipe.place.model_copy(update={"encode": "cpu"})
    placed = replace(run, recipe=run.recipe.model_copy(update={"place": place}))
    assert sending(placed, "encode") is not None
    assert placed.build(Selection(0.3)).outcome == "built"
    sent = replace(run, sent=Sent("train", PARTS.key, {}))
    assert sent.build(Selection(0.5)).outcome == "built"


def rows_of(run: Run) -> list[tuple[str, list[str]]]:
    """(key, URLs) of each planned shard."""
    key = plan_key()
    return [
        (spec.key, read_spans(spec.spans, key)["url"].to_pylist()) for spec in run.plan().shards
    ]


@pytest.mark.parametrize("cache", ["cache", "cache-of-another-machine"])
def test_a_sent_run_takes_the_plan_of_its_sender(
    run: Run, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """The source may grow while the run waits for a worker, whose machine has another plan key."""
    path, rows = tmp_path / "list.csv", [f"http://127.0.0.1/{n},a\n" for n in range(40)]
    path.write_text("url,caption\n" + "".join(rows))
    source = UrlSource(kind="urls", path=str(path), format="csv")
    download = run.recipe.download.model_copy(update={"shard_size": 5})
    recipe = run.recipe.model_copy(update={"source": source, "download": download})
    run = replace(run, recipe=recipe)
    given, expected = sending(run, "download", run.plan().artifact)["before"], rows_of(run)
    sent = replace(run, sent=Sent("download", PARTS.key, given))

    monkeypatch.setenv("KILN_CACHE", str(tmp_path / cache))
    assert rows_of(sent) == expected
    path.write_text("url,caption\nhttp://127.0.0.1/new,a\n" + "".join(rows) + "http://b/,b\n")
    assert rows_of(run) != expected == rows_of(sent)
    path.write_text("url,caption\n" + "".join(rows[:-1]))
    if cache == "cache":
        assert rows_of(sent) == expected
    else:
        with pytest.raises(Refused, match="it no longer has all rows"):
            sent.plan()


def test_too_many_references_are_refused_before_the_download(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text('{"url": "http://a/1", "caption": "a", "before": ["http://b/1", "http://b/2"]}')
    facts = {"path": str(path), "format": "jsonl", "reference_columns": ("before",)}
    recipe = run.recipe.model_copy(update={"source": UrlSource(kind="urls", **facts)})
    with pytest.raises(Refused, match=r"sources\.edits\.source: a picture has 2 references, .* sd"):
        replace(run, recipe=recipe, source="edits").plan()


def test_a_sent_download_of_references_has_the_key_of_its_sender(
    run: Run, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "list.csv"
    path.write_text("url,caption,before\n" + "".join(f"{n},a,r{n % 7}\n" for n in range(40)))
    columns = {"format": "csv", "reference_columns": ["before"]}
    source = UrlSource(kind="urls", path=str(path), base_url="http://127.0.0.1", **columns)
    run = replace(run, recipe=run.recipe.model_copy(update={"source": source}))
    plan = run.planned_rows()
    own = run.stage_of_references(plan)
    assert own is not None and own.plan.rows == 7
    parameters = sending(replace(run, sends_references=True), "download", plan.artifact)
    assert parameters["references"] and not sending(run, "download", plan.artifact)["references"]

    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache-of-another-machine"))
    sent = Sent("download", own.parts.key, parameters["before"], references=True)
    built: list[str] = []

    def build(self: Run, stage: Any, before: Any) -> StageResult:
        built.append(stage.parts.key)
        return StageResult("download", stage.parts.key, "", "", "built", 0.0)

    monkeypatch.setattr(Run, "build", build)
    finetune.download.fn(replace(run, sent=sent))
    assert built == [own.parts.key]


def test_a_row_is_found_that_shards_of_both_plans_have_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row repeats one of an earlier shard, and the shard of the repetition is another by now."""
    groups = {("own", 0): [b"a", b"b"], ("theirs", 0): [b"a", b"b"], ("theirs", 1): [b"b"]}
    monkeypatch.setattr(shard_plan, "read_hashes", lambda *place: groups[place])

    def plan(file: str, *keys: str) -> Any:
        spans = [Span(file, n, 0, len(groups[file, n])) for n in range(len(keys))]
        shards = [ShardSpec(k, s.stop, (s,)) for k, s in zip(keys, spans, strict=True)]
        return DownloadPlan("", 3, tuple(shards), None)  # type: ignore[arg-type]

    placed = shard_plan.place_rows(plan("theirs", "both", "gone"), plan("own", "both"))
    assert [spec.spans for spec in placed.shards] == [
        (Span("own", 0, 0, 2),),
        (Span("own", 0, 1, 2),),
    ]


def test_a_sent_stage_is_built_from_what_its_sender_names(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the source has by now; the store keeps the artifacts for this run too."""
    latents = run.store.draft(KeyParts("encode", 1, {}, {})).commit({}, {})
    parameters, asked = sending(run, "train", latents), list[Any]()

    def train(run: Any, *given: StageResult) -> State[StageResult]:
        asked.append([one.load(run.value.store).key for one in given])
        return Completed(data=given[0])

    monkeypatch.setattr(work_pools, "training_task", lambda *_: train)
    parameters["settings"]["source"] = {"kind": "folder", "path": str(tmp_path / "gone")}
    work_pools.run_stage.fn(**parameters)
    assert asked == [[latents.key]]
    (record,) = runs(run.store)
    assert ("encode", latents.key) in record.keys
    run.store.fs.rm(latents.path, recursive=True)
    with pytest.raises(Failed, match=r"encode .*: it was deleted"):
        work_pools.run_stage.fn(**parameters)


@pytest.mark.parametrize(
    ("stage", "before", "given"),
    [
        ("describe", ["download"], ["download"]),
        ("caption", ["download", "describe"], ["download", None, "describe"]),
        ("encode", ["download", "caption"], ["download", None, "caption", None]),
    ],
)
def test_a_sent_stage_gets_none_for_a_stage_that_the_recipe_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, before: list[str], given: list
) -> None:
    places = {f"place.{name}": "gpu" for name in ("describe", "caption", "encode")}
    sections = {"describe": {"describers": {"hash": {"kind": "hash"}}}, "caption": {}}
    settings = {**places, **sections, "store": str(tmp_path), "shared_folders": [str(tmp_path)]}
    recipe = load_recipe("digits", settings)
    run = Run(recipe, Store(recipe.store), base_of(recipe), MeasuringModels(tmp_path), "a-run")
    made = [run.store.draft(KeyParts(name, 1, {}, {})).commit({}, {}) for name in before]
    asked: list[str | None] = []

    def task(run: Any, *results: StageResult | None) -> State[StageResult]:
        asked.extend(result and result.stage for result in results)
        return Completed(data=results[0])

    monkeypatch.setattr(work_pools, "TASKS", {stage: task})
    monkeypatch.setattr(work_pools, "prepare", lambda *_, **__: run)
    work_pools.run_stage.fn(**sending(run, stage, *made))
    assert asked == given


def test_the_results_before_a_sent_stage_are_in_order(run: Run) -> None:
    stages = reversed(run.recipe.stages[:-1])
    made = {s: run.store.draft(KeyParts(s, 1, {}, {})).commit({}, {}) for s in stages}
    keys = {stage: artifact.key for stage, artifact in made.items()}
    before = replace(run, sent=Sent("evaluate", PARTS.key, keys)).results_before()
    assert [one.stage for one in before] == ["download", "encode", "train", "evaluate"]
    assert [one.digest for one in before] == [made[one.stage].digest for one in before]


class Pool:
    """Plays the runs of a pool: each ends in the next state, after an act."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *runs: tuple[StateType, float]) -> None:
        self.runs, self.slept, self.sent = iter(runs), list[float](), 0
        self.act: Any = lambda: None
        monkeypatch.setattr(send_stage, "_run_once", self.run_once)

    def run_once(self, *given: Any) -> Any:
        self.sent += 1
        kind, percent = next(self.runs)
        given[-1].show(percent, "")
        self.act()
        return State(type=kind, message="preempted"), "a-run"

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def send(self, run: Run) -> None:
        given = ("gpu", "digits", run.store, "train", {"key": PARTS.key}, Progress("train"))
        send_stage.send_stage(*given, clock=Clock(sleep=self.sleep))  # type: ignore[arg-type]


def test_crashes_without_progress_are_sent_again_with_growing_pauses_and_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(monkeypatch, *[(StateType.CRASHED, 10.0)] * 4)
    with pytest.raises(Away, match="3 runs on pool gpu crashed without progress"):
        pool.send(run)
    first, second = pool.slept
    assert 2.5 <= first <= 7.5 and 5 <= second <= 15


def test_a_run_that_comes_further_each_time_is_sent_as_often_as_it_needs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = [(StateType.CRASHED, 10.0 * n) for n in range(1, 8)]
    pool = Pool(monkeypatch, *crashed, (StateType.COMPLETED, 100.0))
    pool.send(run)
    assert pool.sent == 8 and max(pool.slept) <= 7.5


def test_a_run_that_counts_as_crashed_but_builds_on_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an outage of the server: its artifact appears later."""
    pool, alive = Pool(monkeypatch, (StateType.CRASHED, 10.0)), iter([True, True, False])
    monkeypatch.setattr(Store, "is_being_built", lambda *_: next(alive))
    pool.act = lambda: run.store.draft(PARTS).commit({}, {})
    pool.send(run)
    assert pool.sent == 1 and pool.slept == [send_stage.POLL_SECONDS] * 2


@pytest.mark.parametrize("status", [401, 403, 422])
def test_an_answer_that_waiting_does_not_change_ends_the_wait(status: int) -> None:
    with pytest.raises(Failed, match="train: the Prefect server refuses"):
        send_stage._check_away("train", answer(status))


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_may_come_back_is_waited_for(status: int) -> None:
    send_stage._check_away("train", answer(status))
    send_stage._check_away("train", httpx.ConnectError("refused"))


def answer(status: int) -> PrefectHTTPStatusError:
    request = httpx.Request("GET", "http://server/api")
    found = httpx.Response(status, request=request)
    return PrefectHTTPStatusError(str(status), request=request, response=found)


def test_an_interrupt_right_after_the_sending_cancels_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    cancelled: list[Any] = []
    monkeypatch.setattr(send_stage, "get_client", lambda **_: nullcontext())
    monkeypatch.setattr(send_stage, "run_deployment", lambda *_, **given: given)
    monkeypatch.setattr(send_stage, "url_for", interrupted)
    monkeypatch.setattr(send_stage, "_cancel", lambda _, sent: cancelled.append(sent))
    monkeypatch.setattr(send_stage, "_tell", interrupted)
    given: Any = ("gpu", "digits", run.store, "train", {"key": PARTS.key}, Progress("train"))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            send_stage.send_stage(*given)
    first, second = (sent["idempotency_key"] for sent in cancelled)
    assert first != second


def test_a_run_that_was_deleted_ends_the_stage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def deleted(*_: Any) -> Any:
        raise ObjectNotFound(None)

    server = SimpleNamespace(read_flow_run=deleted)
    monkeypatch.setattr(send_stage, "get_client", lambda **_: nullcontext(server))
    monkeypatch.setattr(send_stage, "_start", lambda *_: SimpleNamespace(id=1, name="a-run"))
    monkeypatch.setattr(send_stage, "_tell", lambda *_: None)
    monkeypatch.setattr(send_stage, "_cancel", lambda *_: pytest.fail("cancelled"))
    with pytest.raises(Failed, match="train: run a-run on pool gpu was deleted: run again"):
        reached = send_stage._Reached(Progress("train"))
        send_stage._run_once("train", "digits", "gpu", {}, reached)


def test_pools_of_stages_after_the_last_need_no_lasting_server() -> None:
    recipe = load_recipe("digits", {"place.train": "gpu"})
    asked = {
        until: [check.name for check in checks_of(Doors(recipe, STAGES[: 1 + STAGES.index(until)]))]
        for until in ("encode", "train")
    }
    assert "server" not in asked["encode"] and "server" in asked["train"]


def test_only_the_download_is_told_to_retry_failed_rows(run: Run) -> None:
    """As a try of the run that sends it: `download.retry_failed` counts runs."""
    run = replace(run, retry_run=run.id)
    assert sending(run, "download")["retry_run"] == run.id
    assert sending(run, "train")["retry_run"] is None


def test_a_sent_run_waits_for_a_store_that_is_away(run: Run, waited: list[float]) -> None:
    errors: list[Exception] = [Away("store: it cannot be used now"), StoreRefused("503")]

    def check() -> Run:
        if errors:
            raise errors.pop()
        return run

    assert retrying(check) is run and waited == [10.0, 60.0]
    errors.append(StoreRefused("Forbidden: no"))
    with pytest.raises(StoreRefused):
        retrying(check)
    errors += [Away("store: it cannot be used now")] * 9
    with pytest.raises(Away):
        retrying(check)
    assert waited == [10.0, 60.0, 10.0, 60.0, 300.0]


def test_a_sent_run_waits_for_the_hub(run: Run, waited: list[float]) -> None:
    errors = [Away("model.path: the hub cannot be reached")]

    def check() -> Run:
        if errors:
            raise errors.pop()
        return run

    assert retrying(check) is run and waited == [10.0]


def test_a_retraining_names_its_champion(run: Run) -> None:
    champion = Champion("v3", *[""] * 7)
    assert sending(replace(run, champion=champion), "train")["champion"] == "v3"
    assert sending(run, "train")["champion"] is None


def test_a_sent_download_has_the_champions_data_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = {"source": {"kind": "digits", "count": 9, "rehearsal": 0}}
    settings = {"store": str(tmp_path), "shared_folders": [str(tmp_path)], "place.download": "cpu"}
    recipe = load_recipe("digits", {**settings, "sources": {"old": digits, "new": digits}})
    champion = Champion("v1", *[""] * 7, sources={"old": ("images", "latents")})
    about = (Store(recipe.store), base_of(recipe), MeasuringModels(tmp_path), "a-run")
    run = Run(recipe, *about, champion=champion)
    made = run.store.draft(KeyParts("download", 1, {}, {})).commit({}, {})
    taken: list[Champion | None] = []

    def task(run: Any) -> State[StageResult]:
        taken.append(run.value.champion)
        return Completed(data=StageResult.of_reused(run.value.store, "download", made.key))

    monkeypatch.setattr(work_pools, "TASKS", {"download": task})
    monkeypatch.setattr(work_pools, "prepare", lambda sent, **_: Run(sent, *about))
    monkeypatch.setattr(work_pools, "find_champion", lambda *_: champion)
    for name in recipe.sources:
        work_pools.run_stage.fn(**sending(run.of_source(name), "download"))
    assert taken == [champion.of_source("old"), None]


def test_a_stage_that_waits_holds_no_slot_of_its_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run on the pool would wait for the slot of the run that waits for it."""
    for task in (finetune.train, continue_from_champion, finetune.download):
        assert tags_of_run(task, run, monkeypatch) == {"sent"}
    assert tags_of_run(finetune.encode, run, monkeypatch) == {"accelerator"}
    here = replace(run, recipe=load_recipe("digits"))
    for stage in PLACED_STAGES:
        task = getattr(finetune, stage)
        assert tags_of_run(task, here, monkeypatch) == task.tags


def tags_of_run(task: Task[Any, Any], run: Run, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    with monkeypatch.context() as patch:
        patch.setattr(Task, "__call__", lambda task, run: task.tags)
        return set(send_stage.run_task(task, run))


def test_a_stage_begins_once_the_server_is_back(
    run: Run, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect asks the server for a slot; the stages before may have taken days."""
    without_slot = ConcurrencySlotAcquisitionError("tag:accelerator")
    without_slot.__cause__ = httpx.ConnectError("refused")
    answers = [without_slot, answer(503), "trained"]

    def call(_: object, *given: object) -> object:
        assert given == (quote(run), 2)
        if isinstance(found := answers.pop(0), Exception):
            raise found
        return found

    monkeypatch.setattr(Task, "__call__", call)
    assert send_stage.run_task(finetune.train, run, 2, name="train 3") == "trained"
    assert waited == [10.0, 60.0]
    answers += [answer(401), Away("of the stage, which Prefect has tried again")]
    for kind in (PrefectHTTPStatusError, Away):
        with pytest.raises(kind):
            send_stage.run_task(finetune.train, run, 2)


def test_devices_of_sent_stages_are_not_checked_here(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = ("download", "encode", "train", "evaluate", "publish")
    assert Doors(run.recipe, stages).here == ["encode", "evaluate", "publish"]


@pytest.mark.parametrize(
    ("pool", "deployment"), [("gpu", "kiln-stage/gpu"), ("gpu/urgent", "kiln-stage/gpu")]
)
def test_a_queue_belongs_to_the_deployment_of_its_pool(pool: str, deployment: str) -> None:
    assert send_stage.deployment_of(pool) == deployment


@pytest.mark.parametrize("command", ["run", "sweep", "retrain", "place"])
def test_a_temporary_server_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts: no worker would ever find it."""
    monkeypatch.setattr("flows.run_in_terminal.configured_server", lambda: None)
    words = [command, "digits", "-o", "place.train=gpu"]
    result = typer.testing.CliRunner().invoke(cli.app, words)
    assert isinstance(result.exception, ValueError)
    assert "work pools need a lasting Prefect server" in str(result.exception)
