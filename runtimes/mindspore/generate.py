"""Sample images with mindone's pipelines and compute held-out losses, for a sequence of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from runtimes.contract import StepBatch
from runtimes.families import detect_family
from runtimes.mindspore.device import choose, precision, start
from runtimes.mindspore.load_diffusers_weights import (
    load_denoiser,
    load_text_encoder,
    set_flash_attention,
)
from runtimes.mindspore.lora_injection import merge_adapters
from runtimes.mindspore.micro_batches import Inputs
from runtimes.mindspore.network import Network, load_frozen_clip
from runtimes.mindspore.sampler import Sampler, make_scheduler
from runtimes.process.job import Drawing, GenerateJob
from runtimes.sample.base_pipeline import BasePipeline
from runtimes.sample.trained_components import load_trained_components


class ThePipeline(BasePipeline):
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob) -> None:
        self._dtype = precision(job.dtype, choose(job.device)[0], "evaluate.dtype")
        start(job.device)
        super().__init__(job, make_scheduler)

    def _load_network(self, drawing: Drawing) -> Network:
        job = self._job
        given = (drawing, job.model_folder, self._dtype, job.text_dtype)
        return load_network(*given, flash=job.flash_attention)

    def _open_sampler(self) -> Sampler:
        # The sampler loads its own text encoders: the next model may not have trained ones.
        job, name = self._job, self._network.family.denoiser
        denoiser, flash = {name: self._network.denoiser}, job.flash_attention
        return Sampler(job.model_folder, denoiser, self._dtype, job.vae_folder, flash=flash)

    def _use_network(self) -> None:
        self._sampler.use(self._network.parts, self._scheduler)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        inputs = Inputs(batch, self._network, self._dtype)
        return inputs.errors(self._network).asnumpy()


def load_network(
    drawing: Drawing,
    model: Path,
    dtype: ms.Type,
    text_dtype: str | None = None,
    *,
    flash: bool = True,
) -> Network:
    """Load the denoiser of a drawing and the text encoders that it runs, for inference in `dtype`.

    Adapters are merged in float32 before the weights are cast. `text_dtype` is as in
    sample/load_network.py.

    Raises:
        WrongInput: weights or adapters are missing, damaged or of another architecture.
    """
    family = detect_family(model)

    def load(name: str, folder: Path, adapters: Mapping[str, Any]) -> Any:
        if name == family.denoiser:
            part = load_denoiser(folder)
        else:
            part = load_text_encoder(model, name, folder=folder)
        merge_adapters(name, part, adapters)
        return part

    parts, frozen = load_trained_components(drawing, model, load), None
    if text_dtype is not None and parts.keys().isdisjoint(family.clip_encoders):
        frozen = load_frozen_clip(model, family, text_dtype)
    network = Network(family, parts, frozen)
    network.cast(dtype)
    for part in parts.values():
        set_flash_attention(part, flash=flash)
    return network.set_train(False)
