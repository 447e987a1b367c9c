"""The training step as one compiled function from state and batch to the next state.

It computes forward, backward, clipping, AdamW (arXiv 1711.05101, as torch.optim.AdamW) and EMA.
Numbers that change with each step (learning rate, bias corrections, EMA decay) are inputs, so all
steps run one program.
"""

from __future__ import annotations

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
from runtimes.update.rule import bias_corrections, ema_decay_at, text_encoder_factor

Arrays = dict[str, Array]
#: Group of State (such as `exp_avg`) to State's key to array.
Groups = dict[str, Arrays]


def step_scalars(step: int, learning_rate: float, settings: Train) -> NDArray[np.float32]:
    """The scalars [4] f32 of step `step` (from 0), inputs of the compiled step.

    They are learning rate, bias-corrected step size, sqrt(1 - beta2^t) and EMA decay.
    """
    first, second_root = bias_corrections(settings.adam_betas, step + 1)
    decay = ema_decay_at(step, settings.ema_decay or 0.0)
    numbers = (learning_rate, learning_rate / first, second_root, decay)
    return np.array(numbers, np.float32)


@dataclass(frozen=True)
class Step:
    """The training step of a network.

    Args:
        predict: `(arrays, seed, noisy_latents, timesteps, conditioning)` to the prediction
            [B, C, h, w].
        settings: learning rates, AdamW, clipping, EMA and compute dtype.
        mesh: of the devices.
        names: State's key of each trained parameter to its name in `predict`'s arrays.
        untouched: keys of parameters without gradient; like torch.optim, the step leaves them
            unchanged, without weight decay.
    """

    predict: Callable[..., Array]
    settings: Train
    mesh: Mesh
    names: Mapping[str, str]
    untouched: frozenset[str] = frozenset()

    def compiled(self, state: Mapping[str, Mapping[str, Any]]) -> Any:
        """The jitted step `(state, frozen, batch, seeds, numbers, samples) -> (state, figures)`.

        `figures` [2] f32 are the loss and the gradient norm before clipping. The state is donated:
        its memory is reused for the next state.

        Args:
            state: arrays, or abstract arrays, with their shardings.
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
        """Compute the gradients of all micro-batches and update the state.

        Args:
            state: groups weights, exp_avg, exp_avg_sq and, if set, ema; f32 by State's keys.
            frozen: untrained arrays by their names in the network, compute dtype.
            batch: n micro-batches of B rows, see batches.stack: noisy_latents [n, B, C, h, w]
                compute dtype, timesteps [n, B], target [n, B, C, h, w] f32, weight [n, B] f32.
            seeds: [n] u32, dropout seed of each micro-batch.
            numbers: [4] f32, see `step_scalars`.
            samples: size of the global batch, the denominator of the loss.

        Returns:
            The next state, and [loss, gradient norm] f32.
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
            # On a CPU, XLA runs convolutions in a loop 10 to 100 times slower.
            unroll = len(seeds) if self.mesh.platform == "cpu" else 1
            (loss, sums), _ = jax.lax.scan(accumulate, zeros, (batch, seeds), unroll=unroll)
        gradients = jax.tree.map(lambda array: array / samples, sums)
        state, norm = self._update(state, gradients, numbers)
        return state, jnp.stack([loss / samples, norm])

    def _loss(self, weights: Arrays, frozen: Arrays, micro: dict[str, Any], seed: Array) -> Array:
        """Sum of the weighted errors of a micro-batch's samples."""
        arrays = frozen | {self.names[name]: array for name, array in weights.items()}
        return jnp.sum(micro["weight"] * errors(self.predict, arrays, seed, micro))

    def _sharded(self, weights: Arrays) -> Callable[[Arrays], Arrays]:
        """A function that shards gradients as the weights: each device sums its own shard."""

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
        text_share = text_encoder_factor(settings)
        for name, gradient in gradients.items():
            if name in self.untouched:
                continue
            gradient = gradient * factor
            share = text_share if name.startswith("text_encoder") else 1.0
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
    """Gather the masters to every device in the compute dtype, once per step.

    The sharding constraint is explicit because GSPMD may otherwise partition the convolutions.
    """
    half = jnp.dtype(dtype)
    return {
        name: jax.lax.with_sharding_constraint(array.astype(half), mesh.replicated)
        for name, array in weights.items()
    }


def errors(predict: Callable[..., Array], arrays: Arrays, seed: Array, micro: Any) -> Array:
    """Mean squared error per sample [B] f32, without loss weights."""
    given = micro["noisy_latents"], micro["timesteps"], micro["conditioning"]
    prediction = predict(arrays, seed, *given).astype(jnp.float32)
    return jnp.square(prediction - micro["target"]).mean(axis=(1, 2, 3))
