"""The judges agree with real held-out digits, and say no to wrong ones."""

import numpy as np
import pytest
from digit_prompts import judge
from numpy.typing import NDArray

from demo import captions, dataset, digit_judges
from demo.captions import NEW_STYLE, STYLES, style_index


def held_out(seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The 500 held-out digits, each in a random style: pictures, digits, styles."""
    x8, digit = dataset.load("held_out")
    rng = np.random.default_rng(seed)
    style = rng.integers(len(STYLES), size=len(x8))
    return dataset.render(x8, style, rng), digit, style


def captions_of(digit: NDArray[np.int64], style: NDArray[np.int64]) -> list[str]:
    return [captions.captions(d, s)[0] for d, s in zip(digit.tolist(), style.tolist(), strict=True)]


@pytest.mark.slow
def test_held_out_digits_are_judged_right_99_times_in_100() -> None:
    results = []
    for seed in range(6):
        images, digit, style = held_out(seed)
        results.append(judge(images, captions_of(digit, style)))
    assert np.mean([right["digit"] for right in results]) >= 0.99
    assert np.mean([right["style"] for right in results]) >= 0.99


@pytest.mark.slow
def test_the_judge_separates_wrong_digits_from_wrong_styles() -> None:
    images, digit, style = held_out(0)
    wrong_digit = judge(images, captions_of((digit + 1) % 10, style))
    assert wrong_digit["digit"].mean() < 0.01 and wrong_digit["style"].all()
    wrong_style = judge(images, captions_of(digit, (style + 1) % len(STYLES)))
    assert wrong_style["digit"].mean() > 0.97 and not wrong_style["style"].any()


@pytest.mark.slow
def test_chalk_on_black_is_not_chalk_on_green() -> None:
    x8, digit = dataset.load("held_out")
    black = np.full(len(x8), style_index("white chalk on a black board"))
    images = dataset.render(x8, black, np.random.default_rng(0))
    right = judge(images, captions_of(digit, np.full(len(x8), style_index(NEW_STYLE))))
    assert not right["style"].any()
    assert judge(images[:1], [f"a handwritten {captions.WORDS[digit[0]]} in white chalk"])["style"]


@pytest.mark.slow
def test_noise_and_blank_pictures_pass_only_by_chance() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    asked = captions_of(np.arange(200) % 10, np.arange(200) % len(STYLES))
    for images in (noise, np.full_like(noise, 128)):
        right = judge(images, asked)
        assert (right["digit"] & right["style"]).mean() < 0.05


def test_pictures_and_prompts_must_match_in_number_and_shape() -> None:
    images, digit, style = held_out(0)
    with pytest.raises(ValueError, match="one per prompt"):
        judge(images, captions_of(digit, style)[:-1])
    with pytest.raises(ValueError, match="uint8"):
        judge(images / np.float32(255), captions_of(digit, style))


@pytest.mark.slow
def test_the_classifier_has_learnt_from_training_digits_alone() -> None:
    training = len(dataset.load("train")[0])
    assert digit_judges._classifier().shape_fit_[0] == digit_judges.PASSES * training
