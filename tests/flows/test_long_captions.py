"""Captions of tags and long prompts, from a folder to the pictures of the published model."""

from collections.abc import Callable
from pathlib import Path

import in_process
import long_captions
import numpy as np
import picture_sources
import published
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from PIL import Image
from toy_recipes import toy

from artifacts.latent_shards import open_latents
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.objective.random_draws import Stream, generator

pytestmark = [pytest.mark.slow, pytest.mark.extended]
BEFORE = "a quick brown fox jumps over the lazy dog, " * 4  # 144 tokens of the tiny tokenizers


@pytest.mark.soak
def test_a_model_of_225_tokens_is_trained_measured_published_and_drawn(
    tmp_path: Path, api: str, tiny_model: Callable[[str], Path]
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, one in enumerate(picture_sources.make_pictures(24)):
        (photos / f"{one.name}.png").write_bytes(one.png)
        tags = ", ".join(f"tag {letter * 20}{number}" for letter in "abcdefgh")
        (photos / f"{one.name}.txt").write_text(f"sks fox, {tags}", encoding="utf-8")
    source = {"kind": "folder", "path": str(photos)}
    recipe = toy("sdxl-lora", tmp_path / "store", source, tiny_model) | {
        "encode.max_tokens": 225,
        "encode.captions": {
            "replace": {"sks fox": "ohwx fox"},
            "shuffle": True,
            "keep_tags": 1,
            "tag_dropout": 0.2,
            "variants": 3,
            "emphasis": "weights",
        },
        "train.learning_rate": 1e-2,
        "evaluate.prompts.new.prompts": [f"{BEFORE}a fox"],
        "evaluate.dtype": "float32",
        "publish.dtype": "float32",
        "publish.smoke_test": True,
    }
    report = in_process.finetune(tmp_path, "sdxl-lora", recipe, api)
    assert report["status"] == "published"
    latents = open_latents(str(published.folder(report, "encode")))
    assert latents.info["tokens"] == 227
    summary = published.manifest(report, "encode")["summary"]
    uncut = {"tokens": 227, "cut": 0}
    assert summary["cut"] == {"text_encoder": uncut, "text_encoder_2": uncut}
    texts = [t for (_, ts), _ in published.captions_encoded(report, "train").items() for t in ts]
    assert {text.partition(",")[0] for text in texts} == {"ohwxfox"}
    assert len(set(texts)) > 40, "a picture has three variants"

    folder = Path(report["model"])
    options = {"num_inference_steps": 2, "guidance_scale": 5.0, "device": "cpu", "seed": 3}
    options |= {"num_images_per_prompt": 1, "height": 32, "width": 32}
    settings = options | {"store": str(tmp_path / "store")}
    prompts = [f"({BEFORE}:3) fox"]
    out = in_process.generate(tmp_path, str(folder), api, prompts=prompts, settings=settings)
    ours = np.asarray(Image.open(out / "samples/00000.png")).astype(int)
    parts = [(BEFORE, 3.0), (" fox", 1.0)]
    base, vae = tiny_model("tiny-sdxl"), tiny_model("tiny-vae")
    theirs, without = (draw(base, vae, folder, some) for some in (parts, parts[1:]))
    assert abs(theirs - ours).max() <= 1 < abs(without - ours).max()


def draw(base: Path, vae: Path, adapters: Path, parts: list[tuple[str, float]]) -> np.ndarray:
    """The picture [32, 32, 3] of a prompt by diffusers, with embeddings as sd-scripts encode."""
    decoder = AutoencoderKL.from_pretrained(vae)
    pipe = StableDiffusionXLPipeline.from_pretrained(base, vae=decoder, torch_dtype=torch.float32)
    pipe.load_lora_weights(adapters, weight_name=LORA_WEIGHTS)
    embeds, pooled = (tensor[None] for tensor in long_captions.encode(base, parts, 3))
    noise = generator(3, Stream.PICTURE, 0).standard_normal((1, 4, 8, 8), dtype=np.float32)
    drawn = pipe(
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        negative_prompt_embeds=torch.zeros_like(embeds),
        negative_pooled_prompt_embeds=torch.zeros_like(pooled),
        latents=torch.from_numpy(noise),
        height=32,
        width=32,
        num_inference_steps=2,
        guidance_scale=5.0,
    ).images[0]
    return np.asarray(drawn).astype(int)
