"""The suite's world: a few real pictures, encoded by each tiny model as the encode stage does."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from artifacts.images import Sample, write_tar
from artifacts.store import KeyParts, Store
from configs.schema import Recipe
from configs.training import Train
from runtimes.job import TrainJob
from tasks import encode
from tasks.progress import Progress

PICTURES = 60
MakeJob = Callable[..., TrainJob]


def _pictures(path: Path) -> None:
    """Handwritten digits, captioned, as an image shard."""
    digits = load_digits()
    samples = []
    for number in range(PICTURES):
        grey = Image.fromarray((digits.images[number] * 15).astype(np.uint8))
        buffer = io.BytesIO()
        grey.resize((32, 32)).convert("RGB").save(buffer, "png")
        caption = f"the digit {digits.target[number]}"
        meta = {"aesthetic_score": 4 + number % 7 / 2}
        samples.append(Sample(f"{number:03}", buffer.getvalue(), "png", (caption,), meta))
    write_tar(path, samples)


def _encode(folder: Path, model: Path) -> str:
    """URL of the latents of the pictures by `model`."""
    recipe = Recipe.model_validate(
        {
            "name": "conformance",
            "store": str(folder / "store"),
            "model": {"path": str(model)},
            "source": {"kind": "folder", "path": ".", "aesthetic_column": "score"},
            "encode": {"resolution": 32, "holdout": 0.2, "masks": 3, "device": "cpu"},
            "train": {"inpainting": True, "aesthetic_score": True},
            "evaluate": {"prompts": {"a": {"prompts": ["a"]}}, "clip": "."},
            "publish": {"name": "conformance"},
        }
    )
    store = Store(recipe.store)
    _pictures(folder / "shard.tar")
    images = store.draft(KeyParts("download", 1, {}, {}))
    shard = {".tar": str(folder / "shard.tar")}
    images.add_shard(store.commit_shard("download", "0" * 64, shard, {"samples": PICTURES}))
    draft = store.draft(KeyParts("encode", 1, {}, {}))
    found = images.commit({}, {})
    draft.commit(encode.build(recipe, found, model, None, draft, Progress("encode")), {})
    return draft.uri


@pytest.fixture(scope="session")
def models(tiny_sd: Path, tiny_sdxl: Path, tiny_sd3: Path) -> dict[str, Path]:
    """A tiny pipeline of each family."""
    return {"sd": tiny_sd, "sdxl": tiny_sdxl, "sd3": tiny_sd3}


@pytest.fixture(scope="session")
def latents(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """URL of the encoded pictures by family."""
    return {
        family: _encode(tmp_path_factory.mktemp(f"latents-{family}"), model)
        for family, model in models.items()
    }


@pytest.fixture
def make_job(models: dict[str, Path], latents: dict[str, str], tmp_path: Path) -> MakeJob:
    """`make_job(variant, family, name, **settings)`: a train job with much of what can be set."""

    def make(variant: str, family: str = "sdxl", name: str = "run", **settings: Any) -> TrainJob:
        on = chips.VARIANTS[variant]
        common = {
            "steps": 20,
            "global_batch_size": 8,
            "learning_rate": 1e-3,
            "lr_schedule": "cosine",
            "warmup_steps": 4,
            "weight_decay": 0.02,
            "max_grad_norm": 0.5,
            "caption_dropout": 0.2,
            "ema_decay": 0.9,
            "seed": 3,
            "device": on.device,
            **on.settings,
            "checkpoint_every": 8,
            "keep_checkpoints": 9,
        }
        return TrainJob(
            runtime=on.runtime,
            model=str(models[family]),
            latents=latents[family],
            train=Train(**{**common, **settings}).model_dump(mode="json"),
            work=str(tmp_path / name),
            out=str(tmp_path / name),
        )

    return make
