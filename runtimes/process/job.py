"""What a runtime's process is asked to do: a JSON file that names everything it needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainJob:
    """Fine-tune `model` on `latents`; resume from `work` if it holds a checkpoint."""

    runtime: str
    model: str  # folder of the base pipeline: local, or a URL
    latents: str  # URL of the latents artifact's folder
    train: dict[str, Any]  # configs.training.Train, dumped
    work: str  # URL of the folder for checkpoints and samples
    out: str  # URL of the folder that what was trained (see train/result.py) is written to
    sample_prompts: tuple[str, ...] = ()
    sampler: dict[str, Any] = field(default_factory=dict)  # as GenerateJob.sampler
    vae: str | None = None  # for sample pictures: a VAE in place of the pipeline's own
    denoiser_config: dict[str, Any] | None = None  # of a fresh denoiser; None is the base's
    compiled: str | None = None  # URL of the folder for compiled programs; None keeps none
    kind: str = "train"


@dataclass(frozen=True)
class Drawing:
    """One model's part of a GenerateJob."""

    out: str  # local folder: 00000.png, 00001.png, ... and losses.json
    # Local folders in place of the pipeline's own: part (unet, text_encoder, ...) -> folder.
    parts: dict[str, str] = field(default_factory=dict)
    lora: str | None = None  # local safetensors file of adapters, in diffusers' format


@dataclass(frozen=True)
class GenerateJob:
    """Draw the same prompts from the same noise with each model; take held-out losses if asked."""

    runtime: str
    model: str  # local folder of the pipeline
    drawings: tuple[Drawing, ...]
    prompts: tuple[str, ...]  # one picture each, in order
    # seed, scheduler, num_inference_steps, guidance_scale, height and width (None is the model's
    # own), batch_size; aesthetic_score and negative_aesthetic_score, for models that take one; and,
    # where they are not left out, negative_prompt and eta (DDIM's, arXiv 2010.02502)
    sampler: dict[str, Any]
    device: str = "auto"
    dtype: str = "float32"
    latents: str | None = None  # URL of the latents artifact whose held-out split is measured
    holdout: dict[str, Any] = field(
        default_factory=dict
    )  # samples, draws, seed, objective settings
    vae: str | None = None  # local folder of a VAE in place of the pipeline's own
    compiled: str | None = None  # as TrainJob.compiled
    flash_attention: bool = True  # as train.mindspore.flash_attention
    fixed_noise: bool = False  # every batch starts from the noise of the first
    # What each picture's PNG says of it besides its prompt and noise; None says nothing.
    words: dict[str, Any] | None = None
    kind: str = "generate"


@dataclass(frozen=True)
class EncodeJob:
    """The encoders that a process loads and serves (see contract.PipelineEncoder)."""

    runtime: str
    model: str  # local folder of the pipeline
    vae: str | None = None  # local folder of a VAE in place of the pipeline's own
    batch_size: int = 1  # most pictures at once
    device: str = "auto"
    dtype: str = "float32"
    compiled: str | None = None  # as TrainJob.compiled


Job = TrainJob | GenerateJob


def write_job(job: Job, path: Path) -> None:
    """Write a job for `python -P -m runtimes`."""
    path.write_text(json.dumps(asdict(job), indent=1), encoding="utf-8")


def read_job(path: Path) -> Job:
    """Read what `write_job` wrote."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields["kind"] == "train":
        return TrainJob(**{**fields, "sample_prompts": tuple(fields["sample_prompts"])})
    drawings = tuple(Drawing(**d) for d in fields["drawings"])
    return GenerateJob(**{**fields, "drawings": drawings, "prompts": tuple(fields["prompts"])})
