"""What every runtime must draw alike: the pictures of diffusers' own pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import long_captions
import numpy as np
import pytest
import torch
from conformance.conftest import Subject
from conformance.runs import Once, pictures, skip_unless_known, subjects, subjects_and_families
from diffusers import DiffusionPipeline, Flux2KleinPipeline, FluxPipeline, QwenImagePipeline
from numpy.typing import NDArray
from tolerances import PICTURE

from configs.settings.train import Train
from runtimes.objective.random_draws import Stream, generator
from runtimes.pipeline_folder.folder import Base, trained_config
from runtimes.process.job import Drawing, Events, GenerateJob
from runtimes.sample.generate_job import generate
from runtimes.torch_models.loading import load_denoiser

pytestmark = pytest.mark.slow
PROMPTS = ("a red cat", "a blue dog")
SAMPLER = {
    "seed": 5,
    "num_inference_steps": 4,
    "guidance_scale": 5.0,
    "height": 32,
    "width": 40,  # not square: sides that are exchanged give other pictures
    "batch_size": 2,
}
#: Levels of 255: how far the picture of another prompt or noise is at least.
OTHER = 5


def furthest(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """The largest difference of two sets of pictures, in levels."""
    return int(np.abs(one - other).max())


def drawn_plainly(model: Path, prompts: tuple[str, ...]) -> NDArray[np.int64]:
    """The pipeline called as its users call it, on the start noise that every runtime draws."""
    pipe = DiffusionPipeline.from_pretrained(model)
    # As many tokens as were trained on, which is all that so small a T5 or LLM takes.
    frozen = Base.open(model).family.frozen_text
    longest = None if frozen is None else pipe.components[frozen.tokenizer].model_max_length
    more = {} if longest is None else {"max_sequence_length": longest}
    return drawn_by(pipe, len(prompts), {"prompt": list(prompts), **more})


def drawn_by(pipe: DiffusionPipeline, count: int, texts: dict[str, Any]) -> NDArray[np.int64]:
    """`count` pictures of a pipeline, by the arguments of its call that say their texts."""
    pipe.set_progress_bar_config(disable=True)
    config = pipe.vae.config
    channels = config.get("latent_channels", config.get("z_dim"))
    height, width = SAMPLER["height"], SAMPLER["width"]
    noise = [
        generator(SAMPLER["seed"], Stream.PICTURE, number).standard_normal(
            (channels, height // 4, width // 4), dtype=np.float32
        )
        for number in range(count)
    ]
    latents = torch.from_numpy(np.stack(noise))
    guidance = {"guidance_scale": SAMPLER["guidance_scale"]}
    if isinstance(pipe, FluxPipeline | QwenImagePipeline):
        latents = pipe._pack_latents(latents, *latents.shape)
    if isinstance(pipe, Flux2KleinPipeline):
        latents = pipe._patchify_latents(latents)
    if isinstance(pipe, QwenImagePipeline):
        guidance = {"true_cfg_scale": SAMPLER["guidance_scale"]}
        guidance |= {"negative_prompt": [""] * count}
    drawn = pipe(
        height=height,
        width=width,
        num_inference_steps=SAMPLER["num_inference_steps"],
        latents=latents,
        **guidance,
        **texts,
    ).images
    return np.stack([np.asarray(picture).astype(int) for picture in drawn])


@subjects_and_families(extended="xla mindspore hpu-eager hpu-lazy npu")
def test_the_same_prompts_and_noise_give_the_same_pictures(
    runtime: Subject, family: str, models: dict[str, Path], once: Once, tmp_path: Path
) -> None:
    """Each picture is of its prompt and its noise: those of the other are far from it."""
    skip_unless_known(runtime.name, family)

    def reference(folder: Path) -> None:
        np.save(folder / "drawn", drawn_plainly(models[family], PROMPTS))
        np.save(folder / "swapped", drawn_plainly(models[family], PROMPTS[::-1]))

    plain = once(f"drawn-{family}", reference)
    expected, swapped = np.load(plain / "drawn.npy"), np.load(plain / "swapped.npy")
    assert min(furthest(*pair) for pair in zip(expected, swapped, strict=True)) > OTHER
    assert furthest(expected[0], swapped[1]) > OTHER  # one prompt, two noises

    drawings = (Drawing(str(tmp_path / "drawn")),)
    on, model = runtime.on, str(models[family])
    runtime.run(GenerateJob(on.runtime, model, drawings, PROMPTS, SAMPLER, device=on.device))
    assert furthest(pictures(tmp_path / "drawn"), expected) <= PICTURE


@subjects(extended="xla mindspore", soak="hpu-eager hpu-lazy npu")
def test_long_prompts_with_weights_draw_as_their_embeddings_in_diffusers(
    runtime: Subject, models: dict[str, Path], once: Once, tmp_path: Path
) -> None:
    """Prompts and negative prompt are in three chunks, whose embeddings are sd-scripts'."""
    model = models["sdxl"]
    before = "a quick brown fox " * 6
    parts = [[(before, 3.0), ("red cat", 1.0)], [(before + "dog", 1.0)]]
    negative = "a blurry picture " * 8
    sampler = SAMPLER | {"negative_prompt": negative}

    def reference(folder: Path) -> None:
        pipe = DiffusionPipeline.from_pretrained(model)
        for name, weighted in (("drawn", True), ("another", False)):
            texts = [[(text, weight if weighted else 1.0) for text, weight in p] for p in parts]
            encoded = [long_captions.encode(model, text, 3) for text in texts]
            against = [long_captions.encode(model, [(negative, 1.0)], 3)] * len(parts)
            arguments = {
                "prompt_embeds": torch.stack([states for states, _ in encoded]),
                "pooled_prompt_embeds": torch.stack([pooled for _, pooled in encoded]),
                "negative_prompt_embeds": torch.stack([states for states, _ in against]),
                "negative_pooled_prompt_embeds": torch.stack([pooled for _, pooled in against]),
            }
            np.save(folder / name, drawn_by(pipe, len(parts), arguments))

    plain = once("drawn-long", reference)
    expected = np.load(plain / "drawn.npy")
    assert furthest(expected, np.load(plain / "another.npy")) > OTHER
    drawings = (Drawing(str(tmp_path / "drawn")),)
    on = runtime.on
    prompts = (f"({before}:3)red cat", f"{before}dog")
    reading = {"max_tokens": 225, "emphasis": "weights"}
    about = (on.runtime, str(model), drawings, prompts, sampler, on.device)
    runtime.run(GenerateJob(*about, **reading))
    assert furthest(pictures(tmp_path / "drawn"), expected) <= PICTURE


