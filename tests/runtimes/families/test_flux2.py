"""FLUX.2 klein: encoded, trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' train_dreambooth_lora_flux2_klein.py. The
script takes the posterior's mean as latents; here it takes the job's draw.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import diffusers_script
import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from diffusers_script import Script, assert_figures, levels, read_pictures, start_noise
from jobs import HOLDOUT, MakeJob, predicted, trained
from safetensors.torch import save_file
from training import history, roll_back, train, weights

from runtimes.adapters.kohya_format import to_kohya
from runtimes.adapters.lora_file_format import LORA_WEIGHTS, read_adapters
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import ResolutionShift
from runtimes.pipeline_folder.describe_encoders import describe_encoders
from runtimes.process.events import Events
from runtimes.process.job import Drawing, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.encode_images_and_captions import Encoder
from runtimes.torch_models.network import Network
from runtimes.train.write_result import write_result
from tasks.publish.assemble_pipeline import assemble

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "two dogs")
STEPS, GUIDANCE, LENGTH = 20, 3.5, 40
SIZE = {"height": 32, "width": 48}
SAMPLER = {"seed": 7, "num_inference_steps": 3, "guidance_scale": GUIDANCE, "batch_size": 2} | SIZE
#: The layers of the text stream, and the fused ones of single blocks, beside the script's.
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "to_qkv_mlp_proj"]


@pytest.fixture
def flux2_job(make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path) -> MakeJob:
    """`flux2_job(model, **settings)`: a job on pictures of two shapes."""
    groups = {"train/8x8": 23, "train/4x12": 9, "holdout/8x8": 3}

    def make(model: Path, name: str = "run", **settings: Any) -> TrainJob:
        info = describe_encoders(model)
        latents = write_latents(str(tmp_path / "store"), [groups], **info)
        given = {"steps": STEPS, "max_grad_norm": 1.0, **settings}
        return make_job(name=name, model=str(model), latents=latents, **given)

    return make


def script_of(job: TrainJob) -> Script:
    pipe = Flux2KleinPipeline.from_pretrained(job.model)
    normal = pipe.vae.bn

    def scale(latents: torch.Tensor) -> torch.Tensor:
        patches = pipe._patchify_latents(latents[None])
        std = torch.sqrt(normal.running_var + pipe.vae.config.batch_norm_eps)
        scaled = (patches - normal.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
        return pipe._unpatchify_latents(scaled)[0]

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        embeds, patches = torch.stack(prompts), pipe._patchify_latents(noisy)
        ids = pipe._prepare_latent_ids(patches)
        output = model(
            hidden_states=pipe._pack_latents(patches),
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=embeds,
            txt_ids=pipe._prepare_text_ids(embeds),
            img_ids=ids,
            return_dict=False,
        )[0]
        return pipe._unpatchify_latents(pipe._unpack_latents_with_ids(output, ids))

    model = Flux2Transformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scale)


LORA = {"method": "lora", "lora": {"rank": 4, "alpha": 8.0, "target_modules": TARGETS}}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "weighted": {"weighting_scheme": "cosmap"},
    "accumulated": {"micro_batch_size": 1},
    "lora": {"learning_rate": 1e-2, **LORA},
}
#: Cases of `make soak` alone: Z-Image and Qwen-Image prove it, with captions of varying lengths.
IN_SOAK = ("accumulated",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.soak] * (case in IN_SOAK)) for case in CASES]
)
def test_twenty_steps_have_the_figures_of_diffusers_script(
    flux2_job: MakeJob, tiny_flux2: Path, case: str
) -> None:
    job = flux2_job(tiny_flux2, **CASES[case])
    script = script_of(job)
    if case == "lora":
        script.add_adapters(4, 8.0, TARGETS)
    assert_figures(job, script)


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(tiny_flux2: Path) -> None:
    encoder, pipe = Encoder(tiny_flux2), Flux2KleinPipeline.from_pretrained(tiny_flux2)
    long = "x" * 60  # truncated
    ours, pooled = encoder.texts([*PROMPTS, "", long])
    with torch.no_grad():
        theirs, _ = pipe.encode_prompt([*PROMPTS, "", long], max_sequence_length=LENGTH)
    assert pooled is None
    assert torch.equal(torch.from_numpy(np.asarray(ours)), theirs)
    assert encoder.token_counts(["", long]) == [11, 71]
    pixels = np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 48)).astype(np.float32)
    mean, logvar = encoder.images(pixels)
    with torch.no_grad():
        posterior = pipe.vae.encode(torch.from_numpy(pixels)).latent_dist
    assert torch.equal(torch.from_numpy(mean), posterior.mean)
    assert torch.equal(torch.from_numpy(logvar), posterior.logvar)


def of_diffusers(pipe: Flux2KleinPipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    latents = pipe._patchify_latents(noise)
    found = pipe(prompt=list(prompts), latents=latents, max_sequence_length=LENGTH, **given)
    return levels(found.images)


def pictures(runtime: str, out: Path, model: Path, **changes: Any) -> Any:
    sampler = SAMPLER | changes
    return diffusers_script.pictures(runtime, Drawing(str(out)), model, PROMPTS, sampler)


def test_pictures_are_those_of_diffusers(tiny_flux2: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, with and without a negative prompt."""
    chips.require("jax")
    pipe = Flux2KleinPipeline.from_pretrained(tiny_flux2)
    expected = of_diffusers(pipe, PROMPTS)
    assert np.array_equal(pictures("torch", tmp_path / "torch", tiny_flux2), expected)
    assert np.abs(pictures("jax", tmp_path / "jax", tiny_flux2) - expected).max() <= 1
    assert np.abs(of_diffusers(pipe, PROMPTS[::-1]) - expected).max() > 5, "by other prompts"
    assert np.abs(of_diffusers(pipe, PROMPTS, guidance_scale=1.0) - expected).max() > 2
    negative, _ = pipe.encode_prompt(["grey"] * 2, max_sequence_length=LENGTH)
    other = of_diffusers(pipe, PROMPTS, negative_prompt_embeds=negative)
    assert np.abs(other - expected).max() > 1, "by the negative prompt"
    for runtime, most in (("torch", 0), ("jax", 1)):
        out = tmp_path / f"{runtime}-negative"
        drawn = pictures(runtime, out, tiny_flux2, negative_prompt="grey")
        assert np.abs(drawn - other).max() <= most


