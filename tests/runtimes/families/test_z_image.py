"""Z-Image: encoded, trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' train_dreambooth_lora_z_image.py. The
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
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from diffusers_script import Script, assert_figures, levels, read_pictures, start_noise
from jobs import HOLDOUT, MakeJob, predicted, trained
from safetensors.torch import save_file
from training import history, roll_back, train, weights

from artifacts.latent_shard_writer import write_latent_shard
from artifacts.latent_shards import LatentShard, Texts, to_bfloat16
from runtimes.adapters.kohya_format import to_kohya
from runtimes.adapters.lora_file_format import LORA_WEIGHTS, read_adapters
from runtimes.families import FAMILIES
from runtimes.families.family import token_mask
from runtimes.pipeline_folder.describe_encoders import describe_encoders
from runtimes.process.events import Events
from runtimes.process.job import Drawing, EncodeJob, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.encode_images_and_captions import Encoder
from runtimes.torch_models.network import Network
from runtimes.train.write_result import write_result
from tasks import child_process
from tasks.publish.assemble_pipeline import assemble

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "two dogs in a wide forest")
STEPS, GUIDANCE, LENGTH = 20, 3.5, 64
SIZE = {"height": 32, "width": 48}
SAMPLER = {"seed": 7, "num_inference_steps": 3, "guidance_scale": GUIDANCE, "batch_size": 2} | SIZE
#: The layers that the script adapts without --lora_layers.
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]


@pytest.fixture
def z_image_job(make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path) -> MakeJob:
    """`z_image_job(model, **settings)`: a job on pictures of two shapes."""
    groups = {"train/8x8": 23, "train/4x12": 9, "holdout/8x8": 3}

    def make(model: Path, name: str = "run", **settings: Any) -> TrainJob:
        info = describe_encoders(model)
        latents = write_latents(str(tmp_path / "store"), [groups], **info)
        given = {"steps": STEPS, "max_grad_norm": 1.0, **settings}
        return make_job(name=name, model=str(model), latents=latents, **given)

    return make


def script_of(job: TrainJob) -> Script:
    vae = ZImagePipeline.from_pretrained(job.model).vae.config

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        samples = list(noisy.unsqueeze(2).unbind(0))
        output = model(samples, (1000 - timesteps) / 1000, prompts, return_dict=False)[0]
        return -torch.stack(output).squeeze(2)

    model = ZImageTransformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, lambda z: (z - vae.shift_factor) * vae.scaling_factor)


LORA = {"method": "lora", "lora": {"rank": 4, "alpha": 8.0, "target_modules": TARGETS}}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "weighted": {"weighting_scheme": "cosmap"},
    "accumulated": {"micro_batch_size": 1},
    "lora": {"learning_rate": 1e-2, **LORA},
}
#: Cases of `make soak` alone: FLUX.2 proves it.
IN_SOAK = ("weighted",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.soak] * (case in IN_SOAK)) for case in CASES]
)
def test_twenty_steps_have_the_figures_of_diffusers_script(
    z_image_job: MakeJob, tiny_z_image: Path, case: str
) -> None:
    job = z_image_job(tiny_z_image, **CASES[case])
    script = script_of(job)
    if case == "lora":
        script.add_adapters(4, 8.0, TARGETS)
    assert_figures(job, script)


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(
    tiny_z_image: Path, tmp_path: Path
) -> None:
    """They are stored without padding."""
    encoder, pipe = Encoder(tiny_z_image), ZImagePipeline.from_pretrained(tiny_z_image)
    captions = [*PROMPTS, "", "x" * 80]  # the last one is truncated
    ours, pooled = encoder.texts(captions)
    with torch.no_grad():
        theirs, _ = pipe.encode_prompt(list(captions), max_sequence_length=LENGTH)
    assert pooled is None
    assert len({len(one) for one in ours}) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.from_numpy(one), other)
    assert encoder.token_counts(captions)[:3] == [len(one) for one in theirs[:3]]
    write_latent_shard(tmp_path / "shard", {}, Texts(ours, None, encoder.input_ids(captions), True))
    shard = LatentShard(tmp_path / "shard")
    for row, one in enumerate(ours):
        assert np.array_equal(shard.prompt_embeds(row), to_bfloat16(one))
    pixels = np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 48)).astype(np.float32)
    mean, logvar = encoder.images(pixels)
    with torch.no_grad():
        posterior = pipe.vae.encode(torch.from_numpy(pixels)).latent_dist
    assert torch.equal(torch.from_numpy(mean), posterior.mean)
    assert torch.equal(torch.from_numpy(logvar), posterior.logvar)


def test_jax_encodes_as_torch_does(tiny_z_image: Path) -> None:
    chips.require("jax")
    from runtimes.jax import encoder as of_jax

    job = EncodeJob("jax", str(tiny_z_image), None, 4, "cpu", "float32")
    found, _ = of_jax.open_encoder(job).texts(PROMPTS)
    expected, _ = Encoder(tiny_z_image).texts(PROMPTS)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("length", [64, 96])
def test_the_padding_of_a_batch_changes_no_prediction(tiny_z_image: Path, length: int) -> None:
    model = ZImageTransformer2DModel.from_pretrained(tiny_z_image / "transformer").eval()
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randn(count, 16, generator=rng) for count in (5, 33, 32, 64)]
    latents = torch.randn(4, 4, 8, 12, generator=rng)
    timesteps = torch.tensor([1.0, 300.0, 700.0, 999.0])
    mask = token_mask([len(one) for one in prompts], length)
    embeds = torch.stack([torch.nn.functional.pad(p, (0, 0, 0, length - len(p))) for p in prompts])
    given = {"prompt_embeds": embeds, "prompt_embeds_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        ours = FAMILIES["z_image"].predict(model, latents, timesteps, given)
        samples = list(latents.unsqueeze(2).unbind(0))
        theirs = model(samples, (1000 - timesteps) / 1000, prompts, return_dict=False)[0]
    torch.testing.assert_close(ours, -torch.stack(theirs).squeeze(2), atol=1e-5, rtol=1e-5)


def of_diffusers(pipe: ZImagePipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "guidance_scale": GUIDANCE, **SIZE, **changes}
    found = pipe(prompt=list(prompts), latents=noise, max_sequence_length=LENGTH, **given)
    return levels(found.images)


def pictures(runtime: str, out: Path, model: Path, **changes: Any) -> Any:
    sampler = SAMPLER | changes
    return diffusers_script.pictures(runtime, Drawing(str(out)), model, PROMPTS, sampler)


def test_pictures_are_those_of_diffusers(tiny_z_image: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, with and without a negative prompt."""
    chips.require("jax")
    pipe = ZImagePipeline.from_pretrained(tiny_z_image)
    expected = of_diffusers(pipe, PROMPTS)
    assert np.array_equal(pictures("torch", tmp_path / "torch", tiny_z_image), expected)
    assert np.abs(pictures("jax", tmp_path / "jax", tiny_z_image) - expected).max() <= 1
    assert np.abs(of_diffusers(pipe, PROMPTS[::-1]) - expected).max() > 5, "by other prompts"
    assert np.abs(of_diffusers(pipe, PROMPTS, guidance_scale=0.0) - expected).max() > 2
    other = of_diffusers(pipe, PROMPTS, negative_prompt=["grey"] * 2)
    assert np.abs(other - expected).max() > 1, "by the negative prompt"
    for runtime, most in (("torch", 0), ("jax", 1)):
        out = tmp_path / f"{runtime}-negative"
        drawn = pictures(runtime, out, tiny_z_image, negative_prompt="grey")
        assert np.abs(drawn - other).max() <= most


