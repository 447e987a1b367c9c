"""What a run has left in its store, and whether it is what a user may count on."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from picture_sources import Captioned
from safetensors.numpy import load_file

from artifacts.latents import LatentShard, open_latents
from artifacts.store import KeyParts, Store
from configs.schema import Recipe
from runtimes.objective.random import Stream, generator

STAGES = ["download", "encode", "train", "evaluate", "publish"]
METRICS = {"clip_score", "cmmd", "fd", "holdout_loss"}
#: Of a picture by `kiln generate`, to be compared with one by diffusers alone.
DRAWING = {"seed": 7, "num_inference_steps": 2, "guidance_scale": 3.0}
Report = dict[str, Any]
#: Group of latents -> captions of its pictures, and of how many.
Captions = Counter[tuple[str, tuple[str, ...]]]


def folder(report: Report, stage: str) -> Path:
    return Path(report["stages"][stage]["uri"])


def manifest(report: Report, stage: str) -> dict[str, Any]:
    record = json.loads((folder(report, stage) / "manifest.json").read_text(encoding="utf-8"))
    return dict(record)


def history(trained: Path) -> list[dict[str, Any]]:
    """What is said of each step in a folder of the train stage."""
    lines = (trained / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def train_apart(recipe: Recipe, report: Report, store: Path) -> Path:
    """Where the train stage alone, without pictures, leaves what it makes of a run's latents.

    Args:
        store: a new one, where no checkpoint is.
    """
    from tasks import train
    from tasks.progress import Progress

    latents = Store(str(folder(report, "encode").parents[1])).load(
        "encode", report["stages"]["encode"]["key"]
    )
    assert latents is not None
    draft = Store(str(store)).draft(KeyParts(train.STAGE, train.VERSION, {}, {}))
    model, progress = Path(recipe.model.path), Progress(train.STAGE)
    train.build(recipe, latents, model, None, (), lambda png: {}, draft, progress)
    return Path(draft.uri)


def assert_published(report: Report, runtime: str, steps: int) -> None:
    """Every stage was built, by the runtime, and base and tuned model were measured."""
    assert report["status"] == "published"
    assert {n: s["outcome"] for n, s in report["stages"].items()} == dict.fromkeys(STAGES, "built")
    run = manifest(report, "train")["run"]
    assert (run["runtime"], run["resumed_from"]) == (runtime, 0)
    losses = [line["loss"] for line in history(folder(report, "train"))]
    assert len(losses) == steps >= 2 and all(map(math.isfinite, losses))
    assert report["metrics"].keys() >= METRICS
    for models in report["metrics"].values():
        assert all(math.isfinite(models[name]["value"]) for name in ("base", "tuned"))
    lost = report["metrics"]["holdout_loss"]
    assert lost["base"]["value"] != lost["tuned"]["value"]
    model = Path(report["model"])
    assert (model / "before_after.png").stat().st_size and (model / "report.html").is_file()


def assert_trained(report: Report, base: Path) -> None:
    """The published denoiser differs from the base's, and is close to what was trained."""
    name = "unet/diffusion_pytorch_model.safetensors"
    before, after = load_file(base / name), load_file(Path(report["model"]) / name)
    trained = load_file(folder(report, "train") / name)
    assert before.keys() == after.keys() == trained.keys()
    assert any(np.any(trained[key] != before[key]) for key in before)
    for key, array in trained.items():
        np.testing.assert_allclose(after[key].astype(np.float32), array, rtol=1e-3, atol=1e-6)


def draw(model: Path, prompt: str, *, lora: Path | None = None) -> NDArray[np.int64]:
    """A picture by diffusers alone: the folder as its users load it, and perhaps adapters.

    It starts from the noise that ours of DRAWING do, with their steps.
    """
    import torch
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(lora)
    draws = generator(DRAWING["seed"], Stream.PICTURE, 0)
    start = draws.standard_normal((1, pipe.unet.config.in_channels, 8, 8), dtype=np.float32)
    steps = {name: DRAWING[name] for name in ("num_inference_steps", "guidance_scale")}
    latents = torch.from_numpy(start)
    picture = np.asarray(pipe(prompt, latents=latents, height=32, width=32, **steps).images[0])
    assert picture.shape == (32, 32, 3) and picture.std() > 0
    return picture.astype(int)


def captions_encoded(report: Report, split: str) -> Captions:
    """What the latents' own token ids say of each picture, group by group."""
    found: Captions = Counter()
    for ref in open_latents(str(folder(report, "encode"))).shards:
        shard = LatentShard(ref.url)
        for group, count in shard.groups.items():
            if not group.startswith(f"{split}/"):
                continue
            for index in range(count):
                rows = shard.sample(group, index).caption_rows
                said = tuple(_text(shard.input_ids(row)[0]) for row in rows)
                found[group.partition("/")[2], said] += 1
    return found


def captions_given(pictures: Sequence[Captioned], groups: dict[str, str]) -> Captions:
    """The same of the source's pictures, with the group of each shape."""
    return Counter(
        (groups[one.shape], tuple(_letters(caption) for caption in one.captions))
        for one in pictures
    )


def _text(ids: NDArray[np.int32]) -> str:
    """The letters of a caption: the tiny tokenizer has a token a letter."""
    from tiny_models import END, START, VOCABULARY

    names = {number: token for token, number in VOCABULARY.items()}
    tokens = [names[number] for number in ids.tolist()]
    return "".join(token.removesuffix("</w>") for token in tokens if token not in (START, END))


def _letters(caption: str) -> str:
    return caption.replace(" ", "")
