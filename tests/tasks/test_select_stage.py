"""The select stage on real descriptions: where planted pictures end, and what is done again."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from download_stage import build
from nsfw_describer import NSFW
from picture_bytes import encode_picture
from PIL import Image, ImageFilter, ImageOps
from shortest_recipe import shortest_recipe

from artifacts.records import digest_bytes
from artifacts.store import Artifact, Store
from configs.errors import Failed, Refused
from configs.settings.recipe import Recipe
from tasks.describe.pixels import Hash
from tasks.describe.stage import DescribeStage
from tasks.encode.crop_to_bucket import is_holdout
from tasks.panels import Facts, Table
from tasks.select import stage as select_stage
from tasks.select.selection import LEAKED, read_selection
from tasks.select.stage import SelectStage, check_names

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

DESCRIBERS = {"hash": {"kind": "hash"}, "quality": {"kind": "quality"}, "nsfw": NSFW}


def landscape(seed: int) -> Image.Image:
    """A picture of 96 x 80 pixels with soft shapes and sharp grain, which no other seed has."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (8, 9, 3), np.uint8))
    soft = np.asarray(image.resize((96, 80), Image.Resampling.BICUBIC), float)
    return Image.fromarray((soft + rng.normal(0, 12, soft.shape)).clip(0, 255).astype(np.uint8))


def write_planted(folder: Path) -> None:
    """Ten pictures, and what a person would leave out, by its file's name."""
    folder.mkdir()
    for seed in range(10):
        landscape(seed).save(folder / f"plain-{seed}.png")
    original = landscape(0)
    (folder / "copy.png").write_bytes((folder / "plain-0.png").read_bytes())
    small = original.resize((72, 60), Image.Resampling.BICUBIC)
    (folder / "near.jpg").write_bytes(encode_picture(small, "jpeg", quality=80))
    (folder / "mirror.jpg").write_bytes(
        encode_picture(ImageOps.mirror(original).resize((84, 70)), "jpeg", quality=80)
    )
    landscape(20).filter(ImageFilter.GaussianBlur(4)).save(folder / "blurred.png")
    landscape(21).save(folder / "captionless.png")
    for path in [*folder.iterdir()]:
        if path.stem != "captionless":
            path.with_suffix(".txt").write_text(f"a landscape, {path.stem}")


