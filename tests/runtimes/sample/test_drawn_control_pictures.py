"""Pictures drawn with a ControlNet are those of diffusers' pipelines for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers_script import levels, read_pictures, start_noise
from PIL import Image

from configs.settings.train import Train
from runtimes.families.family import pack
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, Events, GenerateJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.control_network import new_control

pytestmark = pytest.mark.slow
STEPS = {"num_inference_steps": 2, "guidance_scale": 3.0}
#: Model -> largest difference: FLUX's pipeline draws the latents of the control picture from the
#: VAE's posterior, of which ours are the mean.
MODELS = {"tiny-sdxl": 1, "tiny-flux": 8}


def drawn_by_diffusers(base: Path, network: Path, control: Image.Image, *, flux: bool) -> Any:
    common: dict[str, Any] = {"height": 32, "width": 32, **STEPS}
    if flux:
        kind, pipeline = diffusers.FluxControlNetModel, diffusers.FluxControlNetPipeline
        pipe = pipeline.from_pretrained(base, controlnet=kind.from_pretrained(network))
        noise = pack(start_noise(1, (pipe.transformer.config.in_channels // 4, 8, 8), 7))
        generator = torch.Generator().manual_seed(0)
        common |= {"control_image": control, "max_sequence_length": 20, "generator": generator}
    else:
        network = diffusers.ControlNetModel.from_pretrained(network)
        pipe = diffusers.StableDiffusionXLControlNetPipeline.from_pretrained(
            base, controlnet=network, add_watermarker=False
        )
        noise = start_noise(1, (pipe.unet.config.in_channels, 8, 8), 7)
        common |= {"image": control}
    pipe.set_progress_bar_config(disable=True)
    return levels(pipe("a fox", latents=noise, **common).images)


@pytest.mark.parametrize("name", MODELS)
def test_a_picture_is_that_of_the_pipeline_of_diffusers(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model(name)
    network = new_control(Base.open(base), Train(method="controlnet"))
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():  # as if it was trained: new ones have no effect
        for part, parameter in network.named_parameters():
            if "controlnet" in part:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=rng))
    network.save_pretrained(tmp_path / "network")
    lines = np.zeros((32, 32, 3), np.uint8)
    lines[11] = lines[:, 20] = 255
    files = []
    for number, picture in enumerate((lines, 255 - lines)):
        files.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(picture).save(files[-1])
    drawings = (
        Drawing(str(tmp_path / "followed"), {"controlnet": str(tmp_path / "network")}),
        Drawing(str(tmp_path / "plain")),
    )
    sampler = {"seed": 7, "batch_size": 2, "height": 32, "width": 32, **STEPS}
    prompts = ("a fox", "a fox")
    job = GenerateJob("torch", str(base), drawings, prompts, sampler, "cpu", controls=(*files,))
    generate(job, Events())
    ours = read_pictures(tmp_path / "followed")[:1]
    assert np.abs(ours - read_pictures(tmp_path / "plain")[:1]).max() > 10
    control = Image.fromarray(lines)
    theirs = drawn_by_diffusers(base, tmp_path / "network", control, flux="flux" in name)
    assert np.abs(ours - theirs).max() <= MODELS[name]
