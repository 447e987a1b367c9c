"""The encoder's output equals that of diffusers' pipelines."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from diffusers.utils import logging as diffusers_logging
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from artifacts.models import digest_model
from configs.errors import Refused
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob
from runtimes.torch.sampler import open_encoder
from runtimes.torch_models.quantized import PRECISIONS, QuantizedLinear
from runtimes.torch_models.vae_text_encoders import Encoder
from tasks.evaluate.draw import DRAWING_PARTS, digest_pipeline

pytestmark = pytest.mark.slow

CAPTIONS = ["a cat on a mat", "", "Déjà vu, 123 & more", "long " * 60]


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (3, 3, 32, 40)).astype(np.float32)


def test_moments_are_the_vaes_own(tiny_sdxl: Path, pixels: np.ndarray) -> None:
    mean, logvar = Encoder(Base.open(tiny_sdxl), device="cpu").images(pixels)
    vae = AutoencoderKL.from_pretrained(tiny_sdxl / "vae")
    with torch.no_grad():
        posterior = vae.encode(torch.from_numpy(pixels)).latent_dist
    np.testing.assert_array_equal(mean, posterior.mean.numpy())
    np.testing.assert_array_equal(logvar, posterior.logvar.numpy())
    assert mean.shape == (3, 4, 8, 10)


def texts_as_encode_prompt(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and pooled ones of the captions, equal to those of SDXL's pipeline."""
    embeds, pooled = Encoder(Base.open(folder), device="cpu").texts(CAPTIONS)
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder)
    with torch.no_grad():
        theirs, _, their_pooled, _ = pipeline.encode_prompt(
            CAPTIONS, do_classifier_free_guidance=False
        )
    np.testing.assert_allclose(embeds, theirs.numpy(), atol=1e-6)
    np.testing.assert_allclose(pooled, their_pooled.numpy(), atol=1e-6)
    return embeds, pooled


def test_sdxl_texts_equal_encode_prompt(tiny_sdxl: Path) -> None:
    embeds, pooled = texts_as_encode_prompt(tiny_sdxl)
    assert embeds.shape == (4, 77, 64) and pooled.shape == (4, 24)
    assert np.abs(embeds[0] - embeds[2]).max() > 0.1


def test_sdxl_texts_equal_encode_prompt_where_the_first_encoder_projects(
    sdxl_projecting: Path, tmp_path: Path
) -> None:
    """The pipeline takes the pooled output of the first encoder that projects it."""
    folder = Path(shutil.copytree(sdxl_projecting, tmp_path / "model"))
    config = CLIPTextConfig.from_pretrained(folder / "text_encoder", projection_dim=16)
    CLIPTextModelWithProjection(config).save_pretrained(folder / "text_encoder")
    _, pooled = texts_as_encode_prompt(folder)
    assert pooled.shape == (4, 16) and Base.open(folder).encoders["pooled_dim"] == 16


def test_keys_tell_an_unusual_encoder_that_pools(sdxl_projecting: Path, tiny_sdxl: Path) -> None:
    unusual, usual = Base.open(sdxl_projecting), Base.open(tiny_sdxl)
    assert unusual.encoders["pooled"] == "text_encoder" and "pooled" not in usual.encoders
    assert digest_pipeline(unusual) != digest_model(sdxl_projecting, DRAWING_PARTS)
    assert digest_pipeline(usual) == digest_model(tiny_sdxl, DRAWING_PARTS)


def test_sd_texts_equal_encode_prompt(tiny_sd: Path) -> None:
    embeds, pooled = Encoder(Base.open(tiny_sd), device="cpu").texts(CAPTIONS)
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_sd)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(CAPTIONS, "cpu", 1, False)
    assert pooled is None
    np.testing.assert_allclose(embeds, theirs.numpy(), atol=1e-6)


def test_sd3_texts_equal_encode_prompt(tiny_sd3: Path) -> None:
    embeds, pooled = Encoder(Base.open(tiny_sd3), device="cpu").texts(CAPTIONS)
    theirs, their_pooled = _sd3_prompt(StableDiffusion3Pipeline.from_pretrained(tiny_sd3), 20)
    np.testing.assert_allclose(embeds, theirs, atol=1e-6)
    np.testing.assert_allclose(pooled, their_pooled, atol=1e-6)
    assert embeds.shape == (4, 77 + 20, 80) and pooled.shape == (4, 48)
    assert np.abs(embeds[0] - embeds[2])[77:].max() > 0.1, "T5 reads the caption too"


def test_sd3_without_t5_leaves_only_zeros_out(tiny_sd3_without_t5: Path) -> None:
    embeds, pooled = Encoder(Base.open(tiny_sd3_without_t5), device="cpu").texts(CAPTIONS)
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        tiny_sd3_without_t5, text_encoder_3=None, tokenizer_3=None
    )
    theirs, their_pooled = _sd3_prompt(pipeline, 256)
    info = Base.open(tiny_sd3_without_t5).encoders
    assert theirs.shape[1:] == (info["tokens"], info["prompt_dim"]) == (77 + 256, 80)
    np.testing.assert_allclose(embeds, theirs[:, :77, :64], atol=1e-6)
    assert not theirs[:, 77:].any() and not theirs[:, :, 64:].any()
    np.testing.assert_allclose(pooled, their_pooled, atol=1e-6)


