"""The demo's pictures and captions: repeatable, and readable back."""

import subprocess
import sys

import numpy as np
import pytest

from demo import captions, dataset
from demo.captions import BASE_STYLES, NEW_STYLE, STYLES, style_index


def test_every_caption_reads_back_as_what_it_was_made_from() -> None:
    for digit in range(10):
        for index, style in enumerate(STYLES):
            for text in captions.captions(digit, index):
                assert captions.parse(text) == captions.Asked(digit, style.ink, style.paper)
                assert captions.parse(text).styles() == [index]
            for words in (captions.WORDS[digit], f"the number {digit}"):
                assert captions.parse(f"{words} in {style.ink}") == captions.Asked(digit, style.ink)
                assert captions.parse(f"a handwritten {words}") == captions.Asked(digit)


def test_a_caption_that_leaves_the_paper_open_accepts_any_paper() -> None:
    styles = captions.parse("a handwritten three in white chalk").styles()
    assert {STYLES[index].paper for index in styles} == {"a black board", "a green board"}


def test_a_caption_of_an_edit_may_leave_the_digit_to_its_reference() -> None:
    for index, style in enumerate(STYLES):
        for template in captions.EDIT_TEMPLATES:
            text = template.format(ink=style.ink, paper=style.paper)
            asked = captions.parse(text, has_reference=True)
            assert asked == captions.Asked(None, style.ink, style.paper)
            assert asked.styles() == [index]
            with pytest.raises(ValueError, match="should name one digit"):
                captions.parse(text)


@pytest.mark.parametrize(
    "text", ["a cat", "a three or a four in red ink", "a three in gold ink on a green board", ""]
)
def test_a_caption_of_no_picture_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"caption .*(a handwritten seven|no such style)"):
        captions.parse(text)


def test_chalk_is_all_that_the_base_does_not_know() -> None:
    assert captions.captions(7, style_index(NEW_STYLE))[0] == (
        "a handwritten seven in white chalk on a green board"
    )
    unknown = {style.name for style in STYLES} - set(BASE_STYLES)
    assert unknown == {NEW_STYLE, "white chalk on a black board"}
    with pytest.raises(ValueError, match="no style is called 'crayon'"):
        style_index("crayon")


def test_held_out_digits_are_five_hundred_and_apart_from_the_training_ones() -> None:
    train, labels = dataset.load("train")
    held_out, _ = dataset.load("held_out")
    assert (len(train), len(held_out), len(dataset.load()[0])) == (1297, 500, 1797)
    assert set(labels.tolist()) == set(range(10))
    seen = {row.tobytes() for row in train}
    assert not any(row.tobytes() in seen for row in held_out)


def test_the_same_seed_draws_the_same_pictures() -> None:
    x8, _ = dataset.load("held_out")
    style = np.arange(21)
    first, again, other = (
        dataset.render(x8[:21], style, np.random.default_rng(seed)) for seed in (3, 3, 4)
    )
    assert first.shape == (21, 32, 32, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_digit_is_drawn_the_same_beside_any_neighbour() -> None:
    x8, _ = dataset.load("held_out")
    rng = np.random.default_rng(0)
    alone = dataset.strokes(x8[:1], rng, wobble=0)
    beside = dataset.strokes(x8[:9], rng, wobble=0)
    assert np.allclose(alone[0], beside[0], atol=1e-6)


def test_pictures_judges_and_dataset_need_no_torch() -> None:
    code = "import sys, demo.dataset, demo.digit_judges; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
