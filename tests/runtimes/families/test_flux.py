"""FLUX.1 dev and schnell: encoded, trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' scripts train_dreambooth_flux.py and
train_dreambooth_lora_flux.py, written with the functions of diffusers that they call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers_script import Script, assert_figures, levels, prompt_and_pooled_embeds, start_noise
from flow_families import (
    GUIDANCE,
    SIZE,
    FlowFamily,
    WriteLatents,
    as_kohya,
    assert_a_run_moves_to_jax_and_back,
    assert_adapters_load,
    assert_drawn_measured_and_published,
    assert_figures_of_case,
    assert_latents_of_vae,
    assert_pictures,
    cases,
    job_maker,
    tiered,
)
from jobs import MakeJob, trained

from runtimes.adapters.lora_files import LORA_WEIGHTS, read_adapters
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch_models.vae_text_encoders import Encoder
from runtimes.train.training_loop import write_result
from tasks.publish.assemble import assemble

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "two dogs")
#: The layers that train_dreambooth_lora_flux.py adapts without --lora_layers.
SCRIPT_TARGETS = [
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
    *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
]


@pytest.fixture(params=["dev", "schnell"])
def model(request: pytest.FixtureRequest, tiny_flux: Path, tiny_flux_schnell: Path) -> Path:
    return tiny_flux if request.param == "dev" else tiny_flux_schnell


@pytest.fixture
def flux_job(make_job: MakeJob, write_latents: WriteLatents, tmp_path: Path) -> MakeJob:
    """`flux_job(model, **settings)`: a job on pictures of two shapes."""
    return job_maker(make_job, write_latents, tmp_path)


def script_of(job: TrainJob) -> Script:
    folder, scale = Path(job.model), job.train["guidance_scale"]
    vae = FluxPipeline.from_pretrained(folder).vae.config

    def predict(model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: Any) -> Any:
        count, _, height, width = noisy.shape
        prompt, pooled = (torch.stack(part) for part in zip(*prompts, strict=True))
        ids = FluxPipeline._prepare_latent_image_ids(
            count, height // 2, width // 2, "cpu", torch.float32
        )
        output = model(
            hidden_states=FluxPipeline._pack_latents(noisy, *noisy.shape),
            timestep=timesteps / 1000,
            guidance=torch.full([count], scale) if model.config.guidance_embeds else None,
            pooled_projections=pooled,
            encoder_hidden_states=prompt,
            txt_ids=torch.zeros(prompt.shape[1], 3),
            img_ids=ids,
            return_dict=False,
        )[0]
        return FluxPipeline._unpack_latents(output, 4 * height, 4 * width, 4)

    def scaled(latents: torch.Tensor) -> torch.Tensor:
        return (latents - vae.shift_factor) * vae.scaling_factor

    model = FluxTransformer2DModel.from_pretrained(folder / "transformer")
    return Script(job, model, predict, scaled, prompt_and_pooled_embeds)


CASES = cases(SCRIPT_TARGETS, guidance_scale=GUIDANCE)
CASES["weighted"]["guidance_scale"] = 1.0
CASES["shifted"] = {"guidance_scale": GUIDANCE, "timesteps": {"resolution_shift": True}}
#: FLUX.2 proves `weighted`, Z-Image and Qwen-Image `accumulated`.
IN_SOAK = ("weighted", "accumulated")


@pytest.mark.parametrize("case", tiered(CASES, IN_SOAK))
def test_twenty_steps_have_the_figures_of_diffusers_script(
    flux_job: MakeJob, tiny_flux: Path, case: str
) -> None:
    job = flux_job(tiny_flux, **CASES[case])
    assert_figures_of_case(job, script_of(job), case, SCRIPT_TARGETS)


def test_schnell_has_the_figures_of_diffusers_script(
    flux_job: MakeJob, tiny_flux_schnell: Path
) -> None:
    job = flux_job(tiny_flux_schnell)
    assert_figures(job, script_of(job))


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(model: Path) -> None:
    encoder, pipe = Encoder(Base.open(model), device="cpu"), FluxPipeline.from_pretrained(model)
    ours, pooled = encoder.texts(PROMPTS)
    length = Base.open(model).text_length
    with torch.no_grad():  # as the pipeline calls it
        theirs, their_pooled, _ = pipe.encode_prompt(
            list(PROMPTS), None, max_sequence_length=length
        )
    assert ours.shape == (2, length, 80)
    assert torch.equal(torch.from_numpy(ours), theirs)
    assert torch.equal(torch.from_numpy(pooled), their_pooled)
    assert_latents_of_vae(encoder, pipe.vae)


def test_dev_has_512_rows_of_t5_and_schnell_256(model: Path, tmp_path: Path) -> None:
    """The authors' limits, since the published tokenizers have 512; the tests' has fewer."""
    copy = tmp_path / "copy"
    assemble(Base.open(model), {}, copy, dtype="float32")
    path = copy / "tokenizer_2/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 512}))
    guided = json.loads((copy / "transformer/config.json").read_text())["guidance_embeds"]
    base, copied = Base.open(model), Base.open(copy)
    assert copied.text_length == (512 if guided else 256) == copied.encoders["tokens"]
    assert copied.unusual_text_length == (None if guided else 256)
    assert base.unusual_text_length == base.text_length == 20, "the tokenizer's own limit"
    digest = copied.digest_encoders()
    other = copy / "transformer/config.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"guidance_embeds": not guided}))
    assert Base.open(copy).digest_encoders() != digest, "dev and schnell have the same encoders"


def of_diffusers(pipe: FluxPipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (8, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    latents = pipe._pack_latents(noise, *noise.shape)
    return levels(pipe(list(prompts), latents=latents, max_sequence_length=20, **given).images)


FAMILY = FlowFamily("flux", FluxPipeline, PROMPTS, of_diffusers)


def test_pictures_are_those_of_diffusers(model: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, by the guidance and shift of the pipeline."""
    assert_pictures(FAMILY, model, tmp_path)
    pipe = FluxPipeline.from_pretrained(model)
    expected = of_diffusers(pipe, PROMPTS)
    assert np.abs(of_diffusers(pipe, PROMPTS[::-1]) - expected).max() > 5, "by other prompts"
    other = of_diffusers(pipe, PROMPTS, guidance_scale=1.0)
    dev = pipe.transformer.config.guidance_embeds
    assert bool(np.abs(other - expected).max() > 1) == dev, "by other guidance"


