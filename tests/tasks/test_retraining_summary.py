"""The summary of a retraining: the champion's metrics, and the samples closest to copies."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from picture_server import picture

from artifacts.store import Artifact, KeyParts, Store
from tasks.panels import PicturePanel, Table, escape_markdown
from tasks.publish.promotion_gate import Verdict
from tasks.publish.stage import Rejected, VerdictStage
from tasks.retrain.champion import Champion
from tasks.retrain.decision import show_retraining, verdict_of
from tasks.retrain.selection import Changes

CHANGES = Changes("rows", 90, 30, 0, 30, 2, 1)


def metric(value: float) -> dict[str, Any]:
    return {"value": value, "n": 300, "ci": [value, value]}


def evaluation(store: Store) -> Artifact:
    draft = store.draft(KeyParts("evaluate", 1, {}, {}))
    draft.write("before_after.png", picture(1))
    draft.write("closest_pairs.png", picture(2))
    pairs = [{"by": "features", "similarity": 0.99}, {"by": "pixels", "similarity": 0.96}]
    searched = {
        "thresholds": {"similarity": 0.999, "pixel_similarity": 0.95},
        "held_out": {"memorized": 0.0, "memorized_pixels": 0.0},
        "held_out_pictures": 12,
        "closest_held_out": {"memorized": 0.98, "memorized_pixels": 0.945},
        "closest_pairs": pairs,
    }
    metrics = {"cmmd": {"base": metric(1.3), "tuned": metric(0.05)}}
    metrics |= {name: {"tuned": metric(share)} for name, share in SHARES.items()}
    return draft.commit({"metrics": metrics, "fingerprint": "now", "memorization": searched}, {})


SHARES = {"memorized": 0.0, "memorized_pixels": 1 / 300}


def champion(folder: Path, fingerprint: str) -> Champion:
    """The folder of a champion that was published with `cmmd` 0.06."""
    folder.mkdir()
    facts = {"fingerprint": fingerprint, "metrics": {"cmmd": {"tuned": metric(0.06)}}}
    (folder / "metrics.json").write_text(json.dumps(facts))
    (folder / "gate.json").write_text("[]")
    (folder / "before_after.png").write_bytes(picture(3))
    return Champion("v1", str(folder), *["unused"] * 6)


@pytest.mark.parametrize("status", ["rejected", "published"])
@pytest.mark.parametrize(
    ("fingerprint", "compared", "shown"),
    [
        ("now", None, 0.06),  # as it was published
        ("before", 0.07, 0.07),  # measured again, since settings of `evaluate` changed
        ("before", None, "—"),  # no rule names the champion
    ],
)
def test_a_champion_has_the_metrics_that_the_gate_compared(
    tmp_path: Path, status: str, fingerprint: str, compared: float | None, shown: Any
) -> None:
    store = Store(str(tmp_path / "store"))
    evaluated, before = evaluation(store), champion(tmp_path / "v1", fingerprint)
    cmmd = {"tuned": metric(0.05)} | ({} if compared is None else {"champion": metric(compared)})
    report = {"status": status, "start": "v1", "model": None}
    report |= {"stages": {"evaluate": {"key": evaluated.key}}}
    if status == "rejected":
        failed = Verdict("cmmd < champion", False, 0.05, 0.01)
        rejection = Rejected([failed], {"metrics": {"cmmd": cmmd}}, "v1")
        publication: Any = SimpleNamespace(parts=KeyParts("publish", 1, {}, {}))
        stage = VerdictStage(publication, rejection)
        draft = store.draft(stage.parts)
        summary = stage.build(draft, None)
        stored = draft.commit(summary, {"parents": summary.pop("parents")})
        report |= {"gate": rejection.as_json(), "verdict": {"key": stored.key, "uri": stored.uri}}
    else:
        champion(tmp_path / "v2", "now")
        metrics = json.dumps({"metrics": {"cmmd": cmmd}})
        (tmp_path / "v2" / "metrics.json").write_text(metrics)
        report["model"] = str(tmp_path / "v2")
    panels = show_retraining("digits", store, before, CHANGES, report)
    tables = {panel.title: panel.rows for panel in panels if isinstance(panel, Table)}
    first = tables["Metrics on equal held-out pictures"][0]
    assert first == {"metric": "cmmd", "base": 1.3, "champion": shown, "new": 0.05}
    assert (verdict_of(store, report) is not None) == (status == "rejected")


def test_the_samples_closest_to_training_pictures_are_shown(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    evaluated, before = evaluation(store), champion(tmp_path / "v1", "now")
    report = {"status": "published", "start": "v1", "model": before.uri}
    report |= {"stages": {"evaluate": {"key": evaluated.key}}}
    panels = show_retraining("digits", store, before, CHANGES, report)
    (found,) = [p for p in panels if isinstance(p, PicturePanel) and "closest" in p.title]
    assert found.png == picture(2)
    titles = [panel.title for panel in panels if isinstance(panel, PicturePanel)]
    assert titles[0::2] == ["Base above, new model below", "Base above, v1 below"]
    # Prefect's UI shows the backslashes of escaped characters in the names of pictures.
    assert all(escape_markdown(title) == title for title in titles)
    (table,) = [p for p in panels if isinstance(p, Table) and "copies" in p.title]
    assert table.rows[1]["samples that count"] == "1 of 300"
    assert table.rows[1]["closest sample"] == 0.96
    assert table.rows[1]["closest held-out"] == 0.945
