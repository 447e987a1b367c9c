"""Prompts with reference pictures: their files and keys, likeness metrics, and triples."""

import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from evaluation_world import evaluation_recipe
from numpy.typing import NDArray
from picture_bytes import noise_picture
from PIL import Image
from referenced_data import data_set_source, encoded, recipe_of, write_data_set

from artifacts.records import digest_bytes, digest_json
from artifacts.store import Artifact, KeyParts, Shard, Store
from configs.errors import Refused
from configs.load_recipe import anchored
from configs.settings.data import Captions
from configs.settings.evaluate import Edit, Memorization, PromptSet
from configs.settings.recipe import Recipe
from demo import captions, dataset
from demo.digit_judges import judge_digit
from runtimes.pipeline_folder.folder import Base
from tasks.caption.tables import RULE, CaptionedSample, Rule, write_captions
from tasks.encode.crop_to_bucket import is_holdout
from tasks.evaluate import draw, edits, held_out_edits, metrics
from tasks.evaluate import stage as evaluate
from tasks.evaluate.distances import Resampling
from tasks.evaluate.draw import _commit
from tasks.evaluate.edits import Prompt
from tasks.evaluate.features import Float32, ReferenceFeatures
from tasks.evaluate.held_out_edits import held_out_prompts
from tasks.evaluate.measure import MetricSuite, _features_of_files
from tasks.evaluate.stage import _grid, _write_beside
from tasks.pictures import Pictures, images_of
from tasks.preflight import Doors
from tasks.reference_pairs import Pair

Picture = NDArray[np.uint8]


def plain(*rgb: int, side: int = 32) -> Picture:
    return np.full((side, side, 3), rgb, np.uint8)


#: 24 wide, 32 high.
REFERENCES = [noise_picture(1000 + n, 24, 32) for n in range(5)]
TARGETS = [noise_picture(number, 16, 16) for number in range(40)]
RED, GREEN, BLUE = plain(200, 0, 0), plain(0, 200, 0), plain(0, 0, 200)


def digest(data: bytes) -> bytes:
    return bytes.fromhex(digest_bytes(data))


def pixels(data: bytes) -> Picture:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


class MeanColour:
    """An image encoder whose features are the mean colour: cosines are known by heart."""

    def images(self, pictures: Iterable[Picture]) -> Float32:
        return np.stack([p.mean(axis=(0, 1)).astype(np.float32) + 1e-3 for p in pictures])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))


def saved(path: Path, picture: Picture) -> str:
    Image.fromarray(picture).save(path)
    return str(path)


def edit_recipe(tmp_path: Path, *listed: Any, **more: Any) -> Any:
    sets = {"edit": {"prompts": [*listed]}} | more
    return evaluation_recipe(tmp_path, tmp_path, tmp_path, prompts=sets)


def key_of(recipe: Any) -> str:
    return digest_json(evaluate.settings_for_key(recipe))


