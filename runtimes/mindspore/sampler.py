"""Sampling with one of mindone's pipelines, and encoding with its VAE and text encoders.

The encoder loads no denoiser. `ThePipeline` samples images and computes held-out losses for a
sequence of models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindone import diffusers
from mindspore import Tensor, ops
from numpy.typing import NDArray

from configs.errors import Refused
from configs.secrets import one_line
from runtimes.adapters.lora_files import load_trained_components
from runtimes.contract import StepBatch
from runtimes.data.loader import pad_rows
from runtimes.families import TextEncoder
from runtimes.families.inpainting_aesthetics import fully_masked
from runtimes.mindspore import load_diffusers_weights as loading
from runtimes.mindspore import network as networks
from runtimes.mindspore.device import choose, precision, start
from runtimes.pipeline_folder.folder import TEXT_BATCH, Base
from runtimes.process.job import Drawing, EncodeJob, GenerateJob
from runtimes.sample.diffusers_pipeline import BasePipeline, PipelineSampler, encode_prompt_by
from runtimes.sample.sampling_inputs import NoiseBatch
from runtimes.torch_models.tokenize import TextTokenizer, check_vocabulary, weigh_states

Float32 = NDArray[np.float32]


class Encoder:
    """Implements contract.PipelineEncoder.

    Args:
        base: the pipeline, of a family that this runtime supports.
        dtype: float32, bfloat16 or float16. As in diffusers, a VAE with `force_upcast` in its
            config computes in float32 where `dtype` is float16.
        flash: whether the VAE uses fused attention, see load_diffusers_weights.load_vae.
        images, captions: rows to which every batch is padded: MindSpore compiles a program for
            each shape.
        embeds: whether `texts` is called; else no text encoder is loaded, tokenizers alone.

    Raises:
        Refused: weights are missing, damaged or do not match their config.
    """

    def __init__(
        self,
        base: Base,
        dtype: ms.Type = ms.float32,
        *,
        flash: bool = True,
        images: int = 1,
        captions: int = 1,
        embeds: bool = True,
    ) -> None:
        self._image_rows = images
        self._caption_rows = captions
        self.info = base.encoders
        self.limits = base.caption_limits
        self._dtype = dtype
        self.vae = loading.load_vae(base.vae, dtype, flash=flash)
        self.tokenizers = dict[str, Any]()
        self._tokenizers = list[TextTokenizer]()
        self.text_encoders = dict[str, Any]()
        self._family = base.family
        for text_encoder in self._family.clip:
            part = text_encoder.component
            tokenizer = _tokenizer(base, text_encoder)
            self.tokenizers[text_encoder.tokenizer] = tokenizer
            self._tokenizers.append(TextTokenizer(base, text_encoder, tokenizer))
            if embeds:
                self.text_encoders[part] = loading.load_text_encoder(base, part, dtype)

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        """Mean and log-variance [B, C, h, w] f32 of the VAE posterior, without latent scaling.

        Numerical overflow in half precision is returned as NaN or infinity.

        Args:
            pixels: images [B, 3, H, W] f32 in -1..1.
        """
        batch = Tensor(pad_rows(pixels, self._image_rows)).astype(self.vae.dtype)
        moments = self.vae.encode(batch, return_dict=False)[0].astype(ms.float32)[: len(pixels)]
        mean, logvar = ops.split(moments, moments.shape[1] // 2, 1)
        return mean.asnumpy(), np.clip(logvar.asnumpy(), -30.0, 20.0)  # as diffusers

    def texts(
        self, captions: Sequence[str], clip: Sequence[Any] = ()
    ) -> tuple[Float32, Float32 | None]:
        """Prompt embeddings [K, T, D] f32 and pooled embeddings [K, P] f32 of K captions.

        SD 1 and 2 have no pooled embeddings: the second value is None.

        Args:
            clip: CLIP encoders that replace the pipeline's, such as trained ones.
        """
        ids = Tensor(pad_rows(self.input_ids(captions), self._caption_rows))
        models = list(clip or self.text_encoders.values())
        penultimate = self._family.clip_states == "penultimate"
        pooling = networks.pooled_outputs(self._family, models)
        positions = models[0].config.max_position_embeddings
        states, pooled = networks.encode_ids(penultimate, models, pooling, positions, ids)
        count = len(captions)
        embeds = states.astype(ms.float32).asnumpy()[:count]
        widths = [model.config.hidden_size for model in models]
        embeds = weigh_states(embeds, captions, self._tokenizers, widths)
        return embeds, None if pooled is None else pooled.astype(ms.float32).asnumpy()[:count]

    def input_ids(self, captions: Sequence[str]) -> NDArray[np.int64]:
        """Token ids [K, n, T] int64 from each of n CLIP tokenizers, padded and truncated."""
        return np.stack([tokenizer.ids(captions)[0] for tokenizer in self._tokenizers], axis=1)

    def token_counts(self, captions: Sequence[str]) -> dict[str, list[int]]:
        """Text encoder -> number of tokens of each caption before it is cut, special ones too."""
        return {t.encoder.component: t.counts(captions) for t in self._tokenizers}


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises Refused."""
    dtype = precision(job.dtype, choose(job.device)[0], "encode.dtype")
    start(job.device)
    base = Base.of(job)
    return Encoder(base, dtype, images=job.batch_size, captions=TEXT_BATCH, embeds=job.embeds)


