"""References in a run: from the demo's digits to a published edit model, and what changes build."""

import shutil
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


@pytest.fixture
def edits(small: dict[str, Any], tiny_flux_kontext: Path) -> dict[str, Any]:
    """Overrides of `digits`, whose pictures have references, with a tiny FLUX.1 Kontext."""
    return {
        **small,
        "model.path": str(tiny_flux_kontext),
        "source.edit": True,
        "train.snr_gamma": None,
        "train.method": "lora",
        "train.learning_rate": 1e-4,
        "evaluate.height": 32,
        "evaluate.width": 32,
        "encode.bucket_step": 16,
    }


def artifacts(settings: dict[str, Any], stage: str) -> set[str]:
    folder = Path(str(settings["store"]), stage)
    return {path.parent.name for path in folder.glob(f"*/{MANIFEST}")}


def test_an_edit_model_is_published_and_kept_whole_by_gc(
    run_here: Run, here: Callable[..., str], edits: dict[str, Any]
) -> None:
    report = run_here("digits", edits)
    assert report["status"] == "published"
    encoded = manifest(report, "encode")
    assert encoded["summary"]["references"] == 60 and not encoded["summary"]["bad"]
    latents = open_latents(report["stages"]["encode"]["uri"])
    assert all(group.count("+") == 1 for group in latents.groups())
    assert len(artifacts(edits, "download")) == 2 and len(artifacts(edits, "references")) == 1

    again = run_here("digits", edits, until="train")
    assert {*outcomes(again).values()} == {"reused"}
    less = run_here("digits", {**edits, "encode.reference_pixels": 256}, until="encode")
    assert outcomes(less) == {"download": "reused", "encode": "built"}
    sizes = {g.partition("+")[2] for g in open_latents(less["stages"]["encode"]["uri"]).groups()}
    assert sizes == {"4x4"}, "16 pixels a side"
    here("gc", "--store", str(edits["store"]), "--days", "0", "--hours", "0", "--delete")
    assert len(artifacts(edits, "download")) == 2, "the published model's references stay"
    shutil.rmtree(Path(str(edits["store"]), "train"))
    assert outcomes(run_here("digits", edits, until="train"))["encode"] == "reused"
