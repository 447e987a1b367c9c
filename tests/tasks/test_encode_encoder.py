"""The encoder gives what diffusers' own pipelines give."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline

from runtimes.base import WrongInput
from runtimes.encoders import describe_encoders, digest_encoders
from runtimes.torch.encode import Encoder

CAPTIONS = ["a cat on a mat", "", "Déjà vu, 123 & more", "long " * 60]


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (3, 3, 32, 40)).astype(np.float32)


def test_moments_are_the_vaes_own(tiny_sdxl: Path, pixels: np.ndarray) -> None:
    mean, logvar = Encoder(tiny_sdxl, device="cpu").images(pixels)
    vae = AutoencoderKL.from_pretrained(tiny_sdxl / "vae")
    with torch.no_grad():
        posterior = vae.encode(torch.from_numpy(pixels)).latent_dist
    np.testing.assert_array_equal(mean, posterior.mean.numpy())
    np.testing.assert_array_equal(logvar, posterior.logvar.numpy())
    assert mean.shape == (3, 4, 8, 10)


def test_sdxl_texts_equal_encode_prompt(tiny_sdxl: Path) -> None:
    embeds, pooled = Encoder(tiny_sdxl, device="cpu").texts(CAPTIONS)
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl)
    with torch.no_grad():
        theirs, _, their_pooled, _ = pipeline.encode_prompt(
            CAPTIONS, do_classifier_free_guidance=False
        )
    np.testing.assert_allclose(embeds, theirs.numpy(), atol=1e-6)
    np.testing.assert_allclose(pooled, their_pooled.numpy(), atol=1e-6)
    assert embeds.shape == (4, 77, 64) and pooled.shape == (4, 24)
    assert np.abs(embeds[0] - embeds[2]).max() > 0.1


def test_sd_texts_equal_encode_prompt(tiny_sd: Path) -> None:
    embeds, pooled = Encoder(tiny_sd, device="cpu").texts(CAPTIONS)
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_sd)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(CAPTIONS, "cpu", 1, False)
    assert pooled is None
    np.testing.assert_allclose(embeds, theirs.numpy(), atol=1e-6)


def test_token_counts_are_those_before_truncation(tiny_sdxl: Path) -> None:
    # letters without merges: one token each, spaces none, and the two marks
    assert Encoder(tiny_sdxl, device="cpu").token_counts(["a cat", "", "long " * 60]) == [6, 2, 242]


def test_info_tells_what_a_trainer_must_know(tiny_sdxl: Path, tiny_sd: Path) -> None:
    info = describe_encoders(tiny_sdxl)
    assert info == {
        "family": "sdxl",
        "latent_channels": 4,
        "vae_scale_factor": 4,
        "scaling_factor": 0.5,
        "shift_factor": 0.0,
        "latents_mean": None,
        "latents_std": None,
        "empty_prompt": "zeros",
        "tokens": 77,
        "prompt_dim": 64,
        "pooled_dim": 24,
    }
    sd = describe_encoders(tiny_sd)
    assert (sd["family"], sd["empty_prompt"], sd["pooled_dim"]) == ("sd", "encoded", None)


def test_another_vae_is_used_and_counts(
    tiny_sdxl: Path, tiny_vae: Path, pixels: np.ndarray
) -> None:
    own, other = Encoder(tiny_sdxl, device="cpu"), Encoder(tiny_sdxl, tiny_vae, device="cpu")
    assert np.abs(own.images(pixels)[0] - other.images(pixels)[0]).max() > 0.01
    assert digest_encoders(tiny_sdxl) != digest_encoders(tiny_sdxl, tiny_vae)


def test_the_digest_leaves_the_unet_out(tiny_sdxl: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_sdxl, tmp_path / "copy"))
    shutil.rmtree(copy / "unet")
    assert digest_encoders(copy) == digest_encoders(tiny_sdxl)
    weights = copy / "text_encoder_2" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert digest_encoders(copy) != digest_encoders(tiny_sdxl)


def test_a_lone_fp16_variant_is_loaded(tiny_sdxl: Path, tmp_path: Path) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl)
    pipeline.save_pretrained(tmp_path, variant="fp16")
    assert Encoder(tmp_path, device="cpu").texts(["a"])[0].shape == (1, 77, 64)


def test_wrong_folders_are_told_in_one_line(tiny_sdxl: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"model_index\.json: not there"):
        Encoder(tmp_path)
    copy = Path(shutil.copytree(tiny_sdxl, tmp_path / "copy"))
    (copy / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(WrongInput, match="its encoders do not load") as caught:
        Encoder(copy, device="cpu")
    assert "\n" not in str(caught.value)
    index = json.loads((copy / "model_index.json").read_text())
    index["text_encoder_2"] = ["transformers", "T5EncoderModel"]
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(WrongInput, match="T5EncoderModel"):
        Encoder(copy)


def test_a_vocabulary_that_was_not_read_is_refused(tiny_sdxl: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_sdxl, tmp_path / "copy"))
    from transformers import CLIPTokenizer

    CLIPTokenizer().save_pretrained(copy / "tokenizer")
    with pytest.raises(WrongInput, match="tokenizer has 2 tokens"):
        Encoder(copy, device="cpu")
