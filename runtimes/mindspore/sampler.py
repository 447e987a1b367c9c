"""Sampling with one of mindone's pipelines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindone import diffusers
from mindspore import Tensor, ops
from numpy.typing import NDArray

from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.families.inpainting_and_scores import fully_masked
from runtimes.mindspore.encoder import Encoder
from runtimes.mindspore.micro_batches import tensor
from runtimes.objective.scheduler_config import read_scheduler_config
from runtimes.pipeline_folder.read_configs import read_index
from runtimes.sample.diffusers_pipeline_sampler import PipelineSampler
from runtimes.sample.initial_noise import NoiseBatch

#: MindSpore's errors for an operator, or an operator and dtype, that the device does not support.
NO_KERNEL = re.compile(
    r"kernel \S+ unregistered|unsupported op|only supports? Ascend|select \w+ (operator|kernel)",
    re.IGNORECASE,
)


class Sampler(PipelineSampler):
    """A diffusers pipeline of mindone with replaceable components.

    Args:
        folder: local diffusers pipeline folder.
        parts: component name to model; other components are loaded from the folder.
        dtype: of the loaded components.
        vae: folder of an AutoencoderKL that replaces the pipeline's VAE.
        flash: whether the VAE uses fused attention.

    Raises:
        WrongInput: a component is missing or cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        parts: Mapping[str, Any],
        dtype: ms.Type,
        vae: Path | None = None,
        *,
        flash: bool = True,
    ) -> None:
        family, index = detect_family(folder), read_index(folder)
        self._dtype = dtype
        self._encoder = encoder = Encoder(folder, vae, dtype, flash=flash)
        built: dict[str, Any] = {
            "scheduler": make_scheduler(read_scheduler_config(folder / "scheduler"))
        }
        built |= encoder.tokenizers | encoder.text_encoders | {"vae": encoder.vae}
        options = dict(family.pipeline_options)
        if "force_zeros_for_empty_prompt" in index:
            options["force_zeros_for_empty_prompt"] = index["force_zeros_for_empty_prompt"]
        pipe = getattr(diffusers, family.pipelines[0])(**{**built, **parts}, **options)
        if "add_time_ids" in family.inputs:
            _keep_sizes_exact(pipe)
        super().__init__(pipe, family, make_scheduler)

    def _call(self, batch: NoiseBatch, **options: Any) -> Any:
        latents = tensor(batch.noise).astype(self._dtype)
        try:
            return self._pipe(batch.prompts, latents=latents, generator=batch.rngs, **options)[0]
        except (RuntimeError, TypeError) as error:
            raise self._no_kernel(error) from error

    def _no_kernel(self, error: Exception) -> Exception:
        """WrongInput with a remedy if the device lacks an operator, else `error` itself."""
        if not NO_KERNEL.search(str(error)):
            return error
        name, target = type(self._pipe.scheduler).__name__, ms.get_context("device_target")
        words = str(error).strip().splitlines()[0]
        return WrongInput(
            f"MindSpore's {target} lacks an operator of the scheduler {name} ({words}): "
            "choose another scheduler"
        )

    def _fully_masked(self, size: tuple[int, int]) -> NDArray[np.float32]:
        mean, _ = self._encoder.images(np.zeros((1, 3, *size), np.float32))
        return fully_masked(mean, self._encoder.info)

    def _to_device(self, array: NDArray[np.float32]) -> Tensor:
        return tensor(array)

    def _append_channels(self, latents: Tensor, more: NDArray[np.float32]) -> Tensor:
        return ops.cat((latents, tensor(more).astype(latents.dtype)), axis=1)


def make_scheduler(config: Mapping[str, Any]) -> Any:
    """Construct the scheduler of the class `_class_name` in a config.

    Raises:
        WrongInput: mindone has no scheduler of that name.
    """
    name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if kind is None:
        raise WrongInput(f"the scheduler {name} is not of this version of mindone")
    return kind.from_config(dict(config))


def _keep_sizes_exact(pipe: Any) -> None:
    """Make a pipeline compute `add_time_ids` in float32: float16 rounds integers above 2048."""
    made = pipe._get_add_time_ids

    def exact(*arguments: Any, **more: Any) -> Any:
        return made(*arguments, **{**more, "dtype": ms.float32})

    pipe._get_add_time_ids = exact
