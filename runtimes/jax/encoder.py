"""Encode images and captions by JAX, in padded batches sharded over all devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray

from runtimes.data.padding import pad_rows, padded_rows
from runtimes.families import Family
from runtimes.jax.device import start
from runtimes.jax.mesh import Mesh
from runtimes.jax.parameters_and_optimizer_state import move
from runtimes.jax.torchax_bridge import Wrapped, as_function
from runtimes.pipeline_folder.describe_encoders import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.torch_models import encode_images_and_captions
from runtimes.torch_models.encode_images_and_captions import Embeds, Float32, unpadded
from runtimes.torch_models.encode_token_ids import encode_ids, join_t5
from runtimes.torch_models.frozen_text import frozen_states


class Encoder(encode_images_and_captions.Encoder):
    """The encoder of torch_models/encode_images_and_captions.py, compiled by JAX.

    Every batch is padded to one size and runs one program, so the bits of an image do not depend on
    the size of its batch.
    """

    def __init__(self, job: EncodeJob) -> None:
        self._compile_cache, mesh = start(job.device, job.compiled, job.dtype), Mesh(fsdp=1)
        folders = (job.model_folder, job.vae_folder)
        super().__init__(*folders, device="cpu", dtype=job.dtype, embeds=job.embeds)
        self._batch_size = job.batch_size
        clip = [model for _, model in self._clip]
        frozen = None if self._frozen is None else self._frozen.model
        moments = partial(_moments, self.family, self.vae.dtype)
        self._moments = _compiled(Wrapped(self.vae, moments), mesh)
        self._embeds: Any = None
        if job.embeds:
            self._embeds = _compiled(_Embeds(self.family, clip, frozen), mesh)

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        mean, logvar = self._moments(self._batch_size, pixels)
        self._compile_cache.upload()
        return mean, logvar

    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[Embeds, Float32 | None]:
        if clip:
            return super().texts(captions, clip)
        given = [self.input_ids(captions)] if self._clip else []
        kept = None
        if self._frozen is not None:
            ids, mask = self._frozen.ids(captions)
            kept = self._frozen.kept(mask)
            given += [ids, mask]
        states, *pooled = self._embeds(TEXT_BATCH, *(array.astype(np.int32) for array in given))
        return unpadded(states, kept), pooled[0] if pooled else None


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises WrongInput."""
    return Encoder(job)


def _compiled(module: torch.nn.Module, mesh: Mesh) -> Any:
    """Move a module to the devices and compile it.

    Returns:
        A function of the number of rows to pad to, and of the module's inputs as host arrays
        [B, ...]. It returns the module's outputs as host arrays [B, ...].
    """
    arrays, call = move(module, mesh), jax.jit(as_function(module, training=False))

    def run(rows: int, *given: NDArray[Any]) -> list[Float32]:
        count = len(given[0])
        padded = padded_rows(max(rows, count), mesh.local)
        sent = [mesh.shard_rows(pad_rows(array, padded)) for array in given]
        return [mesh.fetch(found)[:count] for found in call(arrays, jnp.uint32(0), *sent)]

    return run


def _moments(
    family: Family, dtype: torch.dtype, vae: Any, pixels: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Mean and log-variance [B, C, h, w] f32 of latents; a VAE of `dtype` computes them."""
    mean, logvar = family.encode_pictures(vae, pixels.to(dtype))
    return mean.float(), logvar.float()


class _Embeds(torch.nn.Module):
    """Text encoders whose forward pass returns prompt embeddings and, if any, pooled ones."""

    def __init__(self, family: Family, clip: list[Any], frozen: Any) -> None:
        super().__init__()
        self.family = family
        self.clip = torch.nn.ModuleList(clip)
        self.frozen = frozen

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Args: CLIP's ids [K, n, T] if it is there; ids and mask [K, T] of the frozen encoder."""
        rest, states, pooled = list(given), None, None
        if len(self.clip):
            states, pooled = encode_ids(self.family, list(self.clip), rest.pop(0))
        if rest:
            ids, mask = rest
            assert self.family.frozen_text is not None
            found = frozen_states(self.family.frozen_text, self.frozen, ids.long(), mask.long())
            states = join_t5(states, found)
        return tuple(array.float() for array in (states, pooled) if array is not None)
