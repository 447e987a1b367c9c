"""A base, its pictures and latents, and evaluations of models trained on them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from picture_bytes import noise_picture
from shortest_recipe import shortest_recipe

from artifacts.image_shards import Sample, write_tar
from artifacts.records import digest_bytes
from artifacts.store import Artifact, KeyParts, Store
from configs.settings.evaluate import PreferenceModel
from configs.settings.recipe import Recipe
from configs.settings.train_parts import HOLDOUT_LOSS
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Events, GenerateJob, Job
from runtimes.sample.generate_job import generate
from tasks.build_or_reuse import Stage, StageResult, build_or_reuse
from tasks.encode.stage import EncodeStage
from tasks.evaluate import metrics
from tasks.evaluate.distances import Estimates
from tasks.evaluate.inputs import EvalInputs, MeasuringModels
from tasks.evaluate.published import PublishedMetrics, metrics_of_published
from tasks.evaluate.stage import EvaluateStage
from tasks.progress import Progress

NEW = ["a red cat", "a blue dog"]
LOSSES = {HOLDOUT_LOSS, *metrics.BANDS}


def evaluation_recipe(store: Path, model: Path, clip: Path, **settings: Any) -> Recipe:
    given = {
        "prompts": {
            "new": {"prompts": NEW, "images_per_prompt": 2},
            "old": {"prompts": ["a house"]},
        },
        "clip": str(clip),
        "num_inference_steps": 2,
        "bootstrap": 20,
        "holdout_samples": 4,
        "device": "cpu",
        **settings,
    }
    return shortest_recipe(
        store=str(store),
        model={"path": str(model)},
        encode={"resolution": 32, "holdout": 0.4, "device": "cpu"},
        evaluate=given,
    )


def noise_pictures(store: Store, path: Path) -> Artifact:
    samples = []
    for number in range(24):
        picture = noise_picture(number, 32, 32)
        meta = {"sha256": digest_bytes(picture)}
        samples.append(Sample(f"{number:03}", picture, "png", ("a thing",), meta))
    write_tar(path, samples)
    draft = store.draft(KeyParts("download", 1, {}, {}))
    key = digest_bytes(path.read_bytes())
    shard = store.commit_shard("download", key, {".tar": str(path)}, {"samples": len(samples)})
    draft.add_shard(shard)
    return draft.commit({}, {})


def fill_store(url: Path, model: Path, clip: Path, scratch: Path) -> None:
    """Write images and their latents into a new store."""
    recipe = evaluation_recipe(url, model, clip)
    store = Store(recipe.store)
    images = noise_pictures(store, scratch / "shard.tar")
    stage = EncodeStage(recipe, images, Base.open(model))
    draft = store.draft(stage.parts)
    draft.commit(stage.build(draft, Progress("encode")), {})


@dataclass
class World:
    """A base, its data and the trained UNets of a test."""

    recipe: Recipe
    model: Path
    clip: Path
    images: Artifact
    latents: Artifact
    tmp: Path
    inception: Path | None = None  # weights file
    jobs: list[GenerateJob] = field(default_factory=list)
    begun: list[tuple[str, str]] = field(default_factory=list)  # (stage, key)

    @property
    def store(self) -> Store:
        return Store(self.recipe.store)

    def run(self, job: Job, on_event: Callable[[dict[str, Any]], None]) -> None:
        """Run the runtime's code in this process, which saves its start."""
        assert isinstance(job, GenerateJob)
        self.jobs.append(job)
        generate(job, Events())

    def trained(self, scale: float) -> Artifact:
        """A UNet whose last layer is scaled, as a train artifact."""
        unet = UNet2DConditionModel.from_pretrained(self.model / "unet")
        with torch.no_grad():
            unet.conv_out.weight *= scale
        unet.save_pretrained(self.tmp / "trained")
        draft = self.store.draft(KeyParts("train", 1, {"scale": scale}, {}))
        for name in ("config.json", "diffusion_pytorch_model.safetensors"):
            draft.upload(str(self.tmp / "trained" / name), f"unet/{name}")
        return draft.commit({}, {})

    def evaluate(
        self, trained: Artifact, recipe: Recipe | None = None, run: Any = None, rounds: int = 1
    ) -> Artifact:
        data = replace(self.inputs(recipe or self.recipe), rounds=rounds)
        stage = EvaluateStage(data, trained, run=run or self.run)
        draft = self.store.draft(stage.parts)
        return draft.commit(stage.build(draft, Progress("evaluate")), {})

    def inputs(self, recipe: Recipe) -> EvalInputs:
        judges = [one for one in recipe.evaluate.judges if isinstance(one, PreferenceModel)]
        models = {judge.name: Path(str(judge.path)) for judge in judges}
        measuring = MeasuringModels(self.clip, preference_models=models, inception=self.inception)
        return EvalInputs(recipe, self.images, self.latents, Base.open(self.model), measuring)

    def metrics_of(self, champion: Path, evaluated: Artifact) -> Estimates:
        """The metrics of a published model, comparable with an evaluation."""
        return self.measured(champion, evaluated).estimates

    def measured(self, champion: Path, evaluated: Artifact) -> PublishedMetrics:
        given = self.inputs(self.recipe)
        return metrics_of_published(given, evaluated, self.build, str(champion), run=self.run)

    def build(self, stage: Stage) -> StageResult:
        self.begun.append((stage.name, stage.parts.key))
        build = partial(stage.build, progress=Progress(stage.name))
        return build_or_reuse(self.store, stage.parts, build, parents=stage.parents)


def metrics_in(artifact: Artifact) -> dict[str, Any]:
    """The metrics of an evaluation, by name and model."""
    return json.loads(artifact.read("metrics.json"))["metrics"]
