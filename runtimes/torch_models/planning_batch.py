"""A batch that has the shapes of a run, to plan its step."""

from __future__ import annotations

import numpy as np

from artifacts.latent_shards import LatentSample
from runtimes.contract import StepBatch
from runtimes.families import Captioned
from runtimes.families.extra_inputs import ExtraInputs
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.network import Network


def sample_batch(base: Base, network: Network, size: tuple[int, int], *, text: bool) -> StepBatch:
    """A batch of one zero sample, with the shapes of a run's latents and conditioning.

    Args:
        base: the pipeline; configs are enough.
        network: network of the run.
        size: (height, width) of the picture, in pixels.
        text: whether the step encodes token ids.
    """
    family = network.family
    extras = ExtraInputs.from_config(network.denoiser.config)
    info = base.encoders
    rows, columns = (pixels // info["vae_scale_factor"] for pixels in size)
    latents = np.zeros((1, info["latent_channels"], rows, columns), np.float32)
    sample = LatentSample(latents[0], latents[0], bytes(32), size, (0, 0), size, False, (0,))
    pooled = info["pooled_dim"] and np.zeros(info["pooled_dim"], np.float32)
    ids = None
    if text:  # only CLIP encoders are trained; `info["tokens"]` of SD3 includes T5's tokens
        tokens = base.caption_limits[family.clip_encoders[0]]
        ids = np.zeros((len(family.clip_encoders), tokens), np.int32)
    embeds = np.zeros((info["tokens"], info["prompt_dim"]), np.float32)
    captioned = Captioned(sample, embeds, pooled, ids)
    conditioning = family.condition([captioned])
    if extras.inpainting:
        shape = (1, 1 + len(latents[0]), rows, columns)
        conditioning["inpainting"] = np.zeros(shape, np.float32)
    if extras.aesthetic_score:
        conditioning["aesthetic_score"] = np.zeros(1, np.float32)
    schedule = base.schedule()
    return StepBatch(
        step=0,
        noisy_latents=latents,
        timesteps=schedule.timesteps(np.zeros(1, np.int32)),
        target=latents,
        weight=np.ones(1, np.float32),
        conditioning=conditioning,
        denominator=1,
    )
