"""A compiled step updates as PyTorch does: accumulation, clipping, AdamW, rates and the average."""

from typing import Any

import chips
import numpy as np
import pytest
import torch

from configs.settings.train import Train
from runtimes.torch.step import Update

jax = chips.importorskip("jax")
from runtimes.jax.mesh import Mesh  # noqa: E402
from runtimes.jax.step import Step  # noqa: E402
from runtimes.optimizer_state import step_scalars  # noqa: E402

WEIGHTS = {"unet.gain": (3, 4, 4), "text_encoder.bias": (3, 1, 1)}
SETTINGS = Train(
    learning_rate=1e-2,
    text_encoder_lr=3e-2,
    train_text_encoder=True,
    weight_decay=0.3,
    max_grad_norm=0.05,
    ema_decay=0.5,
)


def batch(step: int) -> dict[str, np.ndarray]:
    """Four samples, the second two a micro-batch of their own."""
    drawn = np.random.default_rng(step)
    shape = (2, 2, 3, 4, 4)
    return {
        "noisy_latents": drawn.standard_normal(shape, np.float32),
        "target": drawn.standard_normal(shape, np.float32),
        "weight": drawn.random((2, 2), np.float32) + 0.5,
        "timesteps": np.zeros((2, 2), np.int32),
    }


def predict(arrays: Any, seed: Any, latents: Any, timesteps: Any, conditioning: Any) -> Any:
    return latents * arrays["unet.gain"] + arrays["text_encoder.bias"]


def by_torch(update: Update, weights: dict[str, torch.nn.Parameter], step: int) -> tuple[Any, Any]:
    """Loss and gradient norm of a step that takes the whole batch at once."""
    given = {n: torch.from_numpy(a.reshape(4, *a.shape[2:])) for n, a in batch(step).items()}
    prediction = predict(weights, None, given["noisy_latents"], None, None)
    errors = (prediction - given["target"]).square().mean(dim=(1, 2, 3))
    loss = (given["weight"] * errors).sum() / 4
    loss.backward()
    return loss.item(), update.apply(SETTINGS.learning_rate).item()


@pytest.mark.slow
def test_steps_leave_the_weights_moments_and_average_that_pytorch_leaves() -> None:
    rng = np.random.default_rng(9)
    start = {name: rng.standard_normal(shape, np.float32) for name, shape in WEIGHTS.items()}
    theirs = {n: torch.nn.Parameter(torch.from_numpy(a.copy())) for n, a in start.items()}
    update = Update(theirs, SETTINGS)
    mesh = Mesh(1, jax.devices()[:1])
    state: Any = {
        group: {name: mesh.shard(array) for name, array in arrays.items()}
        for group, arrays in update.state().items()
    }
    take = Step(predict, SETTINGS, mesh, {name: name for name in WEIGHTS}).compiled(state)
    for step in range(3):
        numbers = step_scalars(step, SETTINGS.learning_rate, SETTINGS)
        given = {**batch(step), "conditioning": {}}
        state, figures = take(state, {}, given, np.zeros(2, np.uint32), numbers, np.float32(4))
        expected = by_torch(update, theirs, step)
        assert expected[1] > 2 * SETTINGS.max_grad_norm  # it is clipped
        np.testing.assert_allclose(figures, expected, rtol=1e-5)
    for group, arrays in update.state().items():
        for name, array in arrays.items():
            np.testing.assert_allclose(state[group][name], array, rtol=1e-5, atol=1e-7)
