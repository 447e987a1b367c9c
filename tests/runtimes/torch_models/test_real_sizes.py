"""The true UNets of Stable Diffusion 2 base and XL: both are planned, and the smaller trains."""

import ctypes
import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)

from bench.benchmark_inputs import MODELS
from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.families import FAMILIES
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch.runtime import TheRuntime
from runtimes.torch_models.network import FlopCounter, Network


@pytest.fixture(autouse=True)
def _hand_memory_back() -> Iterator[None]:
    """The runtime has the C library keep what is freed, and other tests run beside these."""
    yield
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def make_unet(name: str) -> Any:
    return UNet2DConditionModel.from_config(
        json.loads((MODELS / name / "unet/config.json").read_text())
    )


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


def count_flops(
    family: str, transformer: Any, channels: int, side: int, **conditioning: tuple[int, ...]
) -> float:
    """FLOP of a step with one picture; conditioning by its shape, without the batch axis."""
    latents, one = np.zeros((1, channels, side, side), np.float32), np.ones(1, np.float32)
    given = {name: np.ones((1, *shape), np.float32) for name, shape in conditioning.items()}
    batch = StepBatch(0, latents, one, latents, one, given, 1)
    counted = FlopCounter(Network(FAMILIES[family], {"transformer": transformer})).of(batch)
    assert counted is not None
    return counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "millions", "side", "teraflop"),
    [
        ("stable-diffusion-2-base", "sd", 865.9, 64, 2.41),
        pytest.param(
            "stable-diffusion-xl-base-1.0", "sdxl", 2567.5, 64, 4.77, marks=pytest.mark.soak
        ),
        pytest.param(
            "stable-diffusion-xl-base-1.0", "sdxl", 2567.5, 128, 20.28, marks=pytest.mark.extended
        ),
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


@pytest.mark.extended
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
    shapes = {"prompt_embeds": (tokens, 4096), "pooled_prompt_embeds": (768,), "guidance": ()}
    counted = count_flops("flux", transformer, 16, side, **shapes)
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


@pytest.mark.slow
def test_sd35_medium_has_the_weights_and_operations_of_the_real_one() -> None:
    """The published 2.5 B, of which 0.23 B are its table of positions."""
    config = MODELS / "stable-diffusion-3.5-medium/transformer/config.json"
    with torch.device("meta"):
        transformer = SD3Transformer2DModel.from_config(json.loads(config.read_text()))
    width, side, tokens, layers, dual = 1536, 128, 77 + 256, 24, 13
    count = sum(parameter.numel() for parameter in transformer.parameters())
    # Of the text, the last block has query, key and value only. 6 modulations a block and stream,
    # 3 more for a second attention; 2 at each end, and 2 of time and pooled text.
    image, text = 12 * layers + 4 * dual, 12 * (layers - 1) + 3
    modulation = 6 * layers + 3 * dual + 6 * (layers - 1) + 2 + 2 + 2
    ends = 4096 + 2048 + 256
    hand = (image + text + modulation) * width**2 + ends * width
    assert count == pytest.approx(hand, rel=1e-3)
    assert (count + 384**2 * width) / 1e9 == pytest.approx(2.47, abs=0.01)
    shapes = {"prompt_embeds": (tokens, 4096), "pooled_prompt_embeds": (2048,)}
    counted = count_flops("sd3", transformer, 16, side, **shapes)
    pixels = (side // 2) ** 2
    weights = (image * pixels + text * tokens) * width**2 + 4096 * width * tokens
    attention = 2 * (layers * (pixels + tokens) ** 2 + dual * pixels**2) * width
    assert counted == pytest.approx(3 * 2 * (weights + attention), rel=0.005)


@pytest.mark.slow
def test_flux2_klein_has_the_weights_and_operations_of_the_real_one() -> None:
    """The published 4B: 5 double and 20 single blocks, and states of a Qwen3 of 4 B."""
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            joint_attention_dim=3 * 2560,
            guidance_embeds=False,
        )
    width, side, tokens = 3072, 128, 512
    count = sum(parameter.numel() for parameter in transformer.parameters())
    # A block's MLP has three times the width, and a gate: 4 + 9 width^2, twice in double blocks.
    blocks, modulation = 5 * 2 + 20, 2 * 6 + 3
    ends = 128 * 2 + 3 * 2560 + 256 + 3 * width
    assert count == pytest.approx((blocks * 13 + modulation) * width**2 + ends * width, rel=1e-4)
    assert count / 1e9 == pytest.approx(3.88, abs=0.01)
    counted = count_flops("flux2", transformer, 32, side, prompt_embeds=(tokens, 3 * 2560))
    sequence = (side // 2) ** 2 + tokens  # a token passes one stream of a double block
    weights = 25 * 13 * width**2 * sequence + 3 * 2560 * width * tokens
    attention = 25 * 2 * sequence**2 * width
    assert counted == pytest.approx(3 * 2 * (weights + attention), rel=0.005)


@pytest.mark.slow
def test_z_image_has_the_weights_and_operations_of_the_real_one() -> None:
    """The published 6 B: 30 layers and two refiners of 2, of a width of 3840."""
    with torch.device("meta"):
        transformer = ZImageTransformer2DModel()  # diffusers' defaults are the published sizes
    count = sum(parameter.numel() for parameter in transformer.parameters())
    width, side, tokens = 3840, 128, 512
    # A block has four matrices of attention, and three of 8 / 3 widths; all but the context
    # refiner's have a modulation of 4 widths from 256 features.
    block, modulation = 12 * width**2, 4 * 257 * width
    assert count == pytest.approx(34 * block + 32 * modulation + 2560 * width, rel=2e-3)
    assert count / 1e9 == pytest.approx(6.15, abs=0.01)
    shapes = {"prompt_embeds": (tokens, 2560), "prompt_embeds_mask": (tokens,)}
    counted = count_flops("z_image", transformer, 16, side, **shapes)
    image = (side // 2) ** 2

    def layers(count: int, sequence: int) -> int:
        return count * (block * sequence + 2 * sequence**2 * width)

    hand = layers(30, image + tokens) + layers(2, image) + layers(2, tokens)
    assert counted == pytest.approx(3 * 2 * hand, rel=0.005)


@pytest.mark.soak
@pytest.mark.slow
def test_qwen_image_has_the_weights_and_operations_of_the_real_one() -> None:
    """The published 20 B: 60 blocks of two streams, each with attention, MLP and modulation."""
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel()  # diffusers' defaults are the published sizes
    count = sum(parameter.numel() for parameter in transformer.parameters())
    width, side, tokens = 3072, 128, 512
    stream, modulation = 12 * width**2, 6 * width**2
    assert count == pytest.approx(60 * 2 * (stream + modulation), rel=5e-3)
    assert count / 1e9 == pytest.approx(20.43, abs=0.01)
    shapes = {"prompt_embeds": (tokens, 3584), "prompt_embeds_mask": (tokens,)}
    counted = count_flops("qwen_image", transformer, 16, side, **shapes)
    sequence = (side // 2) ** 2 + tokens
    hand = 60 * (stream * sequence + 2 * modulation + 2 * sequence**2 * width)
    assert counted == pytest.approx(3 * 2 * hand, rel=0.005)


@pytest.mark.soak
@pytest.mark.slow
def test_stable_diffusion_2_takes_a_step_on_a_cpu(tmp_path: Path) -> None:
    """AdamW in float32 takes 14 GB. If the kernel kills this process, pytest-xdist never ends."""
    memory = Path("/proc/meminfo")
    free = re.search(r"MemAvailable:\s+(\d+)", memory.read_text() if memory.exists() else "")
    if free is not None and int(free[1]) * 1024 < 15e9:
        pytest.skip("15 GB of memory are not free")
    torch.manual_seed(0)
    make_unet("stable-diffusion-2-base").save_pretrained(tmp_path / "unet")
    gc.collect()
    index = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    train = Train(global_batch_size=1, learning_rate=1e-6, device="cpu").model_dump(mode="json")
    runtime = TheRuntime()
    runtime.load(TrainJob("torch", str(tmp_path), "", train, "", ""), Base.open(tmp_path))
    batch = make_batch(make_without_weights("stable-diffusion-2-base"), 16)
    first, second = (runtime.step(batch, 1e-6) for _ in range(2))
    assert float(second.loss) < float(first.loss)
    assert np.isfinite(float(first.grad_norm))
    assert runtime.memory_bytes() < 20 * 2**30
