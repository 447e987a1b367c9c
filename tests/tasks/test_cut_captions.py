"""Captions and prompts that a text encoder cuts: counted by limit, and told."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.tokenize import text_tokenizers
from tasks.cut_captions import cut_facts, tell_cut_prompts

Told = Callable[[], list[tuple[int, str]]]
#: The tiny tokenizers of CLIP have a token a letter, and two marks.
LONG = "x" * 76  # one token too many for a limit of 77


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """The level and the words of each line of the log so far."""
    caplog.set_level(logging.INFO, "kiln")
    return lambda: [(record.levelno, record.message) for record in caplog.records]


def test_prompts_are_counted_once_with_the_limit_and_its_encoders(
    tiny_sdxl: Path, told: Told
) -> None:
    cuts = tell_cut_prompts("evaluate", Base.open(tiny_sdxl), [LONG, LONG, LONG[1:], "a cat"])
    assert cuts == {name: {"tokens": 77, "cut": 1} for name in ("text_encoder", "text_encoder_2")}
    ((level, line),) = told()
    assert level == logging.WARNING
    assert line.startswith(
        "evaluate: 1 of 3 prompts are cut at 77 tokens, the limit of text_encoder and "
        "text_encoder_2: "
    )
    assert cut_facts(cuts)["cut at 77 by text_encoder_2"] == 1


def test_a_limit_beyond_which_another_encoder_reads_is_a_note(tiny_sd3: Path, told: Told) -> None:
    """The T5 of this tiny base reads 20 tokens, its CLIP encoders 77."""
    cuts = tell_cut_prompts("generate", Base.open(tiny_sd3), ["x" * 30, "a cat"])
    assert [facts["cut"] for facts in cuts.values()] == [0, 0, 1]
    ((level, line),) = told()
    assert level == logging.INFO and "1 of 2 prompts are cut at 20 tokens" in line
    assert [t.length for t in text_tokenizers(Base.open(tiny_sd3))] == [
        *Base.open(tiny_sd3).caption_limits.values()
    ]


@pytest.mark.parametrize(
    ("prompts", "told_alike"),
    [
        ([LONG + "a", LONG + "b", "a cat"], True),
        ([LONG, "y" + LONG], False),
        (["A cat", "a cat"], False),  # alike to CLIP, which reads both to their ends
    ],
)
def test_prompts_that_differ_only_behind_the_limit_are_told(
    tiny_sdxl: Path, told: Told, prompts: list[str], told_alike: bool
) -> None:
    tell_cut_prompts("evaluate", Base.open(tiny_sdxl), prompts)
    alike = [line for _, line in told() if "differ only behind" in line]
    start = "evaluate: 2 prompts differ only behind the limit of 77 tokens, so the model draws"
    assert [line[: len(start)] for line in alike] == [start] * told_alike


def test_prompts_that_one_encoder_tells_apart_are_not_alike(tiny_sd3: Path, told: Told) -> None:
    """Both are above all limits, and differ behind T5's 20 tokens, before CLIP's 77."""
    tell_cut_prompts("evaluate", Base.open(tiny_sd3), ["x" * 30 + letter + LONG for letter in "ab"])
    assert not any("differ only behind" in line for _, line in told())
