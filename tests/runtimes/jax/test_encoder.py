"""The encoders that JAX compiles give what PyTorch's give."""

from pathlib import Path

import chips
import numpy as np
import pytest

from runtimes.process.job import EncodeJob
from runtimes.torch.sampler import open_encoder

chips.importorskip("jax")
from runtimes.jax import sampler  # noqa: E402

CAPTIONS = ["a red cat", "", "a blue dog on a hill"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("tiny_sd", marks=pytest.mark.soak),
        pytest.param(
            "tiny_sdxl", marks=pytest.mark.soak
        ),  # also by tests/tasks/test_encode_processes.py
        "sdxl_projecting",
        "tiny_sd3",
    ],
)
def test_pictures_and_captions_are_encoded_as_by_torch(
    model: str, request: pytest.FixtureRequest
) -> None:
    """In batches of other sizes as well: filled up and cut again, or larger than was said."""
    folder: Path = request.getfixturevalue(model)
    job = EncodeJob(runtime="jax", model=str(folder), device="cpu", dtype="float32", batch_size=2)
    ours, theirs = sampler.open_encoder(job), open_encoder(job)
    pixels = np.random.default_rng(0).uniform(-1, 1, (3, 3, 32, 32)).astype(np.float32)
    for count in (3, 1):
        for found, expected in zip(
            ours.images(pixels[:count]), theirs.images(pixels[:count]), strict=True
        ):
            np.testing.assert_allclose(found, expected, atol=1e-4)
        states, pooled = ours.texts(CAPTIONS[:count])
        expected_states, expected_pooled = theirs.texts(CAPTIONS[:count])
        np.testing.assert_allclose(states, expected_states, atol=1e-4)
        assert (pooled is None) == (expected_pooled is None)
        if pooled is not None and expected_pooled is not None:
            np.testing.assert_allclose(pooled, expected_pooled, atol=1e-4)