def seeing(model: Path, folder: Path) -> None:
    """Save the model's UNet with a mask and a score among its inputs, which count."""
    settings = Train(inpainting=True, aesthetic_score=True)
    config = trained_config(Base.open(model).denoiser, settings)
    unet = load_denoiser(model / "unet", config=config)
    torch.manual_seed(0)
    for layer in (unet.conv_in, unet.class_embedding.linear_2):
        torch.nn.init.normal_(layer.weight.data, std=0.2)
    unet.save_pretrained(folder)


@subjects(without="torch", extended="mindspore", soak="xla hpu-eager hpu-lazy npu")
def test_what_sees_a_mask_and_a_score_draws_alike(
    runtime: Subject, models: dict[str, Path], once: Once, tmp_path: Path
) -> None:
    """As torch: test_inpainting_and_scores.py compares that with diffusers."""
    model = models["sd"]

    def job(unet: Path, out: Path, runtime: str, device: str, score: float) -> GenerateJob:
        drawings = (Drawing(str(out), {"unet": str(unet)}),)
        asked = {**SAMPLER, "aesthetic_score": score, "negative_aesthetic_score": 2.0}
        return GenerateJob(runtime, str(model), drawings, PROMPTS, asked, device=device)

    def reference(folder: Path) -> None:
        seeing(model, folder / "unet")
        for name, score in (("drawn", 6.5), ("another score", 3.0)):
            generate(job(folder / "unet", folder / name, "torch", "cpu", score), Events())

    plain = once("drawn-seeing", reference)
    expected = pictures(plain / "drawn")
    assert furthest(expected, pictures(plain / "another score")) > OTHER
    on = runtime.on
    runtime.run(job(plain / "unet", tmp_path / "drawn", on.runtime, on.device, 6.5))
    assert furthest(pictures(tmp_path / "drawn"), expected) <= PICTURE
