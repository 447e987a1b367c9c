"""Each family's conditioning is what its diffusers pipeline gives its denoiser."""

import json
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from conformance.reference_training import predict

from artifacts.latent_shards import LatentSample
from configs.errors import Refused
from runtimes.families import FAMILIES, Captioned, Family, detect_family
from runtimes.pipeline_folder.folder import Base
from runtimes.pipeline_folder.weights import weight_files
from runtimes.torch_models.loading import load_denoiser, load_text_encoder
from runtimes.torch_models.network import Network
from runtimes.torch_models.vae_text_encoders import Encoder, encode_ids, encode_in_step

CAPTIONS = ["a cat", "", "Déjà vu"]
SAMPLE = LatentSample(
    mean=np.zeros((4, 8, 8), np.float32),
    logvar=np.zeros((4, 8, 8), np.float32),
    id=b"",
    original_size=(40, 44),
    crop_top_left=(1, 2),
    target_size=(32, 32),
    flip=False,
    caption_rows=(),
)


def family_folder(name: str, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{name}")


def condition(folder: Path, *, in_step: bool, dropped: bool = False) -> dict[str, torch.Tensor]:
    """The conditioning of CAPTIONS as a loader makes it."""
    encoder = Encoder(Base.open(folder), device="cpu")
    embeds, pooled = encoder.texts(CAPTIONS)
    ids = encoder.input_ids(CAPTIONS).astype(np.int32)
    samples = [
        Captioned(
            SAMPLE,
            padded(embeds[row], max(map(len, embeds))),
            None if pooled is None else pooled[row],
            ids[row] if in_step else None,
            dropped,
            len(embeds[row]),
        )
        for row in range(len(CAPTIONS))
    ]
    found = detect_family(folder)[0].condition(samples)
    return {name: torch.from_numpy(array) for name, array in found.items()}


def padded(rows: np.ndarray, length: int) -> np.ndarray:
    return np.pad(rows, ((0, length - len(rows)), (0, 0)))


def clip_encoders(folder: Path) -> list[Any]:
    family, _ = detect_family(folder)
    return [load_text_encoder(Base.open(folder), part) for part in family.clip_encoders]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_defaults_of_sampling_are_those_of_the_pipeline(name: str) -> None:
    family = FAMILIES[name]
    theirs = signature(getattr(diffusers, family.pipelines[0]).__call__).parameters
    guidance = "true_cfg_scale" if name.startswith("qwen_image") else "guidance_scale"
    assert family.num_inference_steps == theirs["num_inference_steps"].default
    assert family.guidance_scale == theirs[guidance].default


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.clip])
def test_encoded_in_the_step_captions_are_what_was_encoded_before(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder = family_folder(name, request)
    before = condition(folder, in_step=False)
    with torch.no_grad():
        encode = partial(encode_ids, FAMILIES[name], clip_encoders(folder))
        now = encode_in_step(encode, condition(folder, in_step=True))
    assert now.keys() == before.keys()
    for keyword, tensor in before.items():
        torch.testing.assert_close(now[keyword], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_a_dropped_caption_is_zeros_and_trains_nothing(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder = family_folder(name, request)
    encoders = clip_encoders(folder)
    encode = partial(encode_ids, FAMILIES[name], encoders)
    found = encode_in_step(encode, condition(folder, in_step=True, dropped=True))
    for keyword in {"prompt_embeds", "pooled_prompt_embeds"} & found.keys():
        assert not found[keyword].any()
    found["prompt_embeds"].sum().backward()
    assert not any(p.grad.any() for p in encoders[0].parameters() if p.grad is not None)


@pytest.mark.parametrize("name", [name for name, f in FAMILIES.items() if f.frozen_text])
def test_the_card_states_the_caption_length_unless_the_plain_call_has_it(name: str) -> None:
    """Captions are as long as those of the evaluation."""
    family = FAMILIES[name]
    encoder, pipeline = family.frozen_text, getattr(diffusers, family.pipelines[0])
    usual = signature(pipeline.__call__).parameters["max_sequence_length"].default
    assert encoder and usual == (encoder.call_tokens or encoder.tokens)
    longest = signature(pipeline.encode_prompt).parameters["max_sequence_length"].default
    assert encoder.tokens == longest


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_network_predicts_what_the_pipeline_s_denoiser_does(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Its captions' embeddings are compared with `encode_prompt` in a test of each family."""
    folder = family_folder(name, request)
    family, _ = detect_family(folder)
    denoiser = load_denoiser(folder / family.denoiser).eval()
    latents = torch.randn(3, family.latent_channels(denoiser.config), 8, 8)
    timesteps = torch.tensor([3.0, 500.0, 998.0])
    conditioning = condition(folder, in_step=False)
    if name == "flux":
        conditioning["guidance"] = torch.ones(3)
    network = Network(family, {family.denoiser: denoiser})
    with torch.no_grad():
        ours = network(latents, timesteps, conditioning)
        theirs = predict(denoiser, latents, timesteps, conditioning)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_latents_without_the_arrays_of_a_family_are_refused() -> None:
    bare = Captioned(SAMPLE, np.zeros((6, 8), np.float32), None)
    with pytest.raises(Refused, match="no pooled_prompt_embeds, which this model needs"):
        FAMILIES["sdxl"].condition([bare])


def test_a_pipeline_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "AmusedPipeline"}))
    with pytest.raises(Refused, match="AmusedPipeline is not of a family known here"):
        detect_family(tmp_path)


@pytest.mark.parametrize("part", ["../../home", "/etc", "..", "a/b", "", "unet/"])
def test_a_part_outside_the_pipeline_folder_is_refused(tmp_path: Path, part: str) -> None:
    """Parts are copied into the published folder: the name must not choose another place."""
    index = {"_class_name": "StableDiffusionXLPipeline", part: ["diffusers", "UNet"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match="is no name of a part: the model may be hostile"):
        detect_family(tmp_path)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "..", 3, "", ".", "a\0", ["a"]]
)
def test_weights_outside_a_part_are_refused(tmp_path: Path, name: object) -> None:
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(Refused, match="is no file beside it: the model may be hostile"):
        weight_files(tmp_path)


@pytest.mark.parametrize("named", [None, [], {}, "a"])
def test_an_index_without_file_names_is_refused(tmp_path: Path, named: object) -> None:
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": named}))
    with pytest.raises(Refused, match="weight_map is no object of file names"):
        weight_files(tmp_path)


def test_a_denoiser_of_another_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UVit2DModel"}))
    with pytest.raises(Refused, match="class UVit2DModel is not known here"):
        load_denoiser(tmp_path)


def test_blocks_are_chained_only_if_a_family_says_so() -> None:
    """Chroma's blocks, for example, have inputs of their own: a loop would give all the first's."""
    assert Family.chained_blocks == ()
    for family in FAMILIES.values():
        assert set(family.chained_blocks) <= set(family.blocks), family.name
        assert "ResnetBlock2D" not in family.chained_blocks
