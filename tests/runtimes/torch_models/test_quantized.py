"""Frozen 8-bit layers: their rounding error, gradients, memory, and what they leave as it is."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import MakeJob, start
from torch.autograd.graph import saved_tensors_hooks

from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.network import Network
from runtimes.torch_models.quantized import PRECISIONS, Int8Linear, QuantizedLinear
from runtimes.torch_models.vae_text_encoders import Encoder

pytestmark = pytest.mark.slow

INT8: dict[str, Any] = {"method": "lora", "lora": {"base_precision": "int8"}}


def layers(
    dtype: torch.dtype = torch.float32, kind: type[QuantizedLinear] = Int8Linear
) -> tuple[torch.nn.Linear, QuantizedLinear]:
    torch.manual_seed(0)
    plain = torch.nn.Linear(48, 32).to(dtype).requires_grad_(False)
    with torch.no_grad():
        plain.weight[3] *= 1000  # rows have scales of their own
        plain.weight[5] = 0.0
    return plain, kind.of(plain)


def test_each_row_is_rounded_by_its_own_scale() -> None:
    plain, rounded = layers()
    dequantized = rounded.weight.float() * rounded.scale
    error = (dequantized - plain.weight).abs().amax(1)
    assert (error <= plain.weight.abs().amax(1) / 127 / 2 * 1.001).all()
    assert rounded.weight.dtype == torch.int8
    assert not rounded.weight.requires_grad


@pytest.mark.parametrize("kind", PRECISIONS.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_those_of_the_dequantized_layer(
    dtype: torch.dtype, kind: type[QuantizedLinear]
) -> None:
    plain, rounded = layers(dtype, kind)
    plain.weight = torch.nn.Parameter(rounded.dequantized(dtype), False)
    given = torch.randn(4, 7, 48).to(dtype)
    outputs, gradients = [], []
    for layer in (plain, rounded):
        leaf = given.clone().requires_grad_()
        outputs.append(layer(leaf))
        outputs[-1].square().sum().backward()
        gradients.append(leaf.grad)
    assert outputs[1].dtype == dtype
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_the_backward_pass_keeps_no_dequantized_weight() -> None:
    _, rounded = layers()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        rounded(torch.randn(2, 48, requires_grad=True))
    sizes = {(tensor.dtype, tuple(tensor.shape)) for tensor in kept}
    assert sizes == {(torch.int8, (32, 48)), (torch.float32, (32, 1))}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_is_read_and_quantized_before_the_next(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """The host never holds the weights of all blocks in full."""
    full: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    plain = PRECISIONS[precision].quantize

    def quantize(weight: torch.Tensor) -> dict[str, Any]:
        alive.append(sum(other() is not None for other in full))
        full.append(weakref.ref(weight))
        return plain(weight)

    monkeypatch.setattr(PRECISIONS[precision], "quantize", staticmethod(quantize))
    job = make_job(method="lora", lora={"base_precision": precision})
    Network.load(job, Base.of(job), Train(**job.train))
    assert len(full) > 10
    assert max(alive) == 0


def test_z_image_s_refiners_and_modulation_keep_their_dtype(
    make_job: MakeJob, tiny_model: Any
) -> None:
    job = make_job(model=str(tiny_model("tiny-z-image")), **INT8)
    denoiser = Network.load(job, Base.of(job), Train(**job.train)).denoiser
    rounded = [n for n, module in denoiser.named_modules() if isinstance(module, Int8Linear)]
    assert any(name.startswith("layers.") for name in rounded)
    assert not [n for n in rounded if "refiner" in n or "adaLN" in n]


@pytest.mark.parametrize("name", ["tiny-sdxl", "tiny-flux", "tiny-qwen-image"])
def test_all_linear_layers_of_blocks_are_quantized(
    make_job: MakeJob, tiny_model: Any, name: str
) -> None:
    """Adapters are float32 and start at nothing; other layers have the compute dtype."""
    job = make_job(model=str(tiny_model(name)), mixed_precision="bf16", **INT8)
    denoiser = Network.load(job, Base.of(job), Train(**job.train)).denoiser
    for path, module in denoiser.named_modules():
        if not isinstance(module, torch.nn.Linear) or "lora_" in path:
            continue
        in_blocks = any(part.isdigit() for part in path.split("."))
        assert isinstance(module, Int8Linear) == in_blocks, path
    down = [p for n, p in denoiser.named_parameters() if "lora_A" in n]
    assert down and all(p.dtype == torch.float32 and p.requires_grad for p in down)


def test_a_step_is_close_to_that_with_weights_in_full(make_job: MakeJob) -> None:
    """The loss differs by the rounding of the base; State has the adapters alone."""
    found = []
    for name, settings in {"plain": {"method": "lora"}, "int8": INT8}.items():
        runtime, batch = start(make_job(name, **settings))
        losses = [float(runtime.step(batch(step), 1e-2).loss) for step in range(3)]
        found.append((losses, set(runtime.state()["weights"])))
    assert found[0][0] == pytest.approx(found[1][0], rel=0.02)
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", ["tiny-sd3", "tiny-flux", "tiny-flux2", "tiny-z-image", "tiny-qwen-image"]
)
def test_every_family_trains_on_an_8_bit_base(
    make_job: MakeJob, tiny_model: Any, write_latents: Any, tmp_path: Path, name: str
) -> None:
    """In bfloat16 with recomputed blocks, as the recipes of large models."""
    model, losses = tiny_model(name), []
    common = {"mixed_precision": "bf16", "gradient_checkpointing": "blocks"}
    info = Encoder(Base.open(model), device="cpu").info
    latents = write_latents(tmp_path / "latents", [{"train/8x8": 9}], **info)
    common |= {"model": str(model), "latents": latents}
    for number, settings in enumerate(({"method": "lora"}, INT8)):
        runtime, batch = start(make_job(str(number), **common, **settings))
        losses.append([float(runtime.step(batch(step), 1e-2).loss) for step in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]
