"""Qwen-Image: encoded as diffusers does it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from flow_families import assert_latents_of_vae
from flow_families_of_diffusers import PROMPTS

from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.vae_text_encoders import Encoder

pytestmark = pytest.mark.slow


def test_the_plain_call_cuts_captions_that_the_training_reads(
    tiny_qwen_image: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_qwen_image, tmp_path / "model"))
    config = model / "tokenizer/tokenizer_config.json"
    found = json.loads(config.read_text(encoding="utf-8"))
    for longest, shown in ((131072, 1024), (512, None)):
        config.write_text(json.dumps(found | {"model_max_length": longest}), encoding="utf-8")
        assert Base.open(model).unusual_text_length == shown


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(
    tiny_qwen_image: Path,
) -> None:
    """Without the template's first 34 tokens; the pipeline pads them to the longest caption."""
    encoder, pipe = (
        Encoder(Base.open(tiny_qwen_image)),
        QwenImagePipeline.from_pretrained(tiny_qwen_image),
    )
    captions = [*PROMPTS, "", "x" * 200]  # the last one is truncated
    ours, pooled = encoder.texts(captions)
    with torch.no_grad():
        theirs, mask = pipe.encode_prompt(captions, max_sequence_length=288)
    assert pooled is None
    assert len({len(one) for one in ours}) == 4
    for one, other, kept in zip(ours, theirs, mask.bool(), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other[kept], atol=1e-6, rtol=1e-5)
    assert encoder.token_counts(captions)["text_encoder"][:3] == [len(one) for one in ours[:3]]
    assert_latents_of_vae(encoder, pipe.vae, frames=True)
