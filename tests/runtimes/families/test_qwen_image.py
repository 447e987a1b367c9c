"""Qwen-Image: encoded, trained, drawn and stored as diffusers does it.

The reference of training is the arithmetic of diffusers' train_dreambooth_lora_qwen_image.py. The
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
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers_script import Script, assert_figures, levels, read_pictures, start_noise
from jobs import HOLDOUT, MakeJob, predicted, trained
from safetensors.torch import save_file
from training import history, roll_back, train, weights

from runtimes.adapters.kohya_format import to_kohya
from runtimes.adapters.lora_file_format import LORA_WEIGHTS, read_adapters
from runtimes.families import FAMILIES
from runtimes.pipeline_folder.describe_encoders import describe_encoders
from runtimes.process.events import Events
from runtimes.process.job import Drawing, EncodeJob, GenerateJob, TrainJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.encode_images_and_captions import Encoder
from runtimes.torch_models.network import Network
from runtimes.train.write_result import write_result
from tasks.publish.assemble_pipeline import assemble

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "two dogs in a wide forest")
STEPS, GUIDANCE, LENGTH = 20, 3.5, 288
SIZE = {"height": 32, "width": 48}
SAMPLER = {"seed": 7, "num_inference_steps": 3, "guidance_scale": GUIDANCE, "batch_size": 2} | SIZE
#: The layers that the script adapts without --lora_layers.
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]


@pytest.fixture
def qwen_image_job(make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path) -> MakeJob:
    """`qwen_image_job(model, **settings)`: a job on pictures of two shapes."""
    groups = {"train/8x8": 23, "train/4x12": 9, "holdout/8x8": 3}

    def make(model: Path, name: str = "run", **settings: Any) -> TrainJob:
        info = describe_encoders(model) | {"tokens": 64}
        latents = write_latents(str(tmp_path / "store"), [groups], **info)
        given = {"steps": STEPS, "max_grad_norm": 1.0, **settings}
        return make_job(name=name, model=str(model), latents=latents, **given)

    return make


def script_of(job: TrainJob) -> Script:
    pipe = QwenImagePipeline.from_pretrained(job.model)
    config = pipe.vae.config

    def scale(latents: torch.Tensor) -> torch.Tensor:
        mean, std = (
            torch.tensor(x)[:, None, None] for x in (config.latents_mean, config.latents_std)
        )
        return (latents - mean) * (1.0 / std)

    def predict(
        model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, prompts: list[torch.Tensor]
    ) -> torch.Tensor:
        count, _, height, width = noisy.shape
        longest = max(map(len, prompts))
        mask = torch.stack([torch.arange(longest) < len(one) for one in prompts])
        output = model(
            hidden_states=pipe._pack_latents(noisy, *noisy.shape),
            encoder_hidden_states=torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
            encoder_hidden_states_mask=mask,
            timestep=timesteps / 1000,
            img_shapes=[[(1, height // 2, width // 2)]] * count,
            return_dict=False,
        )[0]
        return pipe._unpack_latents(output, 4 * height, 4 * width, 4).squeeze(2)

    model = QwenImageTransformer2DModel.from_pretrained(Path(job.model) / "transformer")
    return Script(job, model, predict, scale)


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
    qwen_image_job: MakeJob, tiny_qwen_image: Path, case: str
) -> None:
    job = qwen_image_job(tiny_qwen_image, **CASES[case])
    script = script_of(job)
    if case == "lora":
        script.add_adapters(4, 8.0, TARGETS)
    assert_figures(job, script)


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(
    tiny_qwen_image: Path,
) -> None:
    """Without the template's first 34 tokens; the pipeline pads them to the longest caption."""
    encoder, pipe = Encoder(tiny_qwen_image), QwenImagePipeline.from_pretrained(tiny_qwen_image)
    captions = [*PROMPTS, "", "x" * 200]  # the last one is truncated
    ours, pooled = encoder.texts(captions)
    with torch.no_grad():
        theirs, mask = pipe.encode_prompt(captions, max_sequence_length=LENGTH)
    assert pooled is None
    assert len({len(one) for one in ours}) == 4
    for one, other, kept in zip(ours, theirs, mask.bool(), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other[kept], atol=1e-6, rtol=1e-5)
    assert encoder.token_counts(captions)[:3] == [len(one) for one in ours[:3]]
    pixels = np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 48)).astype(np.float32)
    mean, logvar = encoder.images(pixels)
    with torch.no_grad():
        posterior = pipe.vae.encode(torch.from_numpy(pixels).unsqueeze(2)).latent_dist
    assert torch.equal(torch.from_numpy(mean), posterior.mean.squeeze(2))
    assert torch.equal(torch.from_numpy(logvar), posterior.logvar.squeeze(2))


