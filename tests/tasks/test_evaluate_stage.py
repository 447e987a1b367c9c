"""The evaluate stage: sampling, reuse and metrics."""

import io
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from inception_weights import random_weights, require_fidelity
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file
from shortest_recipe import shortest_recipe

from artifacts.artifact_key import KeyParts
from artifacts.checksummed_files import Damaged, hash_local, write_record
from artifacts.hashing import digest_bytes, digest_json
from artifacts.image_shards import Sample, write_tar
from artifacts.store import Artifact, Shard, Store
from configs.settings.best_checkpoint import HOLDOUT_LOSS
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from runtimes.contract import WrongInput
from runtimes.pipeline_folder.denoiser_config import trained_config
from runtimes.pipeline_folder.read_configs import read_denoiser_config
from runtimes.process.events import Events
from runtimes.process.job import Drawing, GenerateJob, Job
from runtimes.sample.generate_job import generate
from runtimes.torch_models.loading import load_denoiser
from tasks.child_process import run_job
from tasks.encode import stage as encode
from tasks.evaluate import draw_pictures, holdout_loss
from tasks.evaluate import stage as evaluate
from tasks.evaluate.before_after_grid import MARGIN
from tasks.evaluate.bootstrap import Estimates, difference
from tasks.evaluate.comparable_metrics import fingerprint
from tasks.evaluate.distribution_distances import DISTANCES
from tasks.evaluate.evaluation_inputs import EvalInputs, MeasuringModels
from tasks.evaluate.load_published_model import load_published_model
from tasks.evaluate.measure_published_model import PublishedMetrics, metrics_of_published
from tasks.evaluate.metric_names import metric_names
from tasks.evaluate.prompts import sample_prompts
from tasks.panels import Table
from tasks.progress import Progress

pytestmark = pytest.mark.slow

NEW = ["a red cat", "a blue dog"]
LOSSES = {HOLDOUT_LOSS, *holdout_loss.BANDS}


def _recipe(store: Path, model: Path, clip: Path, **settings: Any) -> Recipe:
    given = {
        "prompts": {
            "new": {"prompts": NEW, "images_per_prompt": 2},
            "old": {"prompts": ["a house"]},
        },
        "clip": str(clip),
        "num_inference_steps": 2,
        "bootstrap": 20,
        "holdout_samples": 4,
        "device": "cpu",
        **settings,
    }
    return shortest_recipe(
        store=str(store),
        model={"path": str(model)},
        encode={"resolution": 32, "holdout": 0.4, "device": "cpu"},
        evaluate=given,
    )


def _images(store: Store, path: Path) -> Artifact:
    samples = []
    for number in range(24):
        noise = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, "png")
        meta = {"sha256": digest_bytes(buffer.getvalue())}
        samples.append(Sample(f"{number:03}", buffer.getvalue(), "png", ("a thing",), meta))
    write_tar(path, samples)
    draft = store.draft(KeyParts("download", 1, {}, {}))
    key = digest_bytes(path.read_bytes())
    shard = store.commit_shard("download", key, {".tar": str(path)}, {"samples": len(samples)})
    draft.add_shard(shard)
    return draft.commit({}, {})


