"""The whole sampler as one program draws what a program for each step draws."""

from pathlib import Path

import chips
import numpy as np
import pytest
import torch
from jobs import SAMPLER

from configs.errors import Refused
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing
from runtimes.torch_models.network import load_network

jax = chips.importorskip("jax")
from runtimes.jax.mesh import Mesh  # noqa: E402
from runtimes.jax.sampler import Sampler  # noqa: E402
from runtimes.jax.step import frozen_arrays  # noqa: E402

PROMPTS = ("a red cat", "a blue dog", "a hill")


@pytest.mark.slow
@pytest.mark.extended
def test_one_program_draws_as_one_for_each_step(tiny_sd: Path) -> None:
    """With the pipeline's text encoder, and with the same one as part of the network."""
    mesh, own = Mesh(1, jax.devices()[:1]), {"text_encoder": str(tiny_sd / "text_encoder")}
    drawn, cpu = [], torch.device("cpu")
    for whole, parts in ((False, {}), (True, {}), (True, own)):
        network = load_network(Drawing("", parts), Base.open(tiny_sd), torch.float32, cpu)
        assert bool(network.text_encoders) == bool(parts)
        sampler = Sampler(Base.open(tiny_sd), mesh, "float32", whole=whole)
        arrays = frozen_arrays(network, mesh, torch.float32)
        sampler.use(network, lambda arrays=arrays: arrays)
        drawn.append(sampler.draw(PROMPTS, SAMPLER, first=0).astype(int))
    assert drawn[0].shape == (3, 32, 32, 3) and drawn[0].std() > 1
    for others in drawn[1:]:
        assert np.abs(others - drawn[0]).max() <= 1  # of 255 levels
    turned = sampler.draw(PROMPTS[::-1], SAMPLER, first=0).astype(int)
    assert np.abs(turned - drawn[0]).max() >= 5, "by other prompts"


@pytest.mark.slow
def test_pictures_that_are_not_finite_are_an_error(tiny_sd: Path) -> None:
    mesh = Mesh(1, jax.devices()[:1])
    network = load_network(Drawing(""), Base.open(tiny_sd), torch.float32, torch.device("cpu"))
    torch.nn.init.constant_(network.denoiser.conv_out.bias, torch.nan)
    sampler, arrays = (
        Sampler(Base.open(tiny_sd), mesh, "float32"),
        frozen_arrays(network, mesh, torch.float32),
    )
    sampler.use(network, lambda: arrays)
    with pytest.raises(Refused, match="pictures are not finite"):
        sampler.draw(PROMPTS[:1], SAMPLER, first=0)


def test_a_vae_that_overflows_in_half_precision_stays_in_float32(tiny_sdxl: Path) -> None:
    sampler = Sampler(Base.open(tiny_sdxl), Mesh(1, jax.devices()[:1]), "float16")
    assert {array.dtype for array in sampler._vae.values()} == {np.dtype(np.float32)}
