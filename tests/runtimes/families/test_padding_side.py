"""A tokenizer that pads before the caption: embeddings and keys of the families with an LLM."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, QwenImagePipeline, ZImagePipeline
from flow_families import assert_jax_encodes_as_torch
from transformers import Qwen2Tokenizer

from artifacts.models import digest_model
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.vae_text_encoders import Encoder
from tasks.evaluate.draw import DRAWING_PARTS, digest_pipeline

pytestmark = pytest.mark.slow
CAPTIONS = ("a red cat", "two dogs in a wide forest", "", "x" * 300)  # the last one is truncated
PIPELINES: dict[str, tuple[Any, int]] = {
    "tiny_z_image": (ZImagePipeline, 64),
    "tiny_qwen_image": (QwenImagePipeline, 288),
    "tiny_flux2": (Flux2KleinPipeline, 40),
}
VARYING = ("tiny_z_image", "tiny_qwen_image")  # lengths
PadsLeft = Callable[[str], Path]


@pytest.fixture
def pads_left(request: pytest.FixtureRequest, tmp_path: Path) -> PadsLeft:
    """`pads_left(model)`: a copy of a tiny model whose tokenizer pads on the left."""

    def copied(model: str) -> Path:
        folder = Path(shutil.copytree(request.getfixturevalue(model), tmp_path / model))
        config = folder / "tokenizer/tokenizer_config.json"
        found = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps(found | {"padding_side": "left"}), encoding="utf-8")
        return folder

    return copied


@pytest.mark.parametrize("model", PIPELINES)
def test_embeddings_are_those_of_encode_prompt(pads_left: PadsLeft, model: str) -> None:
    folder, (kind, length) = pads_left(model), PIPELINES[model]
    ours, _ = Encoder(Base.open(folder)).texts(CAPTIONS)
    with torch.no_grad():
        pipe = kind.from_pretrained(folder)
        theirs, mask = pipe.encode_prompt(list(CAPTIONS), max_sequence_length=length)
    assert pipe.tokenizer.padding_side == "left"
    if model == "tiny_qwen_image":  # the pipeline pads the cut captions again, after them
        theirs = [one[kept] for one, kept in zip(theirs, mask.bool(), strict=True)]
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other.numpy(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("model", PIPELINES)
def test_jax_encodes_as_torch_does(pads_left: PadsLeft, model: str) -> None:
    """Queries of the padding see no key, and a softmax over none is not a number."""
    assert_jax_encodes_as_torch(pads_left(model), CAPTIONS[:3])


@pytest.mark.parametrize("model", PIPELINES)
def test_keys_tell_the_padding_side_where_it_cut_captions_wrongly(
    pads_left: PadsLeft, model: str, request: pytest.FixtureRequest
) -> None:
    folder, right = pads_left(model), request.getfixturevalue(model)
    base, usual = Base.open(folder), Base.open(right)
    assert ("padding_side" in base.encoders) == (model in VARYING)
    digest = digest_model(folder, DRAWING_PARTS)
    assert (digest_pipeline(base) != digest) == (model in VARYING)
    assert "padding_side" not in usual.encoders
    assert digest_pipeline(usual) == digest_model(right, DRAWING_PARTS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_keys_tell_the_padding_side_of_tokenizer_json(
    tiny_z_image: Path, tmp_path: Path, side: str
) -> None:
    """It counts where the tokenizer's config names no side."""
    folder = Path(shutil.copytree(tiny_z_image, tmp_path / "model"))
    file = folder / "tokenizer/tokenizer.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    padding = {"strategy": "BatchLongest", "direction": side.capitalize(), "pad_id": 256}
    padding |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    file.write_text(json.dumps(found | {"padding": padding}, indent=2), encoding="utf-8")
    assert Qwen2Tokenizer.from_pretrained(folder / "tokenizer").padding_side == side
    assert ("padding_side" in Base.open(folder).encoders) == (side == "left")
