"""Captions are cleaned, and bad ones have the reason."""

from typing import Any

import pytest

from configs.settings.caption import Caption, CaptionChecks
from tasks.caption.checks import clean, fault_of, repetition

PHOTO = "A photograph of a temple roof in the mountains, with a flock of birds in a blue sky."
TAGS = "1girl, solo, long hair, long sleeves, long skirt, looking at viewer, blue eyes, blue hair"


@pytest.mark.parametrize(
    ("text", "checks", "reason"),
    [
        (PHOTO, {"scripts": ["latin"]}, None),
        (TAGS, {}, None),
        ('A woman unable to stand, beside a sign that reads "I can\'t".', {}, None),
        ("", {}, "empty"),
        ("I\N{RIGHT SINGLE QUOTATION MARK}m sorry, but there are people here.", {}, "refusal"),
        ("The picture is blurred. I cannot name anyone.", {}, "refusal"),
        ("Non posso dirlo.", {"refusals": ["non posso"]}, "refusal"),
        ("a dog " * 20, {}, "repetition"),
        (PHOTO, {"max_characters": 20}, "too long"),
        ("一只狗在公园里", {"scripts": ["latin"]}, "other script"),
        ("一只狗在公园里", {"scripts": ["latin", "cjk"]}, None),
    ],
)
def test_a_bad_caption_has_its_reason(text: str, checks: dict[str, Any], reason: Any) -> None:
    assert fault_of(clean(text), CaptionChecks(**checks)) == reason


def test_repetition_is_the_share_of_sequences_that_occurred_before() -> None:
    assert repetition(PHOTO) == repetition(TAGS) == 0
    assert repetition("abcdefghijkl" * 2) == pytest.approx(1 / 13)


def test_control_characters_and_reversed_text_are_removed() -> None:
    assert clean(" a\x00b\x1b[0m\n\tc\u202ed\ud800 \u200d✓ ") == "ab[0m cd \u200d✓"


@pytest.mark.parametrize("name", ["reasons", "Short", "a b", "row"])
def test_a_prompt_is_named_as_a_column(name: str) -> None:
    with pytest.raises(ValueError, match=rf"prompts\.{name}: a name has small letters"):
        Caption(prompts={name: "Describe it."})
