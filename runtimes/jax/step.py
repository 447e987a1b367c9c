"""The training step, as one function from state and batch to the next state.

It is compiled whole: forward, backward, clipping, AdamW (arXiv 1711.05101, as torch.optim.AdamW)
and the weight average. What changes from step to step (rates, bias corrections, the average's
decay) goes in as data, so that all steps are one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from configs.training import Train
from runtimes.jax.mesh import Mesh

Arrays = dict[str, Array]
#: Group -> State's names -> arrays.
Groups = dict[str, Arrays]


def step_scalars(step: int, learning_rate: float, settings: Train) -> NDArray[np.float32]:
    """What step `step` (from 0) has of its own: see `Step`."""
    beta1, beta2 = settings.adam_betas
    numbers = (
        learning_rate,
        learning_rate / (1 - beta1 ** (step + 1)),
        math.sqrt(1 - beta2 ** (step + 1)),
        min(settings.ema_decay or 0.0, (1 + step) / (10 + step)),
    )
    return np.array(numbers, np.float32)


@dataclass(frozen=True)
class Step:
    """A step of some network with some settings.

    Args:
        predict: `(arrays, seed, noisy latents, timesteps, conditioning)` -> prediction.
        names: State's names of what is trained -> the network's, which `predict` wants.
        untouched: of those, the ones that the loss does not depend on: they do not decay either.
    """

    predict: Callable[..., Array]
    settings: Train
    mesh: Mesh
    names: Mapping[str, str]
    untouched: frozenset[str] = frozenset()

    def compiled(self, state: Mapping[str, Mapping[str, Any]]) -> Any:
        """`(state, frozen, batch, seeds, numbers, samples)` -> `(state, [loss, norm])`, jitted.

        The state's memory is reused for the next one; of it only shapes are looked at here.
        """
        spread = jax.tree.map(lambda array: array.sharding, state)
        out = (spread, self.mesh.replicated)
        return jax.jit(self._run, donate_argnums=0, out_shardings=out)

    def _run(
        self,
        state: Groups,
        frozen: Arrays,
        batch: dict[str, Any],
        seeds: Array,
        numbers: Array,
        samples: Array,
    ) -> tuple[Groups, Array]:
        """
        Args:
            frozen: the network's other arrays, by its names.
            batch: see batches.py.
            seeds: of what is dropped, one a micro-batch.
            numbers: see `step_scalars`.
            samples: in the global batch.
        """
        weights = gather_weights(state["weights"], self.mesh, self.settings.compute_dtype)
        trained = self._sharded(state["weights"])

        def gradient(micro: Any) -> tuple[Array, Arrays]:
            loss, gradients = jax.value_and_grad(self._loss)(weights, frozen, *micro)
            return loss, trained(gradients)

        def accumulate(sums: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, gradient(micro)), None

        if len(seeds) == 1:
            loss, sums = gradient(jax.tree.map(lambda array: array[0], (batch, seeds)))
        else:
            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state["weights"]))
            # On a CPU, convolutions within a loop are slower by an order of magnitude or two.
            unroll = len(seeds) if self.mesh.platform == "cpu" else 1
            (loss, sums), _ = jax.lax.scan(accumulate, zeros, (batch, seeds), unroll=unroll)
        gradients = jax.tree.map(lambda array: array / samples, sums)
        state, norm = self._update(state, gradients, numbers)
        return state, jnp.stack([loss / samples, norm])

    def _loss(self, weights: Arrays, frozen: Arrays, micro: dict[str, Any], seed: Array) -> Array:
        """Sum of the samples' weighted errors."""
        arrays = frozen | {self.names[name]: array for name, array in weights.items()}
        return jnp.sum(micro["weight"] * errors(self.predict, arrays, seed, micro))

    def _sharded(self, weights: Arrays) -> Callable[[Arrays], Arrays]:
        """Has gradients cut as the weights are: each device adds up its own part."""

        def constrain(name: str, gradient: Array) -> Array:
            spread = self.mesh.array_sharding(weights[name].shape)
            return jax.lax.with_sharding_constraint(gradient.astype(jnp.float32), spread)

        return lambda gradients: {name: constrain(name, array) for name, array in gradients.items()}

    def _update(self, state: Groups, gradients: Arrays, numbers: Array) -> tuple[Groups, Array]:
        settings = self.settings
        rate, step_size, root, decay = numbers
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in gradients.values()))
        factor = jnp.ones(())
        if settings.max_grad_norm is not None:
            factor = jnp.minimum(settings.max_grad_norm / (norm + 1e-6), 1.0)
        (beta1, beta2), found = settings.adam_betas, {group: dict(state[group]) for group in state}
        text_rate = settings.text_encoder_lr or settings.learning_rate
        for name, gradient in gradients.items():
            if name in self.untouched:
                continue
            gradient = gradient * factor
            text = name.startswith("text_encoder")
            share = text_rate / settings.learning_rate if text else 1.0
            first, second = state["exp_avg"][name], state["exp_avg_sq"][name]
            first = first + (1 - beta1) * (gradient - first)
            second = beta2 * second + (1 - beta2) * jnp.square(gradient)
            weight = state["weights"][name] * (1 - rate * (share * settings.weight_decay))
            change = first / (jnp.sqrt(second) / root + settings.adam_epsilon)
            found["weights"][name] = weight - (step_size * share) * change
            found["exp_avg"][name], found["exp_avg_sq"][name] = first, second
        for name, average in state.get("ema", {}).items():
            found["ema"][name] = average + (1 - decay) * (found["weights"][name] - average)
        return found, norm


def gather_weights(weights: Arrays, mesh: Mesh, dtype: str) -> Arrays:
    """Whole copies of the masters on every device, in the compute dtype: made once a step.

    Said explicitly; else GSPMD may cut the convolutions instead.
    """
    half = jnp.dtype(dtype)
    return {
        name: jax.lax.with_sharding_constraint(array.astype(half), mesh.replicated)
        for name, array in weights.items()
    }


def errors(predict: Callable[..., Array], arrays: Arrays, seed: Array, micro: Any) -> Array:
    """Mean squared error of each sample [B], in float32."""
    given = micro["noisy_latents"], micro["timesteps"], micro["conditioning"]
    prediction = predict(arrays, seed, *given).astype(jnp.float32)
    return jnp.square(prediction - micro["target"]).mean(axis=(1, 2, 3))
