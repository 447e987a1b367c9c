"""Sampling with a diffusers pipeline, around given components, and encoding with its encoders.

Prompts are encoded before the denoiser is loaded. `ThePipeline` samples images for a sequence of
models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.utils import logging as diffusers_logging
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from artifacts.latent_shards import LatentScale
from configs.errors import Refused
from configs.secrets import one_line
from runtimes.contract import StepBatch
from runtimes.families.family import pictures_beside, token_mask, worded
from runtimes.families.inpainting_aesthetics import fully_masked
from runtimes.pipeline_folder.folder import TEXT_BATCH, Base
from runtimes.pipeline_folder.weights import weight_variant
from runtimes.process.job import Drawing, EncodeJob, GenerateJob
from runtimes.registry import check_family
from runtimes.sample.control_pictures import read_controls
from runtimes.sample.diffusers_pipeline import (
    BasePipeline,
    PipelineSampler,
    encode_prompt_by,
    seen_prompts,
)
from runtimes.sample.reference_pictures import drawn_batches
from runtimes.sample.sampling_inputs import NO_REFERENCES, NoiseBatch, References
from runtimes.torch.device import describe, free_memory, make_deterministic, open_device
from runtimes.torch.kernels import DeviceHooks, enable_npu_attention
from runtimes.torch_models.activation_memory import Inputs, sender
from runtimes.torch_models.loading import empty_denoiser, load_text_encoder, make_scheduler
from runtimes.torch_models.network import Network, load_network, load_text_encoders
from runtimes.torch_models.offload import OFFLOADING, offload_layers
from runtimes.torch_models.tokenize import TextTokenizer, weigh_states
from runtimes.torch_models.vae_text_encoders import (
    Encoder,
    FrozenText,
    PaddedEncoder,
    encode_ids,
    vae_dtype,
)


class Encoded(Exception):
    """A pipeline has encoded its prompts, and shall not draw yet."""


def _stop(*_: Any, **__: Any) -> None:
    raise Encoded


def _moved(embeds: Any, device: torch.device) -> Any:
    """Tensors in nested lists and tuples, on a device."""
    if isinstance(embeds, (list, tuple)):
        return type(embeds)(_moved(part, device) for part in embeds)
    return embeds.to(device) if isinstance(embeds, torch.Tensor) else embeds


class Sampler(PipelineSampler):
    """A diffusers pipeline with replaceable components.

    It keeps the prompt embeddings of all calls in the host's memory. Text encoders are loaded where
    prompts are new, and freed before the denoiser runs: no device and no host holds both.

    Args:
        base: the pipeline.
        parts: component name to model; other components are loaded from the folder. A denoiser on
            `meta` is replaced before it draws.
        device_hooks: device of the pipeline.
        dtype: dtype of the loaded components.
        offload: whether loaded text encoders are on the device layer by layer.
        prompt_embeds: those of earlier samplers with the same text encoders; new ones are added.

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
        prompt_embeds: dict[str, Any] | None = None,
    ) -> None:
        family = base.family
        # The number of tokens must equal that of training.
        frozen = family.frozen_text is not None
        self._text_options = {"max_sequence_length": base.text_length} if frozen else {}
        self._base = base
        self._dtype = dtype
        self._offload = offload
        self._device_hooks = device_hooks
        self.prompt_embeds = {} if prompt_embeds is None else prompt_embeds
        # diffusers requires an explicit None for each absent component.
        absent = [name for name, spec in base.index.items() if spec == [None, None]]
        text_encoders = [encoder.component for encoder in family.text_encoders]
        parts = dict.fromkeys([*absent, *text_encoders]) | parts
        parts |= family.pipeline_options  # disables the safety checker and the watermark
        common = {"torch_dtype": dtype, "local_files_only": True, "use_safetensors": True}
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
        try:
            if "vae" not in parts:
                variant = weight_variant(base.vae)
                vae_class = getattr(diffusers, family.vae_class)
                parts["vae"] = vae_class.from_pretrained(base.vae, variant=variant, **common)
            kind: Any = getattr(diffusers, family.plain_pipeline or family.pipelines[0])
            # Otherwise its device is that of a part, which may be on `meta`.
            own = {"_execution_device": property(lambda _: device_hooks.device)}
            kind = type(kind.__name__, (kind,), own)
            pipe = kind.from_pretrained(base.folder, **parts, **common)
        except (OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise Refused(
                f"model {base.folder}: the pipeline does not load: {one_line(error)}"
            ) from None
        pipe.vae.to(device_hooks.device)
        self._encode = pipe.encode_prompt
        if base.reads_unusually:
            self._encode = encode_prompt_by(pipe, self._texts)
        if family.sees_references:
            self._encode = self._states_with_pictures
        pipe.encode_prompt = self._encode_prompt
        super().__init__(pipe, family, make_scheduler, pads_batches=device_hooks.pads_batches)

    @torch.no_grad()
    def encode_prompts(self, draws: Sequence[Sequence[str]], sampler: dict[str, Any]) -> None:
        """Encode the prompts of later calls of `draw`, in their batches; free the text encoders.

        Args:
            draws: the prompts of each call.
            sampler: as GenerateJob.sampler.
        """
        pipe = self._pipe
        own = {name: getattr(pipe, name) for name in self._text_encoders()}
        pipe.prepare_latents = _stop  # every pipeline calls it after encode_prompt
        try:
            for prompts in draws:
                for _ in self.draw_floats(prompts, sampler, first=0):
                    pass
        finally:
            del pipe.prepare_latents
            if any(getattr(pipe, name) is not part for name, part in own.items()):
                pipe.register_modules(**own)
                free_memory()

    def register(self, parts: Mapping[str, Any]) -> None:
        """Replace components of the pipeline."""
        self._pipe.register_modules(**parts)

    def _text_encoders(self) -> list[str]:
        names = (encoder.component for encoder in self._family.text_encoders)
        return [name for name in names if self._base.class_of(name) is not None]

    def _texts(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
        pipe = self._pipe
        encoders = self._family.clip
        models = [getattr(pipe, encoder.component) for encoder in encoders]
        tokenizers = [TextTokenizer(self._base, e, getattr(pipe, e.tokenizer)) for e in encoders]
        ids = np.stack([tokenizer.ids(prompts)[0] for tokenizer in tokenizers], axis=1)
        states, pooled = encode_ids(self._family, models, self._to_device(ids))
        assert states is not None, "SD's and SDXL's CLIP encoders have states"
        widths = [model.config.hidden_size for model in models]
        weighed = weigh_states(states.float().cpu().numpy(), prompts, tokenizers, widths)
        return self._to_device(weighed).to(states.dtype), pooled

    def _states_with_pictures(
        self, prompt: Sequence[str], **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`encode_prompt` of a pipeline whose text encoder sees the references of prompts."""
        pipe = self._pipe
        encoder = self._family.frozen_text
        assert encoder is not None, "a family whose text encoder sees references has one"
        frozen = FrozenText(self._base, encoder, pipe.tokenizer, pipe.text_encoder)
        rows = [frozen.states_with_pictures(p, pictures_beside(p), self._to_device) for p in prompt]
        counts = [len(row) for row in rows]
        mask = torch.from_numpy(token_mask(counts, max(counts))).bool()
        embeds = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return embeds, None if mask.all() else mask.to(embeds.device)

    def _encode_prompt(self, *args: Any, **named: Any) -> Any:
        """`encode_prompt` of the pipeline, once for each prompt."""
        key = repr((args, sorted(named.items())))
        if key not in self.prompt_embeds:
            self._load_text_encoders()
            self.prompt_embeds[key] = _moved(self._encode(*args, **named), torch.device("cpu"))
        return _moved(self.prompt_embeds[key], self._device_hooks.device)

    def _load_text_encoders(self) -> None:
        device = self._device_hooks.device
        for name in self._text_encoders():
            if getattr(self._pipe, name) is None:
                model = load_text_encoder(self._base, name, self._dtype)
                if self._offload:
                    offload_layers(model, device)
                else:
                    model.to(device)
                self._pipe.register_modules(**{name: model})

    @torch.no_grad()  # not inference_mode: FSDP trains with the tensors that it gathers here
    def draw(
        self,
        prompts: Sequence[str],
        sampler: dict[str, Any],
        *,
        first: int,
        references: References = NO_REFERENCES,
        controls: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        self.encode_prompts([prompts], sampler)
        given: dict[str, Any] = {"first": first, "references": references, "controls": controls}
        return super().draw(prompts, sampler, **given)

    @torch.no_grad()
    def encode_picture(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        vae = self._pipe.vae
        own = vae.dtype
        dtype = vae_dtype(vae.config, own)
        torch.nn.Module.to(vae, dtype)  # ModelMixin.to logs a warning for each cast
        mean, _ = self._family.encode_pictures(vae, self._to_device(pixels).to(dtype))
        torch.nn.Module.to(vae, own)
        return mean.float().cpu().numpy()

    def _call(self, batch: NoiseBatch, **options: Any) -> Any:
        denoiser = getattr(self._pipe, self._family.denoiser)
        latents = self._family.pipeline_latents(torch.from_numpy(batch.noise))
        merged = options | self._text_options
        options = self._family.pipeline_arguments(self._pipe, merged, len(batch.prompts))
        if self._family.sees_references and options.get("negative_prompt"):
            negative = zip(batch.prompts, options["negative_prompt"], strict=True)
            options["negative_prompt"] = [worded(prompt, text) for prompt, text in negative]
        try:
            return self._pipe(
                prompt=batch.prompts,
                latents=latents.to(denoiser.dtype),
                generator=[
                    torch.Generator().manual_seed(int(r.integers(2**63))) for r in batch.rngs
                ],
                callback_on_step_end=self._after_step,
                **options,
            ).images
        except Encoded:
            return np.empty(0)

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

    @contextmanager
    def _controlled(
        self, denoiser: Any, urls: Sequence[str], sampler: dict[str, Any], size: tuple[int, int]
    ) -> Iterator[None]:
        """A forward pre-hook of the denoiser runs the ControlNet, as its pipeline does."""
        family = self._family
        network = self._control
        pixels = read_controls(urls, size)
        if family.control == "latents":
            own = LatentScale.from_info(self._base.encoders)
            pixels = own.scaled(self.encode_picture(2 * pixels - 1))
        control = self._to_device(pixels)
        scale = sampler.get("controlnet_conditioning_scale", 1.0)
        # With true_cfg_scale, FLUX's pipeline runs the ControlNet once for both calls of a step.
        last: list[Any] = [None, {}]

        def add(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            latents = inputs[0] if inputs else named["hidden_states"]
            if latents is not last[0]:
                rows = control.repeat(len(latents) // len(control), 1, 1, 1)
                residuals = family.control_residuals(network, rows, scale, inputs, named)
                last[:] = latents, residuals
            return inputs, {**named, **last[1]}

        handle = denoiser.register_forward_pre_hook(add, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
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
        self._offload = _offloads(job.offload, self._device)
        self._are_trained = False  # whether embeddings are of a drawing's own text encoders
        super().__init__(job, base, make_scheduler, self._device_hooks.save_compiled)

    def _release(self) -> None:
        super()._release()
        free_memory()  # compiled and hooked modules refer to themselves

    def _load_network(self, drawing: Drawing) -> Network:
        """The denoiser is loaded after its prompts are encoded, so that nothing holds both."""
        text_encoders = load_text_encoders(drawing, self._base, self._dtype)
        for part in text_encoders.values():
            self._place(part.requires_grad_(False))
        if self._job.prompts:
            self._encode_prompts(text_encoders)
        place = torch.device("cpu") if self._offload else self._device
        text_dtype = self._job.text_dtype
        about = (drawing, self._base, self._dtype)
        network = load_network(*about, place, text_dtype, text_encoders)
        if self._offload:
            for part in filter(None, (network.denoiser, network.control)):
                offload_layers(part, self._device)
            network.frozen_clip.to(self._device)
        for part in filter(None, (network.denoiser, network.control)):
            enable_npu_attention(part, self._device)
        self._device_hooks.prepare_sampling(network.denoiser)
        return network

    def _place(self, model: torch.nn.Module) -> None:
        if self._offload:
            offload_layers(model, self._device)
        else:
            model.to(self._device)

    def _encode_prompts(self, text_encoders: Mapping[str, torch.nn.Module]) -> None:
        base = self._base
        parts = {base.family.denoiser: empty_denoiser(base.denoiser_folder, None).to(self._dtype)}
        if self._sampler is None:
            about = (base, parts, self._device_hooks, self._dtype)
            self._sampler = Sampler(*about, offload=self._offload)
        if self._are_trained or text_encoders:
            self._sampler.prompt_embeds.clear()
        self._are_trained = bool(text_encoders)
        self._sampler.register({**parts, **text_encoders})
        prompts = seen_prompts(base.family, self._job.prompts, self._job.references)
        draws = [prompts[batch.start : batch.stop] for batch in drawn_batches(self._job)]
        self._sampler.encode_prompts(draws, self._job.sampler)

    def _open_sampler(self) -> Sampler:
        raise AssertionError("a drawing without prompts draws nothing")

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        with torch.inference_mode():
            inputs = Inputs(batch, sender(self._device), dtype=self._dtype)
            return inputs.errors(self._network).cpu().numpy()

    def compile_seconds(self) -> float:
        return self._device_hooks.compile_seconds()


def _offloads(wanted: bool, device: torch.device) -> bool:
    """Whether layers are offloaded; a warning says where they cannot be."""
    if wanted and device.type != "cuda":  # `auto` may have chosen another device
        log.warning("offload has no effect on %s", describe(device))
    return wanted and device.type in OFFLOADING


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises Refused."""
    make_deterministic()  # a rebuilt shard must have identical bytes
    hooks = open_device(job.device, compiled=job.compiled)
    base = Base.of(job)
    options: dict[str, Any] = {"device": hooks.device, "dtype": job.dtype, "embeds": job.embeds}
    options |= {"text_precision": job.text_precision}
    options |= {"offload": _offloads(job.offload, hooks.device)}
    if not hooks.pads_batches:
        return Encoder(base, **options)
    options |= {"images": job.batch_size, "captions": TEXT_BATCH}
    return PaddedEncoder(base, save_compiled=hooks.save_compiled, **options)
