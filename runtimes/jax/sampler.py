"""Sampling as one compiled program: all scheduler steps, guidance and the VAE, on all devices.

The scheduler's coefficients are inputs of the program (sample/tabulated_schedulers.py), and batches
are padded to one size, so one program serves every batch. On a CPU each step is a separate program,
because XLA runs convolutions within a loop slowly there.

`ThePipeline` samples images and computes held-out losses for a sequence of models. `JaxEncoder`
encodes images and captions, in padded batches sharded over all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from numpy.typing import NDArray

from artifacts.latent_shards import LatentScale
from runtimes.contract import UNCAST, StepBatch
from runtimes.data.loader import pad_rows, padded_rows
from runtimes.families import Family
from runtimes.jax.device import compile_seconds, start
from runtimes.jax.mesh import Mesh
from runtimes.jax.step import Arrays, errors, frozen_arrays, held_out_errors, move
from runtimes.jax.torchax_bridge import Wrapped, as_function
from runtimes.pipeline_folder.folder import TEXT_BATCH, Base
from runtimes.process.job import Drawing, EncodeJob, GenerateJob
from runtimes.sample.diffusers_pipeline import BasePipeline
from runtimes.sample.sampling_inputs import (
    NO_REFERENCES,
    ConditionedNoise,
    Conditioner,
    Images,
    References,
    image_levels,
)
from runtimes.sample.tabulated_schedulers import SchedulerTable, scheduler_step
from runtimes.torch_models import vae_text_encoders
from runtimes.torch_models.loading import make_scheduler
from runtimes.torch_models.network import Network, load_network


class Sampler:
    """Samples images with a network and a pipeline's encoders, VAE and scheduler.

    Captions are encoded on the host, except by text encoders that were trained with the network.

    Args:
        base: the pipeline.
        mesh: devices that share the rows of a batch.
        dtype: dtype of the network's arrays and the VAE. A VAE with `force_upcast` uses float32
            where `dtype` is float16.
        whole: whether all steps are one program; None is True except on a CPU.

    Raises:
        Refused: a component is missing or cannot be loaded.
    """

    def __init__(self, base: Base, mesh: Mesh, dtype: str, *, whole: bool | None = None) -> None:
        self._mesh = mesh
        self._dtype = jnp.dtype(dtype)
        self._whole = mesh.platform != "cpu" if whole is None else whole
        self._encoder = vae_text_encoders.Encoder(base, device="cpu")
        self._base = base
        decoder = Wrapped(self._encoder.vae, self._encoder.family.decode_latents)
        wide = vae_text_encoders.vae_dtype(self._encoder.vae.config, getattr(torch, dtype))
        arrays = move(decoder, mesh, wide)
        self._vae_on_host = {name: np.asarray(array) for name, array in arrays.items()}
        self._vae_dtype = jnp.dtype(str(wide).removeprefix("torch."))
        self._decoder = as_function(decoder, training=False)
        self._jit_decode = jax.jit(self._decode)
        self._pipeline_scheduler = make_scheduler(base.scheduler)
        self._network: Any = None

    def use(self, network: Network, arrays: Callable[[], Arrays], scheduler: Any = None) -> None:
        """Set the network; programs of an earlier network with the same architecture are reused.

        Args:
            network: its own weights are not used.
            arrays: returns its parameters and buffers, by their names in it.
            scheduler: scheduler of the network; None selects the pipeline's scheduler.
        """
        self._arrays = arrays
        self._scheduler = self._pipeline_scheduler if scheduler is None else scheduler
        if self._network is not None and same_architecture(network, self._network):
            return
        self._network = network
        self._predict = as_function(network, training=False)
        self._jit_step = jax.jit(self._step)
        self._jit_draw = jax.jit(self._draw)
        self._jit_encode = jax.jit(as_function(Wrapped(network, _encode_texts), training=False))

    def draw(
        self,
        prompts: Sequence[str],
        sampler: dict[str, Any],
        *,
        first: int,
        references: References = NO_REFERENCES,
    ) -> NDArray[np.uint8]:
        """As `PipelineSampler.draw`: images [N, H, W, 3] uint8, one per prompt."""
        arrays = self._arrays()
        trained = self._network.text_encoders
        texts = partial(self._texts, arrays) if trained else self._encoder.texts
        conditioner = Conditioner(self._encoder.info, texts, lambda pixels: self._images(pixels))
        config = self._network.denoiser.config
        table = conditioner.table(self._scheduler, sampler, config)
        guidance = self._network.family.guidance_weight(sampler)
        pictures = list[NDArray[np.uint8]]()
        options: dict[str, Any] = {"denoiser": config, "multiple": self._mesh.count}
        options |= {"first": first, "references": references}
        for batch in conditioner.batches(prompts, sampler, **options):
            drawn = self._mesh.fetch(self._sample(arrays, batch, table, guidance))
            pictures.append(image_levels(drawn[: batch.count]))
        return np.concatenate(pictures)

    def encode_picture(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `PipelineSampler.encode_picture`, on the host."""
        return self._images(pixels)[0]

    @cached_property
    def _vae(self) -> Arrays:
        """The VAE's arrays on every device, until `release`."""
        return {name: self._mesh.replicate(array) for name, array in self._vae_on_host.items()}

    def release(self) -> None:
        """Free the VAE's memory on the devices; the next `draw` copies it there again."""
        self.__dict__.pop("_vae", None)

    @cached_property
    def _images(self) -> Images:
        """A second encoder's: the weights of the VAE in `_encoder` were moved to the devices."""
        return vae_text_encoders.Encoder(self._base, device="cpu", embeds=False).images

    def _sample(
        self, arrays: Arrays, batch: ConditionedNoise, table: SchedulerTable, guidance: float
    ) -> Array:
        to_devices = self._mesh.shard_global_rows
        conditioning = {
            name: to_devices(array if name in UNCAST else array.astype(self._dtype))
            for name, array in batch.conditioning.items()
        }
        latents = to_devices(batch.noise * np.float32(table.start))
        rows = np.column_stack([table.timesteps, table.rows])
        inputs = conditioning, np.float32(guidance)
        if self._whole:
            return self._jit_draw(arrays, self._vae, latents, rows, inputs)
        carry = latents, latents * 0
        for row in rows:
            carry = self._jit_step(arrays, carry, row, inputs)
        return self._jit_decode(self._vae, carry[0])

    def _draw(
        self, arrays: Arrays, vae: Arrays, latents: Array, rows: Array, inputs: tuple[Arrays, Array]
    ) -> Array:
        def step(carry: Any, row: Array) -> Any:
            return self._step(arrays, carry, row, inputs), None

        (latents, _), _ = jax.lax.scan(step, (latents, jnp.zeros_like(latents)), rows)
        return self._decode(vae, latents)

    def _step(
        self, arrays: Arrays, carry: tuple[Array, Array], row: Array, inputs: tuple[Arrays, Array]
    ) -> tuple[Array, Array]:
        """One sampling step.

        Args:
            arrays: the network's.
            carry: noisy latents, and the predicted original of the previous step; both are
                [B, C, h, w] f32.
            row: [7] f32, the timestep and the 6 StepCoefficients.
            inputs: conditioning, keyword to [B, ...] or, with guidance, [2 B, ...]; and the weight
                of guidance, a f32 scalar.

        Returns:
            The next carry.
        """
        latents, previous = carry
        conditioning, guidance = inputs
        timestep, *coefficients = row
        guided = len(conditioning["prompt_embeds"]) > len(latents)
        scaled = (latents * coefficients[0]).astype(self._dtype)
        if guided:
            scaled = jnp.repeat(scaled, 2, axis=0)
        timesteps = jnp.full(len(scaled), timestep)
        output = self._predict(arrays, jnp.uint32(0), scaled, timesteps, conditioning)
        output = output.astype(jnp.float32)
        if guided:
            output = self._network.family.guide(output[0::2], output[1::2], guidance)
        return scheduler_step(latents, previous, output, coefficients)

    def _decode(self, vae: Arrays, latents: Array) -> Array:
        """Decode latents [B, C, h, w] f32 to images [B, H, W, 3] f32 in 0..1."""
        scale, shift = LatentScale.from_info(self._encoder.info).unscaled(latents.shape[1:])
        latents = latents * scale + shift
        pixels = self._decoder(vae, jnp.uint32(0), latents.astype(self._vae_dtype))
        return jnp.clip(pixels.astype(jnp.float32) / 2 + 0.5, 0, 1).transpose(0, 2, 3, 1)

    def _texts(
        self, arrays: Arrays, captions: list[str]
    ) -> tuple[vae_text_encoders.Float32, vae_text_encoders.Float32 | None]:
        """Prompt embeddings [B, T, D] f32 and pooled embeddings [B, P] f32 or None.

        The network's trained encoders compute CLIP's embeddings on the devices; T5 runs on the
        host.
        """
        count = len(captions)
        ids = self._encoder.input_ids(captions).astype(np.int32)
        ids = pad_rows(ids, padded_rows(count, self._mesh.count))
        named = {f"module.{name}": array for name, array in arrays.items()}
        encoded = self._jit_encode(named, jnp.uint32(0), self._mesh.shard_global_rows(ids))
        states, pooled = (
            None
            if array is None
            else torch.from_numpy(self._mesh.fetch(array)[:count].astype(np.float32))
            for array in encoded
        )
        if (t5 := self._encoder.t5(captions)) is not None:
            states = vae_text_encoders.join_t5(states, torch.from_numpy(t5))
        assert states is not None, "each family has CLIP's states or a T5"
        weighed = self._encoder.weighed(states.numpy(), captions)
        return weighed, None if pooled is None else pooled.numpy()