def test_no_guidance_is_the_scale_zero(tiny_z_image: Path, tmp_path: Path) -> None:
    chips.require("jax")
    expected = of_diffusers(
        ZImagePipeline.from_pretrained(tiny_z_image), PROMPTS, guidance_scale=0.0
    )
    for runtime, most in (("torch", 0), ("jax", 1)):
        drawn = pictures(runtime, tmp_path / runtime, tiny_z_image, guidance_scale=0.0)
        assert np.abs(drawn - expected).max() <= most


def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    z_image_job: MakeJob, tiny_z_image: Path
) -> None:
    chips.require("jax")
    settings = {"steps": 6, "checkpointing_steps": 2, "checkpoints_total_limit": 9}
    settings |= {"ema_decay": 0.9, "caption_dropout_rate": 0.3}
    whole = z_image_job(tiny_z_image, "whole", **settings)
    assert train(whole) == 0
    moved = z_image_job(tiny_z_image, "moved", **settings)
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
    z_image_job: MakeJob, tiny_z_image: Path, tmp_path: Path
) -> None:
    job = z_image_job(tiny_z_image)
    train(job)
    parts = {"transformer": f"{job.out}/transformer"}
    drawings = (Drawing(str(tmp_path / "base")), Drawing(str(tmp_path / "tuned"), parts))
    drawn = GenerateJob(
        *("torch", str(tiny_z_image), drawings, PROMPTS, SAMPLER),
        *("cpu", "float32", job.latents, {**HOLDOUT, "levels": 4}),
    )
    generate(drawn, Events())
    paths = [Path(drawing.out, "losses.json") for drawing in drawings]
    found = np.array([json.loads(path.read_text())["losses"] for path in paths])
    assert found.shape == (2, 3, 4), "model, sample, noise level"
    assert found[1].mean() < found[0].mean()

    replaced = {"transformer": Path(parts["transformer"])}
    assemble(tiny_z_image, replaced, tmp_path / "p", dtype="float32")
    expected = of_diffusers(ZImagePipeline.from_pretrained(tmp_path / "p"), PROMPTS)
    assert np.array_equal(read_pictures(Path(drawings[1].out)), expected)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_load_in_diffusers_in_both_layouts(
    z_image_job: MakeJob, tiny_z_image: Path, tmp_path: Path, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "dora": dora}
    job = z_image_job(tiny_z_image, method="lora", lora=adapters, learning_rate=1e-2)
    runtime, batch = trained(job)
    write_result(job, runtime.state(), [])
    expected = predicted(runtime._network, batch)
    files = {LORA_WEIGHTS: Path(job.out)}
    ours = read_adapters(Path(job.out) / LORA_WEIGHTS)
    assert len(ours["transformer"]) == (2 + 2) * 4, "layers and refiners"
    if not dora:  # diffusers ignores DoRA in kohya's layout
        config = json.loads((Path(job.model) / "transformer/config.json").read_text())
        names = FAMILIES["z_image"].kohya
        assert names is not None
        arrays = to_kohya(ours, names, config)
        tensors = {name: torch.as_tensor(a) for name, a in arrays.items()}
        save_file(tensors, tmp_path / "kohya.safetensors")
        files["kohya.safetensors"] = tmp_path
    for name, folder in files.items():
        pipe = ZImagePipeline.from_pretrained(job.model)
        network = Network(FAMILIES["z_image"], {"transformer": pipe.transformer})
        assert (expected - predicted(network, batch)).abs().max() > 1e-2
        pipe.load_lora_weights(folder, weight_name=name)
        torch.testing.assert_close(predicted(network, batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fsdp", ["all", pytest.param(1, marks=pytest.mark.soak)])
def test_two_processes_train_as_one(z_image_job: MakeJob, tiny_z_image: Path, fsdp: Any) -> None:
    """FSDP gathers also the parameters that no block has, such as the tokens of padding."""
    one = z_image_job(tiny_z_image, "one", steps=4)
    train(one)
    two = z_image_job(tiny_z_image, "two", steps=4, processes=2, fsdp=fsdp)
    child_process.run_job(two, lambda event: None)
    for name in ("loss", "grad_norm"):
        found, expected = ([line[name] for line in history(job)] for job in (two, one))
        assert found == pytest.approx(expected, rel=1e-5)