def test_the_distilled_model_ignores_guidance(tiny_flux2_distilled: Path, tmp_path: Path) -> None:
    chips.require("jax")
    pipe = Flux2KleinPipeline.from_pretrained(tiny_flux2_distilled)
    expected = of_diffusers(pipe, PROMPTS, guidance_scale=1.0)
    assert np.array_equal(pictures("torch", tmp_path / "torch", tiny_flux2_distilled), expected)
    assert np.abs(pictures("jax", tmp_path / "jax", tiny_flux2_distilled) - expected).max() <= 1


@pytest.mark.parametrize("tokens", [6, 256, 1024, 4096, 4300, 4301, 9000])
@pytest.mark.parametrize("steps", [1, 4, 28, 50, 200])
def test_the_shift_of_sampling_is_the_pipeline_s(tokens: int, steps: int) -> None:
    shift = ResolutionShift.from_config({"use_dynamic_shifting": True}, 2)
    assert shift is not None
    found = FAMILIES["flux2"].sampling_shift(shift, tokens, steps)
    assert found == pytest.approx(compute_empirical_mu(tokens, steps), abs=1e-12)
    if steps == 200:  # that of training
        assert found == pytest.approx(shift.mu_of(tokens), abs=1e-4)


def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    flux2_job: MakeJob, tiny_flux2: Path
) -> None:
    chips.require("jax")
    settings = {"steps": 6, "checkpointing_steps": 2, "checkpoints_total_limit": 9}
    settings |= {"ema_decay": 0.9, "caption_dropout_rate": 0.3}
    whole = flux2_job(tiny_flux2, "whole", **settings)
    assert train(whole) == 0
    moved = flux2_job(tiny_flux2, "moved", **settings)
    for runtime, first, left in (("torch", 0, 2), ("jax", 2, 4), ("torch", 4, None)):
        assert train(replace(moved, runtime=runtime)) == first
        if left is not None:
            roll_back(moved, left)
    for name, wanted in (("loss", 1e-4), ("grad_norm", 1e-3)):
        found, expected = ([line[name] for line in history(job)] for job in (moved, whole))
        assert found == pytest.approx(expected, rel=wanted)
    before = weights(whole)
    roll_back(whole, 4)
    assert train(whole) == 4
    after = weights(whole)
    assert all(np.array_equal(after[name], array) for name, array in before.items())


def test_a_trained_transformer_is_drawn_measured_and_published(
    flux2_job: MakeJob, tiny_flux2: Path, tmp_path: Path
) -> None:
    job = flux2_job(tiny_flux2)
    train(job)
    parts = {"transformer": f"{job.out}/transformer"}
    drawings = (Drawing(str(tmp_path / "base")), Drawing(str(tmp_path / "tuned"), parts))
    drawn = GenerateJob(
        *("torch", str(tiny_flux2), drawings, PROMPTS, SAMPLER),
        *("cpu", "float32", job.latents, {**HOLDOUT, "levels": 4}),
    )
    generate(drawn, Events())
    paths = [Path(drawing.out, "losses.json") for drawing in drawings]
    found = np.array([json.loads(path.read_text())["losses"] for path in paths])
    assert found.shape == (2, 3, 4), "model, sample, noise level"
    assert found[1].mean() < found[0].mean()

    replaced = {"transformer": Path(parts["transformer"])}
    assemble(tiny_flux2, replaced, tmp_path / "p", dtype="float32")
    expected = of_diffusers(Flux2KleinPipeline.from_pretrained(tmp_path / "p"), PROMPTS)
    assert np.array_equal(read_pictures(Path(drawings[1].out)), expected)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_load_in_diffusers_in_both_layouts(
    flux2_job: MakeJob, tiny_flux2: Path, tmp_path: Path, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "dora": dora}
    job = flux2_job(tiny_flux2, method="lora", lora=adapters, learning_rate=1e-2)
    runtime, batch = trained(job)
    write_result(job, runtime.state(), [])
    expected = predicted(runtime._network, batch)
    files = {LORA_WEIGHTS: Path(job.out)}
    ours = read_adapters(Path(job.out) / LORA_WEIGHTS)
    assert len(ours["transformer"]) == 8 + 2 * 2, "double and single blocks"
    if not dora:  # diffusers ignores DoRA in kohya's layout
        config = json.loads((Path(job.model) / "transformer/config.json").read_text())
        names = FAMILIES["flux2"].kohya
        assert names is not None
        arrays = to_kohya(ours, names, config)
        tensors = {name: torch.as_tensor(a) for name, a in arrays.items()}
        save_file(tensors, tmp_path / "kohya.safetensors")
        files["kohya.safetensors"] = tmp_path
    for name, folder in files.items():
        pipe = Flux2KleinPipeline.from_pretrained(job.model)
        network = Network(FAMILIES["flux2"], {"transformer": pipe.transformer})
        assert (expected - predicted(network, batch)).abs().max() > 1e-2
        pipe.load_lora_weights(folder, weight_name=name)
        torch.testing.assert_close(predicted(network, batch), expected, rtol=1e-4, atol=1e-5)
