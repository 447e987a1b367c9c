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
from transformers.utils import logging as transformers_logging

from artifacts.commit import write_atomic
from artifacts.latents import Latents
from runtimes.adapters.lora import read_adapters
from runtimes.base import WrongInput
from runtimes.data.loader import holdout_batches
from runtimes.encoders import t5_length
from runtimes.events import Events
from runtimes.families import detect_family
from runtimes.job import Drawing, GenerateJob
from runtimes.objective.draws import Stream, generator
from runtimes.objective.noise import Schedule
from runtimes.objective.objective import LatentScale, Objective
from runtimes.objective.scheduler import read_config, read_schedule
from runtimes.torch.device import choose_device, make_deterministic
from runtimes.torch.lora import lay_over
from runtimes.torch.models import load_denoiser, load_text_encoder, weight_variant
from runtimes.torch.network import Network
from runtimes.torch.runtime import Inputs
from runtimes.torch.schedulers import make_scheduler
from runtimes.train.loop import open_job_latents

LOSS_BATCH = 32
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


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
        family = detect_family(folder)
        self._denoiser = family.denoiser
        # Exactly as many tokens as the model was trained with.
        self._more = {"max_sequence_length": t5_length(folder)} if family.has_t5 else {}
        # diffusers wants to be told of parts that are left out.
        parts = {name: None for name, spec in index.items() if spec == [None, None]} | parts
        if "safety_checker" in index:  # judging pictures is not its business
            parts |= {"safety_checker": None, "requires_safety_checker": False}
        if index["_class_name"] == "StableDiffusionXLPipeline":
            parts["add_watermarker"] = False
        common = {"torch_dtype": dtype, "local_files_only": True, "use_safetensors": True}
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
        try:
            # Each part may be stored in another variant than the others.
            for name in ENCODERS:
                if name in index and name not in parts:
                    parts[name] = load_text_encoder(folder, name, dtype)
            if "vae" not in parts:
                part = folder / "vae" if vae is None else vae
                variant = weight_variant(part)
                parts["vae"] = AutoencoderKL.from_pretrained(part, variant=variant, **common)
            pipe = DiffusionPipeline.from_pretrained(folder, **parts, **common)
        except (OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise WrongInput(f"model {folder}: the pipeline does not load: {reason}") from None
        self._pipe = pipe.to(device)
        self._pipe.set_progress_bar_config(disable=True)
        swapped = ("scheduler", *family.clip_encoders)
        self._own = {name: getattr(pipe, name) for name in swapped}

    def use(self, parts: dict[str, Any]) -> None:
        """Put other parts into the pipeline; where none is given it has its own again."""
        self._pipe.register_modules(**{**self._own, **parts})

    @torch.no_grad()  # not inference_mode: what FSDP gathers here it trains with later
    def draw(self, prompts: Sequence[str], sampler: dict[str, Any], *, first: int) -> list[Image]:
        """Pictures of `prompts`, `batch_size` at a time; the first one's noise is number `first`.

        `sampler` has seed, num_inference_steps, guidance_scale, height, width (None is the
        model's own) and batch_size.
        """
        scale = self._pipe.vae_scale_factor
        denoiser = getattr(self._pipe, self._denoiser)
        height, width = (
            sampler.get(side) or denoiser.config.sample_size * scale for side in ("height", "width")
        )
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
                **self._more,
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
            if sampler is None:  # with encoders of its own: the next model may have none
                denoiser = {detect_family(model).denoiser: network.denoiser}
                sampler = Sampler(model, denoiser, device, dtype, vae)
            sampler.use(parts | _own_scheduler(drawing))
            _draw_batch(sampler, job, numbers, out)
            done += len(numbers)
            events.emit("drawn", done=done, total=total)
        if losses is not None:
            schedule = read_schedule(Path(drawing.parts.get("scheduler", model / "scheduler")))
            latents = open_job_latents(str(job.latents))
            values = holdout_losses(network, schedule, job, latents, device)
            _write(losses, json.dumps({"losses": values}).encode())


def holdout_losses(
    network: Network,
    schedule: Schedule,
    job: GenerateJob,
    latents: Latents,
    device: torch.device,
) -> list[float]:
    """Each held-out sample's unweighted mean squared error, averaged over its noise draws."""
    holdout = job.holdout
    family = detect_family(Path(job.model))
    objective = Objective(
        schedule=schedule,
        scale=LatentScale.from_info(latents.info),
        seed=holdout["seed"],
        noise_offset=holdout.get("noise_offset", 0.0),
    )
    samples, draws = holdout["samples"], holdout["draws"]
    sums: dict[int, float] = {}
    dtype = network.denoiser.dtype
    with torch.inference_mode():
        for numbers, batch in holdout_batches(
            latents,
            family,
            objective,
            samples=samples,
            draws=draws,
            batch_size=min(LOSS_BATCH, job.sampler["batch_size"]),  # what there is memory for
            text_encoders=bool(network.text_encoders),
        ):
            errors = Inputs(batch, slice(None), device, dtype).errors(network)
            for number, error in zip(numbers, errors.tolist(), strict=True):
                sums[number] = sums.get(number, 0.0) + error
    return [sums[number] / draws for number in sorted(sums)]


def _load(drawing: Drawing, model: Path, dtype: torch.dtype, device: torch.device) -> Network:
    """The model's own parts: its denoiser, and its text encoders if they were trained too.

    Adapters are merged in float32 before the weights are cast.
    """
    family = detect_family(model)
    adapters = {} if drawing.lora is None else read_adapters(Path(drawing.lora))
    known = (family.denoiser, *family.clip_encoders)
    if strange := adapters.keys() - set(known):
        raise WrongInput(f"{drawing.lora} is for another model: it has adapters of {min(strange)}")
    parts = {}
    for name in known:
        if name != family.denoiser and name not in adapters.keys() | drawing.parts.keys():
            continue
        folder = Path(drawing.parts.get(name, model / name))
        first = torch.float32 if name in adapters else dtype
        if name == family.denoiser:
            parts[name] = load_denoiser(folder, first)
        else:
            parts[name] = load_text_encoder(model, name, first, folder)
        lay_over(name, parts[name], adapters.get(name, {}))
        parts[name].to(dtype)
    network = Network(family, parts)
    network.to(device)
    return network.requires_grad_(False).eval()


def _own_scheduler(drawing: Drawing) -> dict[str, Any]:
    """The scheduler of a model that was trained over to other noise than the pipeline's."""
    if "scheduler" not in drawing.parts:
        return {}
    return {"scheduler": make_scheduler(read_config(Path(drawing.parts["scheduler"])))}


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