class Planted:
    """The planted pictures, downloaded and described."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_planted(folder / "pictures")
        recipe = self.recipe()
        self.store = Store(recipe.store)
        self.images = build(recipe)
        self.described = self.describe()

    def describe(self) -> Artifact:
        stage = DescribeStage(self.recipe(), self.images)
        draft = self.store.draft(stage.parts)
        return draft.commit(stage.build(draft, lambda *_: None), {})

    def recipe(self, holdout: float = 0.0, **select: Any) -> Recipe:
        return shortest_recipe(
            store=str(self.folder / "store"),
            source={"kind": "folder", "path": str(self.folder / "pictures")},
            download={"image_size": 96, "min_image_size": 16, "shard_size": 6},
            describe={"describers": DESCRIBERS, "device": "cpu"},
            encode={"holdout": holdout},
            select=select,
        )

    def select(self, holdout: float = 0.0, **settings: Any) -> Artifact:
        stage = SelectStage(self.recipe(holdout, **settings), self.images, self.described)
        draft = self.store.draft(stage.parts)
        parents = {n: {"stage": a.stage, "key": a.key} for n, a in stage.parents.items()}
        artifact = draft.commit(stage.build(draft, lambda *_: None), {"parents": parents})
        stage.check(artifact.summary)
        return artifact

    def reasons(self, artifact: Artifact) -> dict[str, list[str]]:
        """Name of a file -> why entries with its bytes were dropped, in their order."""
        rows = read_selection(artifact).to_pylist()
        files = [f for f in (self.folder / "pictures").iterdir() if f.suffix != ".txt"]
        return {
            file.name: [row["reason"] for row in rows if row["id"] == digest(file)]
            for file in files
        }


def digest(file: Path) -> bytes:
    return bytes.fromhex(digest_bytes(file.read_bytes()))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return Planted(tmp_path_factory.mktemp("planted"))


#: Between the classifier's scores of plain-9 and of all others; of the blurred picture and of all.
WHERE = "caption_length > 0 and quality_sharpness > 2 and nsfw_nude < 0.016"
DUPLICATES = {"perceptual": "hash"}


def test_planted_pictures_end_where_the_recipe_says(planted: Planted) -> None:
    selected = planted.select(where=WHERE, duplicates=DUPLICATES)
    found = planted.reasons(selected)
    [no_text, blurred, nude] = [f"where: {part}" for part in WHERE.split(" and ")]
    assert {file: reasons for file, reasons in found.items() if reasons != [""]} == {
        "plain-0.png": ["", "exact duplicate"],
        "copy.png": ["", "exact duplicate"],
        "near.jpg": ["near-duplicate"],
        "mirror.jpg": ["near-duplicate"],
        "blurred.png": [blurred],
        "captionless.png": [no_text],
        "plain-9.png": [nude],
    }
    table = read_selection(selected)
    assert table.column_names[6:] == ["caption_length", "quality_sharpness", "nsfw_nude"]
    assert table.to_pylist() == sorted(table.to_pylist(), key=lambda r: (r["tar"], r["row"]))
    facts, counts, examples, *_ = SelectStage.show(selected)
    assert isinstance(facts, Facts)
    assert isinstance(counts, Table)
    assert isinstance(examples, Table)
    assert facts.values["kept"] == 9
    assert {row["reason"]: row["pictures"] for row in counts.rows} == {
        **dict.fromkeys((no_text, blurred, nude), 1),
        "exact duplicate": 1,
        "near-duplicate": 2,
    }
    assert [row["reason"] for row in examples.rows].count("near-duplicate") == 2


def test_no_picture_beside_a_held_out_one_is_trained_on(planted: Planted) -> None:
    held_out = [f for f in (planted.folder / "pictures").glob("*.*g") if is_holdout(digest(f), 0.5)]
    names = {file.name for file in held_out}
    group = {"plain-0.png", "near.jpg", "mirror.jpg"}
    assert names & group
    found = planted.reasons(planted.select(holdout=0.5, duplicates=DUPLICATES))
    assert {f for f in group if found[f][0] == LEAKED} == group - names
    assert sum(found[file].count("") for file in group & names) == 1


def test_another_threshold_compares_no_picture_again(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planted.select(where=WHERE, duplicates=DUPLICATES)
    monkeypatch.setattr(select_stage, "group_pictures", None)
    again = planted.select(where=WHERE, duplicates=DUPLICATES)
    assert again.digest == first.digest
    planted.select(where=WHERE, duplicates={**DUPLICATES, "exact": False, "keep": "first"})
    other = planted.select(where=WHERE.replace("0.016", "1"), duplicates=DUPLICATES, limit=8)
    assert other.summary["kept"] == 8
    assert planted.reasons(other)["near.jpg"] == ["near-duplicate"]


def test_groups_are_of_their_settings(planted: Planted) -> None:
    assert planted.select(duplicates=DUPLICATES).summary["reasons"]["near-duplicate"] == 2
    strict = {**DUPLICATES, "distance": 0, "min_correlation": 1.0}
    assert planted.select(duplicates=strict).summary["reasons"] == {"exact duplicate": 1}


def test_another_describer_of_the_same_name_groups_anew(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.select(duplicates=DUPLICATES)
    monkeypatch.setattr(Hash, "version", 0)
    monkeypatch.setattr(planted, "described", planted.describe())
    grouped = Mock(side_effect=select_stage.group_pictures)
    monkeypatch.setattr(select_stage, "group_pictures", grouped)
    assert planted.select(duplicates=DUPLICATES).summary["reasons"]["near-duplicate"] == 2
    grouped.assert_called_once()


def test_a_wrong_column_is_refused_before_pictures_are_compared(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select_stage, "group_pictures", None)
    with pytest.raises(Refused, match=r"no column 'nsfw_nud' .did you mean 'nsfw_nude'"):
        planted.select(where="nsfw_nud < 0.5", duplicates={"perceptual": "hash", "distance": 3})


def test_names_of_columns_are_checked_before_any_work(planted: Planted) -> None:
    check_names(planted.recipe(where="NSFW_nude < 1 and host = ''", cap={"hash_phash": 1}))
    with pytest.raises(Refused, match=r"select.prefer: .*did you mean 'quality_sharpness'"):
        check_names(planted.recipe(prefer="quality_sharp"))
    with pytest.raises(ValueError, match="perceptual: quality is no describer of kind hash"):
        planted.recipe(duplicates={"perceptual": "quality"})


@pytest.mark.parametrize("name", ["WIDTH", "group", "hash_phash", "id"])
def test_a_name_of_two_columns_is_refused_where_it_is_read(planted: Planted, name: str) -> None:
    def check(**select: Any) -> None:
        values = planted.recipe(**select).model_dump()
        values["source"]["additional_columns"] = [name]
        check_names(Recipe.model_validate(values))

    check()
    with pytest.raises(Refused, match=f"select.cap.{name}: .* another column '{name.lower()}'"):
        check(cap={name: 2})


def test_a_selection_of_nothing_fails_with_the_reasons(planted: Planted) -> None:
    with pytest.raises(Failed, match=r"no picture is kept .where: width > 900: 15"):
        planted.select(where="width > 900")


def test_a_selection_of_all_is_told_without_reasons(
    planted: Planted, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kiln"):
        planted.select(duplicates={"exact": False})
    assert caplog.messages[-1] == "select: 15 of 15 pictures are kept"


def test_a_condition_that_fails_on_every_picture_is_told_with_the_error(planted: Planted) -> None:
    with pytest.raises(Refused, match=r"caption::int > 5.: Conversion Error: Could not convert"):
        planted.select(where="caption::int > 5")
