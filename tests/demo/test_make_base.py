"""A base remade from random weights has the files of the shipped one, and learns from pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from demo.make_base import BASE, make_base

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of a few steps."""
    folder = tmp_path_factory.mktemp("remade") / "base"
    make_base(folder, clip_steps=2, vae_steps=20)
    return folder


def layout(folder: Path) -> dict[str, object]:
    """Files of a base but for the card: shapes of weights, settings but for what was measured."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            with safe_open(path, "np") as weights:
                found[name] = {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
                found[f"{name} dtypes"] = {weights.get_slice(k).get_dtype() for k in weights.keys()}  # noqa: SIM118
        elif path.suffix == ".json":
            facts = json.loads(path.read_text())
            measured = {"scaling_factor", "_name_or_path"}
            found[name] = {k: v for k, v in facts.items() if k not in measured}
        elif path.is_file() and path.name != "README.md":
            found[name] = None
    return found


@pytest.mark.extended
def test_a_base_made_of_a_few_steps_is_laid_out_as_the_shipped_one(remade: Path) -> None:
    assert layout(remade) == layout(BASE)


def test_no_weight_of_the_shipped_base_is_kept(remade: Path) -> None:
    for file in sorted(path.relative_to(BASE) for path in BASE.rglob("*.safetensors")):
        ours, shipped = load_file(remade / file), load_file(BASE / file)
        kept = [name for name, w in ours.items() if w.ndim > 1 and torch.equal(w, shipped[name])]
        assert not kept, file


def test_text_encoders_are_the_evaluators_text_tower(remade: Path) -> None:
    evaluator, *encoders = (
        load_file(remade / part / "model.safetensors")
        for part in ("evaluator", "text_encoder", "text_encoder_2")
    )
    for encoder in encoders:
        assert all(torch.equal(weight, evaluator[name]) for name, weight in encoder.items())


def test_scaled_latents_have_a_standard_deviation_of_one(remade: Path) -> None:
    from diffusers import AutoencoderKL

    from demo import dataset
    from demo.captions import STYLES

    vae = AutoencoderKL.from_pretrained(remade / "vae", torch_dtype=torch.float32)
    x8, _ = dataset.load("held_out")
    images = dataset.render(x8, np.arange(len(x8)) % len(STYLES), np.random.default_rng(0))
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mean * vae.config.scaling_factor
    assert latents.std().item() == pytest.approx(1, abs=0.15)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        make_base(tmp_path)
    assert not list(tmp_path.iterdir())