@dataclass
class World:
    """A base, its data and the trained UNets of a test."""

    recipe: Recipe
    model: Path
    clip: Path
    images: Artifact
    latents: Artifact
    tmp: Path
    inception: Path | None = None  # weights file
    jobs: list[GenerateJob] = field(default_factory=list)
    begun: list[tuple[str, str]] = field(default_factory=list)  # (stage, key)

    @property
    def store(self) -> Store:
        return Store(self.recipe.store)

    def run(self, job: Job, on_event: Callable[[dict[str, Any]], None]) -> None:
        """Run the runtime's code in this process, which saves its start."""
        assert isinstance(job, GenerateJob)
        self.jobs.append(job)
        generate(job, Events())

    def trained(self, scale: float) -> Artifact:
        """A UNet whose last layer is scaled, as a train artifact."""
        unet = UNet2DConditionModel.from_pretrained(self.model / "unet")
        with torch.no_grad():
            unet.conv_out.weight *= scale
        unet.save_pretrained(self.tmp / "trained")
        draft = self.store.draft(KeyParts("train", 1, {"scale": scale}, {}))
        for name in ("config.json", "diffusion_pytorch_model.safetensors"):
            draft.upload(str(self.tmp / "trained" / name), f"unet/{name}")
        return draft.commit({}, {})

    def evaluate(
        self, trained: Artifact, recipe: Recipe | None = None, run: Any = None
    ) -> Artifact:
        given = self.inputs(recipe or self.recipe)
        draft = self.store.draft(evaluate.key_parts(given, trained))
        progress = Progress("evaluate")
        summary = evaluate.build(given, trained, draft, progress, run=run or self.run)
        return draft.commit(summary, {})

    def inputs(self, recipe: Recipe) -> EvalInputs:
        measuring = MeasuringModels(self.clip, inception=self.inception)
        return EvalInputs(recipe, self.images, self.latents, self.model, None, measuring)

    def metrics_of(self, champion: Path, evaluated: Artifact) -> Estimates:
        """The metrics of a published model, comparable with an evaluation."""
        return self.measured(champion, evaluated).estimates

    def measured(self, champion: Path, evaluated: Artifact) -> PublishedMetrics:
        given = self.inputs(self.recipe)
        return metrics_of_published(given, evaluated, self.begin, str(champion), run=self.run)

    def begin(self, parts: KeyParts) -> Progress:
        self.begun.append((parts.stage, parts.key))
        return Progress(parts.stage)


@pytest.fixture(scope="module")
def made(
    tiny_sdxl: Path, tiny_clip: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Recipe]:
    """A store with images and latents, built once."""
    tmp = tmp_path_factory.mktemp("evaluate")
    recipe = _recipe(tmp / "store", tiny_sdxl, tiny_clip)
    store = Store(recipe.store)
    images = _images(store, tmp / "shard.tar")
    draft = store.draft(encode.key_parts(recipe, images, tiny_sdxl, None))
    draft.commit(encode.build(recipe, images, tiny_sdxl, None, draft, Progress("encode")), {})
    return tmp / "store", recipe


@pytest.fixture
def world(made: tuple[Path, Recipe], tiny_sdxl: Path, tiny_clip: Path, tmp_path: Path) -> World:
    shutil.copytree(made[0], tmp_path / "store")
    recipe = _recipe(tmp_path / "store", tiny_sdxl, tiny_clip)
    found = {artifact.stage: artifact for artifact in Store(recipe.store).artifacts()}
    return World(recipe, tiny_sdxl, tiny_clip, found["download"], found["encode"], tmp_path)


def _metrics(artifact: Artifact) -> dict[str, Any]:
    return json.loads(artifact.read("metrics.json"))["metrics"]


