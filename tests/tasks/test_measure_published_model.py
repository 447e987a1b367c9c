"""The champion's metrics: reused where they are comparable and whole, else measured again."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_world import LOSSES, World, metrics_in

from artifacts.records import Damaged, hash_local, write_record
from configs.errors import Away
from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base, trained_config
from runtimes.torch_models.loading import load_denoiser
from tasks.build_or_reuse import Stage
from tasks.evaluate import stage as evaluate
from tasks.evaluate.published import metrics_of_published, published_estimates

pytestmark = pytest.mark.slow


def test_a_champion_with_another_fingerprint_samples_again(world: World, tmp_path: Path) -> None:
    artifact = world.evaluate(world.trained(0.5))
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    stale = json.loads(artifact.read("metrics.json")) | {"fingerprint": "older"}
    (champion / "metrics.json").write_text(json.dumps(stale))
    (champion / "bootstrap.npz").write_bytes(artifact.read("bootstrap.npz"))
    measured = [hash_local(f"{champion}/{n}", n) for n in ("metrics.json", "bootstrap.npz")]
    write_record(artifact.store.fs, f"{champion}/manifest.json", {"files": measured})
    found = world.metrics_of(champion, artifact)
    assert len(world.jobs) == 2 and found.keys() == metrics_in(artifact).keys()
    # the champion's folder holds the base: it must measure as the base did
    for name, estimate in found.items():
        metric, base = dict(estimate.metric()), metrics_in(artifact)[name]["base"]
        assert metric.pop("ci") == pytest.approx(base.pop("ci"), abs=1e-5), "resamples are float32"
        assert metric == base


def test_a_champion_measured_again_is_an_artifact_that_gc_and_verify_know(
    world: World, tmp_path: Path
) -> None:
    artifact = world.evaluate(world.trained(0.5))
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    found, evaluation = world.measured(champion, artifact)
    assert evaluation is not None
    assert world.begun == [(evaluation.stage, evaluation.key)], "recorded before it is built"
    drawn = evaluation.summary["drawn"]["tuned"]
    assert any(drawn in entry.path for entry in evaluation.files)
    assert {p["key"] for p in evaluation.manifest["run"]["parents"].values()} == {
        world.images.key,
        world.latents.key,
    }
    count = len(world.jobs)
    again, same = world.measured(champion, artifact)
    assert same is not None and (same.key, len(world.jobs)) == (evaluation.key, count)
    assert {n: e.metric() for n, e in again.items()} == {n: e.metric() for n, e in found.items()}


def test_another_prediction_measures_the_champion_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a loss of the same quantity is comparable, and the recipe alone names it."""
    begun = []

    def build(stage: Stage) -> Any:
        begun.append(stage.parts.key)
        raise InterruptedError

    artifact = world.evaluate(world.trained(0.5))
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    for kind in ("epsilon", "v_prediction"):
        train = world.recipe.train.model_copy(update={"prediction_type": kind})
        given = world.inputs(world.recipe.model_copy(update={"train": train}))
        with pytest.raises(InterruptedError):
            metrics_of_published(given, artifact, build, str(champion), run=world.run)
    assert len(set(begun)) == 2


def test_a_champion_s_metric_without_a_value_is_left_to_the_gate(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that names it fails, and may be forced."""
    artifact = world.evaluate(world.trained(0.5))
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    measure = evaluate.measure.MetricSuite.measure

    def broken(*given: Any) -> Any:
        found = measure(*given)
        one = found.metrics["holdout_loss"]
        return replace(
            found, metrics={**found.metrics, "holdout_loss": replace(one, value=math.nan)}
        )

    monkeypatch.setattr(evaluate.measure.MetricSuite, "measure", broken)
    found = world.metrics_of(champion, artifact)
    assert found.keys() == metrics_in(artifact).keys() - {"holdout_loss"}


def test_a_champion_with_the_same_fingerprint_is_not_fetched(world: World, tmp_path: Path) -> None:
    artifact = world.evaluate(world.trained(0.5))
    for name in ("manifest.json", "metrics.json", "bootstrap.npz"):  # and no model
        (tmp_path / name).write_bytes(artifact.store.fs.cat_file(f"{artifact.path}/{name}"))
    found = world.metrics_of(tmp_path, artifact)
    tuned = evaluate.read_estimates(artifact)["tuned"]
    assert found.keys() == metrics_in(artifact).keys()
    for name, estimate in found.items():
        assert estimate.value == metrics_in(artifact)[name]["tuned"]["value"]
        np.testing.assert_array_equal(estimate.resampled, tuned[name].resampled)


@pytest.mark.parametrize("damaged", ["metrics.json", "bootstrap.npz"])
def test_a_champion_s_damaged_metrics_decide_nothing(
    world: World, tmp_path: Path, damaged: str
) -> None:
    """A digit that flipped is JSON still; the pictures are drawn again, of files that are whole."""
    artifact = world.evaluate(world.trained(0.5))
    for name in ("manifest.json", "metrics.json", "bootstrap.npz"):
        data = bytearray(artifact.store.fs.cat_file(f"{artifact.path}/{name}"))
        if name == damaged:
            at = data.index(b'"value": ') + 9 if name == "metrics.json" else len(data) // 2
            data[at] ^= 1
        (tmp_path / name).write_bytes(data)
    (tmp_path / "recipe.yaml").write_text("{}")
    with pytest.raises(Damaged, match="is missing or damaged"):
        world.metrics_of(tmp_path, artifact)


def test_the_loss_of_another_prediction_is_not_compared(world: World, tmp_path: Path) -> None:
    """Metrics of a sample-predicting model: it samples again, without a loss."""
    pictures = world.recipe.train.model_copy(update={"prediction_type": "sample"})
    was = world.evaluate(world.trained(0.6), world.recipe.model_copy(update={"train": pictures}))
    assert all(metrics_in(was)[name].keys() == {"tuned"} for name in LOSSES)  # nor the base's
    assert not LOSSES & was.summary["differences"].keys()
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    (champion / "metrics.json").write_bytes(was.read("metrics.json"))
    path = champion / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": "sample"}))
    artifact = world.evaluate(world.trained(0.5))
    found = world.metrics_of(champion, artifact)
    assert found.keys() == metrics_in(artifact).keys() - LOSSES
    assert world.jobs[-1].latents is None


def test_the_loss_of_other_inputs_is_not_compared(world: World, tmp_path: Path) -> None:
    """An inpainting model has more inputs than our latents."""
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    settings = Train(inpainting=True)
    config = trained_config(Base.open(world.model).denoiser, settings)
    load_denoiser(world.model / "unet", config=config).save_pretrained(champion / "unet")
    artifact = world.evaluate(world.trained(0.5))
    found = world.metrics_of(champion, artifact)
    assert found.keys() == metrics_in(artifact).keys() - LOSSES


def test_a_store_that_refuses_does_not_measure_the_champion_again(refusing_url: str) -> None:
    """Its metrics may be whole: a retry reads them, and another measurement may take hours."""
    said = rf"^{refusing_url} cannot be used now \(.*invalid at this time\): run again later$"
    with pytest.raises(Away, match=said):
        published_estimates(refusing_url, "fingerprint")
