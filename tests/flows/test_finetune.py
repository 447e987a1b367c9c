"""`kiln run`: a whole run, reuse, and rebuilds after damage."""

import base64
import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from prefect import runtime
from published import STAGES, expect, folder, manifest, outcomes

from artifacts.store import Store
from configs.load_recipe import load_recipe
from tasks.evaluate.metrics import prompt_sets
from tasks.evaluate.published import ChampionEvaluation
from tasks.publish.registry import Registry

pytestmark = pytest.mark.slow
Overrides = dict[str, Any]
Here = Callable[..., str]  # of conftest.py, as are these
RunHere = Callable[..., dict[str, Any]]
Report = dict[str, Any]
Picture = NDArray[np.uint8]  # [H, W, 3]


def weights(report: Report) -> bytes:
    return (folder(report, "train") / "unet/diffusion_pytorch_model.safetensors").read_bytes()


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_is_published_and_its_repetition_reuses_everything(
    first: Report, small: Overrides, here: Here, run_here: RunHere, api: str
) -> None:
    assert first["status"] == "published"
    assert outcomes(first) == expect(*STAGES)
    model = Path(first["model"])
    assert model.name == "v1"
    card = (model / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "holdout\\_loss" in card
    run = manifest(first, "train")["run"]
    assert run["resumed_from"] == 0
    scores = run["sample_scores"]
    assert [(*line,) for line in scores] == [("step", "clip_score", "digit", "style")] * 2
    assert [line["step"] for line in scores] == [3, 6]

    second = run_here("digits", small)  # by a server whose database has never heard of it
    assert outcomes(second) == expect()
    assert second["model"] == first["model"]

    faster = run_here("digits", {**small, "train.learning_rate": 2e-3})
    assert faster["champion"]["version"] == "v2" and faster["champion"]["why"] == "published"
    assert outcomes(faster) == expect("train", "evaluate", "publish")
    assert Path(faster["model"]).name == "v2"
    for report in (first, faster):
        check_pictures(report, base=(drawn(first) & drawn(faster)).pop())
    assert scored(first, "base") == scored(faster, "base")
    assert scored(first, "tuned") != scored(faster, "tuned")

    rule = "holdout_loss < champion * 0.1"
    harder = {**small, "train.learning_rate": 2e-3, "publish.gate": [rule]}
    assert "rejected by the gate" in here("run", "digits", overrides=harder, code=3, api=api)

    store = str(small["store"])
    listed = json.loads(here("ls", "--store", store, "--json"))
    champions = [(m["version"], m["champion"]) for m in listed["models"]]
    assert champions == [("v1", False), ("v2", True)]
    assert "v1 is the champion again" in here("rollback", "digits", "--store", store)
    back = here("run", "digits", overrides={**small, "train.learning_rate": 2e-3}, api=api)
    assert f"published: {faster['model']}; the champion is v1 (rolled back)" in back
    assert "v2 is the champion" in here("promote", "digits", "v2", "--store", store)
    key = faster["stages"]["publish"]["key"]
    shown = here("show", f"publish/{key}", "--store", store)
    for stage in ("evaluation", "model", "latents", "images", "source"):
        assert f"  {stage} " in shown
    assert "damaged" not in here("verify", "--store", store)
    here("run", "digits", "--force", "a demonstration", overrides=harder, api=api)
    (model,) = json.loads(here("ls", "--store", store, "--json"))["models"][2:]
    card = (Path(model["uri"]) / "README.md").read_text(encoding="utf-8")
    assert model["champion"] and "in spite of a failed gate:** a demonstration" in card
    move = Registry(f"{store}/registry", "digits").last_move()
    assert move is not None and move["why"] == "forced: a demonstration"


def drawn(report: Report) -> set[str]:
    """Names of the shards with either model's samples."""
    return {
        file["path"]
        for file in manifest(report, "evaluate")["files"]
        if file["path"].endswith(".tar")
    }


def scored(report: Report, model: str) -> dict[str, float]:
    return {name: models[model]["value"] for name, models in report["metrics"].items()}


def check_pictures(report: Report, base: str) -> None:
    """The page has each stage's pictures, with the base's above the tuned model's."""
    html = (Path(report["model"]) / "report.html").read_text(encoding="utf-8")
    parts = re.split(r'<h2 id="(\w+)">', html)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(sections) == STAGES
    pictures = {stage: pngs(text) for stage, text in sections.items()}
    evaluation, training = folder(report, "evaluate"), folder(report, "train")
    assert pictures["train"][-1] == (training / "samples/step-00000006.png").read_bytes()
    page = (evaluation / "before_after.png").read_bytes()
    (tuned,) = drawn(report) - {base}
    compared = re.findall(r'base64,([^"]+)" alt="(\w+): ', sections["evaluate"])
    first_of = {model: base64.b64decode(png) for png, model in reversed(compared)}
    for model, shard in (("base", base), ("tuned", tuned)):
        assert np.array_equal(decoded(first_of[model]), first_picture(evaluation / shard))
    (above, left), (below, same_left) = (
        where(decoded(page), first_picture(evaluation / shard)) for shard in (base, tuned)
    )
    assert above < below and left == same_left
    for png in (pictures["download"][0], pictures["train"][0], *pictures["publish"]):
        assert decoded(png).std() > 1


def pngs(html: str) -> list[bytes]:
    return [base64.b64decode(text) for text in re.findall(r"data:image/png;base64,([^\"]+)", html)]


def decoded(png: bytes) -> Picture:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def first_picture(tar: Path) -> Picture:
    with tarfile.open(tar) as stream:
        member = stream.extractfile("00000.png")
        assert member is not None
        return decoded(member.read())


def where(page: Picture, picture: Picture, enlarged: int = 3) -> tuple[int, int]:
    """Row and column of an enlarged picture on a page."""
    wanted = picture.repeat(enlarged, 0).repeat(enlarged, 1)
    height, width = wanted.shape[:2]
    rows, columns = (page.shape[0] - height + 1, page.shape[1] - width + 1)
    likely = np.ones((rows, columns), bool)
    for y, x in ((0, 0), (height // 2, width // 2), (height - 1, 0), (0, width - 1)):
        likely &= (page[y : y + rows, x : x + columns] == wanted[y, x]).all(-1)
    (place,) = [
        (int(y), int(x))
        for y, x in np.argwhere(likely)
        if np.array_equal(page[y : y + height, x : x + width], wanted)
    ]
    return place


def test_only_damaged_artifacts_are_rebuilt(
    first: Report, small: Overrides, run_here: RunHere
) -> None:
    store, trained = Path(str(small["store"])), weights(first)
    for patterns in (
        {
            "download": "shards/*.tar",
            "train": "*/unet/*.safetensors",
            "publish": "*/vae/*.safetensors",
        },
        {"encode": "shards/*.safetensors", "evaluate": "*/metrics.json"},
    ):
        before = {p: p.stat().st_mtime_ns for p in store.glob("*/shards/*")}
        victims = [sorted((store / stage).glob(files))[0] for stage, files in patterns.items()]
        for victim in victims:
            damage(victim)
        report = run_here("digits", small)
        assert outcomes(report) == expect(*patterns)
        assert weights(report) == trained
        written = [p for p, at in before.items() if p.stat().st_mtime_ns != at]
        rebuilt = {p.name.partition(".")[0] for p in written}
        # An encoder makes thumbnails from the pictures that it decodes.
        rebuilt -= {p.name.partition(".")[0] for p in store.glob("encode/shards/*.npy")}
        assert rebuilt == {v.name.partition(".")[0] for v in victims if v.parent.name == "shards"}
    (folder(first, "encode") / "manifest.json").unlink()
    assert outcomes(run_here("digits", small)) == expect("encode")


def test_a_rejected_model_is_not_published(
    first: Report, small: Overrides, here: Here, api: str
) -> None:
    registry = Path(str(small["store"])) / "registry"
    shutil.rmtree(registry)
    strict = {**small, "publish.gate": ["digit/new >= 1.1"]}
    out = here("run", "digits", "--json", overrides=strict, code=3, api=api)
    assert "rejected by the gate" in out
    assert not registry.exists()
    (verdict,) = (Path(str(small["store"])) / "verdict").iterdir()
    assert f"verdict:   {verdict}" in out
    (judged,) = json.loads((verdict / "gate.json").read_bytes())
    measured = json.loads((verdict / "metrics.json").read_bytes())["metrics"]
    assert judged["value"] == measured["digit/new"]["tuned"]["value"] and judged["bound"] == 1.1
    store = str(small["store"])
    assert verdict.name[:12] not in here("gc", "--store", store, "--hours", "0")
    shown = here("show", f"verdict/{verdict.name[:12]}", "--store", store)
    assert all(word in shown for word in ("evaluation", "model", "latents", "source"))


@pytest.mark.soak
def test_the_gate_looks_again_at_more_pictures_until_it_can_tell(
    first: Report, small: Overrides, here: Here, api: str
) -> None:
    """A bound at the measured value is undecided; one far below passes at the first look."""
    sets = prompt_sets(load_recipe("digits", small).evaluate)
    pictures = sum(map(len, sets.values()))
    value = first["metrics"]["clip_score/new"]["tuned"]["value"]
    store = Path(str(small["store"]))

    def run(rule: str, rounds: int, code: int) -> tuple[Report, int]:
        known = set((store / "evaluate/shards").glob("*.tar"))
        limits = {"publish.gate": [rule], "evaluate.max_pictures": rounds * pictures}
        limits["evaluate.bootstrap"] = 40
        out = here("run", "digits", "--json", overrides={**small, **limits}, code=code, api=api)
        new = set((store / "evaluate/shards").glob("*.tar")) - known
        return json.loads(out.splitlines()[-1]), len(new)

    near = f"clip_score/new >= {value} at 95%"
    report, new = run(near, 2, 4)
    assert (report["status"], new) == ("undecided", 2), "a round for each of two models"
    (verdict,) = report["gate"]
    assert verdict["undecided"] and not verdict["passed"]
    assert report["metrics"]["clip_score/new"]["tuned"]["n"] == 2 * len(sets["new"])
    report, new = run(near, 3, 4)
    assert (report["status"], new) == ("undecided", 2), "the first two rounds are not drawn again"
    report, new = run(f"clip_score/new >= {value - 50} at 95%", 3, 0)
    assert (report["status"], new) == ("published", 0)
    assert report["metrics"]["clip_score/new"]["tuned"]["n"] == len(sets["new"])


@pytest.mark.soak
def test_a_model_that_passed_at_a_later_look_is_reused(
    first: Report, small: Overrides, here: Here, api: str
) -> None:
    """Neither it nor the champion before it is measured by fewer pictures again."""
    sets = prompt_sets(load_recipe("digits", small).evaluate)
    pictures = sum(map(len, sets.values()))
    store = Store(str(small["store"]))

    def run(rules: list[str], rounds: int, code: int) -> Report:
        limits = {"publish.gate": rules, "evaluate.max_pictures": rounds * pictures}
        given = {**small, **limits, "evaluate.bootstrap": 40, "train.steps": 7}
        out = here("run", "digits", "--json", overrides=given, code=code, api=api)
        return dict(json.loads(out.splitlines()[-1]))

    values = {
        name: models["tuned"]["value"]
        for name, models in first["metrics"].items()
        if name.startswith("clip_score")
    }
    at_value = [f"{name} >= {value} at 95%" for name, value in values.items()]
    looks = [run(at_value, rounds, 4)["gate"] for rounds in (1, 2)]
    # A bound that the first look's interval contains, and the second's does not.
    chosen = [
        f"{name} {op} {value + sign * (before + after) / 2} at 95%"
        for (name, value), one, two in zip(values.items(), *looks, strict=True)
        for op, sign, before, after in (
            (">=", 1, one["interval"][0], two["interval"][0]),
            ("<=", -1, -one["interval"][1], -two["interval"][1]),
        )
        if before < after
    ]
    rules = [chosen[0], "clip_score/new >= champion * 0.5"]
    published = run(rules, 2, 0)
    assert published["metrics"]["clip_score"]["tuned"]["n"] == 2 * pictures
    known = set(store.artifact_keys())
    again = run(rules, 2, 0)
    assert again["model"] == published["model"]
    assert set(store.artifact_keys()) == known
    assert {name: stage["outcome"] for name, stage in again["stages"].items()} == dict.fromkeys(
        again["stages"], "reused"
    )


@pytest.mark.extended
def test_a_champion_with_other_metrics_is_measured_by_the_evaluation(
    first: Report, small: Overrides, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it has the accelerator, which `publish` on another machine may lack."""
    build, tasks = ChampionEvaluation.build, list[str]()

    def measure(*given: Any, **more: Any) -> Any:
        tasks.append(runtime.task_run.name)
        return build(*given, **more)

    monkeypatch.setattr(ChampionEvaluation, "build", measure)
    rule = "holdout_loss < champion * 1.01"  # its weights were rounded
    other = {**small, "evaluate.num_inference_steps": 3, "publish.gate": [rule]}
    report = run_here("digits", other)
    assert outcomes(report) == expect("evaluate", "publish") and report["model"].endswith("v2")
    assert tasks == ["evaluate"]
    (verdict,) = json.loads((Path(report["model"]) / "gate.json").read_bytes())
    assert verdict["passed"] and verdict["value"] == pytest.approx(
        verdict["bound"] / 1.01, rel=1e-3
    )


@pytest.mark.extended
def test_a_run_until_a_stage_builds_up_to_it(
    small: Overrides, here: Here, run_here: RunHere, api: str
) -> None:
    said = here("run", "digits", "--until", "encode", "--json", overrides=small, api=api)
    report = json.loads(said.splitlines()[-1])
    assert (report["status"], report["model"], report["metrics"]) == ("built", None, {})
    assert outcomes(report) == {"download": "built", "encode": "built"}
    store = Path(str(small["store"]))
    assert {path.name for path in store.iterdir()} == {"download", "encode", "plan", "runs"}
    again = here("run", "digits", "--until", "encode", overrides=small, api=api)
    assert again.splitlines()[-1] == f"encode    reused: {folder(report, 'encode')}"
    assert "warning: encode: fewer than 20 held-out pictures (" in again
    measured = run_here("digits", small, until="evaluate")
    assert outcomes(measured) == {
        **dict.fromkeys(("download", "encode"), "reused"),
        **dict.fromkeys(("train", "evaluate"), "built"),
    }
    assert "clip_score" in measured["metrics"] and not (store / "registry").exists()


@pytest.mark.soak
def test_a_run_on_mindspore_is_published(
    small: Overrides, run_here: RunHere, tiny_model: Callable[[str], Path], tiny_clip: Path
) -> None:
    """Each stage from encoding to sampling runs in the runtime's own environment."""
    chips.require("mindspore")
    least = {
        "model.path": str(tiny_model("least-sdxl")),  # a larger one takes MindSpore longer
        "evaluate.clip": str(tiny_clip),
        "evaluate.judges": [],
    }
    with chips.standing_in("mindspore"):
        report = run_here("digits", {**small, **least, "runtime": "mindspore"})
    assert report["status"] == "published"
    assert outcomes(report) == expect(*STAGES)
    assert manifest(report, "train")["run"]["runtime"] == "mindspore"