def test_the_key_has_the_content_of_each_reference_and_not_its_place(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.png", RED)
    again = saved(tmp_path / "b.png", RED)
    recipes = [
        edit_recipe(tmp_path, {"prompt": "a cat", "references": [path]}) for path in (first, again)
    ]
    assert key_of(recipes[0]) == key_of(recipes[1])
    plainly = key_of(edit_recipe(tmp_path, "a cat"))
    assert plainly != key_of(recipes[0])
    before = key_of(recipes[0])
    saved(tmp_path / "a.png", GREEN)
    assert key_of(recipes[0]) != before


def test_a_key_without_references_is_as_before(tmp_path: Path) -> None:
    settings = evaluate.settings_for_key(edit_recipe(tmp_path, "a cat"))
    assert {"references", "targets", "masks"}.isdisjoint(settings)


def test_references_are_read_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    for name, words in (("text.png", "is no picture"), ("none.png", "no such file")):
        listed = {"prompt": "a cat", "references": [str(tmp_path / name)]}
        with pytest.raises(Refused, match=rf"evaluate\.prompts: .*{name}.*{words}"):
            evaluate.check(edit_recipe(tmp_path, listed))


def test_places_of_references_are_resolved_and_prompts_are_not(tmp_path: Path) -> None:
    sets = {"prompts": ["./a cat", {"prompt": "./a dog", "references": ["./dog.png"]}]}
    assert anchored(sets, tmp_path)["prompts"] == [
        "./a cat",
        {"prompt": "./a dog", "references": [str(tmp_path / "dog.png")]},
    ]


def test_one_text_with_other_references_is_another_prompt(tmp_path: Path) -> None:
    listed = [{"prompt": "a cat", "references": [name]} for name in ("a.png", "b.png", "a.png")]
    sets = metrics.prompt_sets(edit_recipe(tmp_path, *listed).evaluate)
    assert metrics.prompt_numbers(sets) == (0, 1, 0)


def test_held_out_prompts_stand_for_themselves_until_the_pictures_are_there(tmp_path: Path) -> None:
    settings = edit_recipe(tmp_path, "a cat", unseen={"held_out": 3}).evaluate
    sets = metrics.prompt_sets(settings)
    assert len(set(sets["unseen"])) == 3
    found = {"unseen": [Prompt("make it blue", ("a.png",), "b.png")]}
    (known,) = metrics.prompt_rounds(settings, 1, found)
    assert known["unseen"] == tuple(found["unseen"])
    assert metrics.sample_prompts(settings) == ("a cat",)


def test_a_checkpoint_by_samples_is_refused_before_a_run_that_draws_none(tmp_path: Path) -> None:
    recipe = edit_recipe(tmp_path, {"prompt": "a cat", "references": ["a.png"]})
    rule = {"best_checkpoint": {"metric": "clip_score"}, "sample_every_n_steps": 500}
    recipe = Recipe.model_validate(recipe.model_dump() | {"train": rule})
    sampled = recipe.evaluate.model_copy(update={"prompts": {"new": PromptSet(prompts=("a cat",))}})
    Doors(recipe.model_copy(update={"evaluate": sampled}))._monitoring()
    words = r"^train\.best_checkpoint\.metric: clip_score is of sample pictures, and all prompts"
    with pytest.raises(Refused, match=words):
        Doors(recipe)._monitoring()


def test_held_out_prompts_without_held_out_samples_are_refused(tmp_path: Path) -> None:
    recipe = edit_recipe(tmp_path, "a cat", unseen={"held_out": 3})
    none = recipe.model_copy(update={"encode": recipe.encode.model_copy(update={"holdout": 0})})
    with pytest.raises(Refused, match=r"prompts\.unseen\.held_out.*raise encode\.holdout"):
        evaluate.check(none)


@pytest.mark.parametrize(
    "given", [{"held_out": 3, "prompts": ["a cat"]}, {"held_out": 3, "file": "a.txt"}, {}]
)
def test_a_set_has_its_prompts_from_one_place(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"set either|it has no prompts"):
        PromptSet(**given)


def test_metrics_of_likeness_have_the_names_of_the_sets_that_have_the_pictures(
    tmp_path: Path,
) -> None:
    listed = {"prompt": "a cat", "references": ["a.png"]}
    masked = listed | {"mask": "m.png"}
    recipe = edit_recipe(
        tmp_path, listed, old={"prompts": ["x"]}, unseen={"held_out": 3}, m={"prompts": [masked]}
    )
    source = recipe.source.model_copy(update={"references": "files"})
    known = metrics.metric_names(recipe.model_copy(update={"source": source}))
    names = {name for name in known if name.partition("/")[0] in metrics.SIMILARITIES}
    assert names == {
        *("target_similarity", "target_similarity/unseen"),
        *("reference_similarity", "reference_similarity/edit"),
        *("reference_similarity/unseen", "reference_similarity/m"),
        *("kept_similarity", "kept_similarity/m"),
    }
    without = set(metrics.metric_names(recipe))
    assert names - without == {"reference_similarity/unseen"}, "held-out samples have none"
    assert not any(map(metrics.lower_is_better, names))
    plainly = metrics.metric_names(edit_recipe(tmp_path, "a cat"))
    assert set(metrics.SIMILARITIES).isdisjoint(plainly)


def edited_sets(tmp_path: Path) -> metrics.PromptSets:
    red = saved(tmp_path / "red.png", RED)
    blue = saved(tmp_path / "blue.png", BLUE)
    mask = plain(255, 255, 255)
    mask[:16] = 0  # the upper half shall be kept
    kept = saved(tmp_path / "mask.png", mask)
    return {
        "unseen": (Prompt("a", (red,), target=blue), Prompt("b", (red, blue), target=red)),
        "edit": (Prompt("c", (red,), mask=kept),),
        "old": (Prompt("d"),),
    }


def suite_of(sets: metrics.PromptSets, judges: Any = None) -> MetricSuite:
    encoder = MeanColour()
    none = {
        name: ReferenceFeatures(np.zeros((0, 3), np.float32), (), Shard(name, [], {}))
        for name in ("clip", "image", "pixels")
    }
    files = edits.read_files(metrics.all_prompts(sets))
    return MetricSuite(
        rounds=(sets,),
        compared=(),
        learnt=(),
        judges=judges or {},
        resampling=Resampling(20, 0),
        encoders=dict.fromkeys(("clip", "image", "pixels"), encoder),
        text_features=np.ones((len(metrics.all_prompts(sets)), 3), np.float32),
        held_out=none,
        training=none,
        memorization=Memorization(),
        files=files,
        edited=_features_of_files(files, metrics.all_prompts(sets), encoder),
    )


def drawn(store: Store, key: str, pictures: list[Picture], out: Path) -> Shard:
    out.mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(out / f"{number:05d}.png")
    return _commit(store, key, out, len(pictures))


def test_likeness_is_the_cosine_with_the_own_target_and_references(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    shard = drawn(store, "k", [BLUE, GREEN, RED, RED], tmp_path / "out")
    found = suite_of(edited_sets(tmp_path)).measure(store, [shard]).metrics
    values = {name: round(one.value, 3) for name, one in found.items() if "similarity" in name}
    assert values == {
        "target_similarity": 0.5,  # blue as its target; green unlike red
        "target_similarity/unseen": 0.5,
        "reference_similarity": 0.333,
        "reference_similarity/unseen": 0.0,  # blue unlike red; green unlike red and blue
        "reference_similarity/edit": 1.0,
        "kept_similarity": 1.0,
        "kept_similarity/edit": 1.0,
    }
    assert (found["target_similarity"].low, found["target_similarity"].high) == (-1.0, 1.0)
    assert found["reference_similarity"].n == 3 and found["kept_similarity"].n == 1


def test_the_likeness_of_several_references_is_their_mean(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    shard = drawn(store, "k", [RED, RED, RED, RED], tmp_path / "out")
    found = suite_of(edited_sets(tmp_path)).measure(store, [shard]).metrics
    assert found["reference_similarity/unseen"].value == pytest.approx((1.0 + 0.5) / 2, abs=1e-3)


def test_only_pixels_outside_of_a_mask_are_compared() -> None:
    mask = plain(255, 255, 255)
    mask[:16] = 0
    changed_below = RED.copy()
    changed_below[16:] = BLUE[16:]
    assert edits.kept_similarity(changed_below, RED, mask) == 1.0
    changed_above = RED.copy()
    changed_above[:16] = BLUE[:16]
    lost = 2 * 200 / 3 / 255  # red is gone and blue is there, of three channels
    assert edits.kept_similarity(changed_above, RED, mask) == pytest.approx(1.0 - lost)
    large = plain(200, 0, 0, side=64)
    assert edits.kept_similarity(large, RED, mask) == 1.0


def test_judges_see_the_first_reference_of_each_picture(tmp_path: Path) -> None:
    seen: list[Any] = []

    def judge(images: Picture, prompts: Any, references: Any) -> Any:
        seen.extend(references)
        return np.ones(len(images), bool)

    store = Store(str(tmp_path / "store"))
    shard = drawn(store, "k", [BLUE, GREEN, RED, RED], tmp_path / "out")
    suite_of(edited_sets(tmp_path), {"any": judge}).measure(store, [shard])
    assert [None if r is None else int(r[0, 0, 0]) for r in seen] == [200, 200, 200, None]


def test_a_grid_has_references_above_the_models_and_targets_below(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    grey, white = plain(90, 90, 90), plain(255, 255, 255)
    base = drawn(store, "base", [grey] * 4, tmp_path / "base")
    tuned = drawn(store, "tuned", [white] * 4, tmp_path / "tuned")
    sets = edited_sets(tmp_path)
    files = edits.read_files(metrics.all_prompts(sets))
    png = _grid(store, {"base": [base], "tuned": [tuned]}, sets, files)
    page = np.asarray(Image.open(io.BytesIO(png)))
    column = page[:, draw.LABEL + 48].astype(int)
    order = []
    for colour in column:
        for name, rgb in (("reference", RED), ("base", grey), ("tuned", white), ("target", BLUE)):
            if (colour == rgb[0, 0]).all() and order[-1:] != [name]:
                order.append(name)
    of_unseen, of_edit, of_old = order[:4], order[4:7], order[7:]
    assert of_unseen == ["reference", "base", "tuned", "target"]
    assert of_edit == ["reference", "base", "tuned"]
    assert of_old == ["base", "tuned"]


def test_what_is_shown_beside_is_in_the_artifact(tmp_path: Path) -> None:
    written: dict[str, bytes] = {}

    class Draft:
        def write(self, path: str, data: bytes) -> None:
            written[path] = data

    sets = edited_sets(tmp_path)
    named = _write_beside(Draft(), sets, edits.read_files(metrics.all_prompts(sets)))  # type: ignore[arg-type]
    assert named["prompts"]["unseen"] == ["a", "b"]
    assert named["beside"]["unseen"]["0"].keys() == {"reference", "target"}
    assert named["beside"]["edit"]["2"].keys() == {"reference"}
    assert {
        path
        for own in named["beside"].values()
        for kinds in own.values()
        for path in kinds.values()
    } == written.keys()
    two = Image.open(io.BytesIO(written["beside/00001-reference.png"]))
    assert two.size == (64, 32), "references are side by side"


@pytest.fixture(scope="module")
def edits_in_store(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A recipe and its latents: 40 targets share 5 references, and one has none."""
    folder = tmp_path_factory.mktemp("edits")
    rows = [(data, f"picture {n}", REFERENCES[n % 6 : n % 6 + 1]) for n, data in enumerate(TARGETS)]
    path = write_data_set(folder / "data.parquet", rows)
    recipe = recipe_of(folder / "store", tiny_sd, data_set_source(path))
    return recipe, encoded(recipe)


def test_held_out_samples_are_prompts_with_their_references_and_targets(
    edits_in_store: tuple[Any, Any],
) -> None:
    recipe, latents = edits_in_store
    pictures = Pictures.of(latents, images_of(latents))
    prompts = held_out_prompts(recipe, latents, pictures, 100)
    held_out = {n for n, data in enumerate(TARGETS) if is_holdout(digest(data), 0.25)}
    numbers = [int(prompt.text.removeprefix("picture ")) for prompt in prompts]
    assert set(numbers) == held_out and len(numbers) == len(held_out) > 4
    files = edits.read_files(prompts)
    for number, prompt in zip(numbers, prompts, strict=True):
        shown = [pixels(Path(files[place].path).read_bytes()) for place in prompt.references]
        wanted = [pixels(data) for data in REFERENCES[number % 6 : number % 6 + 1]]
        assert all((a == b).all() for a, b in zip(shown, wanted, strict=True))
        assert prompt.target is not None
        assert (files[prompt.target].read() == pixels(TARGETS[number])).all()
    assert held_out_prompts(recipe, latents, pictures, 3) == prompts[:3]


def test_held_out_prompts_have_the_captions_that_were_encoded(
    edits_in_store: tuple[Any, Any], tmp_path: Path
) -> None:
    """By the rule of a captions artifact, and by the changes of `encode.captions`."""
    recipe, latents = edits_in_store
    pictures = Pictures.of(latents, images_of(latents))
    plain = held_out_prompts(recipe, latents, pictures, 4)
    draft = latents.store.draft(KeyParts("caption", 1, {}, {}))
    draft.write(RULE, Rule(prefix="sks, ").as_json())
    for tar in pictures.shards:
        path = tmp_path / f"{tar.sha256}.parquet"
        ids = [sample.source_sha256 for sample in tar.read()]
        write_captions(path, ["short"], [CaptionedSample(id, {"short": "made"}) for id in ids])
        facts = {"tar": tar.sha256, "prompts": {"short": "?"}, "samples": tar.samples}
        local = {".parquet": str(path)}
        draft.add_shard(latents.store.commit_shard("caption", tar.sha256, local, facts))
    captions = draft.commit({}, {})
    run = latents.manifest["run"]
    parents = run["parents"] | {"captions": {"stage": "caption", "key": captions.key}}
    manifest = latents.manifest | {"run": run | {"parents": parents}}
    changes = Captions(replace={"picture": "photo"})
    encode = recipe.encode.model_copy(update={"captions": changes})
    prompts = held_out_prompts(
        recipe.model_copy(update={"encode": encode}),
        replace(latents, manifest=manifest),
        pictures,
        4,
    )
    assert [prompt.text for prompt in prompts] == [
        f"sks, {prompt.text.replace('picture', 'photo')}" for prompt in plain
    ]
    assert [prompt.places for prompt in prompts] == [prompt.places for prompt in plain]


def test_a_picture_in_two_rows_has_the_references_of_a_complete_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = {"a": [Pair(b"target", None)], "b": [Pair(b"target", (b"1",)), Pair(b"target", ())]}
    monkeypatch.setattr(held_out_edits, "read_pairs", lambda _: pairs)
    assert held_out_edits._ids_by_target(cast("Artifact", None)) == {b"target": (b"1",)}


def test_references_of_more_than_a_model_reads_are_refused_before_any_work(
    tiny_sd: Path, tiny_flux_kontext: Path, tmp_path: Path
) -> None:
    listed = {"prompt": "a cat", "references": ["a.png", "b.png"]}
    settings = edit_recipe(tmp_path, "a dog", listed).evaluate
    for model, words in ((tiny_sd, "family sd reads none"), (tiny_flux_kontext, "reads 1;")):
        with pytest.raises(Refused, match=rf"prompts\.edit: a prompt has 2 .*{words}.*flux2"):
            evaluate.check_references(settings, Base.open(model))
    one = edit_recipe(tmp_path, {"prompt": "a cat", "references": ["a.png"]}).evaluate
    evaluate.check_references(one, Base.open(tiny_flux_kontext))


def test_the_digit_of_a_prompt_that_names_none_is_that_of_its_reference() -> None:
    x8, labels = dataset.load("held_out")
    chosen = [int(np.flatnonzero(labels == digit)[0]) for digit in (3, 7)]
    ink = np.zeros(2, int)
    chalk = np.full(2, captions.style_index(captions.NEW_STYLE))
    three, seven = dataset.render(x8[chosen], ink, np.random.default_rng(0))
    pictures = dataset.render(x8[chosen], chalk, np.random.default_rng(0))
    prompts = ["the same digit in white chalk on a green board"] * 2
    assert judge_digit(pictures, prompts, [three, seven]).tolist() == [True, True]
    assert judge_digit(pictures, prompts, [seven, seven]).tolist() == [False, True]
    named = ["a handwritten seven in white chalk on a green board"] * 2
    assert judge_digit(pictures, named, [three, three]).tolist() == [False, True]
    with pytest.raises(ValueError, match="names no digit: it needs a reference"):
        judge_digit(pictures, prompts)


def test_a_prompt_without_digit_and_reference_is_refused(tmp_path: Path) -> None:
    text = "the same digit in white chalk on a green board"
    recipe = evaluation_recipe(
        *(tmp_path, tmp_path, tmp_path), prompts={"new": {"prompts": [text]}}, judges=["digits"]
    )
    with pytest.raises(Refused, match="should name one digit"):
        evaluate.check(recipe)
    reference = saved(tmp_path / "r.png", RED)
    listed = Edit(prompt=text, references=(reference,))
    sets = {"new": recipe.evaluate.prompts["new"].model_copy(update={"prompts": (listed,)})}
    evaluate.check(
        recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"prompts": sets})})
    )


def test_the_key_of_a_drawing_has_its_references() -> None:
    from runtimes.process.job import GenerateJob

    job = GenerateJob("torch", "m", (), ("a",), {"seed": 0}, vae=None)
    spec = draw.SamplingSpec(job, "", {})
    assert "references" not in spec.facts()
    one, other = (replace(spec, references=[[sha]]) for sha in ("aa", "bb"))
    assert digest_json(one.facts()) != digest_json(other.facts())
    smaller = replace(one, job=replace(job, reference_pixels=64))
    assert digest_json(one.facts()) != digest_json(smaller.facts())
