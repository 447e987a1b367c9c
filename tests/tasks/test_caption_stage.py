"""The caption stage: real captioners, what is captioned again, and what is bad about captions."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from caption_server import CaptionServer
from download_stage import build
from encode_stage import images_of, picture_of, pictures_of
from picture_sources import make_pictures, write_folder
from PIL import Image
from shortest_recipe import shortest_recipe
from tiny_vision_language import save_vision_language

from artifacts.records import digest_bytes
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Failed
from configs.settings.recipe import Recipe
from tasks import download
from tasks.build_or_reuse import Stage
from tasks.caption.stage import CaptionStage
from tasks.caption.tables import (
    RULE,
    CaptionedSample,
    Rule,
    captions_to_train,
    read_captions,
    tables_of,
)
from tasks.describe.stage import DescribeStage
from tasks.describe.tables import read_table
from tasks.encode.crop_to_bucket import is_holdout
from tasks.evaluate.features import Clip
from tasks.evaluate.judges import cosine
from tasks.panels import to_markdown
from tasks.pictures import Pictures
from tasks.select.selection import FILE

#: Random weights give no sentence: they repeat, and never end.
LENIENT = {"cut_off": False, "max_repetition": 1.0}


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_language(tmp_path_factory.mktemp("vision-language"))


def caption_images(
    store: Store, images: Artifact, caption: dict[str, Any], selected: Artifact | None = None
) -> Artifact:
    recipe = shortest_recipe(store=store.url, caption=caption, encode={"holdout": 0})
    return built(CaptionStage(recipe, images, selected), store)


def built(stage: Stage, store: Store) -> Artifact:
    draft = store.draft(stage.parts)
    artifact = draft.commit(stage.build(draft, lambda *_: None), {})
    stage.check(artifact.summary)
    return artifact


def local(captioner: Path, **settings: Any) -> dict[str, Any]:
    settings = {"max_new_tokens": 8, "dtype": "float32", "device": "cpu", **settings}
    return {"model": str(captioner), "checks": LENIENT, **settings}


def served(server: CaptionServer, **settings: Any) -> dict[str, Any]:
    endpoint = {"urls": [server.base_url], "model": "tiny", "backoff": 0.01}
    return {"endpoint": endpoint, "prompts": {"short": "In short:"}, **settings}


def captions_of(artifact: Artifact) -> dict[bytes, CaptionedSample]:
    tables = tables_of(artifact).values()
    return {s.id: s for table in tables for s in read_captions(table["url"], table["sha256"])}


def content(artifact: Artifact) -> list[tuple[str, str]]:
    return [(entry.path, entry.sha256) for entry in artifact.files]


def test_a_model_captions_every_picture_and_again_with_the_same_bytes(
    tmp_path: Path, captioner: Path
) -> None:
    shard = {f"{n:02}": (picture_of(n, 40 + 20 * (n % 3), 32), ("",)) for n in range(7)}
    other = {f"{n:02}": (picture_of(n, 32, 100), ("",)) for n in range(7, 14)}
    built = []
    for name, batch_size in (("one", 8), ("other", 1)):
        store = Store(str(tmp_path / name))
        images = images_of(store, [shard, other], tmp_path)
        built.append(caption_images(store, images, local(captioner, batch_size=batch_size)))
    samples = captions_of(built[0])
    assert len(samples) == 14
    assert all(len(sample.good) == 1 for sample in samples.values())
    assert len({sample.texts["caption"] for sample in samples.values()}) > 5
    assert content(built[0]) == content(built[1])


def test_one_changed_prompt_asks_that_prompt_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    images = images_of(store, pictures_of(shards=2, each=5), tmp_path)
    with CaptionServer() as server:
        prompts = {"short": "In short:", "long": "At length:"}
        before = caption_images(store, images, served(server, prompts=prompts))
        assert sorted(server.asked) == ["At length:"] * 10 + ["In short:"] * 10
        server.asked.clear()
        prompts["long"] = "In detail:"
        after = caption_images(store, images, served(server, prompts=prompts))
        assert server.asked == ["In detail:"] * 10
        for sample_id, sample in captions_of(after).items():
            assert sample.texts["short"] == captions_of(before)[sample_id].texts["short"]
            assert sample.texts["long"].startswith("In detail: a picture")
        server.asked.clear()
        checks = {"max_characters": 10}
        strict = caption_images(
            store, images, served(server, prompts=prompts, checks=checks, max_bad=1)
        )
    assert server.asked == []
    assert strict.summary["bad"] == {"too long": 20}


def test_chosen_pictures_alone_are_captioned_and_a_wider_choice_asks_the_new_ones(
    tmp_path: Path,
) -> None:
    store = Store(str(tmp_path / "store"))
    images = images_of(store, pictures_of(shards=2, each=5), tmp_path)

    def choose(kept: list[int]) -> Artifact:
        tars = [entry.sha256 for entry in images.files]
        rows = [
            {"tar": tar, "row": n, "kept": n in kept, "id": b""} for tar in tars for n in range(5)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / FILE)
        draft = store.draft(KeyParts("select", 1, {"kept": kept}, {}))
        draft.upload(str(tmp_path / FILE), FILE)
        return draft.commit({}, {})

    with CaptionServer() as server:
        few = caption_images(store, images, served(server), choose([1, 3]))
        assert len(server.asked) == 4
        samples = captions_of(few).values()
        assert [bool(sample.good) for sample in samples] == [False, True, False, True, False] * 2
        caption_images(store, images, served(server), choose([0, 1, 3]))
    assert len(server.asked) == 6


def recipe_of_folder(folder: Path, count: int = 24, **sections: Any) -> Recipe:
    """Of pictures in image shards of about four."""
    if not (folder / "pictures").exists():
        write_folder(folder / "pictures", make_pictures(count))
    return shortest_recipe(
        store=str(folder / "store"),
        source={"kind": "folder", "path": str(folder / "pictures")},
        download={"image_size": 32, "min_image_size": 16, "shard_size": 4},
        **sections,
    )


def test_one_changed_picture_is_captioned_alone(tmp_path: Path) -> None:
    with CaptionServer() as server:
        recipe = recipe_of_folder(tmp_path, caption=served(server), encode={"holdout": 0})
        store = Store(recipe.store)
        before = built(CaptionStage(recipe, build(recipe)), store)
        assert len(server.asked) == 24
        server.asked.clear()
        changed = sorted((tmp_path / "pictures").rglob("*.png"))[7]
        Image.new("RGB", (40, 40), "red").save(changed)
        after = built(CaptionStage(recipe, build(recipe)), store)
    assert len(server.asked) == 1
    samples = captions_of(before)
    assert sum(sample == samples.get(i) for i, sample in captions_of(after).items()) == 23


def test_of_held_out_pictures_those_without_a_caption_are_captioned(tmp_path: Path) -> None:
    with CaptionServer() as server:
        encode = {"holdout": 0.5}
        recipe = recipe_of_folder(tmp_path, caption=served(server, prefix="TOK "), encode=encode)
        [*_, bare] = held_out = [
            file
            for file in sorted((tmp_path / "pictures").rglob("*.png"))
            if is_holdout(bytes.fromhex(digest_bytes(file.read_bytes())), 0.5)
        ]
        bare.with_suffix(".txt").write_text("")
        images = build(recipe)
        artifact = built(CaptionStage(recipe, images), Store(recipe.store))
        assert len(server.asked) == 24 - len(held_out) + 1 == artifact.summary["kept"]
    rule = json.loads(artifact.read(RULE))
    shards = Pictures(images, None, artifact).shards
    read = {s.source_sha256: s.captions for shard in shards for s in shard.read(rule, 0.5)}
    texts = {file: read[bytes.fromhex(digest_bytes(file.read_bytes()))] for file in held_out}
    assert texts.pop(bare)[0].startswith("TOK In short: a picture")
    assert all(texts[f] == (f"TOK {f.with_suffix('.txt').read_text()}",) for f in texts)


def test_only_pictures_without_a_caption_are_captioned(tmp_path: Path) -> None:
    with CaptionServer() as server:
        caption = served(server, prefix="TOK ", only_missing=True, on_bad="drop")
        recipe = recipe_of_folder(tmp_path, caption=caption, encode={"holdout": 0})
        files = sorted((tmp_path / "pictures").rglob("*.png"))
        bare = files[:5]
        for file in bare:
            file.with_suffix(".txt").write_text("")
        images = build(recipe)
        artifact = built(CaptionStage(recipe, images), Store(recipe.store))
        assert len(server.asked) == 5
    rule = json.loads(artifact.read(RULE))
    shards = Pictures(images, None, artifact).shards
    read = {s.source_sha256: s.captions for shard in shards for s in shard.read(rule, 0.0)}
    texts = {file: read[bytes.fromhex(digest_bytes(file.read_bytes()))] for file in files}
    assert all(texts.pop(file)[0].startswith("TOK In short: a picture") for file in bare)
    assert all(texts[f] == (f"TOK {f.with_suffix('.txt').read_text()}",) for f in texts)


@pytest.mark.parametrize("captioned", [False, True])
def test_download_misses_no_captions_where_a_captioner_writes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, captioned: bool
) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(4):
        (pictures / f"{number}.png").write_bytes(picture_of(number))
    recipe = recipe_of_folder(tmp_path, **({"caption": {"model": "unused"}} if captioned else {}))
    stage = download.DownloadStage.of(recipe, download.plan(recipe), Store(recipe.store), None)
    stage.check(build(recipe).summary)
    assert ("4 of 4 pictures have no caption" in caplog.text) is not captioned


def embeddings_of(artifact: Artifact) -> Iterator[tuple[bytes, list[float]]]:
    for entry in artifact.files:
        table = read_table(artifact.url(entry.path), entry.sha256, ["id", "value_"])
        yield from ((row["id"], row["value_"]) for row in table.to_pylist())


def test_captions_unlike_their_pictures_are_bad(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    clip = tiny_model("tiny-clip")
    describe = {"describers": {"eyes": {"kind": "clip", "model": str(clip)}}, "device": "cpu"}
    with CaptionServer() as server:
        limit = 0.0
        expected: dict[bytes, float] = {}
        for _ in range(2):
            caption = served(server, checks={"min_likeness": limit}, max_bad=1)
            recipe = recipe_of_folder(tmp_path, count=8, describe=describe, caption=caption)
            store = Store(recipe.store)
            images = build(recipe)
            described_images = built(DescribeStage(recipe, images), store)
            captioned = built(CaptionStage(recipe, images, None, described_images), store)
            samples = captions_of(captioned)
            if not expected:
                model = Clip(clip, "cpu")
                for sample_id, embedding in embeddings_of(described_images):
                    text = model.texts([samples[sample_id].texts["short"]])
                    expected[sample_id] = 100 * float(cosine(np.array([embedding]), text)[0])
                limit = float(np.median([*expected.values()]))
    assert len(server.asked) == 8  # another limit asks nothing
    unlike = {i for i, sample in samples.items() if "unlike the picture" in sample.reasons.values()}
    assert unlike == {i for i, likeness in expected.items() if likeness < limit}
    assert 0 < len(unlike) < 8


def test_likeness_without_embeddings_is_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="min_likeness requires embeddings of pictures"):
        recipe_of_folder(tmp_path, caption={"checks": {"min_likeness": 20}})


def test_captions_before_an_outage_are_kept(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    images = images_of(store, pictures_of(shards=1, each=9), tmp_path)
    with CaptionServer() as server:
        settings = served(server)
        settings["endpoint"] |= {"max_requests": 6, "max_connections": 1}
        with pytest.raises(Failed, match="budget of 6 requests is spent"):
            caption_images(store, images, settings)
        assert len(server.asked) == 6
        caption_images(store, images, settings)
    assert len(server.asked) == 9


def test_hostile_captions_stay_text(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    images = images_of(store, pictures_of(shards=1, each=2), tmp_path)
    hostile = "<script>alert(1)</script>\x00\x1b[31m\n| a | ![x](http://x)\u202eevil" + "y" * 20_000
    with CaptionServer(text=hostile) as server:
        checks = {"max_characters": 99_999, "max_repetition": 1}
        captions = caption_images(store, images, served(server, checks=checks))
    (text,) = {sample.texts["short"] for sample in captions_of(captions).values()}
    assert text.startswith("<script>alert(1)</script>[31m | a | ![x](http://x)evily")
    assert len(text) == 10_000
    page = to_markdown("captions", CaptionStage.show(captions))
    assert "<script>" not in page
    assert "![x]" not in page


def test_too_many_bad_captions_end_the_stage(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    images = images_of(store, pictures_of(shards=1, each=2), tmp_path)
    with CaptionServer(text="I'm sorry, I can't help.") as server:
        with pytest.raises(Failed, match=r"2 of 2 captions are bad \(refusal: 2\)"):
            caption_images(store, images, served(server))
        captions = caption_images(store, images, served(server, max_bad=1, on_bad="drop"))
        assert len(server.asked) == 2
    assert captions.summary["without"] == 2
    assert "left out" in to_markdown("", CaptionStage.show(captions))


@pytest.mark.parametrize(
    ("rule", "trained"),
    [(Rule(), ("a dog",)), (Rule(prefix="sks, ", keep_source=True), ("sks, a dog", "sks, mine"))],
)
def test_training_reads_good_captions_with_the_prefix(rule: Rule, trained: Any) -> None:
    sample = CaptionedSample(b"", {"short": "a dog", "long": "no no"}, (), {"long": "repetition"})
    assert captions_to_train(sample, ["mine", ""], rule) == trained


@pytest.mark.parametrize(
    ("on_bad", "trained"), [("source", ("sks mine",)), ("blank", ("sks",)), ("drop", None)]
)
def test_what_a_picture_without_a_good_caption_gets(on_bad: str, trained: Any) -> None:
    sample = CaptionedSample(b"", {"short": "no no"}, (), {"short": "repetition"})
    assert captions_to_train(sample, ["mine"], Rule("sks ", on_bad=on_bad)) == trained
