"""The true UNets of Stable Diffusion 2 base and XL, by their configs alone: what a plan counts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import pytest

from configs.settings.train import Train

jax = chips.importorskip("jax")
from runtimes.jax.abstract_step import AbstractStep  # noqa: E402
from runtimes.jax.step import names_without_gradient  # noqa: E402
from runtimes.process.questions import TpuStepRequest  # noqa: E402

MODELS = Path(__file__).parents[3] / "bench/models"
GIB = 2**30


def clip(width: int, projected: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "projection_dim": projected,
        "num_attention_heads": width // 64,
        "max_position_embeddings": 77,
    }


#: UNet's file, like which tiny pipeline the rest is, text encoders, pictures' side, TFLOP an image.
TRUE = {
    "sd2": ("stable-diffusion-2-base", "tiny_sd", [clip(1024, 512)], 512, 2.41),
    "sdxl": (
        "stable-diffusion-xl-base-1.0",
        "tiny_sdxl",
        [clip(768, 768), clip(1280, 1280)],
        1024,
        20.28,
    ),
}


def configs_of(name: str, like: Path, folder: Path) -> Path:
    """A pipeline folder without weights."""
    unet, _, encoders, _, _ = TRUE[name]
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(MODELS / unet / "unet/config.json", folder / "unet/config.json")
    parts = dict(zip(("text_encoder", "text_encoder_2"), encoders, strict=False))
    parts["vae"] = {"block_out_channels": [128, 256, 512, 512]}
    for part, config in parts.items():
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd2", pytest.param("sdxl", marks=pytest.mark.soak)])
def test_a_true_model_is_planned_from_its_configs(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    _, like, _, resolution, teraflops = TRUE[name]
    folder = configs_of(name, request.getfixturevalue(like), tmp_path / name)
    settings = Train(global_batch_size=16, ema_decay=0.9999, mixed_precision="bf16")
    asked = TpuStepRequest(str(folder), settings.model_dump(mode="json"), resolution, "v5p-8")
    step = AbstractStep(asked, settings, jax.devices()[:1], hosts=1)
    assert step.flops_per_image() == pytest.approx(teraflops * 1e12, rel=0.02)
    state = 4 * 4 * step.parameters  # weights, two moments and average, in float32
    assert state < step.argument_bytes() < state + GIB / 4
    assert step.prior_bytes() == 0
    with_base = AbstractStep(replace(asked, has_prior=True), settings, jax.devices()[:1], hosts=1)
    assert with_base.prior_bytes() == 2 * step.parameters  # a copy in bfloat16


@pytest.mark.extended
@pytest.mark.slow
def test_the_cost_of_a_step_has_every_iteration_of_its_loops(
    tiny_sdxl: Path, tmp_path: Path
) -> None:
    """XLA's cost analysis counts one iteration."""
    folder = tmp_path / "sdxl"
    shutil.copytree(tiny_sdxl, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "unet/config.json"
    config = json.loads(path.read_text())
    layers = [3] * len(config["block_out_channels"])
    path.write_text(json.dumps(config | {"transformer_layers_per_block": layers}))
    settings = Train(global_batch_size=2, mixed_precision="bf16", gradient_checkpointing="blocks")
    asked = TpuStepRequest(str(folder), settings.model_dump(mode="json"), 32, "v5p-8")
    flops: dict[bool, float] = {}
    for has_loops in (False, True):
        step = AbstractStep(asked, settings, jax.devices()[:1], hosts=1)
        step._mesh.has_loops = has_loops
        flops[has_loops] = step.lower().cost_analysis()["flops"]
        bodies = step.lower_loop_bodies()
        assert bool(bodies) == has_loops, "loops are for a trained denoiser"
        omitted = sum(count * body.cost_analysis()["flops"] for count, body in bodies)
        assert omitted > 0.01 * flops[has_loops] or not has_loops
        flops[has_loops] += omitted
    assert flops[True] == pytest.approx(flops[False], rel=0.01)
    merged = "XLA would merge the recomputation with the forward pass"
    assert all("optimization_barrier" in body.as_text() for _, body in bodies), merged
    lora = settings.model_copy(update={"method": "lora"})
    step = AbstractStep(asked, lora, jax.devices()[:1], hosts=1)
    step._mesh.has_loops = True
    step.lower()
    assert not step.lower_loop_bodies(), "stacks of the base would be copies of it"


@pytest.mark.slow
def test_weights_on_which_the_loss_does_not_depend_are_known(tiny_qwen_image: Path) -> None:
    """PyTorch's optimizers skip them; weight decay of the compiled step must, too."""
    settings = Train(global_batch_size=2)
    asked = TpuStepRequest(str(tiny_qwen_image), settings.model_dump(mode="json"), 32, "v5p-8")
    step = AbstractStep(asked, settings, jax.devices()[:1], hosts=1)
    found = names_without_gradient(step._counter, step._network, step._batch)
    last = "transformer.transformer_blocks.1."
    assert {name.removeprefix(last).partition(".")[0] for name in found} == {"attn", "txt_mlp"}
    assert any("to_add_out" in name for name in found)


@pytest.mark.slow
def test_references_count_as_tokens(tiny_flux2: Path) -> None:
    """A picture with three references of its size has the tokens of one with twice its sides."""
    settings = Train(global_batch_size=2, mixed_precision="bf16")
    asked = TpuStepRequest(str(tiny_flux2), settings.model_dump(mode="json"), 64, "v5p-8")
    three, large = (
        AbstractStep(each, settings, jax.devices()[:1], hosts=1)
        for each in (replace(asked, references=((64, 64),) * 3), replace(asked, resolution=128))
    )
    assert three.flops_per_image() == pytest.approx(large.flops_per_image(), rel=0.01)
