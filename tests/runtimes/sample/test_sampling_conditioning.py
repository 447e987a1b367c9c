"""What compiled samplers start from: without the caption above, with it below, for each picture."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import SAMPLER

from runtimes.pipeline_folder.folder import Base
from runtimes.sample.sampling_inputs import ConditionedNoise, Conditioner
from runtimes.torch_models.vae_text_encoders import Encoder

PROMPTS = ("a red cat", "a blue dog", "a hill")


@pytest.fixture(scope="module")
def encoder(tiny_sdxl: Path) -> Encoder:
    return Encoder(Base.open(tiny_sdxl), device="cpu")


def started(encoder: Encoder, **sampler: Any) -> list[ConditionedNoise]:
    denoiser = {"sample_size": 8, "in_channels": 4}
    starts = Conditioner(encoder.info, encoder.texts, encoder.images)
    given = {**SAMPLER, "batch_size": 2, **sampler}
    return list(starts.batches(PROMPTS, given, first=0, denoiser=denoiser))


def test_rows_without_and_with_the_caption_lie_in_turns(encoder: Encoder) -> None:
    states, pooled = encoder.texts(PROMPTS)
    assert pooled is not None
    first, second = started(encoder, guidance_scale=3.0)
    assert (first.count, second.count) == (2, 1)
    for name, expected in (("prompt_embeds", states), ("pooled_prompt_embeds", pooled)):
        rows = first.conditioning[name]
        assert not rows[0::2].any()  # SDXL's empty caption is zeros
        np.testing.assert_allclose(rows[1::2], expected[:2], atol=1e-6)
        filled = second.conditioning[name][1::2]
        np.testing.assert_allclose(filled, expected[[2, 2]], atol=1e-6)


def test_sizes_are_height_then_width(encoder: Encoder) -> None:
    first = started(encoder, guidance_scale=3.0, height=32, width=48)[0]
    assert first.noise.shape[2:] == (8, 12)
    assert first.conditioning["add_time_ids"].tolist() == [[32, 48, 0, 0, 32, 48]] * 4


def test_a_negative_prompt_is_what_is_led_away_from(encoder: Encoder) -> None:
    states, _ = encoder.texts(["a house"])
    first = started(encoder, guidance_scale=3.0, negative_prompt="a house")[0]
    np.testing.assert_allclose(first.conditioning["prompt_embeds"][0::2], states[[0, 0]], atol=1e-6)


def test_without_guidance_there_are_captions_alone(encoder: Encoder) -> None:
    states, _ = encoder.texts(PROMPTS)
    first = started(encoder, guidance_scale=1.0)[0]
    np.testing.assert_allclose(first.conditioning["prompt_embeds"], states[:2], atol=1e-6)


def test_each_picture_has_noise_of_its_own_whatever_the_batch(encoder: Encoder) -> None:
    in_twos = [noise for start in started(encoder) for noise in start.noise[: start.count]]
    at_once = started(encoder, batch_size=3)[0].noise
    np.testing.assert_array_equal(np.stack(in_twos), at_once)
    assert len({noise.tobytes() for noise in at_once}) == 3
    assert not np.array_equal(started(encoder, seed=SAMPLER["seed"] + 1)[0].noise[0], at_once[0])
