"""Photos with edges beside them become a ControlNet that plain diffusers loads and draws with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import in_process
import numpy as np
import pytest
import torch
from diffusers_script import levels, start_noise
from picture_bytes import encode_picture
from picture_sources import make_pictures
from PIL import Image
from toy_recipes import toy

from runtimes.families.family import pack

pytestmark = [pytest.mark.slow, pytest.mark.extended]
PROMPT = "a drawing of a fox"
DRAWING = {"num_inference_steps": 2, "guidance_scale": 3.0}


def control_of(number: int, size: tuple[int, int]) -> Image.Image:
    """White lines on black, at places of their own."""
    lines = np.zeros((size[1], size[0], 3), np.uint8)
    lines[number % size[1]] = lines[:, (7 * number) % size[0]] = 255
    return Image.fromarray(lines)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, one in enumerate(make_pictures(24)):
        (folder / f"{one.name}.png").write_bytes(one.png)
        (folder / f"{one.name}.txt").write_text(PROMPT)
        size = Image.open(folder / f"{one.name}.png").size
        control = encode_picture(control_of(number, size))
        (folder / f"{one.name}.control.png").write_bytes(control)
    return folder


def overrides(
    name: str, tmp_path: Path, photos: Path, tiny_model: Callable[[str], Path]
) -> dict[str, Any]:
    source = {"kind": "folder", "path": str(photos), "control": "files"}
    return toy(name, tmp_path / "store", source, tiny_model) | {
        **{"train.method": "controlnet", "train.steps": 16, "train.learning_rate": 5e-2},
        **{"encode.aspect_buckets": False, "publish.merge": False, "publish.smoke_test": True},
        **{"evaluate.dtype": "float32", "publish.dtype": "float32"},
        "evaluate.prompts": {"new": {"prompts": [PROMPT], "images_per_prompt": 2}},
        **{"model.vae": None, "train.sample_every_n_steps": 8},
    }


def drawn_by_diffusers(model: Path, base: Path, kind: str, control: Image.Image) -> Any:
    """Levels [1, 32, 32, 3] of the pipeline that the model's card names."""
    is_flux = kind == "flux"
    network_class = diffusers.FluxControlNetModel if is_flux else diffusers.ControlNetModel
    pipeline = "FluxControlNetPipeline" if is_flux else "StableDiffusionXLControlNetPipeline"
    network = network_class.from_pretrained(model)
    options = {} if is_flux else {"add_watermarker": False}
    pipe = getattr(diffusers, pipeline).from_pretrained(base, controlnet=network, **options)
    pipe.set_progress_bar_config(disable=True)
    config = pipe.transformer.config if is_flux else pipe.unet.config
    channels = config.in_channels // 4 if is_flux else config.in_channels
    noise = start_noise(1, (channels, 8, 8), 7)
    arguments = {"latents": pack(noise) if is_flux else noise, "height": 32, "width": 32}
    arguments["control_image" if is_flux else "image"] = control
    if is_flux:
        arguments["max_sequence_length"] = 20
        arguments["generator"] = torch.Generator().manual_seed(0)
    return levels(pipe(PROMPT, **arguments, **DRAWING).images)


@pytest.mark.parametrize(
    ("name", "kind"), [("sdxl", "sdxl"), pytest.param("flux-lora", "flux", marks=pytest.mark.soak)]
)
def test_a_published_controlnet_draws_alike_in_kiln_and_in_diffusers(
    tmp_path: Path, photos: Path, tiny_model: Callable[[str], Path], api: str, name: str, kind: str
) -> None:
    recipe = overrides(name, tmp_path, photos, tiny_model)
    report = in_process.finetune(tmp_path, name, recipe, api)
    assert report["status"] == "published"
    model = Path(report["model"])
    class_name = json.loads((model / "config.json").read_text(encoding="utf-8"))["_class_name"]
    assert class_name in ("ControlNetModel", "FluxControlNetModel")
    assert not (model / "model_index.json").exists()
    assert (Path(report["stages"]["train"]["uri"]) / "samples").is_dir()
    control = control_of(11, (32, 32))
    control.save(tmp_path / "control.png")
    settings = {"seed": 7, "num_images_per_prompt": 1, "store": recipe["store"], **DRAWING}
    drawn = []
    for file in ("control.png", "photos/00.png"):
        own = {**settings, "control": [str(tmp_path / file)]}
        folder = in_process.generate(tmp_path, str(model), api, prompts=[PROMPT], settings=own)
        drawn.append(np.asarray(Image.open(folder / "samples/00000.png")).astype(int)[None])
    assert (drawn[0] != drawn[1]).any()
    expected = drawn_by_diffusers(model, Path(recipe["model.path"]), kind, control)
    if kind == "sdxl":  # FLUX's pipeline draws the latents of a control picture: a test of its own
        assert np.abs(drawn[0] - expected).max() <= 1
    again = in_process.finetune(tmp_path, name, recipe, api)
    assert again["stages"]["train"]["outcome"] == "reused"
