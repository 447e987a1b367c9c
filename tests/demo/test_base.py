"""The committed base model loads as any SDXL folder does, and draws what it is asked for."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from digit_prompts import all_captions, judge, prompts
from document_blocks import blocks_of
from kiln_command import python
from numpy.typing import NDArray
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

from demo import captions, dataset
from demo.captions import BASE_STYLES, NEW_STYLE, STYLES
from demo.make_base import BASE


def draw(pipe: StableDiffusionXLPipeline, asked: Sequence[str]) -> NDArray[np.uint8]:
    """Pictures [N, H, W, 3], one per prompt."""
    pipe.set_progress_bar_config(disable=True)
    drawn = pipe(
        list(asked),
        num_inference_steps=20,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images
    return (drawn * 255).round().astype(np.uint8)


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
    assert "python -m demo.make_base" in body and "kiln run digits-base" in body


@pytest.mark.extended
@pytest.mark.slow
def test_the_code_of_the_card_draws_without_a_warning() -> None:
    (code,) = (b.body for b in blocks_of("demo/base/README.md") if b.language == "python")
    done = python("-c", code)
    assert done.returncode == 0 and "dtype" not in done.stderr


def test_tokenizers_know_every_caption_word_by_word(pipe: StableDiffusionXLPipeline) -> None:
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        ids = tokenizer(all_captions(), padding="max_length", truncation=True).input_ids
        assert len({tuple(row) for row in ids}) == len(all_captions())
        assert {len(row) for row in ids} == {77}
        assert len(tokenizer) == pipe.text_encoder.config.vocab_size
    assert pipe.tokenizer.tokenize("a handwritten seven, red ink") == [
        f"{word}</w>" for word in ("a", "handwritten", "seven", ",", "red", "ink")
    ]


def test_an_older_reader_finds_the_vocabulary_in_the_usual_files() -> None:
    vocab = json.loads((BASE / "tokenizer" / "vocab.json").read_text(encoding="utf-8"))
    lines = (BASE / "tokenizer" / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    characters = sorted(ByteLevel.alphabet())
    marks = ["<|startoftext|>", "<|endoftext|>"]
    words = [*characters, *(c + "</w>" for c in characters), *("".join(m) for m in merges)]
    assert list(vocab) == list(dict.fromkeys([*words, *marks]))
    older = CLIPTokenizer(vocab=vocab, merges=merges)
    tokenizer = CLIPTokenizer.from_pretrained(BASE / "tokenizer")
    assert older.get_vocab() == tokenizer.get_vocab() == vocab
    assert older(all_captions()).input_ids == tokenizer(all_captions()).input_ids


def test_it_has_the_layout_and_the_objective_that_the_recipe_counts_on(
    pipe: StableDiffusionXLPipeline,
) -> None:
    assert pipe.vae_scale_factor == 4
    assert pipe.config.force_zeros_for_empty_prompt
    assert pipe.unet.config.addition_embed_type == "text_time"
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert pipe.scheduler.config.rescale_betas_zero_snr
    assert pipe.scheduler.config.timestep_spacing == "trailing"


@pytest.mark.slow
def test_the_evaluator_finds_the_caption_of_a_held_out_picture() -> None:
    folder = BASE / "evaluator"
    clip = CLIPModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    tokenizer, processor = (
        kind.from_pretrained(folder) for kind in (CLIPTokenizer, CLIPImageProcessor)
    )
    x8, digit = dataset.load("held_out")
    style = np.arange(200) % len(STYLES)
    images = dataset.render(x8[:200], style, np.random.default_rng(0))
    texts = [captions.captions(d, s)[0] for d in range(10) for s in range(len(STYLES))]
    with torch.no_grad():
        logits = clip(
            input_ids=tokenizer(
                texts, padding="max_length", truncation=True, return_tensors="pt"
            ).input_ids,
            pixel_values=processor(
                [Image.fromarray(image) for image in images], return_tensors="pt"
            ).pixel_values,
        ).logits_per_image
    found = logits.argmax(1).numpy()
    assert (found == digit[:200] * len(STYLES) + style).mean() >= 0.85


@pytest.mark.extended
@pytest.mark.slow
def test_it_draws_the_styles_it_knows(pipe: StableDiffusionXLPipeline) -> None:
    asked = prompts(BASE_STYLES, 40)
    right = judge(draw(pipe, asked), asked)
    assert right["digit"].mean() >= 0.9
    assert right["style"].mean() >= 0.9


@pytest.mark.extended
@pytest.mark.slow
def test_it_does_not_draw_the_new_style_before_fine_tuning(pipe: StableDiffusionXLPipeline) -> None:
    asked = prompts((NEW_STYLE,), 40)
    assert judge(draw(pipe, asked), asked)["style"].mean() < 0.05
