"""Qwen-Image-Edit: encoded and predicted as diffusers' QwenImageEditPlusPipeline does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as code
from diffusers_script import Script, assert_figures, levels, read_pictures, start_noise
from flow_families import (
    GUIDANCE,
    SAMPLER,
    SIZE,
    WriteLatents,
    assert_a_run_moves_to_jax_and_back,
    job_maker,
)
from jobs import MakeJob
from PIL import Image
from qwen_image_edit import open_pipeline, pictures_of, predict_as_pipeline

from runtimes.families import FAMILIES, family_named
from runtimes.families.qwen_image_edit import QwenImageEdit
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, Events, GenerateJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.loading import load_denoiser
from runtimes.torch_models.vae_text_encoders import Encoder

pytestmark = pytest.mark.slow


SIZES = [(40, 56), (64, 32), (30, 90)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_embeddings_are_those_of_encode_prompt(tiny_qwen_image_edit: Path, count: int) -> None:
    pipe = open_pipeline(tiny_qwen_image_edit)
    encoder = Encoder(Base.open(tiny_qwen_image_edit))
    pictures = pictures_of(SIZES[:count])
    captions = ["a red cat", ""]
    ours = encoder.texts_with_pictures(
        captions, [[encoder.family.condition_picture(picture) for picture in pictures]] * 2
    )
    for caption, own in zip(captions, ours, strict=True):
        resized = [pipe.condition_image(picture) for picture in pictures]
        with torch.no_grad():
            theirs, mask = pipe.encode_prompt(caption, image=resized or None)
        assert mask is None, "no padding"
        torch.testing.assert_close(torch.from_numpy(own), theirs[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shapes", [[], [(8, 4)], [(4, 8), (8, 4), (6, 6)]], ids=[0, 1, 3])
def test_predictions_are_those_of_the_pipelines_formula(
    tiny_qwen_image_edit: Path, shapes: Sequence[tuple[int, int]]
) -> None:
    """References are in other places than the noisy picture, and are not noisy (`zero_cond_t`)."""
    model = load_denoiser(tiny_qwen_image_edit / "transformer").eval()
    family = family_named("qwen_image_edit")
    rng = torch.Generator().manual_seed(4)
    noisy, *references = (torch.randn(2, 4, *shape, generator=rng) for shape in [(8, 12), *shapes])
    timesteps = torch.tensor([3.0, 500.0])
    prompts = [torch.randn(count, 16, generator=rng) for count in (7, 5)]
    conditioning = {f"reference_{n}": latents for n, latents in enumerate(references)}
    conditioning["prompt_embeds"] = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    conditioning["prompt_embeds_mask"] = torch.tensor([[1.0] * 7, [1.0] * 5 + [0.0] * 2])
    with torch.no_grad():
        ours = family.predict(model, noisy, timesteps, conditioning)
        theirs = predict_as_pipeline(model, noisy, timesteps, prompts, references)
        plain = predict_as_pipeline(model, noisy, timesteps, prompts, [])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert bool(references) == bool((ours - plain).abs().max() > 1e-2)


#: Height and width of each reference's latents.
LATENT_SIZES = ((4, 8), (8, 6), (6, 6))
LORA = {
    "method": "lora",
    "learning_rate": 1e-2,
    "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["to_k", "to_q", "to_v", "to_out.0"]},
}


@pytest.fixture
def edit_job(
    make_job: MakeJob,
    write_latents: WriteLatents,
    tmp_path: Path,
    tiny_qwen_image_edit: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Any, list[torch.Tensor]]]:
    """`edit_job(count, **settings)`: a job whose samples have these references, and these."""
    make = job_maker(make_job, write_latents, tmp_path, tokens=64)
    # Made-up latents have embeddings in their shards, as those of other families.
    monkeypatch.setattr(QwenImageEdit, "sees_references", False)

    def made(count: int, name: str = "run", **settings: Any) -> tuple[Any, list[torch.Tensor]]:
        rng = np.random.default_rng(5)
        shapes = [(4, 4, *size) for size in LATENT_SIZES[:count]]
        references = [rng.standard_normal(shape, np.float32) for shape in shapes]
        more = {f"reference_{number}": array for number, array in enumerate(references)}
        own = QwenImageEdit().condition

        def condition(samples: Any, *args: Any) -> Any:
            return own(samples, *args) | {k: v[: len(samples)] for k, v in more.items()}

        monkeypatch.setattr(FAMILIES["qwen_image_edit"], "condition", condition)
        job = make(tiny_qwen_image_edit, name, **settings)
        return job, [torch.from_numpy(array) for array in references]

    return made


def script_of(job: Any, references: Sequence[torch.Tensor]) -> Script:
    pipe = open_pipeline(Path(job.model))
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    model = QwenImageTransformer2DModel.from_pretrained(Path(job.model) / "transformer")

    def predict(model: Any, noisy: Any, timesteps: Any, prompts: Any) -> torch.Tensor:
        return predict_as_pipeline(model, noisy, timesteps, prompts, references)

    return Script(job, model, predict, lambda latents: (latents - mean) / std)


@pytest.mark.parametrize(
    ("count", "method"),
    [(1, "full"), (3, "lora"), pytest.param(3, "full", marks=pytest.mark.extended)],
)
def test_twenty_steps_have_the_figures_of_the_pipelines_formula(
    edit_job: Any, count: int, method: str
) -> None:
    job, references = edit_job(count, **(LORA if method == "lora" else {}))
    script = script_of(job, references)
    if method == "lora":
        script.add_adapters(4, 8.0, LORA["lora"]["target_modules"])
    assert_figures(job, script)


@pytest.mark.extended
def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    edit_job: Any, tiny_qwen_image_edit: Path
) -> None:
    def make(model: Path, name: str, **settings: Any) -> Any:
        return edit_job(3, name, **settings)[0]

    assert_a_run_moves_to_jax_and_back(make, tiny_qwen_image_edit)


PROMPTS = ("a red cat", "two dogs in a wide forest")


@pytest.fixture
def files(tmp_path: Path) -> list[list[str]]:
    """Three references for each of two prompts, of three sizes."""
    sizes = [(64, 96), (64, 64), (96, 64)]
    pictures = pictures_of(sizes * 2)
    paths = [str(tmp_path / f"{number}.png") for number in range(len(pictures))]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    return [paths[:3], paths[3:]]


def drawn(runtime: str, model: Path, out: Path, references: list[list[str]]) -> Any:
    """Levels [N, H, W, 3] of a job's pictures."""
    job = GenerateJob(
        *(runtime, str(model), (Drawing(str(out)),), PROMPTS, SAMPLER, "cpu"),
        references=tuple(map(tuple, references)),
        reference_step=32,
    )
    generate(job, Events())
    return read_pictures(out)


