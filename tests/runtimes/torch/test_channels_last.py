"""Activations stay channels-last through diffusers' blocks, and are the numbers they were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from runtimes.torch.step import keep_channels_last


def make_unet(folder: Path, linear: bool) -> Any:
    config = json.loads((folder / "unet/config.json").read_text())
    torch.manual_seed(0)
    unet = UNet2DConditionModel.from_config({**config, "use_linear_projection": linear})
    return unet.to(memory_format=torch.channels_last)


def run(unet: Any, watch: Callable[..., None] | None = None) -> list[torch.Tensor]:
    for module in unet.modules():
        if watch and isinstance(module, ResnetBlock2D | Transformer2DModel):
            module.register_forward_hook(watch)
    torch.manual_seed(1)
    prompt, pooled, sizes = torch.randn(2, 6, 64), torch.randn(2, 24), torch.randn(2, 6)
    added = {"text_embeds": pooled, "time_ids": sizes}
    latents, timesteps = torch.randn(2, 4, 8, 8), torch.tensor([7, 400])
    predicted = unet(latents, timesteps, prompt, added_cond_kwargs=added).sample
    predicted.square().mean().backward()
    return [predicted, *(p.grad for p in unet.parameters())]


@pytest.mark.parametrize("linear", [True, False])
def test_nothing_falls_back_to_channels_first(tiny_sdxl: Path, linear: bool) -> None:
    plain = run(make_unet(tiny_sdxl, linear).train())
    unet = make_unet(tiny_sdxl, linear)
    keep_channels_last(unet)
    unet.train()
    seen: list[str] = []

    def watch(module: Any, given: tuple[Any, ...], output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        assert tensor.is_contiguous(memory_format=torch.channels_last), type(module)
        seen.append(type(module).__name__)

    for kept, expected in zip(run(unet, watch), plain, strict=True):
        torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-6)
    assert {"ResnetBlock2D", "Transformer2DModel"} <= set(seen)
