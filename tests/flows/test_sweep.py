"""`kiln sweep`: shared download and encode; the best is published, a failed trial is lost alone."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from caption_server import CaptionServer
from kill_training import kill_at_record

import flows.sweep as sweep_flow
from artifacts.gc import runs
from artifacts.store import KeyParts, Store
from configs.errors import Failed
from configs.load_recipe import Trial, load_recipe
from tasks.build_or_reuse import METRICS, StageResult
from tasks.publish.registry import Registry

pytestmark = pytest.mark.slow
Report = dict[str, Any]
RATE = "train.learning_rate"


def outcomes(report: Report) -> list[dict[str, str]]:
    """Of each trial: stage -> outcome."""
    return [
        {name: stage["outcome"] for name, stage in trial["stages"].items()}
        for trial in report["trials"]
    ]


def test_the_best_trial_is_published_and_a_failed_one_does_not_end_the_others(
    here: Callable[..., str], api: str, first: Report, small: dict[str, Any]
) -> None:
    given = {**small, "sweep.values": {RATE: [1e-3, 1e30, 5e-4]}}  # 1e-3 is that of `first`
    report: Report = json.loads(
        here("sweep", "digits", "--json", overrides=given, api=api).splitlines()[-1]
    )
    built = {"train": "built", "evaluate": "built"}
    assert outcomes(report) == [dict.fromkeys(built, "reused"), {}, built]
    for stage in ("download", "encode"):
        assert report["stages"][stage]["outcome"] == "reused"
        assert report["stages"][stage]["key"] == first["stages"][stage]["key"]
    failed = report["trials"][1]
    assert failed["status"] == "failed" and "step" in failed["error"]
    for trial in (report["trials"][0], report["trials"][2]):
        evaluated = Path(trial["stages"]["evaluate"]["uri"], METRICS).read_bytes()
        models = json.loads(evaluated)["metrics"]
        assert trial["metrics"] == {name: values["tuned"] for name, values in models.items()}
    losses = {n: report["trials"][n]["metrics"]["holdout_loss"]["value"] for n in (0, 2)}
    best = min(losses, key=lambda n: losses[n])
    assert (report["status"], report["best"]) == ("published", best + 1)
    assert report["stages"]["train"]["key"] == report["trials"][best]["stages"]["train"]["key"]
    used = {(name, s["key"]) for trial in report["trials"] for name, s in trial["stages"].items()}
    used |= {(name, report["stages"][name]["key"]) for name in ("download", "encode")}
    assert any(used <= run.keys for run in runs(Store(small["store"]))), "`kiln gc` keeps them all"
    registry = Registry(f"{small['store']}/registry", "digits")
    found = {version.manifest["inputs"]["model"] for version in registry.versions()}
    assert len(found) == 1 + (best != 0), "the other trials stay unpublished"

    strict = {**given, "publish.gate": ["holdout_loss < 0"], "sweep.mode": "max"}
    said = here("sweep", "digits", "--set", f"{RATE}=1e-3,5e-4", overrides=strict, code=3, api=api)
    head, *rows = [line for line in said.splitlines() if line.startswith(("trial", "1", "2"))]
    assert head.split()[:3] == ["trial", RATE, "holdout_loss"]
    assert [row.split()[-1] for row in rows] == ["best", "measured"]
    assert int(rows[0].split()[0]) != best // 2 + 1
    assert "rejected by the gate: holdout_loss < 0" in said


@pytest.mark.soak
def test_captioners_share_a_download_and_have_a_training_each(
    here: Callable[..., str], api: str, small: dict[str, Any]
) -> None:
    with CaptionServer() as server:
        endpoint = {"urls": [server.base_url], "model": "unset"}
        prompts = {"all": "Describe it:"}
        names = {"caption.endpoint.model": ["one", "other"], RATE: None}
        given = {**small, "caption": {"endpoint": endpoint, "prompts": prompts}}
        given |= {"sweep.values": names}
        report: Report = json.loads(
            here("sweep", "digits", "--json", overrides=given, api=api).splitlines()[-1]
        )
        asked = Counter(body["model"] for body in server.bodies)
    store = Store(small["store"])
    encoded = store.load("encode", report["stages"]["encode"]["key"])
    assert encoded is not None
    summary = encoded.manifest["summary"]
    trained_on = summary["samples"] - summary["holdout"]  # the others keep the source's captions
    assert summary["samples"] == 60 and asked == {"one": trained_on, "other": trained_on}
    assert [trial["status"] for trial in report["trials"]] == ["measured", "measured"]
    made = {
        stage: len([*Path(small["store"], stage).glob("*/manifest.json")])
        for stage in ("download", "caption", "encode", "train")
    }
    assert made == {"download": 1, "caption": 2, "encode": 2, "train": 2}


def test_a_trials_metrics_are_its_evaluations_not_its_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    recipe = load_recipe("digits", {"sweep.metric": "holdout_loss"})
    history = [{"step": step, "loss": 0.5, "validation_loss": 0.4} for step in (1, 2)]
    draft = store.draft(KeyParts("train", 1, {}, {}))
    draft.write("history.jsonl", "\n".join(map(json.dumps, history)).encode())
    trained = draft.commit({}, {})
    models = {"base": {"value": 0.3}, "tuned": {"value": 0.2}}
    results = {
        "train": StageResult("train", trained.manifest["key"], trained.uri, "", "built", 1.0),
        "evaluate": StageResult(
            *("evaluate", "key", "uri", "", "built", 1.0, {"metrics": {"holdout_loss": models}})
        ),
    }

    def done(task: Any, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(result=lambda: results[task.name])

    monkeypatch.setattr(sweep_flow, "run_task", done)
    run: Any = SimpleNamespace(recipe=recipe, store=store)
    captioned: Any = [(None, [None, None])]
    outcome, *_ = sweep_flow._try(1, Trial({}, recipe), run, captioned)
    assert (outcome["status"], outcome["error"]) == ("measured", None)
    assert outcome["metrics"] == {"holdout_loss": {"value": 0.2}}
    assert outcome["curve"] == [(1, 0.4), (2, 0.4)]


@pytest.mark.parametrize(("error", "traced"), [(KeyError("a bug"), True), (Failed("no"), False)])
def test_a_bug_in_a_trial_is_logged_with_its_traceback(
    error: Exception,
    traced: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(sweep_flow, "run_task", fail)
    none: Any = None
    once = SimpleNamespace(max_pictures=None)
    run: Any = SimpleNamespace(recipe=SimpleNamespace(place=none, evaluate=once, caption=none))
    with caplog.at_level("WARNING", logger="kiln"):
        outcome, _, states = sweep_flow._try(1, Trial({}, none), run, [(none, [none, none])])
    assert (outcome["status"], states) == ("failed", [])
    assert ("Traceback" in caplog.text) is traced


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--set", "model.path=a,b"], "model.path cannot be swept"),
        (["--set", "train.noise_offset=0,0.1"], "is not comparable"),
    ],
)
def test_wrong_sweeps_are_refused_before_work(
    here: Callable[..., str], api: str, small: dict[str, Any], words: list[str], error: str
) -> None:
    said = here("sweep", "digits", *words, overrides=small, code=2, api=api)
    assert error in said.splitlines()[-1]
    assert not list(Path(small["store"]).glob("*/*/manifest.json"))


def test_a_trial_without_a_step_is_refused_before_the_download(
    here: Callable[..., str], api: str, small: dict[str, Any]
) -> None:
    given = {name: value for name, value in small.items() if name != "train.steps"}
    said = here("sweep", "digits", "--set", "train.epochs=1,1e-9", overrides=given, code=2, api=api)
    assert "train.epochs: 1e-09 of 60 rows are less than one step" in said.splitlines()[-1]
    assert not (Path(small["store"]) / "download").exists()


@pytest.mark.soak
def test_a_killed_sweep_reuses_its_finished_trials(
    here: Callable[..., str], api: str, small: dict[str, Any], tmp_path: Path
) -> None:
    given = {**small, "sweep.values": {RATE: [1e-3, 5e-4, 2e-4]}}
    kill_at_record(tmp_path, api, ["sweep", "digits"], given, r"/evaluate/\w+/manifest", 2)
    said = here("sweep", "digits", "--json", overrides=given, api=api)
    report: Report = json.loads(said.splitlines()[-1])
    assert outcomes(report) == [
        {"train": "reused", "evaluate": "reused"},
        {"train": "reused", "evaluate": "built"},
        {"train": "built", "evaluate": "built"},
    ]
    assert {report["stages"][name]["outcome"] for name in ("download", "encode")} == {"reused"}
