"""CLIP features and judges equal those of the models."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

from demo import digits
from runtimes.contract import WrongInput
from tasks.evaluate import metrics
from tasks.evaluate.clip_features import ClipFeatures, check_clip
from tasks.evaluate.judges import check_prompts, judge_pictures
from tasks.evaluate.score_training_samples import SampleScorer

PROMPTS = ["a cat", "two dogs", "a cat", "words " * 40]


@pytest.fixture
def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = [(32, 32), (40, 50), (64, 32), (32, 32)]
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def test_clip_score_equals_that_of_transformers(
    tiny_clip: Path, pictures: list[np.ndarray]
) -> None:
    clip = ClipFeatures(tiny_clip, "cpu")
    ours = metrics.clip_scores(clip.images(pictures), clip.texts(PROMPTS))
    model = CLIPModel.from_pretrained(tiny_clip).eval()
    tokens = CLIPTokenizer.from_pretrained(tiny_clip)(
        PROMPTS, padding=True, truncation=True, max_length=77, return_tensors="pt"
    )
    processor = CLIPImageProcessor.from_pretrained(tiny_clip)
    pixels = processor([Image.fromarray(p) for p in pictures], return_tensors="pt").pixel_values
    with torch.no_grad():
        logits = model(pixel_values=pixels, **tokens).logits_per_image
        cosine = (logits / model.logit_scale.exp()).diag().numpy()
    np.testing.assert_allclose(ours, 100 * np.maximum(cosine, 0), atol=2e-4)
    assert np.abs(cosine).max() > 0.01


def test_samples_are_scored_by_the_clip_model_and_the_judges_of_the_recipe(tiny_clip: Path) -> None:
    x8, labels = digits.load("test")
    drawn = digits.render(x8[:4], np.full(4, 2), np.random.default_rng(0))
    prompts = [digits.captions(int(label), 2)[0] for label in labels[:4]]
    strip = io.BytesIO()
    Image.fromarray(np.concatenate(list(drawn), axis=1)).save(strip, "png")
    found = SampleScorer(["digits"], tiny_clip, prompts)(strip.getvalue())
    clip = ClipFeatures(tiny_clip, "cpu")
    scores = metrics.clip_scores(clip.images(drawn), clip.texts(prompts))
    said = judge_pictures(["digits"], drawn, prompts)
    assert found["clip_score"] == pytest.approx(scores.mean())
    assert {name: found[name] for name in said} == {n: p.mean() for n, p in said.items()}


def test_no_pictures_have_no_features(tiny_clip: Path) -> None:
    assert ClipFeatures(tiny_clip, "cpu").images([]).shape == (0, 24)


def test_the_error_of_a_folder_without_a_clip_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput, match=r"evaluate\.clip: .* does not load as a CLIPModel"
    ) as caught:
        ClipFeatures(tmp_path, "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no model.safetensors .*weights"),
        ("tokenizer.json vocab.json", "tokenizer"),
        ("preprocessor_config.json processor_config.json", "image processor"),
    ],
)
def test_a_missing_part_is_reported_before_any_work(
    tiny_clip: Path, tmp_path: Path, without: str, words: str
) -> None:
    folder = Path(shutil.copytree(tiny_clip, tmp_path / "clip"))
    check_clip(folder)
    for name in without.split():
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(WrongInput, match=words):
        check_clip(folder)


def test_a_text_encoder_alone_is_not_a_clip(tiny_sdxl: Path) -> None:
    with pytest.raises(WrongInput, match=r"evaluate\.clip: .* model_type is clip_text_model"):
        check_clip(tiny_sdxl / "text_encoder")


def test_the_digits_judge_recognises_real_digits() -> None:
    x8, labels = digits.load("test")
    style = digits.style_index(digits.NEW_STYLE)
    rng = np.random.default_rng(0)
    images = digits.render(x8[:40], np.full(40, style), rng)
    right = [digits.captions(int(label), style)[0] for label in labels[:40]]
    wrong = [digits.captions(int(label + 1) % 10, style)[0] for label in labels[:40]]
    said = judge_pictures(("digits",), images, right)
    assert said["digit"].mean() > 0.9 and said["style"].mean() > 0.9
    assert judge_pictures(("digits",), images, wrong)["digit"].mean() < 0.1


def test_unsupported_prompts_of_a_judge_are_reported_before_any_work() -> None:
    check_prompts(("digits",), ["a handwritten seven in white chalk on a green board"])
    with pytest.raises(WrongInput, match=r"evaluate\.judges: digits: .*a cat"):
        check_prompts(("digits",), ["a cat"])
