"""One training step as a compiled function from state and batch to the next state.

It computes the forward and backward pass of each micro-batch, and the update
(clip_update_and_ema.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from configs.settings.train import Train
from runtimes.jax.clip_update_and_ema import Arrays, Groups, update
from runtimes.jax.mesh import Mesh


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
        scanned: names in `predict`'s arrays of weights that the step gathers block by block.
    """

    predict: Callable[..., Array]
    settings: Train
    mesh: Mesh
    names: Mapping[str, str]
    untouched: frozenset[str] = frozenset()
    scanned: frozenset[str] = frozenset()

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
            batch: n micro-batches of B rows, see stack_micro_batches: noisy_latents [n, B, C, h, w]
                compute dtype, timesteps [n, B], target [n, B, C, h, w] f32, weight [n, B] f32.
            seeds: [n] u32, dropout seed of each micro-batch.
            numbers: [4] f32, see optimizer_step.step_scalars.
            samples: size of the global batch, the denominator of the loss.

        Returns:
            The next state, and [loss, gradient norm] f32.
        """
        weights = self._working(state["weights"])
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
            unroll = not self.mesh.has_loops
            (loss, sums), _ = jax.lax.scan(accumulate, zeros, (batch, seeds), unroll=unroll)
        gradients = jax.tree.map(lambda array: array / samples, sums)
        state, norm = update(state, gradients, numbers, self.settings, self.untouched)
        return state, jnp.stack([loss / samples, norm])

    def _working(self, masters: Arrays) -> Arrays:
        """The masters in the compute dtype; those of scanned blocks stay sharded."""
        by_block = {name for name in masters if self.names[name] in self.scanned}
        whole = {name: array for name, array in masters.items() if name not in by_block}
        found = gather_weights(whole, self.mesh, self.settings.compute_dtype)
        half = jnp.dtype(self.settings.compute_dtype)
        return found | {name: masters[name].astype(half) for name in by_block}

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


def gather_weights(weights: Arrays, mesh: Mesh, dtype: str) -> Arrays:
    """Gather masters to every device in the compute dtype.

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
