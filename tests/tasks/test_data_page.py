"""`kiln data` and `kiln show PICTURE`: what became of pictures, by real stages before captions."""

import html
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from encode_stage import picture_of
from picture_bytes import encode_picture, noise_picture
from PIL import Image
from referenced_data import data_set_source, encoded, recipe_of, write_data_set
from shortest_recipe import shortest_recipe
from source_rows import write_list

from artifacts.gc import record_run
from artifacts.image_shards import read_tar
from artifacts.records import digest_bytes
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Refused
from configs.load_recipe import dump
from configs.settings.data import UrlSource
from configs.settings.recipe import Recipe
from flows.data_commands import show_data, show_picture
from runtimes.pipeline_folder.folder import Base
from tasks import data_page, download
from tasks.build_or_reuse import Stage
from tasks.caption.tables import RULE, CaptionedSample, Rule, write_captions
from tasks.data_page import PICTURES, count_rows, counts, write_page
from tasks.data_set import DataSet, column_facts
from tasks.encode.stage import EncodeStage
from tasks.panels import Gallery, human
from tasks.picture_story import tell
from tasks.select.selection import read_selection
from tasks.select.stage import SelectStage

pytestmark = pytest.mark.slow

COUNT = 24
LEAST = 5
WHERE = f"where: likes >= {LEAST} or likes < 2"
HOSTILE = "<script>alert(1)</script> ![p](http://x/y)"


class World(NamedTuple):
    """A folder of pictures, of which some are dropped, and what a run made of it."""

    recipe: Recipe
    data: DataSet
    folder: Path

    def told(self, number: int) -> list[dict[str, str]]:
        """What is told of a picture's entries: stage -> text."""
        return [dict(story) for story in tell(self.recipe, self.data, str(self.file(number)))]

    def file(self, number: int) -> Path:
        return self.folder / f"{number:02}.png"


def build(store: Store, stage: Stage, parents: dict[str, Artifact]) -> Artifact:
    draft = store.draft(stage.parts)
    summary = stage.build(draft, lambda *_: None)  # type: ignore[arg-type]
    summary.pop("run", None)
    named = {n: {"stage": a.stage, "key": a.key} for n, a in parents.items()}
    return draft.commit(summary, {"parents": named, "created": "2026-11-30T00:00:00+00:00"})


def captioned(
    store: Store, images: Artifact, selected: Artifact, recipe: Recipe, folder: Path
) -> Artifact:
    """Captions `made N` of the kept pictures; that of 7 is hostile, that of 10 rejected."""
    assert recipe.caption is not None
    kept = {(row["tar"], row["row"]) for row in read_selection(selected).to_pylist() if row["kept"]}
    draft = store.draft(KeyParts("caption", 1, {}, {"images": images.digest}))
    for entry in images.files:
        if entry.path.endswith(".tar"):
            rows = []
            for row, sample in enumerate(read_tar(images.url(entry.path))):
                number = sample.meta["likes"]
                text = {7: HOSTILE, 10: "blue blue blue"}.get(number, f"made {number}")
                reasons = {"short": "repetition"} if number == 10 else {}
                made = ({"short": text}, (), reasons) if (entry.sha256, row) in kept else ({},)
                rows.append(CaptionedSample(sample.source_sha256, *made))
            write_captions(folder / "captions", ["short"], rows)
            meta = {"tar": entry.sha256, "prompts": {"short": ""}}
            local = {".parquet": str(folder / "captions")}
            draft.add_shard(store.commit_shard("caption", entry.sha256, local, meta))
    draft.write(RULE, Rule.of(recipe.caption).as_json())
    good = {"short": len(kept) - 1}
    summary = {"kept": len(kept), "good": good, "bad": {"repetition": 1}, "without": 1}
    run = {"parents": {}, "created": "2026-11-30T00:00:00+00:00"}
    return draft.commit(summary, run)


