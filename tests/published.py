"""Checks of a run's report and published model."""

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
from toy_recipes import base_of

from artifacts.latent_shards import LatentShard, open_latents
from artifacts.store import KeyParts, Store
from configs.settings.recipe import Recipe
from runtimes.objective.random_draws import Stream, generator
from runtimes.train.checkpoints import Checkpoints

STAGES = ["download", "encode", "train", "evaluate", "publish"]
METRICS = {"clip_score", "cmmd", "fd", "holdout_loss"}
#: Settings of a picture, for `kiln generate` and for diffusers.
DRAWING = {"seed": 7, "num_inference_steps": 2, "guidance_scale": 3.0}
Report = dict[str, Any]
#: (group of latents, captions of a picture) -> number of pictures.
Captions = Counter[tuple[str, tuple[str, ...]]]


def folder(report: Report, stage: str) -> Path:
    return Path(report["stages"][stage]["uri"])


def manifest(report: Report, stage: str) -> dict[str, Any]:
    record = json.loads((folder(report, stage) / "manifest.json").read_text(encoding="utf-8"))
    return dict(record)


def outcomes(report: Report) -> dict[str, str]:
    """Stage -> `built` or `reused`."""
    return {name: stage["outcome"] for name, stage in report["stages"].items()}


def expect(*built: str) -> dict[str, str]:
    """The outcomes of a run that built these stages and reused the others."""
    return {name: "built" if name in built else "reused" for name in STAGES}


def history(trained: Path) -> list[dict[str, Any]]:
    """The records of all steps of a train artifact."""
    lines = (trained / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def train_apart(recipe: Recipe, report: Report, store: Path) -> Path:
    """Run only the train stage on a run's latents, without sample pictures; the output folder.

    Args:
        store: a new store, without checkpoints.
    """
    from tasks.progress import Progress
    from tasks.train import TrainStage

    latents = Store(str(folder(report, "encode").parents[1])).load(
        "encode", report["stages"]["encode"]["key"]
    )
    assert latents is not None
    stage = TrainStage(recipe, latents, base_of(recipe), None)
    draft = Store(str(store)).draft(KeyParts(stage.name, stage.version, {}, {}))
    stage.build(draft, Progress(stage.name))
    return Path(draft.uri)


def assert_published(report: Report, runtime: str, steps: int) -> None:
    """Check that every stage was built by the runtime, and both models were measured."""
    assert report["status"] == "published"
    assert outcomes(report) == dict.fromkeys(STAGES, "built")
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


def assert_trained(report: Report, base: Path, denoiser: str = "unet") -> None:
    """Check that the published denoiser differs from the base's and is close to the trained one."""
    name = f"{denoiser}/diffusion_pytorch_model.safetensors"
    before, after = load_file(base / name), load_file(Path(report["model"]) / name)
    trained = load_file(folder(report, "train") / name)
    assert before.keys() == after.keys() == trained.keys()
    assert any(np.any(trained[key] != before[key]) for key in before)
    for key, array in trained.items():
        np.testing.assert_allclose(after[key].astype(np.float32), array, rtol=1e-3, atol=1e-6)


def assert_best_chosen(report: Report, field: str) -> None:
    """Check that the trained weights are those of the checkpoint with the highest score.

    Args:
        field: of the history, with a score of each checkpoint.
    """
    trained = folder(report, "train")
    scores = {line["step"]: line[field] for line in history(trained) if field in line}
    summary = manifest(report, "train")["summary"]
    assert summary["chosen_step"] == max(scores, key=lambda step: scores[step])
    assert summary["chosen_because"].endswith(
        f" of {len(scores)} checkpoints: " + (f"{scores[summary['chosen_step']]:.4g}")
    )
    saved = Checkpoints(str(trained), 9).read(summary["chosen_step"]).state
    expected = saved.get("ema") or saved["weights"]
    for name, array in load_file(trained / "unet/diffusion_pytorch_model.safetensors").items():
        np.testing.assert_array_equal(array, expected[f"unet.{name}"][...], err_msg=name)


def draw(model: Path, prompt: str, *, lora: Path | None = None) -> NDArray[np.int64]:
    """A picture by diffusers, from the noise and settings of DRAWING, [32, 32, 3].

    Args:
        model: pipeline folder.
        lora: folder of LoRA weights to load.
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
    """Captions by group, decoded from the token ids of a run's latents."""
    found: Captions = Counter()
    for ref in open_latents(str(folder(report, "encode"))).shards:
        shard = LatentShard(ref.url)
        for group, count in shard.groups.items():
            if not group.startswith(f"{split}/"):
                continue
            for index in range(count):
                rows = shard.sample(group, index).caption_rows
                texts = tuple(text_of_ids(shard.input_ids(row)[0]) for row in rows)
                found[group.partition("/")[2], texts] += 1
    return found


def captions_given(pictures: Sequence[Captioned], groups: dict[str, str]) -> Captions:
    """Expected captions by group, from the source's pictures.

    Args:
        groups: shape -> group.
    """
    return Counter(
        (groups[one.shape], tuple(_letters(caption) for caption in one.captions))
        for one in pictures
    )


def text_of_ids(ids: NDArray[np.int32]) -> str:
    """The letters of a caption; the tiny tokenizer has one token per letter."""
    from tiny_models import END, START, VOCABULARY

    names = {number: token for token, number in VOCABULARY.items()}
    tokens = [names[number] for number in ids.tolist()]
    return "".join(token.removesuffix("</w>") for token in tokens if token not in (START, END))


def _letters(caption: str) -> str:
    return caption.replace(" ", "")
