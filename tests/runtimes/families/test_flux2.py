"""FLUX.2 klein: encoded as diffusers does it, and its own in sampling."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from flow_families import assert_latents_of_vae, assert_pictures
from flow_families_of_diffusers import FLUX2

from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import ResolutionShift
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.vae_text_encoders import Encoder

pytestmark = pytest.mark.slow


def test_embeddings_are_those_of_encode_prompt_and_latents_of_its_vae(tiny_flux2: Path) -> None:
    encoder, pipe = Encoder(Base.open(tiny_flux2)), Flux2KleinPipeline.from_pretrained(tiny_flux2)
    long = "x" * 60  # truncated
    ours, pooled = encoder.texts([*FLUX2.prompts, "", long])
    with torch.no_grad():
        theirs, _ = pipe.encode_prompt([*FLUX2.prompts, "", long], max_sequence_length=40)
    assert pooled is None
    assert torch.equal(torch.from_numpy(np.asarray(ours)), theirs)
    assert encoder.token_counts(["", long]) == {"text_encoder": [11, 71]}
    assert_latents_of_vae(encoder, pipe.vae)


def test_the_distilled_model_ignores_guidance(tiny_flux2_distilled: Path, tmp_path: Path) -> None:
    plain = {"guidance_scale": 1.0}
    assert_pictures(FLUX2, tiny_flux2_distilled, tmp_path, theirs=plain)


@pytest.mark.parametrize("tokens", [6, 256, 1024, 4096, 4300, 4301, 9000])
@pytest.mark.parametrize("steps", [1, 4, 28, 50, 200])
def test_the_shift_of_sampling_is_the_pipeline_s(tokens: int, steps: int) -> None:
    shift = ResolutionShift.from_config({"use_dynamic_shifting": True}, 2)
    assert shift is not None
    found = FAMILIES["flux2"].sampling_shift(shift, tokens, steps)
    assert found == pytest.approx(compute_empirical_mu(tokens, steps), abs=1e-12)
    if steps == 200:  # that of training
        assert found == pytest.approx(shift.mu_of(tokens), abs=1e-4)