class Heard(Events):
    """Events that a function hears at once."""

    def __init__(self, hear: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.hear = hear

    def emit(self, event: str, **fields: Any) -> None:
        self.hear({"event": event, **fields})


def test_measuring_is_not_silent(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Features of thousands of pictures, and the losses of held-out ones, take minutes."""
    caplog.set_level("INFO", "kiln")
    told: list[str] = []
    monkeypatch.setattr("tasks.progress.listeners", [lambda *given: told.append(given[3])])
    artifact = world.evaluate(world.trained(0.5), run=lambda job, hear: generate(job, Heard(hear)))
    counts = artifact.summary["memorization"]
    held_out, training = counts["held_out_pictures"], counts["training_pictures"]
    assert told[-4:] == [
        f"{held_out} of {held_out} held-out pictures measured",
        f"{training} of {training} training pictures measured",
        "5 of 5 pictures of the base measured",
        "5 of 5 pictures of the tuned model measured",
    ]
    assert [r.message for r in caplog.records if "held-out losses" in r.message] == [
        f"evaluate: held-out losses of model {number} of 2" for number in (1, 2)
    ]
    resamples = f"{world.recipe.evaluate.bootstrap:,} resamples"
    assert [r.message for r in caplog.records if "intervals" in r.message] == [
        f"evaluate: intervals of the {model} by {resamples}" for model in ("base", "tuned model")
    ]


def test_every_named_metric_is_measured_for_both_models(world: World) -> None:
    artifact = world.evaluate(world.trained(0.5))
    found = _metrics(artifact)
    assert list(found) == metric_names(world.recipe)
    assert found["clip_score"]["tuned"]["n"] == 5
    assert found["clip_score/new"]["tuned"]["n"] == 4 and found["clip_score/old"]["base"]["n"] == 1
    assert found["holdout_loss"]["base"]["n"] == 4
    assert len(world.jobs) == 1 and len(world.jobs[0].drawings) == 2
    assert found["clip_score/old"]["tuned"]["ci"] == [0, 100], "one picture tells nothing"
    for models in found.values():
        for metric in models.values():
            assert metric["ci"][0] <= metric["ci"][1]
    for name in ("cmmd", "fd", "holdout_loss"):
        assert found[name]["base"]["value"] != found[name]["tuned"]["value"]
    bands = [found[name]["tuned"]["value"] for name in holdout_loss.BANDS]
    assert found["holdout_loss"]["tuned"]["value"] == pytest.approx(np.mean(bands))
    assert len(set(bands)) == 8
    assert not (Path(artifact.path) / "drawing").exists()


def test_only_compared_sets_enter_the_distances(world: World) -> None:
    def metrics(**old: Any) -> dict[str, Any]:
        sets = {"new": {"prompts": NEW}, "old": {"prompts": ["a house", "a tree"], **old}}
        recipe = _recipe(Path(world.recipe.store), world.model, world.clip, prompts=sets)
        found = _metrics(world.evaluate(trained, recipe))
        assert list(found) == metric_names(recipe)
        return found

    trained = world.trained(0.5)
    every, new = metrics(), metrics(compare=False)
    assert (every["cmmd"]["base"]["n"], new["cmmd"]["base"]["n"], new["fd"]["tuned"]["n"]) == (
        4,
        2,
        2,
    )
    assert every["cmmd"]["base"]["value"] != new["cmmd"]["base"]["value"]
    assert every["clip_score"] == new["clip_score"]
    assert len(world.jobs) == 1  # the same pictures, measured otherwise


def test_one_compared_picture_has_no_distances(world: World) -> None:
    sets = {"new": {"prompts": NEW, "compare": False}, "old": {"prompts": ["a house"]}}
    recipe = _recipe(Path(world.recipe.store), world.model, world.clip, prompts=sets)
    found = _metrics(world.evaluate(world.trained(0.5), recipe))
    assert list(found) == metric_names(recipe)
    assert not set(found) & {"cmmd", *DISTANCES}


def test_an_unsupported_size_is_reported_before_sampling(world: World) -> None:
    def check(**size: int) -> None:
        evaluate.check_drawn_size(
            _recipe(world.tmp, world.model, world.clip, **size), world.model, None
        )

    check()
    check(height=32, width=40)
    with pytest.raises(WrongInput, match=r"evaluate\.width: 36 is not a multiple of 8"):
        check(height=32, width=36)


def test_an_untrained_model_has_the_metrics_of_its_base(world: World) -> None:
    artifact = world.evaluate(world.trained(1.0))
    metrics = _metrics(artifact)
    for models in metrics.values():
        assert models["base"] == models["tuned"]
    widths = {}
    for name, others in artifact.summary["differences"].items():
        assert others["base"]["value"] == 0
        if name == "clip_score/old":  # one picture
            assert others["base"]["ci"] is None
            continue
        low, high = others["base"]["ci"]
        assert low <= 0 <= high
        widths[name] = high - low
    shares = {name for name, models in metrics.items() if models["tuned"]["interval"] == "wilson"}
    assert shares == {"precision", "recall", "memorized", "memorized_pixels"}
    assert all(widths[name] == 0 for name in widths.keys() - shares)
    perfect = {name for name in shares if metrics[name]["tuned"]["value"] in (0, 1)}
    assert perfect and all(widths[name] > 0 for name in perfect)  # a width without change


def test_differences_are_paired_by_picture(world: World) -> None:
    artifact = world.evaluate(world.trained(0.5))
    models = evaluate.read_estimates(artifact)
    assert artifact.summary["differences"].keys() == _metrics(artifact).keys()
    for name, others in artifact.summary["differences"].items():
        base, tuned = models["base"][name], models["tuned"][name]
        assert others["base"]["value"] == pytest.approx(tuned.value - base.value)
        if name != "clip_score/old":  # one picture
            assert others["base"]["ci"] == pytest.approx(difference(tuned, base), abs=1e-4)


def test_the_closest_pairs_show_samples_above_training_pictures(world: World) -> None:
    artifact = world.evaluate(world.trained(0.5))
    found = artifact.summary["memorization"]
    assert (found["training_pictures"], found["held_out_pictures"]) == (13, 11)
    assert len(found["closest_pairs"]) == 8 and found["held_out"]["memorized_pixels"] == 0
    by_chance = found["closest_held_out"]["memorized_pixels"]
    assert 0 < by_chance < found["thresholds"]["pixel_similarity"]
    shown = [panel for panel in evaluate.show(artifact) if isinstance(panel, Table)][-1]
    assert shown.title == "Search for copies of training pictures"
    assert shown.rows[1] == {
        "compared by": "pixels",
        "counts from": 0.95,
        "samples that count": "0 of 5",
        "closest sample": found["closest_pairs"][4]["similarity"],
        "held-out that count": "0 of 11",
        "closest held-out": by_chance,
    }
    page = np.asarray(Image.open(io.BytesIO(artifact.read("closest_pairs.png"))))
    samples = list(draw_pictures.read_pictures(world.store, _drawn_by_the_tuned(world, artifact)))
    for column, pair in enumerate(found["closest_pairs"]):
        left, top = 4 + column * 132, 3 * 14 + 4
        shown = page[top + 2 : top + 128 : 4, left + 2 : left + 128 : 4]
        np.testing.assert_array_equal(shown, samples[pair["sample"]])
        training = page[top + 134 : top + 260 : 4, left + 2 : left + 128 : 4]
        assert training.std() > 60  # noise, as all pictures of this source


def _drawn_by_the_tuned(world: World, artifact: Artifact) -> Shard:
    key = Path(world.jobs[0].drawings[1].out).name
    shard = world.store.shard("evaluate", key)
    assert shard is not None
    return shard


def test_another_training_run_reuses_the_bases_pictures(world: World) -> None:
    first, second = world.evaluate(world.trained(0.5)), world.evaluate(world.trained(0.6))
    assert [len(job.drawings) for job in world.jobs] == [2, 1]
    assert _metrics(first)["cmmd"]["base"] == _metrics(second)["cmmd"]["base"]
    assert _metrics(first)["cmmd"]["tuned"] != _metrics(second)["cmmd"]["tuned"]


def test_the_content_of_inceptions_weights_is_in_key_and_fingerprint(world: World) -> None:
    trained = world.trained(0.5)

    def identity() -> tuple[str, str]:
        given = world.inputs(world.recipe)
        return evaluate.key_parts(given, trained).key, fingerprint(given)

    found = [identity()]
    for name, content in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        world.inception = world.tmp / name
        world.inception.write_bytes(content)
        named = {"evaluate": world.recipe.evaluate.model_copy(update={"inception": name})}
        world.recipe = world.recipe.model_copy(update=named)
        found.append(identity())
    assert found[1] == found[3]
    for pairs in zip(*found[:3], strict=True):
        assert len(set(pairs)) == 3


def test_losses_on_draws_are_not_compared_with_losses_on_the_mean(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of FLUX.2, whose base an earlier release measured on draws."""
    world.evaluate(world.trained(0.5))
    before = fingerprint(world.inputs(world.recipe))
    monkeypatch.setattr("runtimes.families.sdxl.SDXL.draws_latents", False)
    world.evaluate(world.trained(0.6))
    assert [len(job.drawings) for job in world.jobs] == [2, 2]
    assert fingerprint(world.inputs(world.recipe)) != before


@pytest.mark.soak
def test_inceptions_features_of_held_out_pictures_are_stored_by_its_weights(world: World) -> None:
    require_fidelity()
    features = Path(world.store.shards_path("evaluate"))

    def stored() -> list[NDArray[np.float32]]:
        """The stored features of held-out pictures by Inception."""
        files = [load_file(path)["features"] for path in features.glob("*.safetensors")]
        return [one for one in files if one.shape[1] == 2048]

    metrics = []
    for name, seed in (("a", 0), ("b", 1)):
        world.inception = random_weights(world.tmp / name, seed)
        named = {"evaluate": world.recipe.evaluate.model_copy(update={"inception": name})}
        world.recipe = world.recipe.model_copy(update=named)
        artifact = world.evaluate(world.trained(0.5))
        assert list(_metrics(artifact)) == metric_names(world.recipe)
        metrics.append(_metrics(artifact))
        assert len(stored()) == 1 + seed
    (count,) = {len(one) for one in stored()}
    facts = json.loads(artifact.read("metrics.json"))["memorization"]
    assert count == facts["held_out_pictures"]
    by_a, by_b = (one["fd_inception"]["tuned"]["value"] for one in metrics)
    assert by_a != pytest.approx(by_b, rel=0.01)
    assert metrics[0]["fd"] == metrics[1]["fd"]


def test_the_same_evaluation_has_the_same_digest(world: World) -> None:
    trained = world.trained(0.5)
    first = world.evaluate(trained)
    shutil.rmtree(Path(world.store.root) / "evaluate")
    assert world.evaluate(trained).digest == first.digest


def test_a_damaged_picture_is_sampled_again(world: World) -> None:
    trained = world.trained(0.5)
    first = world.evaluate(trained)
    tar = sorted((Path(world.store.root) / "evaluate/shards").glob("*.tar"))[0]
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    tar.write_bytes(data)
    assert world.evaluate(trained).digest == first.digest
    assert [len(job.drawings) for job in world.jobs] == [2, 1]


def test_prompts_and_seeds_change_the_fingerprint_and_batch_size_does_not(world: World) -> None:
    trained = world.trained(0.5)

    def mark(**settings: Any) -> str:
        recipe = _recipe(Path(world.recipe.store), world.model, world.clip, **settings)
        return str(world.evaluate(trained, recipe).summary["fingerprint"])

    assert mark() == mark(batch_size=2) != mark(seed=5)
    assert mark() != mark(prompts={"new": {"prompts": NEW}})


def test_another_clip_model_is_another_fingerprint(world: World, tmp_path: Path) -> None:
    other = Path(shutil.copytree(world.clip, tmp_path / "clip"))
    (other / "preprocessor_config.json").write_text("{}")
    given = world.inputs(world.recipe)
    measuring = replace(given.measuring, clip=other)
    assert fingerprint(replace(given, measuring=measuring)) != fingerprint(given)


def drawn(world: World, parts: dict[str, str]) -> list[np.ndarray]:
    """Pictures [H, W, 3] of every prompt, sampled by the base with replaced parts."""
    out = world.tmp / "apart"
    generate(replace(world.jobs[0], drawings=(Drawing(str(out), parts),), latents=None), Events())
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in sorted(out.glob("*.png"))]
    shutil.rmtree(out)
    return pictures


def places(page: np.ndarray, picture: np.ndarray) -> list[tuple[int, int]]:
    """(x, y) of the page where a picture begins, enlarged three times."""
    shown = picture.repeat(3, axis=0).repeat(3, axis=1)
    height, width = shown.shape[:2]
    begins = (page[: 1 - height, : 1 - width] == shown[0, 0]).all(axis=-1)
    found = ((int(x), int(y)) for y, x in np.argwhere(begins))
    return [(x, y) for x, y in found if (page[y : y + height, x : x + width] == shown).all()]


def test_the_grid_shows_each_prompt_by_the_base_above_and_by_the_tuned_below(world: World) -> None:
    artifact = world.evaluate(world.trained(-3.0))
    page = np.asarray(Image.open(io.BytesIO(artifact.read("before_after.png"))))
    base = drawn(world, {})
    tuned = drawn(world, {"unet": str(world.tmp / "trained")})
    assert len(base) == len(tuned) == 5  # four of the new prompts, one of the old
    columns = []
    for number in (0, 2, 4):  # the first of each prompt
        assert np.abs(base[number].astype(int) - tuned[number]).max() > 8
        ((x, above),) = places(page, base[number])
        assert places(page, tuned[number]) == [(x, above + 96 + MARGIN)]
        columns.append((x, above))
    assert columns[0][1] == columns[1][1] < columns[2][1] and columns[0][0] < columns[1][0]


def test_a_model_whose_loss_is_not_finite_is_one_line(world: World) -> None:
    def overflowing(job: Job, on_event: Callable[[dict[str, Any]], None]) -> None:
        world.run(job, on_event)
        path = Path(world.jobs[-1].drawings[1].out, "losses.json")
        losses = json.loads(path.read_text())["losses"]
        losses[0][0] = math.inf
        path.write_text(json.dumps({"losses": losses}))

    with pytest.raises(WrongInput, match=r"holdout_loss\S* of the tuned model is (inf|nan)"):
        world.evaluate(world.trained(0.5), run=overflowing)


def test_pictures_that_are_not_finite_are_no_evaluation(world: World) -> None:
    with pytest.raises(WrongInput, match="pictures are not finite"):
        world.evaluate(world.trained(1e30))


def test_a_champion_with_another_fingerprint_samples_again(world: World, tmp_path: Path) -> None:
    artifact = world.evaluate(world.trained(0.5))
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    stale = json.loads(artifact.read("metrics.json")) | {"fingerprint": "older"}
    (champion / "metrics.json").write_text(json.dumps(stale))
    (champion / "bootstrap.npz").write_bytes(artifact.read("bootstrap.npz"))
    measured = [hash_local(f"{champion}/{n}", n) for n in ("metrics.json", "bootstrap.npz")]
    write_record(artifact.store.fs, f"{champion}/manifest.json", {"files": measured})
    found = world.metrics_of(champion, artifact)
    assert len(world.jobs) == 2 and found.keys() == _metrics(artifact).keys()
    # the champion's folder holds the base: it must measure as the base did
    for name, estimate in found.items():
        metric, base = dict(estimate.metric()), _metrics(artifact)[name]["base"]
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

    def begin(parts: KeyParts) -> Progress:
        begun.append(parts.key)
        raise InterruptedError

    artifact = world.evaluate(world.trained(0.5))
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    for kind in ("epsilon", "v_prediction"):
        train = world.recipe.train.model_copy(update={"prediction_type": kind})
        given = world.inputs(world.recipe.model_copy(update={"train": train}))
        with pytest.raises(InterruptedError):
            metrics_of_published(given, artifact, begin, str(champion), run=world.run)
    assert len(set(begun)) == 2


def test_a_champion_s_metric_without_a_value_is_left_to_the_gate(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that names it fails, and may be forced."""
    artifact = world.evaluate(world.trained(0.5))
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    measure = evaluate.MetricSuite.measure

    def broken(*given: Any) -> Any:
        found = measure(*given)
        one = found.metrics["holdout_loss"]
        return replace(
            found, metrics={**found.metrics, "holdout_loss": replace(one, value=math.nan)}
        )

    monkeypatch.setattr(evaluate.MetricSuite, "measure", broken)
    found = world.metrics_of(champion, artifact)
    assert found.keys() == _metrics(artifact).keys() - {"holdout_loss"}


def test_a_champion_with_the_same_fingerprint_is_not_fetched(world: World, tmp_path: Path) -> None:
    artifact = world.evaluate(world.trained(0.5))
    for name in ("manifest.json", "metrics.json", "bootstrap.npz"):  # and no model
        (tmp_path / name).write_bytes(artifact.store.fs.cat_file(f"{artifact.path}/{name}"))
    found = world.metrics_of(tmp_path, artifact)
    tuned = evaluate.read_estimates(artifact)["tuned"]
    assert found.keys() == _metrics(artifact).keys()
    for name, estimate in found.items():
        assert estimate.value == _metrics(artifact)[name]["tuned"]["value"]
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
    assert all(_metrics(was)[name].keys() == {"tuned"} for name in LOSSES)  # nor the base's
    assert not LOSSES & was.summary["differences"].keys()
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    (champion / "metrics.json").write_bytes(was.read("metrics.json"))
    path = champion / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": "sample"}))
    artifact = world.evaluate(world.trained(0.5))
    found = world.metrics_of(champion, artifact)
    assert found.keys() == _metrics(artifact).keys() - LOSSES
    assert world.jobs[-1].latents is None


def test_the_loss_of_other_inputs_is_not_compared(world: World, tmp_path: Path) -> None:
    """An inpainting model has more inputs than our latents."""
    champion = Path(shutil.copytree(world.model, tmp_path / "champion"))
    settings = Train(inpainting=True)
    config = trained_config(read_denoiser_config(world.model), settings)
    load_denoiser(world.model / "unet", config=config).save_pretrained(champion / "unet")
    artifact = world.evaluate(world.trained(0.5))
    found = world.metrics_of(champion, artifact)
    assert found.keys() == _metrics(artifact).keys() - LOSSES


def test_a_champion_encodes_with_its_trained_text_encoders(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    digests = set()
    for trained in (False, True):
        (tmp_path / "recipe.yaml").write_text(
            f"train: {{train_text_encoder: {str(trained).lower()}}}"
        )
        model = load_published_model(tmp_path)
        names = ("text_encoder", "text_encoder_2") if trained else ()
        assert model.weights.parts == {name: tmp_path / name for name in names}
        digests.add(model.digest)
    assert len(digests) == 2  # the losses of one are not to be had for the other's


def test_without_a_holdout_there_is_still_a_clip_score(world: World) -> None:
    recipe = world.recipe.model_copy(
        update={"encode": world.recipe.encode.model_copy(update={"holdout": 0.0})}
    )
    draft = world.store.draft(KeyParts("encode", 1, {}, {}))
    draft.commit(
        encode.build(recipe, world.images, world.model, None, draft, Progress("encode")), {}
    )
    world.latents = draft.commit({}, {})
    found = _metrics(world.evaluate(world.trained(0.5), recipe))
    assert list(found) == metric_names(recipe)
    assert not set(found) & {"cmmd", *DISTANCES, *LOSSES} and "clip_score/new" in found


def test_prompt_files_are_read_and_checked(world: World, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo\n")
    sets = {"a": {"file": str(tmp_path / "prompts.txt"), "images_per_prompt": 2}}
    recipe = _recipe(tmp_path, world.model, world.clip, prompts=sets | {"b": {"prompts": ["x"]}})
    assert evaluate.settings_for_key(recipe)["prompts"]["a"] == ["one", "one", "two", "two"]
    assert sample_prompts(recipe) == ("one", "x", "two")
    evaluate.check(recipe)
    (tmp_path / "prompts.txt").unlink()
    with pytest.raises(WrongInput, match=r"evaluate\.prompts\.a\.file"):
        evaluate.check(recipe)
    with pytest.raises(WrongInput, match=r"evaluate\.judges: digits"):
        evaluate.check(_recipe(tmp_path, world.model, world.clip, judges=["digits"]))


def test_the_order_of_prompt_sets_is_in_the_key(tmp_path: Path) -> None:
    """It selects the noise of every picture."""
    one, other = {"prompts": ["a"], "compare": False}, {"prompts": ["b"]}
    keys = [
        digest_json(evaluate.settings_for_key(_recipe(tmp_path, tmp_path, tmp_path, prompts=sets)))
        for sets in ({"one": one, "other": other}, {"other": other, "one": one})
    ]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("name", ["clip_score", "cmmd", "digit", "holdout_loss"])
def test_a_judge_with_the_name_of_another_metric_is_refused(name: str, tmp_path: Path) -> None:
    judge = {"name": name, "path": "a-model"}
    prompts = {"new": {"prompts": ["a blue seven on black"]}}
    given = {"judges": ["digits", judge], "prompts": prompts}
    recipe = _recipe(tmp_path, tmp_path, tmp_path, **given)
    with pytest.raises(WrongInput, match=f"evaluate.judges: {name} is the name of another metric"):
        evaluate.check(recipe)


@pytest.mark.extended
def test_the_runtimes_process_samples_equal_pictures(world: World) -> None:
    trained = world.trained(0.5)
    here = world.evaluate(trained)
    shutil.rmtree(Path(world.store.root) / "evaluate")
    assert world.evaluate(trained, run=run_job).digest == here.digest


@pytest.mark.parametrize("stage", ["download", "evaluate"])
def test_a_replaced_shard_is_not_measured(world: World, stage: str) -> None:
    """Held-out pictures and samples are both verified."""
    world.evaluate(world.trained(2.0))
    (tar, *_) = sorted(Path(world.store.shards_path(stage)).glob("*.tar"))
    before = tar.stat()
    tar.write_bytes(tar.read_bytes()[:-1] + b"!")  # in the padding, which nothing else looks at
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(Damaged, match=f"{tar} is damaged"):
        world.evaluate(world.trained(2.0))