def same_architecture(network: Network, other: Network) -> bool:
    """Whether two networks have the same components with the same configs.

    They are then the same function of their arrays, so they can share compiled programs.
    """
    configs = [{n: str(p.config) for n, p in each.parts.items()} for each in (network, other)]
    return configs[0] == configs[1]


def _encode_texts(network: Network, ids: torch.Tensor) -> Any:
    """Encode token ids [B, n, T] by the trained text encoders of a network."""
    return vae_text_encoders.encode_ids(network.family, network.text_encoders, ids)


class ThePipeline(BasePipeline):
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob, base: Base) -> None:
        save_compiled = start(job.device, job.compiled, job.dtype).upload
        super().__init__(job, base, make_scheduler, save_compiled)
        self._mesh = Mesh(fsdp=1)

    def _release(self) -> None:
        self._arrays: Arrays = {}  # the network itself has no weights

    def _load_network(self, drawing: Drawing) -> Network:
        half = getattr(torch, self._job.dtype)
        network = load_network(drawing, self._base, half, torch.device("cpu"), self._job.text_dtype)
        self._arrays = frozen_arrays(network, self._mesh, half)
        if self._network is not None and same_architecture(network, self._network):
            return self._network  # its programs are reused
        self._errors = jax.jit(partial(errors, as_function(network, training=False)))
        return network

    def _open_sampler(self) -> Sampler:
        return Sampler(self._base, self._mesh, self._job.dtype)

    def _use_network(self) -> None:
        self._sampler.use(self._network, lambda: self._arrays, self._scheduler)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        dtype = jnp.dtype(self._job.dtype)
        rows = self._loss_rows
        return held_out_errors(self._errors, self._arrays, batch, rows, self._mesh, dtype)

    def compile_seconds(self) -> float:
        return compile_seconds()