@pytest.mark.parametrize("negative", [pytest.param(None, marks=pytest.mark.extended), "fog"])
def test_classifier_free_guidance_is_that_of_diffusers(
    model: Path, tmp_path: Path, negative: str | None
) -> None:
    """The pipeline's true_cfg_scale; without a negative prompt, against the empty one."""
    pipe = FluxPipeline.from_pretrained(model)
    asked = {"true_cfg_scale": 3.0, "negative_prompt": [negative or ""] * len(PROMPTS)}
    plain, guided = of_diffusers(pipe, PROMPTS), of_diffusers(pipe, PROMPTS, **asked)
    assert np.abs(plain - guided).max() > 5, "it has an effect"
    given = {"true_cfg_scale": 3.0, "negative_prompt": negative}
    assert_pictures(FAMILY, model, tmp_path, ours=given, theirs=asked)


@pytest.mark.soak
@pytest.mark.parametrize("method", ["full", pytest.param("text", marks=pytest.mark.extended)])
def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    flux_job: MakeJob, tiny_flux: Path, method: str
) -> None:
    more = {"train_text_encoder": True} if method == "text" else {"ema_decay": 0.9}
    assert_a_run_moves_to_jax_and_back(flux_job, tiny_flux, guidance_scale=GUIDANCE, **more)


def test_a_trained_transformer_is_drawn_measured_and_published(
    flux_job: MakeJob, tiny_flux: Path, tmp_path: Path
) -> None:
    job = flux_job(tiny_flux, guidance_scale=GUIDANCE)
    given = {"guidance_scale": GUIDANCE}
    found, losses = assert_drawn_measured_and_published(FAMILY, job, tmp_path, **given)
    assert not np.array_equal(losses(guidance_scale=1.0), found)


TARGETS: dict[str, Any] = {
    "attention": "attention",
    "blocks": [*SCRIPT_TARGETS, "proj_mlp", "norm.linear"],
    # diffusers reads single blocks in kohya's layout in the published sizes alone.
    "double": [f"transformer_blocks.0.{name}" for name in (*SCRIPT_TARGETS, "norm1.linear")],
}


@pytest.mark.parametrize(
    ("targets", "dora"), [("attention", False), ("blocks", True), ("double", False)]
)
def test_adapters_load_in_diffusers_in_both_layouts(
    flux_job: MakeJob, tiny_flux: Path, tmp_path: Path, targets: str, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "target_modules": TARGETS[targets], "dora": dora}
    text = targets == "double"
    given = {"method": "lora", "lora": adapters, "train_text_encoder": text}
    job = flux_job(tiny_flux, **given, learning_rate=1e-2)
    assert_adapters_load(FAMILY, job, tmp_path, kohya=text)


def test_kohya_s_names_and_products_are_those_of_the_original_code(
    flux_job: MakeJob, tiny_flux: Path
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "target_modules": ["to_q", "to_v", "proj_mlp"]}
    job = flux_job(tiny_flux, method="lora", lora=adapters, learning_rate=1e-2)
    runtime, _ = trained(job)
    write_result(job, Base.of(job), runtime.state(), [])
    found = {name: tuple(array.shape) for name, array in as_kohya("flux", job).items()}
    width, mlp = 32, 128
    assert found == {
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (6, width),
        "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": (3 * width, 6),
        "lora_unet_double_blocks_0_img_attn_qkv.alpha": (),
        **{
            f"lora_unet_single_blocks_{block}_linear1.{name}": shape
            for block in (0, 1)
            for name, shape in {
                "lora_down.weight": (9, width),
                "lora_up.weight": (3 * width + mlp, 9),
                "alpha": (),
            }.items()
        },
    }
    ours = read_adapters(Path(job.out) / LORA_WEIGHTS)["transformer"]
    arrays = as_kohya("flux", job)
    key = "lora_unet_single_blocks_1_linear1"
    up, down = arrays[f"{key}.lora_up.weight"], arrays[f"{key}.lora_down.weight"]
    fused = arrays[f"{key}.alpha"] / len(down) * up @ down
    block = "single_transformer_blocks.1"
    for layer, first in (("attn.to_q", 0), ("attn.to_v", 2 * width), ("proj_mlp", 3 * width)):
        adapter = ours[f"{block}.{layer}"]
        product = torch.from_numpy(adapter.scale * adapter.up @ adapter.down)
        part = fused[first : first + len(product)]
        torch.testing.assert_close(part, product.float(), atol=1e-6, rtol=1e-5)
    assert not fused[width : 2 * width].any(), "the key has no adapter"