def _sd3_prompt(pipeline: StableDiffusion3Pipeline, length: int) -> list[np.ndarray]:
    diffusers_logging.set_verbosity_error()  # it prints what it truncates, pads and all
    with torch.no_grad():
        found = pipeline.encode_prompt(
            CAPTIONS, None, None, do_classifier_free_guidance=False, max_sequence_length=length
        )
    return [found[0].numpy(), found[2].numpy()]


def test_input_ids_are_the_tokenizers_own(tiny_sdxl: Path, tiny_sd: Path) -> None:
    ids = Encoder(Base.open(tiny_sdxl), device="cpu").input_ids(CAPTIONS)
    for row, name in enumerate(("tokenizer", "tokenizer_2")):
        tokenizer = CLIPTokenizer.from_pretrained(tiny_sdxl / name)
        theirs = tokenizer(CAPTIONS, padding="max_length", max_length=77, truncation=True)
        np.testing.assert_array_equal(ids[:, row], theirs.input_ids)
    assert not np.array_equal(ids[:, 0], ids[:, 1]), "they pad with different tokens"
    assert Encoder(Base.open(tiny_sd), device="cpu").input_ids(CAPTIONS).shape == (4, 1, 77)


def test_token_counts_are_those_before_truncation(tiny_sdxl: Path) -> None:
    # letters without merges: one token each, spaces none, and the two marks
    counts = Encoder(Base.open(tiny_sdxl), device="cpu").token_counts(["a cat", "", "long " * 60])
    assert counts == {name: [6, 2, 242] for name in ("text_encoder", "text_encoder_2")}


def test_each_text_encoder_counts_its_tokens_up_to_its_limit(tiny_sd3: Path) -> None:
    # T5: a mark before each word, and one at the end
    encoder = Encoder(Base.open(tiny_sd3), device="cpu")
    clip = {name: [6, 2] for name in ("text_encoder", "text_encoder_2")}
    assert encoder.token_counts(["a cat", ""]) == clip | {"text_encoder_3": [7, 1]}
    assert encoder.limits == {"text_encoder": 77, "text_encoder_2": 77, "text_encoder_3": 20}
    assert Base.open(tiny_sd3).encoders["caption_tokens"] == 20


def test_info_has_the_trainers_facts(tiny_sdxl: Path, tiny_sd: Path, tiny_sd3: Path) -> None:
    sdxl, sd, sd3 = (Base.open(model).encoders for model in (tiny_sdxl, tiny_sd, tiny_sd3))
    assert sdxl == {
        "family": "sdxl",
        "latent_channels": 4,
        "vae_scale_factor": 4,
        "size_step": 4,
        "scaling_factor": 0.5,
        "shift_factor": 0.0,
        "latents_mean": None,
        "latents_std": None,
        "empty_prompt": "zeros",
        "tokens": 77,
        "caption_tokens": 77,
        "prompt_dim": 64,
        "pooled_dim": 24,
    }
    assert (sd["family"], sd["empty_prompt"], sd["pooled_dim"]) == ("sd", "encoded", None)
    assert sd3 == sdxl | {
        **{"family": "sd3", "empty_prompt": "encoded"},
        **{"latent_channels": 8, "size_step": 8, "shift_factor": 0.06},
        **{"tokens": 97, "caption_tokens": 20, "prompt_dim": 80, "pooled_dim": 48},
    }


def test_another_vae_is_used_and_counts(
    tiny_sdxl: Path, tiny_vae: Path, pixels: np.ndarray
) -> None:
    bases = Base.open(tiny_sdxl), Base.open(tiny_sdxl, tiny_vae)
    own, other = (Encoder(base, device="cpu").images(pixels)[0] for base in bases)
    assert np.abs(own - other).max() > 0.01
    assert bases[0].digest_encoders() != bases[1].digest_encoders()


def test_the_digest_leaves_the_unet_out(tiny_sdxl: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_sdxl, tmp_path / "copy"))
    shutil.rmtree(copy / "unet")
    assert Base.open(copy).digest_encoders() == Base.open(tiny_sdxl).digest_encoders()
    weights = copy / "text_encoder_2" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert Base.open(copy).digest_encoders() != Base.open(tiny_sdxl).digest_encoders()


