"""The caption stage: real captioners, what is captioned again, and what is bad about captions."""

from pathlib import Path
from typing import Any

import pytest
from caption_server import CaptionServer
from encode_stage import images_of, pictures_of
from shortest_recipe import shortest_recipe
from tiny_vision_language import save_vision_language

from artifacts.store import Artifact, Store
from configs.errors import Failed
from tasks.caption.stage import CaptionStage
from tasks.caption.tables import CaptionedSample, Rule, captions_to_train, read_captions, tables_of
from tasks.panels import to_markdown

#: Random weights give no sentence: they repeat, and never end.
LENIENT = {"cut_off": False, "max_repetition": 1.0}


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_language(tmp_path_factory.mktemp("vision-language"))


def caption_images(store: Store, images: Artifact, caption: dict[str, Any]) -> Artifact:
    recipe = shortest_recipe(store=store.url, caption=caption)
    stage = CaptionStage(recipe, images)
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
    built = []
    for name, batch_size in (("one", 8), ("other", 3)):
        store = Store(str(tmp_path / name))
        images = images_of(store, pictures_of(shards=2, each=7), tmp_path)
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
