"""The diffusers pipeline that draws, around given components; start noise is of the host."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.utils import logging as diffusers_logging
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.families.unet_inputs import (
    NO_EXTRA_INPUTS,
    ExtraInputs,
    aesthetic_scores,
    fully_masked,
)
from runtimes.models.loading import load_text_encoder
from runtimes.models.schedulers import make_scheduler
from runtimes.objective.scheduler_config import sampling_scheduler
from runtimes.pipeline_folder.describe import t5_length
from runtimes.pipeline_folder.weight_files import weight_variant
from runtimes.sample.start import noise_batches, optional_arguments
from runtimes.torch.device_kind import DeviceKind


class Sampler:
    """A diffusers pipeline with replaceable components.

    Initial noise is drawn on the host, so it is the same on every device.

    Args:
        folder: local diffusers pipeline folder.
        parts: component name to model; other components are loaded from the folder.
        device_kind: device of the pipeline.
        dtype: of the loaded components.
        vae: folder of an AutoencoderKL that replaces the pipeline's VAE.

    Raises:
        WrongInput: a component is missing or cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        parts: dict[str, Any],
        device_kind: DeviceKind,
        dtype: torch.dtype = torch.float32,
        vae: Path | None = None,
    ) -> None:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        family = detect_family(folder)
        self._family = family
        # T5's sequence length must equal that of training.
        self._t5_options = {} if family.t5 is None else {"max_sequence_length": t5_length(folder)}
        # diffusers requires an explicit None for each absent component.
        parts = {name: None for name, spec in index.items() if spec == [None, None]} | parts
        parts |= family.pipeline_options  # disables the safety checker and the watermark
        common = {"torch_dtype": dtype, "local_files_only": True, "use_safetensors": True}
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
        try:
            # Components are loaded one by one: each may be stored in another weight variant.
            for name in (encoder.component for encoder in family.text_encoders):
                if name in index and name not in parts:
                    parts[name] = load_text_encoder(folder, name, dtype)
            if "vae" not in parts:
                part = folder / "vae" if vae is None else vae
                variant = weight_variant(part)
                parts["vae"] = AutoencoderKL.from_pretrained(part, variant=variant, **common)
            kind = getattr(diffusers, family.pipelines[0])
            pipe = kind.from_pretrained(folder, **parts, **common)
        except (OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise WrongInput(f"model {folder}: the pipeline does not load: {reason}") from None
        self._pipe = pipe.to(device_kind.device)
        self._device_kind = device_kind
        self._pipe.set_progress_bar_config(disable=True)
        replaceable = ("scheduler", *family.clip_encoders)
        self._defaults = {name: getattr(pipe, name) for name in replaceable}

    def use(self, parts: dict[str, Any]) -> None:
        """Replace components of the pipeline; those not in `parts` are reset to the pipeline's."""
        self._pipe.register_modules(**{**self._defaults, **parts})

    @torch.no_grad()  # not inference_mode: FSDP trains with the tensors that it gathers here
    def draw(
        self, prompts: Sequence[str], sampler: dict[str, Any], *, first: int
    ) -> NDArray[np.uint8]:
        """Sample one image per prompt, in batches of `batch_size`.

        Args:
            prompts: N prompts.
            sampler: as GenerateJob.sampler.
            first: number of the first image; it selects the noise stream.

        Returns:
            Images [N, H, W, 3] uint8.
        """
        self._pipe.register_modules(
            scheduler=sampling_scheduler(self._pipe.scheduler, sampler, make_scheduler)
        )
        family, denoiser = self._family, getattr(self._pipe, self._family.denoiser)
        scale, pictures = self._pipe.vae_scale_factor, list[NDArray[np.uint8]]()
        rows = sampler["batch_size"] if self._device_kind.pads_batches else 0
        numbering = {"first": first, "rows": rows}
        for batch in noise_batches(prompts, sampler, family, denoiser.config, scale, **numbering):
            rngs = [torch.Generator().manual_seed(int(r.integers(2**63))) for r in batch.rngs]
            size = (batch.height, batch.width)
            with extra_inputs(denoiser, self._pipe.vae, sampler, size):
                drawn = self._pipe(
                    batch.prompts,
                    height=batch.height,
                    width=batch.width,
                    num_inference_steps=sampler["num_inference_steps"],
                    guidance_scale=sampler["guidance_scale"],
                    latents=family.pipeline_latents(torch.from_numpy(batch.noise)).to(
                        denoiser.dtype
                    ),
                    generator=rngs,
                    callback_on_step_end=self._after_step,
                    **optional_arguments(sampler, len(batch.prompts)),
                    **self._t5_options,
                ).images
            pictures += [np.asarray(picture) for picture in drawn[: batch.count]]
        return np.stack(pictures)

    def _after_step(self, *_: Any) -> dict[str, Any]:
        self._device_kind.mark_step()
        return {}


@contextmanager
def extra_inputs(
    denoiser: Any, vae: Any, sampler: dict[str, Any], size: tuple[int, int]
) -> Iterator[None]:
    """Within the context, a text-to-image pipeline passes the denoiser's extra inputs.

    The extra inputs (families/unet_inputs.py) are an inpainting mask that hides the whole image,
    and the requested aesthetic score.

    Args:
        denoiser: diffusers model; a forward pre-hook adds the inputs.
        vae: encodes the masked image.
        sampler: as GenerateJob.sampler.
        size: (height, width) of the images, in pixels.
    """
    extras = ExtraInputs.from_config(denoiser.config)
    if extras == NO_EXTRA_INPUTS:
        yield
        return
    device = denoiser.device
    blank = fully_masked_latents(vae, size).to(device) if extras.inpainting else None
    scores = (
        torch.tensor(aesthetic_scores(sampler), device=device) if extras.aesthetic_score else None
    )

    def more(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        latents = given[0]
        if blank is not None:
            seen = blank.to(latents.dtype).expand(len(latents), -1, -1, -1)
            given = (torch.cat([latents, seen], dim=1), *given[1:])
        if scores is not None:  # with guidance, the unconditional rows come first
            times = len(latents) // len(scores)
            named = {**named, "class_labels": scores.repeat_interleave(times)}
        return given, named

    handle = denoiser.register_forward_pre_hook(more, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def fully_masked_latents(vae: Any, size: tuple[int, int]) -> torch.Tensor:
    """Mask and masked-image latents [1, 1 + C, h, w] of one fully masked image."""
    config, dtype = vae.config, vae.dtype
    grey = torch.zeros(1, config.in_channels, *size, device=vae.device)
    # SDXL's VAE overflows to NaN in half precision. ModelMixin.to logs a warning for each cast.
    torch.nn.Module.to(vae, torch.float32)
    mean = vae.encode(grey).latent_dist.mean
    torch.nn.Module.to(vae, dtype)
    return torch.from_numpy(fully_masked(mean.cpu().numpy(), config))
