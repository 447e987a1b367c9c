"""Sampling with a diffusers pipeline, around given components, and encoding with its encoders.

Weights of an offloaded model stay in the host's memory; a layer is on the device while it runs.
`ThePipeline` samples images for a sequence of models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.utils import logging as diffusers_logging
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from configs.errors import Refused
from configs.secrets import one_line
from runtimes.contract import StepBatch
from runtimes.families.inpainting_aesthetics import fully_masked
from runtimes.pipeline_folder.folder import TEXT_BATCH, Base
from runtimes.pipeline_folder.weights import weight_variant
from runtimes.process.job import Drawing, EncodeJob, GenerateJob
from runtimes.registry import check_family
from runtimes.sample.diffusers_pipeline import BasePipeline, PipelineSampler
from runtimes.sample.sampling_inputs import NoiseBatch
from runtimes.torch.device import describe, free_memory, make_deterministic, open_device
from runtimes.torch.kernels import DeviceHooks, enable_npu_attention
from runtimes.torch_models.activation_memory import Inputs, sender
from runtimes.torch_models.loading import load_text_encoder, make_scheduler
from runtimes.torch_models.network import Network, load_network
from runtimes.torch_models.vae_text_encoders import Encoder, PaddedEncoder

#: Kinds of devices that diffusers copies single layers to; on the CPU nothing moves.
OFFLOADING = ("cuda", "cpu")
#: PyTorch rounds an allocation of pinned memory up to a power of two, so weights share blocks.
BLOCK = 2**30  # bytes
ALIGNMENT = 64  # bytes


def offload_layers(model: torch.nn.Module, device: torch.device) -> None:
    """Copy each layer of a model on the host to a device before it runs, and drop it afterwards.

    On CUDA, the next layer is copied from pinned memory on a separate stream while the kernels of
    the current layer run. The first pass records the order of layers.
    """
    from diffusers.hooks import apply_group_offloading

    if device.type == "cuda":
        move_to_blocks(model, partial(torch.empty, dtype=torch.uint8, pin_memory=True))
    apply_group_offloading(  # already pinned memory is not copied
        model, onload_device=device, offload_type="leaf_level", use_stream=device.type == "cuda"
    )


@torch.no_grad()
def move_to_blocks(model: torch.nn.Module, allocate: Callable[[int], torch.Tensor]) -> None:
    """Move all tensors of a model into shared blocks of memory, and free their own one by one.

    Args:
        model: on the host.
        allocate: returns that many bytes, a tensor of dtype uint8.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    left = sum(sizes)
    used = 0
    block = torch.empty(0, dtype=torch.uint8)
    for tensor, size in zip(tensors, sizes, strict=True):
        if used + size > block.nbytes:
            used = 0
            block = allocate(max(size, min(BLOCK, left)))
        moved = block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = moved.copy_(tensor)
        used = used + size
        left = left - size


class Sampler(PipelineSampler):
    """A diffusers pipeline with replaceable components.

    Args:
        base: the pipeline.
        parts: component name to model; other components are loaded from the folder.
        device_hooks: device of the pipeline.
        dtype: dtype of the loaded components.
        offload: whether text encoders are on the device layer by layer, as a denoiser in `parts`
            already is.

    Raises:
        Refused: a component is missing or cannot be loaded.
    """

    def __init__(
        self,
        base: Base,
        parts: dict[str, Any],
        device_hooks: DeviceHooks,
        dtype: torch.dtype = torch.float32,
        *,
        offload: bool = False,
    ) -> None:
        family = base.family
        index = base.index
        # The number of tokens must equal that of training.
        frozen = family.frozen_text is not None
        self._text_options = {"max_sequence_length": base.text_length} if frozen else {}
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
                    parts[name] = load_text_encoder(base, name, dtype)
            if "vae" not in parts:
                variant = weight_variant(base.vae)
                vae_class = getattr(diffusers, family.vae_class)
                parts["vae"] = vae_class.from_pretrained(base.vae, variant=variant, **common)
            kind = getattr(diffusers, family.pipelines[0])
            pipe = kind.from_pretrained(base.folder, **parts, **common)
        except (OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise Refused(
                f"model {base.folder}: the pipeline does not load: {one_line(error)}"
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
        merged = options | self._text_options
        options = self._family.pipeline_arguments(self._pipe, merged, len(batch.prompts))
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
        config = vae.config
        dtype = vae.dtype
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


log = logging.getLogger("kiln")


class ThePipeline(BasePipeline):
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob, base: Base) -> None:
        make_deterministic()
        self._device_hooks = open_device(job.device, compiled=job.compiled)
        self._device = self._device_hooks.device
        check_family("torch", base.family.name, self._device.type)
        self._dtype = getattr(torch, job.dtype)
        self._offload = job.offload and self._device.type in OFFLOADING
        if job.offload and self._device.type != "cuda":  # `auto` may have chosen another device
            log.warning("offload has no effect on %s", describe(self._device))
        super().__init__(job, base, make_scheduler, self._device_hooks.save_compiled)

    def _release(self) -> None:
        super()._release()
        free_memory()  # compiled and hooked modules refer to themselves

    def _load_network(self, drawing: Drawing) -> Network:
        place = torch.device("cpu") if self._offload else self._device
        network = load_network(drawing, self._base, self._dtype, place, self._job.text_dtype)
        if self._offload:
            for part in network.parts.values():
                offload_layers(part, self._device)
            network.frozen_clip.to(self._device)
        enable_npu_attention(network.denoiser, self._device)
        self._device_hooks.prepare_sampling(network.denoiser)
        return network

    def _open_sampler(self) -> Sampler:
        # The sampler loads its own text encoders: the next model may not have trained ones.
        denoiser = {self._network.family.denoiser: self._network.denoiser}
        return Sampler(self._base, denoiser, self._device_hooks, self._dtype, offload=self._offload)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        with torch.inference_mode():
            inputs = Inputs(batch, sender(self._device), dtype=self._dtype)
            return inputs.errors(self._network).cpu().numpy()

    def compile_seconds(self) -> float:
        return self._device_hooks.compile_seconds()


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises Refused."""
    make_deterministic()  # a rebuilt shard must have identical bytes
    hooks = open_device(job.device, compiled=job.compiled)
    base = Base.of(job)
    options: dict[str, Any] = {"device": hooks.device, "dtype": job.dtype, "embeds": job.embeds}
    if not hooks.pads_batches:
        return Encoder(base, **options)
    options |= {"images": job.batch_size, "captions": TEXT_BATCH}
    return PaddedEncoder(base, save_compiled=hooks.save_compiled, **options)
