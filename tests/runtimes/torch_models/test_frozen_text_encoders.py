"""Frozen text encoders in the step: latents with token ids train as those with embeddings."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import HOLDOUT, SAMPLER, MakeJob, lora, start
from training import history, results, roll_back, train

from configs.errors import Refused
from runtimes.process.job import Drawing, Events, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate

pytestmark = pytest.mark.slow

BothForms = Callable[..., tuple[str, str]]  # of runtimes/conftest.py
METHODS: dict[str, dict[str, Any]] = {
    "full": {"ema_decay": 0.9},
    "lora": lora(dropout=0.3),
    "bf16": lora() | {"mixed_precision": "bf16", "micro_batch_size": 2},
}


@pytest.fixture(params=[pytest.param("sd", marks=pytest.mark.soak), "sdxl"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A base whose text encoders have dropout, which frozen ones must not draw."""
    folder: Path = request.getfixturevalue(f"tiny_{request.param}")
    copy = shutil.copytree(folder, tmp_path / "base")
    for path in copy.glob("text_encoder*/config.json"):
        config = json.loads(path.read_text()) | {"attention_dropout": 0.5}
        path.write_text(json.dumps(config))
    return copy


def jobs(make_job: MakeJob, urls: tuple[str, str], dtype: str, **given: Any) -> list[TrainJob]:
    """A job that reads embeddings, and one that encodes captions in the step."""
    embeds, ids = urls
    return [
        make_job("embeddings", latents=embeds, **given),
        make_job("token_ids", latents=ids, text_dtype=dtype, **given),
    ]


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.extended] * (m != "full")) for m in METHODS]
)
def test_token_ids_train_as_embeddings_to_the_bit(
    method: str, model: Path, make_job: MakeJob, both_forms: BothForms
) -> None:
    """Losses, held-out losses and weights, also after a resume."""
    settings = METHODS[method] | {
        "steps": 4,
        "caption_dropout_rate": 0.4,
        "checkpointing_steps": 3,
        "logging_steps": 1,
        "holdout_loss": {"every_n_steps": 2, "samples": 3},
    }
    stored, encoded = jobs(make_job, both_forms(model), "float32", model=str(model), **settings)
    for job in (stored, encoded):
        train(job)
    assert results(encoded) == results(stored)
    whole = results(encoded)
    roll_back(encoded, 3)
    assert train(encoded) == 3
    assert results(encoded) == whole


def test_encoders_compute_in_the_dtype_of_the_encode_stage(
    model: Path, make_job: MakeJob, both_forms: BothForms
) -> None:
    """Autocast and the dtype of the weights in training are others."""
    urls = both_forms(model, "bfloat16")
    stored, encoded = jobs(make_job, urls, "bfloat16", model=str(model), steps=2)
    wrong = replace(encoded, text_dtype="float32", out=f"{encoded.out}2", work=f"{encoded.work}2")
    for job in (stored, encoded, wrong):
        train(job)
    assert history(encoded) == history(stored) != history(wrong)


def test_frozen_encoders_are_not_in_the_training_state(
    model: Path, make_job: MakeJob, both_forms: BothForms
) -> None:
    pair = jobs(make_job, both_forms(model), "float32", model=str(model), ema_decay=0.9)
    (stored, _), (encoded, batch) = map(start, pair)
    assert encoded.state_shapes() == stored.state_shapes()
    encoded.step(batch(0), 1e-3)
    assert all(p.grad is None for p in encoded._network.frozen_clip.parameters())


def test_trained_encoders_read_the_same_token_ids(
    model: Path, make_job: MakeJob, both_forms: BothForms
) -> None:
    """Trained encoders replace frozen ones, and their latents need no embeddings."""
    pair = jobs(make_job, both_forms(model), "float32", model=str(model), train_text_encoder=True)
    for job in pair:
        train(job)
    assert results(pair[0]) == results(pair[1])
    assert len(start(pair[1])[0]._network.frozen_clip) == 0


def test_held_out_losses_of_pictures_drawn_are_those_with_embeddings(
    model: Path, both_forms: BothForms, tmp_path: Path
) -> None:
    found = []
    for url, dtype in zip(both_forms(model), (None, "float32"), strict=True):
        out = tmp_path / str(dtype)
        job = GenerateJob(
            runtime="torch",
            model=str(model),
            drawings=(Drawing(str(out)),),
            prompts=(),
            sampler=SAMPLER,
            device="cpu",
            latents=url,
            text_dtype=dtype,
            holdout=HOLDOUT,
        )
        generate(job, Events())
        found.append(json.loads((out / "losses.json").read_text()))
    assert found[0] == found[1] and found[0]["losses"]


def test_token_ids_are_not_read_as_embeddings(
    model: Path, make_job: MakeJob, both_forms: BothForms
) -> None:
    _, encoded = jobs(make_job, both_forms(model), "float32", model=str(model))
    with pytest.raises(Refused, match=r"token ids of captions.*encode\.text: embeddings"):
        train(replace(encoded, text_dtype=None))
