"""Sample images with mindone's pipelines and compute held-out losses, for a sequence of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindone import diffusers
from mindspore import ops
from numpy.typing import NDArray

from runtimes.contract import StepBatch, WrongInput
from runtimes.families import detect_family
from runtimes.families.unet_inputs import (
    NO_EXTRA_INPUTS,
    ExtraInputs,
    aesthetic_scores,
    fully_masked,
)
from runtimes.mindspore.encode import Encoder
from runtimes.mindspore.inputs import Inputs, tensor
from runtimes.mindspore.lora import merge_adapters
from runtimes.mindspore.models import load_denoiser, load_text_encoder, set_flash_attention
from runtimes.mindspore.network import Network
from runtimes.objective.scheduler_config import read_config, sampling_scheduler
from runtimes.pipeline_folder.describe import read_config as read_index
from runtimes.process.job import Drawing, GenerateJob
from runtimes.sample.start import (
    load_trained_components,
    load_trained_scheduler,
    noise_batches,
    optional_arguments,
)

#: MindSpore's errors for an operator, or an operator and dtype, that the device does not support.
NO_KERNEL = re.compile(
    r"kernel \S+ unregistered|unsupported op|only supports? Ascend|select \w+ (operator|kernel)",
    re.IGNORECASE,
)


class Sampler:
    """A diffusers pipeline of mindone with replaceable components.

    Initial noise is drawn on the host, so it is the same on every device.

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
        family, index = detect_family(folder), read_index(folder / "model_index.json")
        self._dtype = dtype
        self._family = family
        self._encoder = encoder = Encoder(folder, vae, dtype, flash=flash)
        built: dict[str, Any] = {"scheduler": make_scheduler(read_config(folder / "scheduler"))}
        built |= encoder.tokenizers | encoder.text_encoders | {"vae": encoder.vae}
        options = dict(family.pipeline_options)
        if "force_zeros_for_empty_prompt" in index:
            options["force_zeros_for_empty_prompt"] = index["force_zeros_for_empty_prompt"]
        self._defaults = {name: built[name] for name in ("scheduler", *family.clip_encoders)}
        self._pipe = getattr(diffusers, family.pipelines[0])(**{**built, **parts}, **options)
        self._pipe.set_progress_bar_config(disable=True)
        if "add_time_ids" in family.inputs:
            _keep_sizes_exact(self._pipe)

    def use(self, parts: Mapping[str, Any]) -> None:
        """Replace components of the pipeline; those not in `parts` are reset to the pipeline's."""
        self._pipe.register_modules(**{**self._defaults, **parts})

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
        drawn = list(self.draw_floats(prompts, sampler, first=first))
        return (np.concatenate(drawn) * 255).round().astype(np.uint8)

    def draw_floats(
        self, prompts: Sequence[str], sampler: dict[str, Any], *, first: int
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the images of each batch [B, H, W, 3] f32 in 0..1; arguments as for `draw`."""
        scheduler = sampling_scheduler(self._pipe.scheduler, sampler, make_scheduler)
        self._pipe.register_modules(scheduler=scheduler)
        unet = getattr(self._pipe, self._family.denoiser)
        for batch in noise_batches(
            prompts, sampler, self._family, unet.config, self._pipe.vae_scale_factor, first=first
        ):
            size = (batch.height, batch.width)
            try:
                with extra_inputs(unet, self._encoder, sampler, size):
                    drawn = self._pipe(
                        batch.prompts,
                        height=batch.height,
                        width=batch.width,
                        num_inference_steps=sampler["num_inference_steps"],
                        guidance_scale=sampler["guidance_scale"],
                        latents=tensor(batch.noise).astype(self._dtype),
                        generator=batch.rngs,
                        output_type="np",
                        **optional_arguments(sampler, len(batch.prompts)),
                    )[0]
            except (RuntimeError, TypeError) as error:
                raise self._no_kernel(error) from error
            yield np.asarray(drawn, np.float32)

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


@contextmanager
def extra_inputs(
    unet: Any, encoder: Encoder, sampler: dict[str, Any], size: tuple[int, int]
) -> Iterator[None]:
    """Within the context, the pipeline passes the UNet's extra inputs, as in torch/generate.py.

    The extra inputs (families/unet_inputs.py) are an inpainting mask that hides the whole image,
    and the requested aesthetic score.

    Args:
        unet: a forward pre-hook adds the inputs.
        encoder: its VAE encodes the masked image.
        sampler: as GenerateJob.sampler.
        size: (height, width) of the images, in pixels.
    """
    extras = ExtraInputs.from_config(unet.config)
    if extras == NO_EXTRA_INPUTS:
        yield
        return
    hidden = None
    if extras.inpainting:
        mean, _ = encoder.images(np.zeros((1, 3, *size), np.float32))
        hidden = fully_masked(mean, encoder.info)
    scores = aesthetic_scores(sampler) if extras.aesthetic_score else []

    def more(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        latents = given[0]
        if hidden is not None:
            seen = tensor(np.repeat(hidden, len(latents), axis=0)).astype(latents.dtype)
            given = (ops.cat((latents, seen), axis=1), *given[1:])
        if scores:  # with guidance, the unconditional rows come first
            asked = np.repeat(np.array(scores, np.float32), len(latents) // len(scores))
            named = {**named, "class_labels": tensor(asked)}
        return given, named

    handle = unet.register_forward_pre_hook(more, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class ThePipeline:
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob) -> None:
        self._model = Path(job.model)
        self._settings = job.sampler
        self._dtype = getattr(ms, job.dtype)
        self._flash = job.flash_attention
        self._vae = None if job.vae is None else Path(job.vae)
        self._sampler: Sampler | None = None

    def load(self, drawing: Drawing) -> None:
        self._network = load_network(drawing, self._model, self._dtype, flash=self._flash)
        self._scheduler = load_trained_scheduler(drawing, make_scheduler)
        self.encodes_text = self._network.encodes_text

    def draw(self, prompts: Sequence[str], first: int) -> NDArray[np.uint8]:
        parts = self._network.parts
        # The sampler loads its own text encoders: the next model may not have trained ones.
        if self._sampler is None:
            name = self._network.family.denoiser
            own = {name: parts[name]}
            self._sampler = Sampler(self._model, own, self._dtype, self._vae, flash=self._flash)
        own = {} if self._scheduler is None else {"scheduler": self._scheduler}
        self._sampler.use(parts | own)
        return self._sampler.draw(prompts, self._settings, first=first)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        inputs = Inputs(batch, self._network, self._dtype)
        return inputs.errors(self._network).asnumpy()

    def compile_seconds(self) -> float:
        return 0.0


def load_network(drawing: Drawing, model: Path, dtype: ms.Type, *, flash: bool = True) -> Network:
    """Load the denoiser of a drawing and its trained text encoders, for inference in `dtype`.

    Adapters are merged in float32 before the weights are cast.

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

    parts = load_trained_components(drawing, model, load)
    network = Network(family, parts)
    network.cast(dtype)
    for part in parts.values():
        set_flash_attention(part, flash=flash)
    return network.set_train(False)


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