def _tokenizer(base: Base, encoder: TextEncoder) -> Any:
    """The tokenizer of a text encoder, whose vocabulary it must fit."""
    from transformers import CLIPTokenizerFast

    folder = base.part(encoder.tokenizer)
    try:
        tokenizer = CLIPTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise Refused(f"{folder} does not load: {one_line(error)}") from None
    config = loading.text_config(base.part(encoder.component))
    check_vocabulary(str(folder), tokenizer, config.vocab_size)
    return tokenizer


#: MindSpore's errors for an operator, or an operator and dtype, that the device does not support.
NO_KERNEL = re.compile(
    r"kernel \S+ unregistered|unsupported op|only supports? Ascend|select \w+ (operator|kernel)",
    re.IGNORECASE,
)


class Sampler(PipelineSampler):
    """A diffusers pipeline of mindone with replaceable components.

    Args:
        base: the pipeline.
        parts: component name to model; other components are loaded from the folder.
        dtype: dtype of the loaded components.
        flash: whether the VAE uses fused attention.

    Raises:
        Refused: a component is missing or cannot be loaded.
    """

    def __init__(
        self, base: Base, parts: Mapping[str, Any], dtype: ms.Type, *, flash: bool = True
    ) -> None:
        family = base.family
        index = base.index
        self._dtype = dtype
        self._encoder = encoder = Encoder(base, dtype, flash=flash)
        built: dict[str, Any] = {"scheduler": make_scheduler(base.scheduler)}
        built |= encoder.tokenizers | encoder.text_encoders | {"vae": encoder.vae}
        options = dict(family.pipeline_options)
        if "force_zeros_for_empty_prompt" in index:
            options["force_zeros_for_empty_prompt"] = index["force_zeros_for_empty_prompt"]
        pipe = getattr(diffusers, family.pipelines[0])(**{**built, **parts}, **options)
        if "add_time_ids" in family.inputs:
            _keep_sizes_exact(pipe)
        if base.reads_unusually:
            pipe.encode_prompt = encode_prompt_by(pipe, self._texts)
        super().__init__(pipe, family, make_scheduler)

    def _texts(self, prompts: list[str]) -> tuple[Tensor, Tensor | None]:
        clip = [getattr(self._pipe, name) for name in self._family.clip_encoders]
        states, pooled = self._encoder.texts(prompts, clip)
        as_pipeline = partial(Tensor, dtype=self._dtype)
        return as_pipeline(states), None if pooled is None else as_pipeline(pooled)

    def encode_picture(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._encoder.images(pixels)[0]

    def _call(self, batch: NoiseBatch, **options: Any) -> Any:
        latents = networks.tensor(batch.noise).astype(self._dtype)
        try:
            return self._pipe(batch.prompts, latents=latents, generator=batch.rngs, **options)[0]
        except (RuntimeError, TypeError) as error:
            if not NO_KERNEL.search(str(error)):
                raise
            name = type(self._pipe.scheduler).__name__
            target = ms.get_context("device_target")
            words = str(error).strip().splitlines()[0]
            raise Refused(
                f"MindSpore's {target} lacks an operator of the scheduler {name} ({words}): "
                "choose another scheduler"
            ) from error

    def _fully_masked(self, size: tuple[int, int]) -> NDArray[np.float32]:
        mean, _ = self._encoder.images(np.zeros((1, 3, *size), np.float32))
        return fully_masked(mean, self._encoder.info)

    def _to_device(self, array: NDArray[np.float32]) -> Tensor:
        return networks.tensor(array)

    def _append_channels(self, latents: Tensor, more: NDArray[np.float32]) -> Tensor:
        return ops.cat((latents, networks.tensor(more).astype(latents.dtype)), axis=1)


def make_scheduler(config: Mapping[str, Any]) -> Any:
    """Construct the scheduler of the class `_class_name` in a config.

    Raises:
        Refused: mindone has no scheduler of that name.
    """
    name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if kind is None:
        raise Refused(f"the scheduler {name} is not of this version of mindone")
    return kind.from_config(dict(config))


def _keep_sizes_exact(pipe: Any) -> None:
    """Make a pipeline compute `add_time_ids` in float32: float16 rounds integers above 2048."""
    made = pipe._get_add_time_ids

    def exact(*arguments: Any, **more: Any) -> Any:
        return made(*arguments, **{**more, "dtype": ms.float32})

    pipe._get_add_time_ids = exact


class ThePipeline(BasePipeline):
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob, base: Base) -> None:
        self._dtype = precision(job.dtype, choose(job.device)[0], "evaluate.dtype")
        start(job.device)
        super().__init__(job, base, make_scheduler)

    def _load_network(self, drawing: Drawing) -> networks.Network:
        job = self._job
        flash = job.flash_attention
        return load_network(drawing, self._base, self._dtype, job.text_dtype, flash=flash)

    def _open_sampler(self) -> Sampler:
        # The sampler loads its own text encoders: the next model may not have trained ones.
        denoiser = {self._network.family.denoiser: self._network.denoiser}
        return Sampler(self._base, denoiser, self._dtype, flash=self._job.flash_attention)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        return networks.Inputs(batch, self._network, self._dtype).errors(self._network).asnumpy()


def load_network(
    drawing: Drawing,
    base: Base,
    dtype: ms.Type,
    text_dtype: str | None = None,
    *,
    flash: bool = True,
) -> networks.Network:
    """Load the denoiser of a drawing and the text encoders that it runs, for inference in `dtype`.

    Adapters are merged in float32 before the weights are cast. `text_dtype` is as in
    sample/generate_job.py.

    Raises:
        Refused: weights or adapters are missing, damaged or of another architecture.
    """
    family = base.family

    def load(name: str, folder: Path, adapters: Mapping[str, Any]) -> Any:
        if name == family.denoiser:
            part = loading.load_denoiser(folder)
        else:
            part = loading.load_text_encoder(base, name, folder=folder)
        networks.merge_adapters(name, part, adapters)
        return part

    parts = load_trained_components(drawing, base, load)
    frozen = None
    if text_dtype is not None and parts.keys().isdisjoint(family.clip_encoders):
        frozen = networks.load_frozen_clip(base, text_dtype)
    network = networks.Network(family, parts, frozen)
    network.cast(dtype)
    for part in parts.values():
        loading.set_flash_attention(part, flash=flash)
    return network.set_train(False)