def test_the_digest_has_the_third_encoder_but_no_transformer_weights(
    tiny_sd3: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_sd3, tmp_path / "copy"))
    (copy / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    assert Base.open(copy).digest_encoders() == Base.open(tiny_sd3).digest_encoders()
    for name in ("text_encoder_3/model.safetensors", "tokenizer_3/tokenizer.json"):
        before = Base.open(copy).digest_encoders()
        data = bytearray((copy / name).read_bytes())
        data[-2] ^= 1
        (copy / name).write_bytes(data)
        assert Base.open(copy).digest_encoders() != before


@pytest.mark.parametrize("variant", ["fp16", "bf16"])
def test_a_lone_variant_is_loaded(tiny_sdxl: Path, tmp_path: Path, variant: str) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl)
    pipeline.save_pretrained(tmp_path, variant=variant)
    assert Encoder(Base.open(tmp_path), device="cpu").texts(["a"])[0].shape == (1, 77, 64)


def test_errors_of_wrong_folders_are_one_line(tiny_sdxl: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"model_index\.json is missing: a diff"):
        Encoder(Base.open(tmp_path))
    copy = Path(shutil.copytree(tiny_sdxl, tmp_path / "copy"))
    (copy / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(Refused, match="its encoders do not load") as caught:
        Encoder(Base.open(copy), device="cpu")
    assert "\n" not in str(caught.value)
    index = json.loads((copy / "model_index.json").read_text())
    index["text_encoder_2"] = ["transformers", "T5EncoderModel"]
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match="T5EncoderModel"):
        Encoder(Base.open(copy))


@pytest.mark.parametrize("part", ["text_encoder_2", "text_encoder_3"])
def test_encoder_widths_must_match_the_transformer(
    tiny_sd3: Path, tmp_path: Path, part: str
) -> None:
    copy = Path(shutil.copytree(tiny_sd3, tmp_path / "copy"))
    path = copy / part / "config.json"
    config = json.loads(path.read_text())
    config[{"text_encoder_2": "hidden_size", "text_encoder_3": "d_model"}[part]] = 96
    path.write_text(json.dumps(config))
    with pytest.raises(Refused, match="numbers a token, its transformer takes 80"):
        assert Base.open(copy).encoders


def test_missing_weights_in_a_file_are_reported(tiny_sd: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_sd, tmp_path / "copy"))
    path = copy / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("fc1.weight"))
    save_file({n: t for n, t in weights.items() if n != name}, path, {"format": "pt"})
    with pytest.raises(Refused, match=r"lacks 1 weights, such as .*fc1\.weight"):
        Encoder(Base.open(copy), device="cpu")


def test_an_unread_vocabulary_is_refused(tiny_sdxl: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_sdxl, tmp_path / "copy"))
    CLIPTokenizer().save_pretrained(copy / "tokenizer")
    with pytest.raises(Refused, match="tokenizer has 2 tokens"):
        Encoder(Base.open(copy), device="cpu")


def test_another_vae_counts_by_its_weights(tiny_sdxl: Path, tiny_vae: Path, tmp_path: Path) -> None:
    """Two VAEs with the same config have different digests."""
    other = Path(shutil.copytree(tiny_vae, tmp_path / "vae"))
    weights = load_file(other / "diffusion_pytorch_model.safetensors")
    weights["encoder.conv_in.bias"] += 1
    save_file(weights, other / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    assert (
        Base.open(tiny_sdxl, other).digest_encoders()
        != Base.open(tiny_sdxl, tiny_vae).digest_encoders()
    )


def opened(folder: Path, **settings: Any) -> Encoder:
    return open_encoder(EncodeJob("torch", str(folder), device="cpu", **settings))


@pytest.mark.parametrize("precision", [None, "nf4"])
def test_offloaded_text_encoders_return_the_same_bits(
    tiny_sd3: Path, precision: str | None
) -> None:
    plain, offloaded = (
        opened(tiny_sd3, text_precision=precision, offload=offload) for offload in (False, True)
    )
    assert offloaded._frozen is not None
    models = [offloaded._frozen.model, *(model for _, model in offloaded._clip)]
    assert all(map(_is_group_offload_enabled, models))
    for expected, found in zip(plain.texts(CAPTIONS), offloaded.texts(CAPTIONS), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", ["tiny-sd3", "tiny-flux", "tiny-qwen-image", "tiny-z-image"])
def test_a_quantized_t5_or_language_model_computes_with_its_dequantized_weights(
    tiny_model: Callable[[str], Path], model: str, precision: str
) -> None:
    """CLIP keeps its weights."""
    plain = opened(tiny_model(model))
    quantized = opened(tiny_model(model), text_precision=precision)
    assert plain._frozen is not None and quantized._frozen is not None
    layers = dict(quantized._frozen.model.named_modules())
    changed = {n: m for n, m in layers.items() if isinstance(m, PRECISIONS[precision])}
    assert changed
    for _, clip in quantized._clip:
        assert not any(isinstance(layer, QuantizedLinear) for layer in clip.modules())
    before, _ = plain.texts(CAPTIONS[:2])
    found, _ = quantized.texts(CAPTIONS[:2])
    assert any((one != other).any() for one, other in zip(before, found, strict=True))
    for name, layer in changed.items():
        plain._frozen.model.get_submodule(name).weight.data = layer.dequantized()
    expected, _ = plain.texts(CAPTIONS[:2])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
