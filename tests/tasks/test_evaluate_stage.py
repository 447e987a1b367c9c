"""The evaluate stage: sampling, reuse and metrics."""

import io
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
from evaluation_world import LOSSES, NEW, World, evaluation_recipe, metrics_in
from inception_weights import random_weights, require_fidelity
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from safetensors.numpy import load_file
from transformers import CLIPModel

from artifacts.latent_shards import (
    INFO,
    LEFT_OUT,
    encode_left_out,
    open_latents,
    read_ids,
    shard_key,
)
from artifacts.records import Damaged
from artifacts.store import Artifact, KeyParts, Shard
from configs.errors import Refused
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, Events, Job
from runtimes.sample.generate_job import generate
from runtimes.torch import device
from tasks.child_process import run_job
from tasks.encode.stage import EncodeStage
from tasks.evaluate import draw
from tasks.evaluate import metrics as evaluate_metrics
from tasks.evaluate import stage as evaluate
from tasks.evaluate.distances import DISTANCES, Resampling, difference
from tasks.evaluate.draw import INK, LABEL, MARGIN, PAPER
from tasks.evaluate.inputs import fingerprint
from tasks.evaluate.metrics import metric_names
from tasks.evaluate.stage import EvaluateStage
from tasks.mixture import MixtureStage
from tasks.panels import Table
from tasks.progress import Progress
from tasks.publish.promotion_gate import check_rules

pytestmark = pytest.mark.slow


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


