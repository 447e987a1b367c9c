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
from runtimes.torch_models.encode_images_and_captions import Float32
from runtimes.torch_models.encode_token_ids import encode_ids, join_t5


class Encoder(encode_images_and_captions.Encoder):
    """The encoder of torch_models/encode_images_and_captions.py, compiled by JAX.

    Every batch is padded to one size and runs one program, so the bits of an image do not depend on
    the size of its batch.
    """

    def __init__(self, job: EncodeJob) -> None:
        self._compile_cache, mesh = start(job.device, job.compiled, job.dtype), Mesh(fsdp=1)
        super().__init__(job.model_folder, job.vae_folder, device="cpu", dtype=job.dtype)
        self._batch_size = job.batch_size
        clip = [model for _, model in self._clip]
        t5 = None if self._t5 is None else self._t5[1]
        self._moments = _compiled(Wrapped(self.vae, partial(_moments, self.vae.dtype)), mesh)
        self._embeds = _compiled(_Embeds(self.family, clip, t5), mesh)

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        mean, logvar = self._moments(self._batch_size, pixels)
        self._compile_cache.upload()
        return mean, logvar

    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[Float32, Float32 | None]:
        if clip:
            return super().texts(captions, clip)
        ids = [self.input_ids(captions).astype(np.int32)]
        if self._t5 is not None:
            ids.append(self._tokens.ids(self._t5[0], captions, self._t5_length).astype(np.int32))
        states, *pooled = self._embeds(TEXT_BATCH, *ids)
        return states, pooled[0] if pooled else None


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


def _moments(dtype: torch.dtype, vae: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Mean and log-variance [B, C, h, w] f32 of latents; a VAE of `dtype` computes them."""
    posterior = vae.encode(pixels.to(dtype)).latent_dist
    return posterior.mean.float(), posterior.logvar.float()


class _Embeds(torch.nn.Module):
    """Text encoders whose forward pass returns prompt embeddings and, if any, pooled ones."""

    def __init__(self, family: Family, clip: list[Any], t5: Any) -> None:
        super().__init__()
        self.family = family
        self.clip = torch.nn.ModuleList(clip)
        self.t5 = t5

    def forward(
        self, ids: torch.Tensor, t5_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        states, pooled = encode_ids(self.family, list(self.clip), ids)
        if t5_ids is not None:
            states = join_t5(states, self.t5(t5_ids.long())[0])
        return tuple(array.float() for array in (states, pooled) if array is not None)