def of_pipeline(model: Path, references: list[list[str]]) -> Any:
    """The same of diffusers, prompt by prompt as its pipeline takes them."""
    pipe = open_pipeline(model)
    noise = start_noise(2, (4, 8, 12), 7)
    found = []
    for row, (prompt, paths) in enumerate(zip(PROMPTS, references, strict=True)):
        own = noise[row : row + 1]
        found += pipe(
            image=[Image.open(path) for path in paths],
            prompt=prompt,
            negative_prompt="",
            true_cfg_scale=GUIDANCE,
            num_inference_steps=3,
            latents=pipe._pack_latents(own, *own.shape),
            **SIZE,
        ).images
    return levels(found)


@pytest.mark.parametrize("count", [1, 3])
def test_pictures_are_those_of_the_pipeline(
    tiny_qwen_image_edit: Path,
    files: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    """The pipeline's references for its VAE have 1024 x 1024 pixels, in any shape."""
    chips.require("jax")
    references = [row[:count] for row in files]
    sides = {(96, 64): 64 * 96, (64, 64): 64 * 64, (64, 96): 64 * 96}

    def own_size(area: int, ratio: float) -> tuple[int, int]:
        if area == code.VAE_IMAGE_SIZE:
            return next(s for s in sides if s[0] / s[1] == ratio)
        return area_of(area, ratio)

    area_of = code.calculate_dimensions
    monkeypatch.setattr(code, "calculate_dimensions", own_size)
    expected = of_pipeline(tiny_qwen_image_edit, references)
    for runtime in ("torch", "jax"):
        found = drawn(runtime, tiny_qwen_image_edit, tmp_path / runtime, references)
        assert np.abs(found - expected).max() <= 1, runtime
    exchanged = of_pipeline(tiny_qwen_image_edit, references[::-1])
    assert np.abs(exchanged - expected).max() > 1, "by other references"


def test_a_prompt_without_references_is_drawn(tiny_qwen_image_edit: Path, tmp_path: Path) -> None:
    """The pipeline refuses that; sample pictures of a training have none."""
    chips.require("jax")
    torchs, jaxs = (
        drawn(name, tiny_qwen_image_edit, tmp_path / name, []) for name in ("torch", "jax")
    )
    assert np.abs(torchs - jaxs).max() <= 1
