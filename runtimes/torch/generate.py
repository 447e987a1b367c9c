"""Draw prompts with a diffusers pipeline, and take held-out losses, for one model after another."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from fsspec.implementations.local import LocalFileSystem
from PIL.Image import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection
from transformers.utils import logging as transformers_logging

from artifacts.commit import write_atomic
from artifacts.latents import Latents
from runtimes.base import WrongInput
from runtimes.draws import Stream, generator
from runtimes.events import Events
from runtimes.families import detect_family
from runtimes.job import Drawing, GenerateJob
from runtimes.loader import holdout_batches
from runtimes.loop import open_job_latents, read_schedule
from runtimes.objective import LatentScale, Objective
from runtimes.torch.device import choose_device, make_deterministic
from runtimes.torch.models import load_denoiser, weight_variant
from runtimes.torch.network import Network
from runtimes.torch.runtime import Inputs

LOSS_BATCH = 32
#: Parts with weights beside the UNet: each may be stored in another variant than the others.
WEIGHTED = {
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
}


class Sampler:
    """A pipeline around given parts. Start noise is drawn on the host, so every chip starts alike.

    Raises:
        WrongInput: a part of the pipeline is missing or does not load.
    """

    def __init__(
        self,
        folder: Path,
        parts: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        vae: Path | None = None,
    ) -> None:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        self._denoiser = detect_family(folder).denoiser
        parts = dict(parts)
        if "safety_checker" in index:  # judging pictures is not its business
            parts |= {"safety_checker": None, "requires_safety_checker": False}
        if index["_class_name"] == "StableDiffusionXLPipeline":
            parts["add_watermarker"] = False
        common = {"torch_dtype": dtype, "local_files_only": True, "use_safetensors": True}
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
        try:
            for name, kind in WEIGHTED.items():
                if name not in parts and (index.get(name) or [None])[0] is not None:
                    part = vae if name == "vae" and vae is not None else folder / name
                    variant = weight_variant(part)
                    parts[name] = kind.from_pretrained(part, variant=variant, **common)
            pipe = DiffusionPipeline.from_pretrained(folder, **parts, **common)
        except (OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise WrongInput(f"model {folder}: the pipeline does not load: {reason}") from None
        self._pipe = pipe.to(device)
        self._pipe.set_progress_bar_config(disable=True)

    def use(self, parts: dict[str, Any]) -> None:
        """Put other parts into the pipeline."""
        self._pipe.register_modules(**parts)

    @torch.inference_mode()
    def draw(self, prompts: Sequence[str], sampler: dict[str, Any], *, first: int) -> list[Image]:
        """Pictures of `prompts`, `batch_size` at a time; the first one's noise is number `first`.

        `sampler` has seed, num_inference_steps, guidance_scale, height, width (None is the
        model's own) and batch_size.
        """
        scale = self._pipe.vae_scale_factor
        denoiser = getattr(self._pipe, self._denoiser)
        own = denoiser.config.sample_size * scale
        height, width = sampler.get("height") or own, sampler.get("width") or own
        shape = (denoiser.config.in_channels, height // scale, width // scale)
        size, pictures = sampler["batch_size"], list[Image]()
        for start in range(0, len(prompts), size):
            part = list(prompts[start : start + size])
            numbers = range(first + start, first + start + len(part))
            rngs = [generator(sampler["seed"], Stream.PICTURE, number) for number in numbers]
            noise = np.stack([rng.standard_normal(shape, dtype=np.float32) for rng in rngs])
            # For schedulers that draw noise at every step: of the picture, not of the batch.
            later = [torch.Generator().manual_seed(int(rng.integers(2**63))) for rng in rngs]
            pictures += self._pipe(
                part,
                height=height,
                width=width,
                num_inference_steps=sampler["num_inference_steps"],
                guidance_scale=sampler["guidance_scale"],
                latents=torch.from_numpy(noise).to(denoiser.dtype),
                generator=later,
            ).images
        return pictures


def generate(job: GenerateJob, events: Events) -> None:
    """Draw `<out>/00000.png`, ... and take `<out>/losses.json` for each of the job's drawings.

    What is there already is kept, so that an interrupted job goes on where it was.
    """
    make_deterministic()
    device, dtype = choose_device(job.device), getattr(torch, job.dtype)
    model, vae = Path(job.model), None if job.vae is None else Path(job.vae)
    detect_family(model)
    sampler: Sampler | None = None
    missing = [_missing(Path(drawing.out), job) for drawing in job.drawings]
    total = len(job.drawings) * len(job.prompts)
    done = total - sum(len(numbers) for batches in missing for numbers in batches)
    events.emit("drawn", done=done, total=total)
    for drawing, batches in zip(job.drawings, missing, strict=True):
        out = Path(drawing.out)
        out.mkdir(parents=True, exist_ok=True)
        losses = _losses_file(out, job)
        if not batches and losses is None:
            continue
        network = _load(drawing, model, dtype, device)
        parts = dict(network.named_children())
        for numbers in batches:
            sampler = sampler or Sampler(model, parts, device, dtype, vae)
            sampler.use(parts)
            _draw_batch(sampler, job, numbers, out)
            done += len(numbers)
            events.emit("drawn", done=done, total=total)
        if losses is not None:
            values = holdout_losses(network, job, open_job_latents(str(job.latents)), device)
            _write(losses, json.dumps({"losses": values}).encode())


def holdout_losses(
    network: Network, job: GenerateJob, latents: Latents, device: torch.device
) -> list[float]:
    """Each held-out sample's unweighted mean squared error, averaged over its noise draws."""
    model, holdout = Path(job.model), job.holdout
    family = detect_family(model)
    objective = Objective(
        schedule=read_schedule(model),
        scale=LatentScale.from_info(latents.info),
        seed=holdout["seed"],
        prediction_type=holdout.get("prediction_type"),
        noise_offset=holdout.get("noise_offset", 0.0),
    )
    samples, draws = holdout["samples"], holdout["draws"]
    sums: dict[int, float] = {}
    dtype = network.denoiser.dtype
    with torch.inference_mode():
        for numbers, batch in holdout_batches(
            latents, family, objective, samples=samples, draws=draws, batch_size=LOSS_BATCH
        ):
            errors = Inputs(batch, slice(None), device, dtype).errors(network)
            for number, error in zip(numbers, errors.tolist(), strict=True):
                sums[number] = sums.get(number, 0.0) + error
    return [sums[number] / draws for number in sorted(sums)]


def _load(drawing: Drawing, model: Path, dtype: torch.dtype, device: torch.device) -> Network:
    family = detect_family(model)
    folder = Path(drawing.parts.get(family.denoiser, model / family.denoiser))
    network = Network(family, {family.denoiser: load_denoiser(folder, dtype)})
    network.to(device)
    return network.requires_grad_(False).eval()


def _missing(out: Path, job: GenerateJob) -> list[range]:
    """The batches with a picture that is not there. Whole batches: a picture's last bits depend on
    which others are drawn beside it."""
    size, count = job.sampler["batch_size"], len(job.prompts)
    batches = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return [b for b in batches if not all(_picture(out, number).exists() for number in b)]


def _losses_file(out: Path, job: GenerateJob) -> Path | None:
    path = out / "losses.json"
    return None if job.latents is None or path.exists() else path


def _draw_batch(sampler: Sampler, job: GenerateJob, numbers: range, out: Path) -> None:
    prompts = [job.prompts[number] for number in numbers]
    pictures = sampler.draw(prompts, job.sampler, first=numbers.start)
    for number, picture in zip(numbers, pictures, strict=True):
        path = _picture(out, number)
        if not path.exists():
            _write(path, _png(picture))


def _png(picture: Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    return buffer.getvalue()


def _picture(out: Path, number: int) -> Path:
    return out / f"{number:05d}.png"


def _write(path: Path, data: bytes) -> None:
    write_atomic(LocalFileSystem(), str(path), data)
