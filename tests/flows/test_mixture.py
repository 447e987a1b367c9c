"""A mixture of named sources in a run: what each change builds again, and what people see."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published import manifest, outcomes

from artifacts.latent_shards import open_latents
from artifacts.store import MANIFEST

pytestmark = pytest.mark.slow
Report = dict[str, Any]
Run = Callable[..., Report]


def digits(count: int, rehearsal: int, **facts: Any) -> dict[str, Any]:
    source = {"kind": "digits", "count": count, "rehearsal": rehearsal}
    return {"source": source, **facts}


def test_a_mixture_is_published_and_a_new_source_encodes_one(
    run_here: Run, here: Callable[..., str], small: dict[str, Any], tmp_path: Path
) -> None:
    settings = {name: of for name, of in small.items() if not name.startswith("source.")}
    sources = {
        "chalk": digits(40, 0, weight=0.5),
        "mirrored": {"like": "chalk", "encode": {"flip": True}, "repeats": 2},
        "old": digits(0, 30, regularisation="images", encode={"holdout": 0.2}),
    }
    given = {**settings, "sources": sources}
    built = {stage: Path(str(small["store"]), stage) for stage in ("download", "encode")}

    def keys(stage: str) -> set[str]:
        return {path.parent.name for path in built[stage].glob(f"*/{MANIFEST}")}

    first = run_here("digits", given)
    assert first["status"] == "published"
    assert len(keys("download")) == 3  # chalk and what is like it share one; old; the mixture's
    latents = open_latents(first["stages"]["encode"]["uri"])
    counts = {name: of["samples"] for name, of in _sources(first).items()}
    assert counts == {"chalk": 40, "mirrored": 40, "old": 30}
    assert [*latents.training_by_source] == ["chalk", "mirrored", "old"]
    assert sum(latents.training_by_source.values()) == latents.training
    urls = {name: {s.url for s in latents.of_source(name).shards} for name in sources}
    assert not urls["chalk"] & urls["mirrored"]  # which has further variants
    # An evaluation compares with the pictures to learn.
    assert _sources(first, "download").keys() == {"chalk", "mirrored"}

    chalk, old = (_sources(first)[name]["holdout"] for name in ("chalk", "old"))
    measured = manifest(first, "evaluate")["summary"]["memorization"]["held_out_pictures"]
    assert 0 < measured <= chalk and old > 0  # those of the source that is like it once

    model = Path(first["model"])
    card = (model / "README.md").read_text(encoding="utf-8")
    assert "| old: images | `" in card and "| chalk: digits; mirrored: digits; old: digits" in card
    report = (model / "report.html").read_text(encoding="utf-8")
    assert all(
        f"{name}: Buckets" in report and f"holdout_loss/{name}" in report for name in sources
    )
    assert "held out" in here("data", "digits", overrides=given)

    given["sources"] = {**sources, "chalk": digits(40, 0, weight=0.3)}
    encoded = keys("encode")
    again = run_here("digits", given, until="train")
    assert outcomes(again) == {"download": "reused", "encode": "reused", "train": "built"}
    assert keys("encode") == encoded
    why = manifest(again, "train")["run"]["reason"]
    assert why.endswith(": settings.sources.chalk.weight 0.5 → 0.3")

    given["sources"] = {**given["sources"], "more": digits(50, 0)}
    grown = run_here("digits", given, until="encode")
    added = keys("encode") - encoded
    assert len(added) == 2 and grown["stages"]["encode"]["key"] in added  # the source, the mixture
    here("gc", "--store", str(small["store"]), "--days", "0", "--hours", "0", "--delete")
    assert keys("encode") == encoded  # which the published model needs


@pytest.mark.soak
def test_a_mixture_is_trained_again_when_one_of_its_sources_has_grown(
    run_here: Run, here: Callable[..., str], api: str, small: dict[str, Any]
) -> None:
    settings = {name: of for name, of in small.items() if not name.startswith("source.")}
    settings |= {"publish.gate": ["cmmd < champion + 100"], "retrain.start": "base"}
    sources = {"chalk": digits(40, 0), "old": digits(0, 30, regularisation="images")}
    first = run_here("digits", {**settings, "sources": sources})

    def retrain(**changed: Any) -> Report:
        given = {**settings, "sources": {**sources, **changed}}
        report: Report = json.loads(
            here("retrain", "digits", "--json", overrides=given, api=api).splitlines()[-1]
        )
        return report

    assert retrain()["why"] == "the source has no new rows since v1"
    again = retrain(chalk=digits(60, 0))
    assert (again["status"], again["changes"]["new_rows"]) == ("published", 20)
    before, after = _sources(first), _sources(again)
    assert before["old"] == after["old"]
    assert after["chalk"]["samples"] == before["chalk"]["samples"] + 20
    settings["retrain.start"] = "champion"
    given = {**settings, "sources": sources}
    said = here("retrain", "digits", overrides=given, api=api, code=2)
    assert "retrain.start: a mixture is trained again from the base's weights: set base" in said


@pytest.mark.soak
def test_prior_targets_keep_the_styles_that_the_demo_s_base_draws(
    run_here: Run, small: dict[str, Any]
) -> None:
    """Recipe digits-mixture with a fifth of its steps, and the same without source `old`."""
    settings = {name: of for name, of in small.items() if not name.startswith("source.")}
    settings |= {"train.steps": 100, "train.global_batch_size": 32, "train.lr_warmup_steps": 5}
    settings |= {"train.checkpointing_steps": 100, "train.sample_every_n_steps": 0}
    settings |= {"evaluate.num_inference_steps": 20}
    settings |= {f"sources.{name}.source.count": 300 for name in ("green", "black")}
    settings |= {f"evaluate.prompts.{name}.images_per_prompt": 2 for name in ("new", "black")}
    settings["publish.gate"] = ["style/old >= 0.6", "style/new >= 0.6", "style/black >= 0.6"]
    kept = run_here("digits-mixture", settings)
    assert kept["status"] == "published"
    settings |= {"sources.old": None, "train.steps": 60}  # half of the others are of `old`
    lost = run_here("digits-mixture", settings, until="evaluate")
    before, after = (report["metrics"]["style/old"]["tuned"]["value"] for report in (lost, kept))
    assert before < after - 0.3


def _sources(report: Report, stage: str = "encode") -> dict[str, Any]:
    found: dict[str, Any] = manifest(report, stage)["summary"]["sources"]
    return found
