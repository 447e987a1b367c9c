"""A batch reaches the network in parts, and its errors are taken in float32."""

from typing import Any

import numpy as np
import torch

from runtimes.contract import StepBatch
from runtimes.torch_models.activation_memory import micro_batches, sender


def batch(count: int) -> StepBatch:
    drawn = np.random.default_rng(0)
    latents, target = (drawn.standard_normal((count, 4, 8, 8), np.float32) for _ in range(2))
    levels, weight = np.arange(count, dtype=np.int32), drawn.random(count, np.float32)
    conditioning = {"add_time_ids": np.full((count, 6), 4001, np.float32)}
    return StepBatch(0, latents, levels, target, weight, conditioning, count)


def halved(latents: torch.Tensor, timesteps: torch.Tensor, conditioning: Any) -> torch.Tensor:
    """A network in half precision."""
    return latents.to(torch.bfloat16)


def test_the_errors_of_half_precision_are_taken_in_float32() -> None:
    given = batch(3)
    (whole,) = micro_batches(given, None, sender(torch.device("cpu")))
    prediction = torch.from_numpy(given.noisy_latents).to(torch.bfloat16).float().numpy()
    expected = np.square(prediction - given.target).mean(axis=(1, 2, 3))
    found = whole.errors(halved)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_every_sample_is_in_one_part_with_all_that_is_its_own() -> None:
    given = batch(5)
    parts = list(micro_batches(given, 2, sender(torch.device("cpu"))))
    assert [(part.first, part.last) for part in parts] == [(0, False), (2, False), (4, True)]
    for name in ("noisy_latents", "timesteps", "target", "weight"):
        joined = torch.cat([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined.numpy(), getattr(given, name))
    assert sum(len(part.conditioning["add_time_ids"]) for part in parts) == 5
