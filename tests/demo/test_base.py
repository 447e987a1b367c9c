"""The committed base model loads as any SDXL folder does, and draws what it is asked for."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

from demo import world
from demo.base_card import prompts
from demo.base_text import make_tokenizer
from demo.judges import judge
from demo.tensors import draw, token_ids

BASE = Path(__file__).parents[2] / "demo" / "base"


@pytest.fixture(scope="module")
def pipe() -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline.from_pretrained(
        BASE, torch_dtype=torch.float32, add_watermarker=False
    )


def test_it_is_small_enough_to_commit_and_says_nothing_of_the_machine_that_made_it() -> None:
    files = [path for path in BASE.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) < 8_000_000
    assert sum(path.stat().st_size for path in files) < 9_000_000
    for path in files:
        if path.suffix in {".json", ".md"}:
            assert "_name_or_path" not in path.read_text(encoding="utf-8"), path


def test_the_card_opens_with_front_matter() -> None:
    front, body = (BASE / "README.md").read_text().removeprefix("---\n").split("\n---\n")
    assert "license: apache-2.0" in front and "pipeline_tag: text-to-image" in front
    assert "python -m demo.make_base" in body


def test_tokenizers_know_every_caption_word_by_word(pipe: StableDiffusionXLPipeline) -> None:
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        ids = token_ids(tokenizer, world.all_captions(), 77)
        assert len({tuple(row) for row in ids.tolist()}) == len(world.all_captions())
        assert len(tokenizer) == pipe.text_encoder.config.vocab_size
    assert pipe.tokenizer.tokenize("a handwritten seven, red ink") == [
        f"{word}</w>" for word in ("a", "handwritten", "seven", ",", "red", "ink")
    ]


def test_an_older_reader_finds_the_vocabulary_in_the_usual_files() -> None:
    vocab = json.loads((BASE / "tokenizer" / "vocab.json").read_text(encoding="utf-8"))
    lines = (BASE / "tokenizer" / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    assert make_tokenizer(merges).get_vocab() == vocab


def test_it_has_the_layout_and_the_objective_that_the_recipe_counts_on(
    pipe: StableDiffusionXLPipeline,
) -> None:
    assert pipe.vae_scale_factor == 4
    assert pipe.config.force_zeros_for_empty_prompt
    assert pipe.unet.config.addition_embed_type == "text_time"
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert pipe.scheduler.config.rescale_betas_zero_snr
    assert pipe.scheduler.config.timestep_spacing == "trailing"


def test_the_evaluator_finds_the_caption_of_a_held_out_picture() -> None:
    folder = BASE / "evaluator"
    clip = CLIPModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    tokenizer, processor = (
        kind.from_pretrained(folder) for kind in (CLIPTokenizer, CLIPImageProcessor)
    )
    x8, digit = world.digits("held_out")
    style = np.arange(200) % len(world.STYLES)
    images = world.render(x8[:200], style, np.random.default_rng(0))
    texts = [world.captions(d, s)[0] for d in range(10) for s in range(len(world.STYLES))]
    with torch.no_grad():
        logits = clip(
            input_ids=token_ids(tokenizer, texts, 77),
            pixel_values=processor(
                [Image.fromarray(image) for image in images], return_tensors="pt"
            ).pixel_values,
        ).logits_per_image
    found = logits.argmax(1).numpy()
    assert (found == digit[:200] * len(world.STYLES) + style).mean() >= 0.85


@pytest.mark.slow
def test_it_draws_the_styles_it_knows(pipe: StableDiffusionXLPipeline) -> None:
    asked = prompts(world.BASE_STYLES, 40)
    right = judge(draw(pipe, asked, seed=1), asked)
    assert right["digit"].mean() >= 0.9
    assert right["style"].mean() >= 0.9


@pytest.mark.slow
def test_it_does_not_draw_the_new_style_before_fine_tuning(pipe: StableDiffusionXLPipeline) -> None:
    asked = prompts((world.NEW_STYLE,), 40)
    assert judge(draw(pipe, asked, seed=1), asked)["style"].mean() < 0.05
