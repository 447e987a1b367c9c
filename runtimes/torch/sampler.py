"""Sampling with a diffusers pipeline, around given components."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.utils import logging as diffusers_logging
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from configs.secrets import one_line
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.families.inpainting_and_scores import fully_masked
from runtimes.pipeline_folder.describe_encoders import text_length
from runtimes.pipeline_folder.read_configs import read_index
from runtimes.pipeline_folder.weight_files import weight_variant
from runtimes.sample.diffusers_pipeline_sampler import PipelineSampler
from runtimes.sample.initial_noise import NoiseBatch
from runtimes.torch.device_hooks import DeviceHooks
from runtimes.torch.offload import offload_layers
from runtimes.torch_models.loading import load_text_encoder
from runtimes.torch_models.make_scheduler import make_scheduler


class Sampler(PipelineSampler):
    """A diffusers pipeline with replaceable components.

    Args:
        folder: local diffusers pipeline folder.
        parts: component name to model; other components are loaded from the folder.
        device_hooks: device of the pipeline.
        dtype: of the loaded components.
        vae: folder of an AutoencoderKL that replaces the pipeline's VAE.
        offload: whether text encoders are on the device layer by layer; so is the denoiser given.

    Raises:
        WrongInput: a component is missing or cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        parts: dict[str, Any],
        device_hooks: DeviceHooks,
        dtype: torch.dtype = torch.float32,
        vae: Path | None = None,
        *,
        offload: bool = False,
    ) -> None:
        family, index = detect_family(folder), read_index(folder)
        # The number of tokens must equal that of training.
        frozen = family.frozen_text is not None
        self._text_options = {"max_sequence_length": text_length(folder)} if frozen else {}
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
                vae_class = getattr(diffusers, family.vae_class)
                parts["vae"] = vae_class.from_pretrained(part, variant=variant, **common)
            kind = getattr(diffusers, family.pipelines[0])
            pipe = kind.from_pretrained(folder, **parts, **common)
        except (OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise WrongInput(
                f"model {folder}: the pipeline does not load: {one_line(error)}"
            ) from None
        self._device_hooks = device_hooks
        if offload:
            pipe.vae.to(device_hooks.device)
            for name in (encoder.component for encoder in family.text_encoders):
                if (part := getattr(pipe, name)) is not None:
                    offload_layers(part, device_hooks.device)
        else:
            pipe = pipe.to(device_hooks.device)
        super().__init__(pipe, family, make_scheduler, pads_batches=device_hooks.pads_batches)

    @torch.no_grad()  # not inference_mode: FSDP trains with the tensors that it gathers here
    def draw(
        self, prompts: Sequence[str], sampler: dict[str, Any], *, first: int
    ) -> NDArray[np.uint8]:
        return super().draw(prompts, sampler, first=first)

    def _call(self, batch: NoiseBatch, **options: Any) -> Any:
        denoiser = getattr(self._pipe, self._family.denoiser)
        latents = self._family.pipeline_latents(torch.from_numpy(batch.noise))
        given = options | self._text_options
        options = self._family.pipeline_arguments(self._pipe, given, len(batch.prompts))
        return self._pipe(
            prompt=batch.prompts,
            latents=latents.to(denoiser.dtype),
            generator=[torch.Generator().manual_seed(int(r.integers(2**63))) for r in batch.rngs],
            callback_on_step_end=self._after_step,
            **options,
        ).images

    def _after_step(self, *_: Any) -> dict[str, Any]:
        self._device_hooks.mark_step()
        return {}

    def _fully_masked(self, size: tuple[int, int]) -> NDArray[np.float32]:
        vae = self._pipe.vae
        config, dtype = vae.config, vae.dtype
        grey = torch.zeros(1, config.in_channels, *size, device=vae.device)
        # SDXL's VAE overflows to NaN in half precision. ModelMixin.to logs a warning for each cast.
        torch.nn.Module.to(vae, torch.float32)
        mean = vae.encode(grey).latent_dist.mean
        torch.nn.Module.to(vae, dtype)
        return fully_masked(mean.cpu().numpy(), config)

    def _to_device(self, array: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device_hooks.device)

    def _append_channels(self, latents: torch.Tensor, more: NDArray[np.float32]) -> torch.Tensor:
        return torch.cat([latents, self._to_device(more).to(latents.dtype)], dim=1)
