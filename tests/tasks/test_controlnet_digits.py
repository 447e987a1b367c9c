"""A tiny ControlNet learns to follow edges: digits are drawn by outlines, without a prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encode_stage import encode_images, encode_recipe
from numpy.typing import NDArray
from picture_bytes import encode_picture
from PIL import Image
from training import train

from artifacts.image_shards import Sample, write_tar
from artifacts.records import digest_bytes
from artifacts.store import Artifact, KeyParts, Store
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from demo import captions, dataset
from demo.digit_judges import _classifier, ink_shape
from runtimes.process.job import Drawing, Events, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate

pytestmark = [pytest.mark.slow, pytest.mark.soak]
BASE = Path(__file__).parents[2] / "demo/base"
TRAINED_ON = 600
DRAWN = 50
STEPS = 500


def edges(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """White outlines on black, [N, 32, 32, 3], of pictures of any colours."""
    grey = images.astype(np.float32).mean(-1)
    down, right = np.gradient(grey, axis=(1, 2))
    strength = np.hypot(down, right)
    strength /= strength.max((1, 2), keepdims=True)
    return np.repeat((255 * (strength > 0.3)).astype(np.uint8)[..., None], 3, axis=-1)


def rendered(split: str, count: int) -> tuple[NDArray[np.uint8], NDArray[Any], list[str]]:
    """Pictures in the base's styles, their digits and captions."""
    x8, labels = dataset.load(split)
    style = np.arange(count) % len(captions.BASE_STYLES)
    images = dataset.render(x8[:count], style, np.random.default_rng(5))
    texts = [captions.captions(int(d), int(s))[0] for d, s in zip(labels, style, strict=False)]
    return images, labels[:count], texts


def images_of(store: Store, tmp_path: Path) -> Artifact:
    images, _, texts = rendered("train", TRAINED_ON)
    samples = []
    for number, (image, control) in enumerate(zip(images, edges(images), strict=True)):
        data = encode_picture(Image.fromarray(image))
        meta = {"sha256": digest_bytes(data)}
        own = encode_picture(Image.fromarray(control))
        samples.append(Sample(f"{number:05}", data, "png", (texts[number],), meta, control=own))
    write_tar(tmp_path / "shard.tar", samples)
    draft = store.draft(KeyParts("download", 1, {}, {"pictures": "digits"}))
    key = digest_bytes((tmp_path / "shard.tar").read_bytes())
    local = {".tar": str(tmp_path / "shard.tar")}
    draft.add_shard(store.commit_shard("download", key, local, {"samples": len(samples)}))
    return draft.commit({}, {})


def test_digits_are_drawn_by_their_edges_without_a_prompt(tmp_path: Path) -> None:
    recipe = encode_recipe(
        *(tmp_path / "store", BASE), holdout=0.0, batch_size=64, leave_out_copies=False
    )
    source = {"kind": "folder", "path": str(tmp_path), "control": "files"}
    settings = recipe.model_dump() | {"source": source, "train": {"method": "controlnet"}}
    recipe = Recipe.model_validate(settings)
    latents = encode_images(recipe, images_of(Store(recipe.store), tmp_path))
    job = TrainJob(
        runtime="torch",
        model=str(BASE),
        latents=latents.uri,
        train=Train(
            method="controlnet",
            steps=STEPS,
            global_batch_size=16,
            learning_rate=2e-3,
            lr_warmup_steps=20,
            adam_betas=(0.9, 0.99),
            caption_dropout_rate=0.5,
            checkpointing_steps=10_000,
            device="cpu",
            holdout_loss={"every_n_steps": 0},
        ).model_dump(mode="json"),
        work=str(tmp_path / "work"),
        out=str(tmp_path / "out"),
    )
    train(job)
    images, digits, _ = rendered("held_out", DRAWN)
    controls = []
    for number, control in enumerate(edges(images)):
        path = tmp_path / f"control-{number}.png"
        Image.fromarray(control).save(path)
        controls.append(str(path))
    drawings = (
        Drawing(str(tmp_path / "base")),
        Drawing(str(tmp_path / "tuned"), {"controlnet": str(tmp_path / "out/controlnet")}),
    )
    sampler = {
        **{"seed": 1, "num_inference_steps": 15, "guidance_scale": 1.0, "batch_size": DRAWN},
        **{"height": None, "width": None},
    }
    prompts = ("",) * DRAWN
    generate(
        GenerateJob("torch", str(BASE), drawings, prompts, sampler, controls=tuple(controls)),
        Events(),
    )
    found = {}
    for name in ("base", "tuned"):
        drawn = [np.asarray(Image.open(p)) for p in sorted((tmp_path / name).glob("*.png"))]
        own = edges(np.stack(drawn))[..., 0] > 0
        wanted = edges(images)[..., 0] > 0
        found[name] = (
            float(np.mean(_classifier().predict(ink_shape(np.stack(drawn))) == digits)),
            float((own & wanted).sum() / (own | wanted).sum()),
        )
    print(found)
    assert found["tuned"][0] >= 0.8 > 0.3 >= found["base"][0]
    assert found["tuned"][1] > 2 * found["base"][1]