@pytest.fixture(scope="module")
def world(tiny_sdxl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Picture 1 has the bytes of picture 0; picture 2 is broken."""
    root = tmp_path_factory.mktemp("data")
    folder = root / "in"
    folder.mkdir()
    lines = []
    for number in range(COUNT):
        (folder / f"{number:02}.png").write_bytes(picture_of(max(number, 1) - 1))
        line = {"file_name": f"{number:02}.png", "text": f"picture {number}", "likes": number}
        lines.append(line)
    (folder / "02.png").write_bytes(b"broken")
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = shortest_recipe(
        store=str(root / "store"),
        source={"kind": "folder", "path": str(folder), "additional_columns": ["likes"]},
        download={"image_size": 32, "min_image_size": 1, "shard_size": 8},
        select={"where": WHERE.removeprefix("where: ")},
        caption={"model": "unused", "prefix": "TOK "},
        encode={"resolution": 32, "holdout": 0.25, "device": "cpu"},
        model={"path": str(tiny_sdxl)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILN_CACHE", str(root / "cache"))
        store = Store(recipe.store)
        plan = download.plan(recipe)
        images = build(store, download.DownloadStage(recipe, plan), {"plan": plan.artifact})
        of_images = {"images": images}
        selected = build(store, SelectStage(recipe, images, None), of_images)
        captions = captioned(store, images, selected, recipe, root)
        latents = build(store, EncodeStage(recipe, images, Base.open(tiny_sdxl)), of_images)
        stages = {a.stage: [a.key] for a in (plan.artifact, images, selected, captions, latents)}
        record_run(store, "a-run", {"recipe": dump(recipe), "stages": stages})
        yield World(recipe, DataSet.newest(store, recipe.name), folder)


def test_counts_are_those_of_each_stage_by_reason(world: World) -> None:
    found = counts(world.recipe, world.data)
    assert found["download"] == {"downloaded": COUNT - 1, "not an image": 1}
    assert found["select"] == {"kept": COUNT - 4, WHERE: 2, "exact duplicate": 1}
    assert found["caption"] == {
        "captioned": COUNT - 4,
        "good captions, short": COUNT - 5,
        "bad captions: repetition": 1,
        "without a good one": 1,
    }
    encoded = found["encode"] or {}
    assert encoded["trained on"] + encoded["held out"] == COUNT - 1


def test_a_stage_that_is_not_built_has_the_command_that_builds_it(world: World) -> None:
    artifacts = {n: a for n, a in world.data.artifacts.items() if n != "encode"}
    rows = count_rows(counts(world.recipe, DataSet(artifacts)), "my.yaml")
    assert rows[-1] == {
        "stage": "encode",
        "pictures": "not built",
        "what": "kiln run my.yaml --until encode",
    }


def galleries(page: str) -> dict[str, list[str]]:
    """Title of each gallery -> the texts of its pictures."""
    found = {}
    for panel in page.split('<section class="panel pictures">')[1:]:
        [title] = re.findall("<h3>(.*?)</h3>", panel)
        found[html.unescape(title)] = re.findall("<figcaption>(.*?)</figcaption>", panel)
    return found


def test_the_page_shows_each_threshold_its_neighbours_and_what_was_dropped(world: World) -> None:
    page = write_page(world.recipe, "my.yaml", world.data)
    assert f"&gt;= {LEAST}</text>" in page and ">likes</h3>" in page
    found = galleries(page)
    inside = found[f"Just inside likes >= {LEAST}"]
    outside = found[f"Just outside likes >= {LEAST}"]
    assert [text.partition(" · ")[0] for text in inside[:2]] == ["likes 5", "likes 6"]
    assert [text.partition(" · ")[0] for text in outside[:2]] == ["likes 4", "likes 3"]
    assert outside[0] == "likes 4 · dropped: where · picture 4"
    assert found["Dropped: exact duplicate"] == ["likes 1 · dropped: exact duplicate · picture 1"]
    assert found["Rejected captions"] == ["short: repetition: blue blue blue"]
    neighbours = found["Held-out pictures, each before the nearest training picture"]
    assert neighbours[0] == "held out" and "correlation of thumbnails" in neighbours[1]
    trained = found["Trained on, bucket 32 x 32 (height x width)"]
    assert any(text.endswith("TOK made 9") for text in trained)


def test_the_page_is_one_file_of_bounded_size_without_hostile_text(world: World) -> None:
    page = write_page(world.recipe, "my.yaml", world.data)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert set(re.findall(r'(?:src|href)="(.{5})', page)) <= {"data:", "#Coun", "#Hist", "#Pict"}
    assert page.count("<img") <= PICTURES and len(page) < 2_000_000


def test_a_page_of_many_pictures_has_at_most_as_many_as_its_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_page, "PICTURES", 5)
    assert write_page(world.recipe, "my.yaml", world.data).count("<img") == 5


def test_what_became_of_a_picture_is_told_at_each_stage(world: World) -> None:
    [kept] = world.told(9)
    assert kept["source"].endswith("'picture 9', likes 9")
    assert kept["select"] == "kept" and kept["caption"] == "training reads 'TOK made 9'"
    assert kept["encode"].startswith(("train, bucket 32 x 32", "holdout, bucket 32 x 32"))
    assert world.told(4)[0]["select"] == f"dropped: {WHERE}"
    [original, copy] = world.told(0)
    assert original["select"] == "kept; of 2 duplicates"
    url = original["source"].partition(", ")[0]
    names = {str(world.file(number)) for number in (0, 1)}
    assert names == {url, copy["source"].partition(", ")[0]}
    assert copy["select"] == f"dropped: exact duplicate; of 2 duplicates, {url} is kept"
    assert "train" not in copy and copy["encode"].startswith("see its entry above")
    sha256 = digest_bytes(world.file(9).read_bytes())
    assert dict(tell(world.recipe, world.data, sha256)[0]) == kept


def test_a_rejected_caption_is_told_with_its_reason(world: World) -> None:
    story = tell(world.recipe, world.data, str(world.file(10)))[0]
    assert [text for stage, text in story if stage == "caption"] == [
        "short: rejected (repetition): 'blue blue blue'",
        "training reads 'TOK picture 10'",
    ]


def test_a_picture_that_was_not_captioned_is_trained_on_its_own_caption(world: World) -> None:
    assert world.data.captions("mine", None, None) == ("TOK mine",)


def test_a_failed_row_is_told_by_its_url(world: World) -> None:
    url = f"sha256:{digest_bytes(b'broken')}"
    for what in (url, str(world.file(2))):
        [story] = tell(world.recipe, world.data, what)
        assert story[0].text == f"{what}, 'picture 2'"
        assert dict(story)["download"].startswith("no picture: not an image")


def test_a_url_that_the_condition_of_the_source_drops_is_told_so(
    world: World, tmp_path: Path
) -> None:
    rows = [{"url": f"http://a/{n}.jpg", "caption": "", "score": n} for n in range(3)]
    path = write_list(tmp_path / "a.parquet", rows)
    source = UrlSource(kind="urls", path=path, where="score > 1")
    recipe = world.recipe.model_copy(update={"source": source})
    [[dropped]] = tell(recipe, world.data, "http://a/1.jpg")
    assert dropped == ("source", "dropped by source.where: score > 1")
    [[other]] = tell(recipe, world.data, "http://a/2.jpg")
    assert other.text == "a row of the list that the newest run did not download"
    with pytest.raises(Refused, match="neither its source nor its newest run has it"):
        tell(recipe, world.data, "http://a/9.jpg")


def test_a_selections_panels_have_the_thresholds_and_dropped_pictures(world: World) -> None:
    titles = [panel.title for panel in SelectStage.show(world.data.artifacts["select"])]
    assert titles[-3:] == ["likes", f"Dropped: {WHERE}", "Dropped: exact duplicate"]


def test_the_card_says_what_kept_columns_have_of_the_pictures_trained_on(world: World) -> None:
    trained = []
    for number in (0, *range(LEAST, COUNT)):
        for story in tell(world.recipe, world.data, str(world.file(number))):
            is_trained_on = ("train", "will be trained on") in story
            if is_trained_on and dict(story)["select"].startswith("kept"):
                trained += [int(n) for n in re.findall("likes (\\d+)", story[0].text)]
    [facts] = column_facts(world.data, ["likes"], world.recipe.encode.holdout)
    assert facts["pictures with a value"] == len(trained)
    mean = human(sum(trained) / len(trained))
    assert facts["values"] == f"least {min(trained)}, mean {mean}, greatest {max(trained)}"


def test_the_commands_print_counts_and_stories_and_write_the_page(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "data.html"
    show_data(world.recipe, "my.yaml", page, as_json=False)
    printed = capsys.readouterr().out.splitlines()
    assert "select    20        kept" in printed and printed[-1] == f"page: {page}"
    assert "<h1>test</h1>" in page.read_text()
    show_data(world.recipe, "my.yaml", None, as_json=True)
    assert json.loads(capsys.readouterr().out)["counts"]["select"]["kept"] == 20
    show_picture(world.recipe, "my.yaml", str(world.file(4)), as_json=False)
    assert f"select    dropped: {WHERE}" in capsys.readouterr().out.splitlines()
    other = world.recipe.model_copy(update={"name": "other"})
    with pytest.raises(Refused, match=r"no pictures of it: kiln run my\.yaml --until download"):
        show_data(other, "my.yaml", None, as_json=False)


def test_the_page_shows_masks_as_pictures_are_trained_on(
    tiny_sdxl: Path, tmp_path: Path, own_cache: Path
) -> None:
    """Pictures are white; masks show the left of their middle square, to which encode crops."""
    folder = tmp_path / "in"
    folder.mkdir()
    mask = np.zeros((64, 128), np.uint8)
    mask[:, 32:64] = 255
    for number in range(6):
        white = np.full((64, 128, 3), 255 - number, np.uint8)
        (folder / f"{number}.png").write_bytes(encode_picture(Image.fromarray(white)))
        if number:
            data = encode_picture(Image.fromarray(mask))
            (folder / f"{number}.mask.png").write_bytes(data)
    recipe = shortest_recipe(
        store=str(tmp_path / "store"),
        source={"kind": "folder", "path": str(folder), "mask": "files"},
        download={"image_size": 64, "min_image_size": 1},
        encode={"resolution": 64, "holdout": 0.0, "device": "cpu"},
        train={"masked_loss": {}},
        model={"path": str(tiny_sdxl)},
    )
    store = Store(recipe.store)
    plan = download.plan(recipe)
    images = build(store, download.DownloadStage(recipe, plan), {"plan": plan.artifact})
    latents = build(store, EncodeStage(recipe, images, Base.open(tiny_sdxl)), {"images": images})
    panels = [p for p in data_page.panels_of(DataSet.before(latents)) if isinstance(p, Gallery)]
    [gallery] = [panel for panel in panels if "masks hide" in panel.title]
    shown = [np.asarray(Image.open(BytesIO(data)), int) for data, _ in gallery.pictures]
    assert len(shown) == 6 and all(picture.shape == (64, 64, 3) for picture in shown)
    left = [picture[:, :28].mean() for picture in shown]
    green = sorted(picture[:, 36:, 1].mean() for picture in shown)
    assert min(left) > 245
    assert max(green[:5]) < 110 and green[5] > 245  # one has no mask


def test_references_follow_their_pictures(tiny_sd: Path, tmp_path: Path) -> None:
    """Picture n has the greys of the references n and n + 1, or none; none are shown of others."""
    greys = [
        encode_picture(Image.fromarray(np.full((16, 16, 3), 20 * n, np.uint8))) for n in range(9)
    ]
    rows = [
        (noise_picture(n, 16, 16), f"picture {n}", greys[n : n + 2] if n else []) for n in range(8)
    ]
    path = write_data_set(tmp_path / "data.parquet", rows)
    recipe = recipe_of(tmp_path / "store", tiny_sd, data_set_source(path), holdout=0.0)
    data = DataSet.before(encoded(recipe))
    [gallery] = [panel for panel in data_page.panels_of(data) if isinstance(panel, Gallery)]
    found: dict[str, list[int]] = {}
    target = ""
    for picture, text in gallery.pictures:
        if "its reference" in text:
            found[target].append(round(np.asarray(Image.open(BytesIO(picture))).mean() / 20))
        else:
            target = text.rpartition(" · ")[2]
            found[target] = []
    assert found == {f"picture {n}": [n, n + 1] if n else [] for n in range(8)}
