"""Captions that are changed before they are encoded: words, tags and variants."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from encode_stage import encode_images, encode_recipe, images_of, picture_of, pictures_of
from published import text_of_ids

from artifacts.latent_shards import LatentShard, open_latents
from artifacts.records import digest_bytes
from artifacts.store import Store
from configs.settings.data import Captions, Encode
from configs.settings.sources import MixtureSource, faults_between
from tasks.encode.captions import encoded_captions, replaced
from tasks.encode.crop_to_bucket import TransformSettings, shard_key

IDS = [digest_bytes(str(number).encode()) for number in range(400)]
TAGS = "sks dog, red, blue, green, big"


def variants(
    caption: str = TAGS, *, held_out: bool = False, **settings: Any
) -> list[tuple[str, ...]]:
    """The captions of 400 pictures."""
    chosen = Captions(**settings)
    ids = map(bytes.fromhex, IDS)
    return [encoded_captions((caption,), sha256, chosen, held_out=held_out) for sha256 in ids]


def test_every_place_has_each_tag_equally_often_and_kept_ones_stay_first() -> None:
    drawn = variants(shuffle=True, keep_tags=1, variants=5)
    assert {len(of_picture) for of_picture in drawn} == {5}
    listed = [text.split(", ") for of_picture in drawn for text in of_picture]
    assert {tags[0] for tags in listed} == {"sks dog"}
    assert all(sorted(tags) == sorted(TAGS.split(", ")) for tags in listed)
    for place in range(1, 5):
        shares = Counter(tags[place] for tags in listed)
        assert all(abs(count / len(listed) - 1 / 4) < 0.03 for count in shares.values())


def test_each_tag_but_the_kept_ones_is_left_out_at_the_rate() -> None:
    drawn = variants(tag_dropout=0.3, keep_tags=2, variants=5)
    texts = [text for of_picture in drawn for text in of_picture]
    for tag, share in {"sks dog": 1, "red": 1, "blue": 0.7, "green": 0.7, "big": 0.7}.items():
        there = sum(tag in text.split(", ") for text in texts) / len(texts)
        assert there == pytest.approx(share, abs=0.03)
    order = TAGS.split(", ")
    assert all(text.split(", ") == [t for t in order if t in text.split(", ")] for text in texts)


def test_variants_depend_on_the_picture_and_the_seed_alone() -> None:
    drawn = variants(shuffle=True)
    assert drawn == variants(shuffle=True) != variants(shuffle=True, seed=1)
    assert len(set(drawn)) > 300
    chosen = Captions(shuffle=True)
    more = encoded_captions((TAGS, "a, b"), bytes.fromhex(IDS[0]), chosen, held_out=False)
    assert more[:8] == drawn[0], "another caption changes none of the first one's"


def test_held_out_pictures_keep_their_tags() -> None:
    settings = {"shuffle": True, "tag_dropout": 0.5, "replace": {"sks dog": "dog"}}
    assert set(variants(held_out=True, **settings)) == {(TAGS.replace("sks dog", "dog"),)}


@pytest.mark.parametrize(
    ("words", "text", "found"),
    [
        ({"sks dog": "dog"}, "a sks dog, a sks dogs", "a dog, a sks dogs"),
        ({"cat": "dog", "dog": "cat"}, "a cat and a dog", "a dog and a cat"),
        ({"dog": "pet", "sks dog": "dog"}, "sks dog, dog", "dog, pet"),
        ({"c++": "code"}, "c++, c", "code, c"),
        ({}, "as it is", "as it is"),
    ],
)
def test_whole_words_are_replaced_at_once(words: dict[str, str], text: str, found: str) -> None:
    assert replaced(text, words) == found


def test_prompts_replace_the_captions_and_separators_the_comma() -> None:
    assert set(variants(prompts=["a dog", "a cat"])) == {("a dog", "a cat")}
    (only,) = encoded_captions(
        ("a | b|c",), bytes(32), Captions(tag_dropout=1e-9, separator="|", variants=1),
        held_out=False,
    )  # fmt: skip
    assert only == "a| b| c"


def test_only_recipes_that_change_captions_have_them_in_their_keys() -> None:
    assert not {"captions", "max_tokens"} & Encode().key_settings().keys()
    settings = TransformSettings(64, False, 16, 2.0, "center", False, 0, 0.1, 10**6)
    encodes = [Encode(), Encode(captions=Captions()), Encode(captions=Captions(seed=1))]
    keys = [shard_key("t", "e", encode, settings) for encode in encodes]
    assert len(set(keys)) == 3


def test_sources_of_a_mixture_change_captions_of_their_own_and_read_weights_alike() -> None:
    def faults(captions: dict[str, Any]) -> list[str]:
        subject = MixtureSource.model_validate({"source": {"kind": "folder", "path": "."}})
        kept = MixtureSource.model_validate({"like": "subject", "encode": {"captions": captions}})
        return list(faults_between({"subject": subject, "kept": kept}))

    assert faults({"replace": {"sks dog": "dog"}}) == []
    (fault,) = faults({"emphasis": "weights"})
    assert fault.startswith("sources.kept.encode.captions.emphasis: all sources have the same: set")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["embeddings", "token_ids"])
def test_a_shard_has_the_variants_and_a_grown_source_keeps_them(
    text: str, tiny_sdxl: Path, tmp_path: Path
) -> None:
    (shard,) = pictures_of(shards=1, each=6)
    tagged = {key: (data, (TAGS.replace(", ", ","),)) for key, (data, _) in shard.items()}
    captions = {"shuffle": True, "keep_tags": 1, "variants": 4}

    def encoded(pictures: dict[str, Any], store: str) -> dict[bytes, list[str]]:
        recipe = encode_recipe(tmp_path / store, tiny_sdxl, captions=captions, text=text)
        latents = open_latents(
            encode_images(recipe, images_of(Store(recipe.store), [pictures], tmp_path)).uri
        )
        (ref,) = latents.shards
        opened = LatentShard(ref.url)
        samples = [opened.sample(g, i) for g, n in opened.groups.items() for i in range(n)]
        return {
            s.id: [text_of_ids(opened.input_ids(row)[0]) for row in s.caption_rows] for s in samples
        }

    found = encoded(tagged, "store")
    lengths = sorted(len(texts) for texts in found.values())
    assert lengths[-1] == 4 and set(lengths) <= {1, 4}  # held-out pictures have one
    chosen = Captions(**captions)
    for sha256, texts in found.items():
        of_picture = encoded_captions((TAGS,), sha256, chosen, held_out=len(texts) == 1)
        assert [t.replace(" ", "") for t in texts] == [t.replace(" ", "") for t in of_picture]
    grown = encoded({**tagged, "99999": (picture_of(999), ("another, one",))}, "grown")
    assert grown.items() >= found.items()
