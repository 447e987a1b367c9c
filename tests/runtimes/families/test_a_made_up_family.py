"""A family is one file: tests/made_up/patchwork.py encodes, trains, draws and is published.

Its file and a plug-in's entry point are all that this family needs; nothing else knows its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from jobs import SAMPLER, lora
from PIL import Image
from training import losses, roll_back, train, weights

from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, Events, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.vae_text_encoders import Encoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plugged_in")]
PROMPTS = ("a red cat", "a hill", "two dogs")


@pytest.fixture
def job(patchwork: Path, write_latents: Callable[..., str], tmp_path: Path, make_job: Any) -> Any:
    """`job(runtime, **settings)` trains the family for six steps."""
    groups = {"train/8x8": 9, "train/4x12": 3, "holdout/8x8": 3}
    latents = write_latents(str(tmp_path / "store"), [groups], **Base.open(patchwork).encoders)

    def make(runtime: str, **settings: Any) -> TrainJob:
        settings = {
            "caption_dropout_rate": 0.3,
            "checkpointing_steps": 3,
            "ema_decay": 0.9,
        } | settings
        given = {"model": str(patchwork), "latents": latents, "runtime": runtime}
        found: TrainJob = make_job(name=runtime, **given, **settings)
        return found

    return make


def test_captions_are_encoded_as_its_pipeline_does(patchwork: Path) -> None:
    assert Base.open(patchwork).family.name == "patchwork"
    ours, pooled = Encoder(Base.open(patchwork), device="cpu").texts(PROMPTS)
    pipe = FluxPipeline.from_pretrained(patchwork)
    length = Base.open(patchwork).text_length
    theirs, their_pooled, _ = pipe.encode_prompt(list(PROMPTS), None, max_sequence_length=length)
    torch.testing.assert_close(torch.from_numpy(ours), theirs)
    torch.testing.assert_close(torch.from_numpy(pooled), their_pooled)


@pytest.mark.extended
@pytest.mark.parametrize(
    "method", ["full", *(pytest.param(more, marks=pytest.mark.soak) for more in ("lora", "text"))]
)
def test_it_trains_on_both_runtimes_alike_and_resumes(job: Any, method: str) -> None:
    chips.require("jax")
    settings: dict[str, Any] = {"full": {}, "lora": lora(), "text": {"train_text_encoder": True}}[
        method
    ]
    found = []
    for runtime in ("torch", "jax"):
        one = job(runtime, **settings)
        assert train(one) == 0
        found.append(losses(one))
        whole = weights(one)
        roll_back(one, 3)
        assert train(one) == 3
        assert losses(one) == found[-1] and weights(one) == whole
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert len(set(found[0])) == 6, "each step has a loss of its own"


def test_both_runtimes_draw_what_its_pipeline_does(patchwork: Path, tmp_path: Path) -> None:
    chips.require("jax")
    drawn = {}
    for runtime, prompts in (("torch", PROMPTS), ("jax", PROMPTS), ("other", PROMPTS[::-1])):
        out = tmp_path / runtime
        name = "torch" if runtime == "other" else runtime
        drawing = (Drawing(str(out)),)
        generate(GenerateJob(name, str(patchwork), drawing, prompts, SAMPLER, "cpu"), Events())
        pictures = [Image.open(path) for path in sorted(out.glob("*.png"))]
        drawn[runtime] = np.stack([np.asarray(picture).astype(int) for picture in pictures])
    assert drawn["torch"].shape == (3, 32, 32, 3) and drawn["torch"].std() > 1
    assert np.abs(drawn["jax"] - drawn["torch"]).max() <= 1  # of 255 levels
    assert np.abs(drawn["other"] - drawn["torch"]).max() > 5, "by other prompts"