def test_jax_encodes_as_torch_does(tiny_qwen_image: Path) -> None:
    chips.require("jax")
    from runtimes.jax import encoder as of_jax

    job = EncodeJob("jax", str(tiny_qwen_image), None, 4, "cpu", "float32")
    found, _ = of_jax.open_encoder(job).texts(PROMPTS)
    expected, _ = Encoder(tiny_qwen_image).texts(PROMPTS)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def of_diffusers(pipe: QwenImagePipeline, prompts: tuple[str, ...], **changes: Any) -> Any:
    noise = start_noise(len(prompts), (4, 8, 12), 7)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "true_cfg_scale": GUIDANCE, **SIZE}
    given |= {"negative_prompt": [""] * len(prompts), **changes}
    latents = pipe._pack_latents(noise, *noise.shape)
    found = pipe(prompt=list(prompts), latents=latents, max_sequence_length=LENGTH, **given)
    return levels(found.images)


def pictures(runtime: str, out: Path, model: Path, **changes: Any) -> Any:
    sampler = SAMPLER | changes
    return diffusers_script.pictures(runtime, Drawing(str(out)), model, PROMPTS, sampler)


def test_pictures_are_those_of_diffusers(tiny_qwen_image: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, with and without a negative prompt."""
    chips.require("jax")
    pipe = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    expected = of_diffusers(pipe, PROMPTS)
    assert np.array_equal(pictures("torch", tmp_path / "torch", tiny_qwen_image), expected)
    assert np.abs(pictures("jax", tmp_path / "jax", tiny_qwen_image) - expected).max() <= 1
    assert np.abs(of_diffusers(pipe, PROMPTS[::-1]) - expected).max() > 5, "by other prompts"
    assert np.abs(of_diffusers(pipe, PROMPTS, true_cfg_scale=1.0) - expected).max() > 2
    other = of_diffusers(pipe, PROMPTS, negative_prompt=["grey"] * 2)
    assert np.abs(other - expected).max() > 1, "by the negative prompt"
    for runtime, most in (("torch", 0), ("jax", 1)):
        out = tmp_path / f"{runtime}-negative"
        drawn = pictures(runtime, out, tiny_qwen_image, negative_prompt="grey")
        assert np.abs(drawn - other).max() <= most


def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    qwen_image_job: MakeJob, tiny_qwen_image: Path
) -> None:
    chips.require("jax")
    settings = {"steps": 6, "checkpointing_steps": 2, "checkpoints_total_limit": 9}
    settings |= {"ema_decay": 0.9, "caption_dropout_rate": 0.3}
    whole = qwen_image_job(tiny_qwen_image, "whole", **settings)
    assert train(whole) == 0
    moved = qwen_image_job(tiny_qwen_image, "moved", **settings)
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
    qwen_image_job: MakeJob, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    job = qwen_image_job(tiny_qwen_image)
    train(job)
    parts = {"transformer": f"{job.out}/transformer"}
    drawings = (Drawing(str(tmp_path / "base")), Drawing(str(tmp_path / "tuned"), parts))
    drawn = GenerateJob(
        *("torch", str(tiny_qwen_image), drawings, PROMPTS, SAMPLER),
        *("cpu", "float32", job.latents, {**HOLDOUT, "levels": 4}),
    )
    generate(drawn, Events())
    paths = [Path(drawing.out, "losses.json") for drawing in drawings]
    found = np.array([json.loads(path.read_text())["losses"] for path in paths])
    assert found.shape == (2, 3, 4), "model, sample, noise level"
    assert found[1].mean() < found[0].mean()

    replaced = {"transformer": Path(parts["transformer"])}
    assemble(tiny_qwen_image, replaced, tmp_path / "p", dtype="float32")
    expected = of_diffusers(QwenImagePipeline.from_pretrained(tmp_path / "p"), PROMPTS)
    assert np.array_equal(read_pictures(Path(drawings[1].out)), expected)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_load_in_diffusers_in_both_layouts(
    qwen_image_job: MakeJob, tiny_qwen_image: Path, tmp_path: Path, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "dora": dora}
    job = qwen_image_job(tiny_qwen_image, method="lora", lora=adapters, learning_rate=1e-2)
    runtime, batch = trained(job)
    write_result(job, runtime.state(), [])
    expected = predicted(runtime._network, batch)
    files = {LORA_WEIGHTS: Path(job.out)}
    ours = read_adapters(Path(job.out) / LORA_WEIGHTS)
    assert len(ours["transformer"]) == 2 * 8, "both streams"
    if not dora:  # diffusers ignores DoRA in kohya's layout
        config = json.loads((Path(job.model) / "transformer/config.json").read_text())
        names = FAMILIES["qwen_image"].kohya
        assert names is not None
        arrays = to_kohya(ours, names, config)
        tensors = {name: torch.as_tensor(a) for name, a in arrays.items()}
        save_file(tensors, tmp_path / "kohya.safetensors")
        files["kohya.safetensors"] = tmp_path
    for name, folder in files.items():
        pipe = QwenImagePipeline.from_pretrained(job.model)
        network = Network(FAMILIES["qwen_image"], {"transformer": pipe.transformer})
        assert (expected - predicted(network, batch)).abs().max() > 1e-2
        pipe.load_lora_weights(folder, weight_name=name)
        torch.testing.assert_close(predicted(network, batch), expected, rtol=1e-4, atol=1e-5)