class JaxEncoder(vae_text_encoders.Encoder):
    """The encoder of torch_models/vae_text_encoders.py, compiled by JAX.

    Every batch is padded to one size and runs one program, so the bits of an image do not depend on
    the size of its batch. A text encoder that sees references stays on the host: it would need a
    program for each number and shape of pictures.
    """

    def __init__(self, job: EncodeJob) -> None:
        self._compile_cache = start(job.device, job.compiled, job.dtype)
        mesh = Mesh(fsdp=1)
        super().__init__(Base.of(job), device="cpu", dtype=job.dtype, embeds=job.embeds)
        self._batch_size = job.batch_size
        clip = [model for _, model in self._clip]
        frozen = None if self._frozen is None else self._frozen.model
        dtype = self.vae.dtype

        def moments(vae: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mean, logvar = self.family.encode_pictures(vae, pixels.to(dtype))
            return mean.float(), logvar.float()

        self._moments = _compiled(Wrapped(self.vae, moments), mesh)
        self._embeds: Any = None
        if job.embeds and not self.family.sees_references:
            self._embeds = _compiled(_Embeds(self.family, clip, frozen), mesh)

    def images(
        self, pixels: vae_text_encoders.Float32
    ) -> tuple[vae_text_encoders.Float32, vae_text_encoders.Float32]:
        mean, logvar = self._moments(self._batch_size, pixels)
        self._compile_cache.upload()
        return mean, logvar

    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[vae_text_encoders.Embeds, vae_text_encoders.Float32 | None]:
        if clip:
            return super().texts(captions, clip)
        arrays = [self.input_ids(captions)] if self._clip else []
        kept = None
        if self._frozen is not None:
            ids, mask = self._frozen.ids(captions)
            kept = self._frozen.kept(mask)
            arrays += [ids, mask]
        states, *pooled = self._embeds(TEXT_BATCH, *(array.astype(np.int32) for array in arrays))
        states = self.weighed(states, captions)
        return vae_text_encoders.unpadded(states, kept), pooled[0] if pooled else None


def open_encoder(job: EncodeJob) -> JaxEncoder:
    """Open the encoders of a job. Raises Refused."""
    return JaxEncoder(job)


def _compiled(module: torch.nn.Module, mesh: Mesh) -> Any:
    """Move a module to the devices and compile it.

    Returns:
        A function of the number of rows to pad to, and of the module's inputs as host arrays
        [B, ...]. It returns the module's outputs as host arrays [B, ...].
    """
    arrays = move(module, mesh)
    call = jax.jit(as_function(module, training=False))

    def run(rows: int, *inputs: NDArray[Any]) -> list[vae_text_encoders.Float32]:
        count = len(inputs[0])
        padded = padded_rows(max(rows, count), mesh.local)
        sent = [mesh.shard_rows(pad_rows(array, padded)) for array in inputs]
        return [mesh.fetch(output)[:count] for output in call(arrays, jnp.uint32(0), *sent)]

    return run


class _Embeds(torch.nn.Module):
    """Text encoders whose forward pass returns prompt embeddings and, if any, pooled ones."""

    def __init__(self, family: Family, clip: list[Any], frozen: Any) -> None:
        super().__init__()
        self.family = family
        self.clip = torch.nn.ModuleList(clip)
        self.frozen = frozen

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Args: CLIP's ids [K, n, T] if it is there; ids and mask [K, T] of the frozen encoder."""
        rest = list(inputs)
        states = None
        pooled = None
        if len(self.clip):
            states, pooled = vae_text_encoders.encode_ids(self.family, list(self.clip), rest.pop(0))
        if rest:
            ids, mask = rest
            encoder = self.family.frozen_text
            assert encoder is not None
            frozen = vae_text_encoders.frozen_states(encoder, self.frozen, ids.long(), mask.long())
            states = vae_text_encoders.join_t5(states, frozen)
        return tuple(array.float() for array in (states, pooled) if array is not None)
