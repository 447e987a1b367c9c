"""The true UNets of Stable Diffusion 2 base and XL: both are planned, and the smaller trains."""

import ctypes
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel

from configs.train import Train
from runtimes.contract import StepBatch
from runtimes.families import FAMILIES
from runtimes.process.job import TrainJob
from runtimes.torch.runtime import TheRuntime
from runtimes.torch_models.flop_count import FlopCounter
from runtimes.torch_models.network import Network

MODELS = Path(__file__).parents[3] / "bench/models"


@pytest.fixture(autouse=True)
def _hand_memory_back() -> Iterator[None]:
    """The runtime has the C library keep what is freed, and other tests run beside these."""
    yield
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def make_unet(name: str) -> Any:
    return UNet2DConditionModel.from_config(json.loads((MODELS / f"{name}.json").read_text()))


def make_without_weights(name: str) -> Any:
    with torch.device("meta"):
        return make_unet(name)


def make_batch(unet: Any, side: int, size: int = 1) -> StepBatch:
    """Of random numbers, for pictures whose latents are `side` wide and high."""
    rng, config = np.random.default_rng(0), unet.config

    def normal(*shape: int) -> Any:
        return rng.normal(size=(size, *shape)).astype(np.float32)

    conditioning = {"prompt_embeds": normal(77, config.cross_attention_dim)}
    if config.addition_embed_type == "text_time":
        conditioning |= {"pooled_prompt_embeds": normal(1280), "add_time_ids": normal(6)}
    return StepBatch(
        step=0,
        noisy_latents=normal(4, side, side),
        timesteps=rng.integers(0, 1000, size).astype(np.int32),
        target=normal(4, side, side),
        weight=np.ones(size, np.float32),
        conditioning=conditioning,
        denominator=size,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "millions", "side", "teraflop"),
    [
        ("sd2-base", "sd", 865.9, 64, 2.41),
        pytest.param("sdxl", "sdxl", 2567.5, 64, 4.77, marks=pytest.mark.soak),
        ("sdxl", "sdxl", 2567.5, 128, 20.28),
    ],
)
def test_weights_and_operations_are_those_of_the_real_model(
    name: str, family: str, millions: float, side: int, teraflop: float
) -> None:
    unet = make_without_weights(name)
    assert sum(p.numel() for p in unet.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    counter = FlopCounter(Network(FAMILIES[family], {"unet": unet}))
    counted = counter.of(make_batch(unet, side, size=3)) / 3
    # Ours are a little less: those published have gradients of the captions, which nobody needs.
    assert 0.985 * teraflop < counted / 1e12 < 1.002 * teraflop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guidance", "millions", "side", "tokens", "teraflop"),
    [  # MLPerf's shape is schnell at 256 x 256 pixels, with 256 tokens of T5: 20.3 TFLOP
        (False, 11891.2, 32, 256, 20.3),
        (True, 11901.4, 128, 512, None),
    ],
    ids=["schnell", "dev"],
)
def test_flux_has_the_weights_and_operations_of_the_real_one(
    guidance: bool, millions: float, side: int, tokens: int, teraflop: float | None
) -> None:
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(guidance_embeds=guidance)
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.1)
    family = FAMILIES["flux"]

    def zeros(*shape: int) -> Any:
        return np.zeros((1, *shape), np.float32)

    latents, guide = zeros(16, side, side), np.ones(1, np.float32)
    embeds = {"prompt_embeds": zeros(tokens, 4096), "pooled_prompt_embeds": zeros(768)}
    batch = StepBatch(0, latents, guide, latents, guide, {**embeds, "guidance": guide}, 1)
    counted = FlopCounter(Network(family, {"transformer": transformer})).of(batch)
    assert counted is not None
    hand = flux_flops((side // 2) ** 2, tokens)
    assert counted == pytest.approx(hand, rel=0.005)
    if teraflop is not None:
        assert counted / 1e12 == pytest.approx(teraflop, rel=0.01)


def flux_flops(image: int, text: int, width: int = 3072) -> float:
    """FLOPs of a forward and backward pass, by hand: three times the forward's matrix products.

    A token passes 12 width^2 weights in each of 19 double and 38 single blocks (query, key, value,
    projection and an MLP of four times the width); attention multiplies tokens by tokens twice.
    """
    tokens, blocks = image + text, 19 + 38
    weights = blocks * 12 * width**2 * tokens
    modulation = (19 * 2 * 6 + 38 * 3) * width**2  # once a picture
    attention = blocks * 2 * tokens**2 * width
    return 3.0 * 2 * (weights + modulation + attention)


@pytest.mark.soak
@pytest.mark.slow
def test_stable_diffusion_2_takes_a_step_on_a_cpu(tmp_path: Path) -> None:
    """AdamW in float32 takes 14 GB."""
    torch.manual_seed(0)
    make_unet("sd2-base").save_pretrained(tmp_path / "unet")
    gc.collect()
    index = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    train = Train(global_batch_size=1, learning_rate=1e-6, device="cpu").model_dump(mode="json")
    runtime = TheRuntime()
    runtime.load(TrainJob("torch", str(tmp_path), "", train, "", ""))
    batch = make_batch(make_without_weights("sd2-base"), 16)
    first, second = (runtime.step(batch, 1e-6) for _ in range(2))
    assert float(second.loss) < float(first.loss)
    assert np.isfinite(float(first.grad_norm))
    assert runtime.memory_bytes() < 20 * 2**30
