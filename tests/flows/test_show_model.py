"""`kiln show NAME@VERSION` compares a version with the champion."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts.store import KeyParts, Store
from tasks.build_or_reuse import BOOTSTRAP, METRICS
from tasks.evaluate import distances
from tasks.evaluate.stage import metrics_by_name
from tasks.publish.registry import Registry

Here = Callable[..., str]  # of conftest.py
FACTS = {"created": "2026-01-01", "host": "here", "seconds": 1.0, "reason": "none was there"}


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., None]:
    """`publish(score, fingerprint)` makes the next version of model `tiny` the champion.

    Without a score it has no metrics.
    """
    store = Store(str(tmp_path / "store"))
    registry = Registry(store.url_of("registry"), "tiny")

    def estimates(score: float) -> distances.Estimates:
        return {
            "clip_score": distances.mean(
                np.array([score, score + 1, score + 2]), distances.Resampling(20, 0)
            )
        }

    def make(
        score: float | None,
        fingerprint: str,
        compared_with: str = "",
        champion: float | None = None,
    ) -> None:
        if score is None:
            draft = store.draft(KeyParts("publish", 1, {}, {"number": f"{registry.versions()}"}))
            registry.promote(registry.publish(draft.commit({}, FACTS)).name)
            return
        models = {"base": estimates(1), "tuned": estimates(score)}
        measured = models | ({} if champion is None else {"champion": estimates(champion)})
        metrics: Any = {"metrics": metrics_by_name(measured), "differences": {"clip_score": {}}}
        for other in measured.keys() - {"tuned"}:
            found = distances.differences(models["tuned"], measured[other])
            metrics["differences"]["clip_score"][other] = found["clip_score"]
        draft = store.draft(KeyParts("publish", 1, {"score": score}, {}))
        draft.write(METRICS, json.dumps({**metrics, "fingerprint": fingerprint}).encode())
        draft.write(BOOTSTRAP, distances.to_npz(models))
        summary = {"compared_with": compared_with or None}
        registry.promote(registry.publish(draft.commit(summary, FACTS)).name)

    return make


def values(found: dict[str, Any]) -> dict[str, float]:
    return {model: one["value"] for model, one in found["metrics"]["clip_score"].items()}


def test_a_version_is_shown_beside_the_champion(
    here: Here, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish(5, "same")
    publish(8, "same")
    stored = ["--store", str(tmp_path / "store")]
    found = json.loads(here("show", "tiny@v1", "--json", *stored))
    assert (found["version"], found["champion"], found["versions"]) == ("v1", "v2", ["v1", "v2"])
    assert values(found) == {"base": 2, "tuned": 6, "champion": 9} and found["comparable"]
    assert found["differences"]["clip_score"]["champion"]["value"] == -3
    title, row = here("show", "tiny@v1", *stored).splitlines()[-2:]
    titles = ["metric", "base", "v1", "champion v2", "v1 - base", "v1 - v2", "samples"]
    assert re.split("  +", title) == ["", *titles]
    values_of = dict(zip(titles, re.split("  +", row)[1:], strict=True))
    assert values_of["metric"] == "clip_score"
    assert values_of["v1 - base"].startswith("4 [") and values_of["v1 - v2"].startswith("-3 [")


def test_the_champion_alone_has_nothing_beside_it(
    here: Here, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish(5, "same")
    publish(8, "same")
    found = json.loads(here("show", "tiny", "--json", "--store", str(tmp_path / "store")))
    assert found["version"] == "v2" and values(found) == {"base": 2, "tuned": 9}
    assert {m: one["value"] for m, one in found["differences"]["clip_score"].items()} == {"base": 7}


def test_a_champion_that_was_measured_otherwise_has_no_difference(
    here: Here, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish(5, "few prompts")
    publish(8, "many prompts")
    stored = ["--store", str(tmp_path / "store")]
    found = json.loads(here("show", "tiny@v1", "--json", *stored))
    assert values(found)["champion"] == 9 and not found["comparable"]
    assert found["differences"]["clip_score"].keys() == {"base"}
    last = here("show", "tiny@v1", *stored).splitlines()[-1].strip()
    assert last == "v2 was measured with other prompts, pictures or settings"


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ((None, None), "v1 and v2: no measurements, since no metrics were published"),
        ((None, 8), "v1: no measurements, since no metrics were published"),
        ((5, None), "v2: no measurements, since no metrics were published"),
    ],
)
def test_a_version_without_metrics_was_not_measured_otherwise(
    here: Here,
    publish: Callable[..., None],
    tmp_path: Path,
    scores: tuple[float | None, float | None],
    said: str,
) -> None:
    for score in scores:
        publish(score, "same")
    stored = ["--store", str(tmp_path / "store")]
    lines = here("show", "tiny@v1", *stored).splitlines()
    assert lines[-1].strip() == said
    assert ("clip_score" in lines[-2]) == (scores[0] is not None), "what there is, is shown"


def test_the_numbers_of_the_versions_own_gate_count(
    here: Here, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish(5, "few prompts")
    publish(8, "many prompts", "v1", champion=4)
    stored = ["--store", str(tmp_path / "store")]
    here("rollback", "tiny", *stored)
    found = json.loads(here("show", "tiny@v2", "--json", *stored))
    assert values(found) == {"base": 2, "tuned": 9, "champion": 5} and found["comparable"]
    assert found["differences"]["clip_score"]["champion"]["value"] == 4


def test_a_name_is_no_key_and_a_key_is_no_name(
    here: Here, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish(5, "same")
    stored = ["--store", str(tmp_path / "store")]
    assert here("show", "publish/", *stored).startswith("publish ")
    said = here("show", "tiny@v7", *stored, code=2)
    assert said == "kiln: tiny v7: no such version (there are: v1)\n"