def test_prompts_that_are_cut_are_told_once_for_the_model_and_for_the_judge(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {"new": {"prompts": ["x" * 90 + "a", "x" * 90 + "b"]}, "old": {"prompts": ["a"]}}
    judge = {"name": "pick", "path": str(world.clip)}
    recipe = evaluation_recipe(
        Path(world.store.root), world.model, world.clip, prompts=prompts, judges=[judge]
    )

    def run(*job: Any) -> None:
        assert "of 3 prompts are cut at 77 tokens" in caplog.text, "told before hours of drawing"
        world.run(*job)

    summary = world.evaluate(world.trained(2.0), recipe, run).summary
    lines = [one.message for one in caplog.records if one.message.startswith("evaluate: ")]
    cut = [line for line in lines if "2 of 3 prompts are cut at 77 tokens" in line]
    readers = [line.partition("the limit of ")[2].partition(":")[0] for line in cut]
    assert readers == ["text_encoder and text_encoder_2", "evaluate.clip", "evaluate.judges.pick"]
    assert sum("2 prompts differ only behind the limit" in line for line in lines) == 1
    assert summary["cut"]["text_encoder"] == {"tokens": 77, "cut": 2}


def test_every_named_metric_is_measured_for_both_models(world: World) -> None:
    artifact = world.evaluate(world.trained(0.5))
    found = metrics_in(artifact)
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
    bands = [found[name]["tuned"]["value"] for name in evaluate_metrics.BANDS]
    assert found["holdout_loss"]["tuned"]["value"] == pytest.approx(np.mean(bands))
    assert len(set(bands)) == 8
    assert not (Path(artifact.path) / "drawing").exists()


def test_only_compared_sets_enter_the_distances(world: World) -> None:
    def metrics(**old: Any) -> dict[str, Any]:
        sets = {"new": {"prompts": NEW}, "old": {"prompts": ["a house", "a tree"], **old}}
        recipe = evaluation_recipe(Path(world.recipe.store), world.model, world.clip, prompts=sets)
        found = metrics_in(world.evaluate(trained, recipe))
        assert list(found) == metric_names(recipe)
        return found

    trained = world.trained(0.5)
    every, new = metrics(), metrics(compare=False)
    counts = [(every, "cmmd", "base"), (new, "cmmd", "base"), (new, "fd", "tuned")]
    assert [found[name][model]["n"] for found, name, model in counts] == [4, 2, 2]
    assert every["cmmd"]["base"]["value"] != new["cmmd"]["base"]["value"]
    assert every["clip_score"] == new["clip_score"]
    assert len(world.jobs) == 1  # the same pictures, measured otherwise


def test_one_compared_picture_has_no_distances(world: World) -> None:
    sets = {"new": {"prompts": NEW, "compare": False}, "old": {"prompts": ["a house"]}}
    recipe = evaluation_recipe(Path(world.recipe.store), world.model, world.clip, prompts=sets)
    found = metrics_in(world.evaluate(world.trained(0.5), recipe))
    assert list(found) == metric_names(recipe)
    assert not set(found) & {"cmmd", *DISTANCES}


def test_an_unsupported_size_is_reported_before_sampling(world: World) -> None:
    def check(**size: int) -> None:
        recipe = evaluation_recipe(world.tmp, world.model, world.clip, **size)
        evaluate.check_drawn_size(recipe.evaluate, Base.open(world.model))

    check()
    check(height=32, width=40)
    with pytest.raises(Refused, match=r"evaluate\.width: 36 is not a multiple of 8"):
        check(height=32, width=36)


def test_an_untrained_model_has_the_metrics_of_its_base(world: World) -> None:
    artifact = world.evaluate(world.trained(1.0))
    metrics = metrics_in(artifact)
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
    assert artifact.summary["differences"].keys() == metrics_in(artifact).keys()
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
    shown = [panel for panel in EvaluateStage.show(artifact) if isinstance(panel, Table)][-1]
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
    samples = list(draw.read_pictures(world.store, _drawn_by_the_tuned(world, artifact)))
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


def test_pictures_that_training_leaves_out_are_no_training_pictures(world: World) -> None:
    trained = world.trained(0.5)
    before = world.evaluate(trained).summary["memorization"]
    draft = world.store.draft(KeyParts("encode", 1, {"left_out": 2}, {}))
    for entry in world.latents.files:
        if entry.path.startswith("../"):
            draft.files[entry.path] = entry
    (shard,) = open_latents(world.latents.uri).shards
    groups = read_ids(world.store.fs, shard.url).items()
    ((group, ids),) = (one for one in groups if one[0].startswith("train/"))
    draft.write(INFO, world.latents.read(INFO))
    left_out = {row: sha256.hex() for row, sha256 in enumerate(ids[:2])}
    draft.write(LEFT_OUT, encode_left_out({shard_key(shard.url): {group: left_out}}))
    after = replace(world, latents=draft.commit({}, {})).evaluate(trained).summary["memorization"]
    assert after["training_pictures"] == before["training_pictures"] - 2
    assert after["held_out_pictures"] == before["held_out_pictures"]


def test_another_training_run_reuses_the_bases_pictures(world: World) -> None:
    first, second = world.evaluate(world.trained(0.5)), world.evaluate(world.trained(0.6))
    assert [len(job.drawings) for job in world.jobs] == [2, 1]
    assert metrics_in(first)["cmmd"]["base"] == metrics_in(second)["cmmd"]["base"]
    assert metrics_in(first)["cmmd"]["tuned"] != metrics_in(second)["cmmd"]["tuned"]


def test_the_content_of_inceptions_weights_is_in_key_and_fingerprint(world: World) -> None:
    trained = world.trained(0.5)

    def identity() -> tuple[str, str]:
        given = world.inputs(world.recipe)
        return EvaluateStage(given, trained).parts.key, fingerprint(given)

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
        assert list(metrics_in(artifact)) == metric_names(world.recipe)
        metrics.append(metrics_in(artifact))
        assert len(stored()) == 1 + seed
    (count,) = {len(one) for one in stored()}
    facts = json.loads(artifact.read("metrics.json"))["memorization"]
    assert count == facts["held_out_pictures"]
    by_a, by_b = (one["fd_inception"]["tuned"]["value"] for one in metrics)
    assert by_a != pytest.approx(by_b, rel=0.01)
    assert metrics[0]["fd"] == metrics[1]["fd"]


@pytest.mark.parametrize(
    "run", [None, pytest.param(run_job, marks=pytest.mark.extended)], ids=["here", "process"]
)
def test_the_same_evaluation_has_the_same_digest(world: World, run: Any) -> None:
    """Also by the runtime's process."""
    trained = world.trained(0.5)
    first = world.evaluate(trained)
    shutil.rmtree(Path(world.store.root) / "evaluate")
    assert world.evaluate(trained, run=run).digest == first.digest


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
        recipe = evaluation_recipe(Path(world.recipe.store), world.model, world.clip, **settings)
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


def written(word: str) -> np.ndarray:
    """The label of a row of the grid, with the height of its pictures."""
    label = Image.new("RGB", (LABEL - MARGIN, 96), PAPER)
    font = ImageFont.load_default(14)
    ImageDraw.Draw(label).text((0, 48), word, INK, font, anchor="lm")
    return np.asarray(label)


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
        for word, top in (("base", above), ("tuned", above + 96 + MARGIN)):
            assert (page[top : top + 96, MARGIN:LABEL] == written(word)).all(), word
    assert columns[0][1] == columns[1][1] < columns[2][1] and columns[0][0] < columns[1][0]


def test_held_out_losses_of_a_mixture_are_also_of_each_source(world: World) -> None:
    """Its metrics may be in rules of the gate; the report has each source's loss by noise level."""
    given = world.recipe.model_dump(mode="json")
    source = given.pop("source")
    sources = {"subject": {"source": source}, "old": {"source": source, "regularisation": "prior"}}
    recipe = Recipe.model_validate({**given, "sources": sources})
    world.latents = mixed(world, dict.fromkeys(sources, world.latents))
    world.images = mixed(world, {"subject": world.images})  # of the sources to learn
    artifact = world.evaluate(world.trained(0.5), recipe)
    found = metrics_in(artifact)
    assert list(found) == metric_names(recipe)
    check_rules(["holdout_loss/old <= base * 1.05 at 80%"], [*found], recipe.evaluate.bootstrap)
    by_source = [found[f"holdout_loss{part}"] for part in ("", "/old", "/subject")]
    assert [models["base"]["n"] for models in by_source] == [4, 4, 4]
    for model in ("base", "tuned"):
        whole, old, subject = (models[model] for models in by_source)
        assert old["ci"][0] < old["value"] < old["ci"][1]
        assert old["value"] != subject["value"], "the same pictures have noise of their own"
        assert whole == subject, "the base is the best at what it shall keep"
        levels = artifact.summary["holdout_loss_by_level"][model]["old"]
        assert np.mean(levels) == pytest.approx(old["value"])
    (table,) = (p for p in EvaluateStage.show(artifact) if "noise level" in p.title)
    assert isinstance(table, Table)
    assert [(row["source"], row["model"]) for row in table.rows] == [
        *(("old", "base"), ("old", "tuned")),
        *(("subject", "base"), ("subject", "tuned")),
    ]


def mixed(world: World, sources: dict[str, Artifact]) -> Artifact:
    """The artifact of a mixture."""
    stage = MixtureStage(sources["subject"].stage, sources)
    return world.build(stage).load(world.store)


def test_a_model_whose_loss_is_not_finite_is_one_line(world: World) -> None:
    def overflowing(job: Job, on_event: Callable[[dict[str, Any]], None]) -> None:
        world.run(job, on_event)
        path = Path(world.jobs[-1].drawings[1].out, "losses.json")
        losses = json.loads(path.read_text())["losses"]
        losses[0][0] = math.inf
        path.write_text(json.dumps({"losses": losses}))

    with pytest.raises(Refused, match=r"holdout_loss\S* of the tuned model is (inf|nan)"):
        world.evaluate(world.trained(0.5), run=overflowing)


def test_pictures_that_are_not_finite_are_no_evaluation(world: World) -> None:
    with pytest.raises(Refused, match="pictures are not finite"):
        world.evaluate(world.trained(1e30))


def test_the_next_stages_have_the_memory_of_the_models_that_measured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing draws on the same device, and the next trial of a sweep trains there."""
    models, left = list[ref[Any]](), list[tuple[int, int]]()
    move, free = CLIPModel.to, device.free_memory

    def watched(model: CLIPModel, *given: Any) -> Any:
        models.append(ref(model))
        return move(model, *given)

    def freed() -> None:
        free()
        left.append((len(models), sum(model() is not None for model in models)))

    monkeypatch.setattr(CLIPModel, "to", watched)
    monkeypatch.setattr(device, "free_memory", freed)
    world.evaluate(world.trained(0.5))
    assert left[-1] == (1, 0)
    assert Resampling.weights.cache_info().currsize == 0


def test_without_a_holdout_there_is_still_a_clip_score(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = world.recipe.model_copy(
        update={"encode": world.recipe.encode.model_copy(update={"holdout": 0.0})}
    )
    draft = world.store.draft(KeyParts("encode", 1, {}, {}))
    stage = EncodeStage(recipe, world.images, Base.open(world.model))
    draft.commit(stage.build(draft, Progress("encode")), {})
    world.latents = draft.commit({}, {})
    found = metrics_in(world.evaluate(world.trained(0.5), recipe))
    assert list(found) == metric_names(recipe)
    assert not set(found) & {"cmmd", *DISTANCES, *LOSSES} and "clip_score/new" in found
    told = [record.message for record in caplog.records if "no held-out" in record.message]
    assert len(told) == 1, told


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
