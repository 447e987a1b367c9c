"""One training step as a compiled function from state and batch to the next state.

It computes the forward and backward pass of each micro-batch, then the update: gradient clipping,
AdamW and EMA. Micro-batches have one size and are stacked, as inputs of the step. The rule of the
update is that of torch.optim.AdamW (arXiv 1711.05101). Numbers that change with each step (learning
rate, bias corrections, share of the EMA) are inputs, so all steps run one program.

A network's arrays on the devices are trained parameters, optimizer state and frozen arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from numpy.typing import NDArray

from configs.settings.train import Train
from runtimes.contract import OPTIONAL, UNCAST, StepBatch
from runtimes.data.loader import pad_batch, padded_rows
from runtimes.jax.mesh import Mesh
from runtimes.learning_rate import learning_rate_factors
from runtimes.objective.training_objective import elementwise_loss
from runtimes.torch_models.network import FlopCounter, Network

Arrays = dict[str, Array]
#: Group of State (such as `exp_avg`) to State's key to array.
Groups = dict[str, Arrays]


def update(
    state: Groups, gradients: Arrays, numbers: Array, settings: Train, untouched: frozenset[str]
) -> tuple[Groups, Array]:
    """Clip the gradients and compute the next state.

    Args:
        state: groups weights, exp_avg, exp_avg_sq and, if set, ema; f32 by State's keys.
        gradients: f32 by State's keys.
        numbers: [4] f32, see optimizer_state.step_scalars.
        settings: AdamW, clipping and EMA.
        untouched: keys of parameters that stay unchanged, without weight decay.

    Returns:
        The next state, and the gradients' L2 norm before clipping, a f32 scalar.
    """
    rate, step_size, root, ema_share = numbers
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in gradients.values()))
    factor = jnp.ones(())
    if settings.max_grad_norm is not None:
        factor = jnp.minimum(settings.max_grad_norm / (norm + 1e-6), 1.0)
    (beta1, beta2) = settings.adam_betas
    updated = {group: dict(state[group]) for group in state}
    shares = learning_rate_factors(gradients, settings)
    for name, gradient in gradients.items():
        if name in untouched:
            continue
        gradient = gradient * factor
        share = shares[name]
        first = state["exp_avg"][name]
        second = state["exp_avg_sq"][name]
        first = first + (1 - beta1) * (gradient - first)
        second = beta2 * second + (1 - beta2) * jnp.square(gradient)
        weight = state["weights"][name] * (1 - rate * (share * settings.weight_decay))
        change = first / (jnp.sqrt(second) / root + settings.adam_epsilon)
        updated["weights"][name] = weight - (step_size * share) * change
        updated["exp_avg"][name] = first
        updated["exp_avg_sq"][name] = second
    for name, average in state.get("ema", {}).items():
        updated["ema"][name] = average + ema_share * (updated["weights"][name] - average)
    return updated, norm


@dataclass(frozen=True)
class Step:
    """The training step of a network.

    Args:
        predict: `(arrays, seed, noisy_latents, timesteps, conditioning)` to the prediction
            [B, C, h, w].
        settings: learning rates, AdamW, clipping, EMA and compute dtype.
        mesh: mesh of the devices.
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
        return jax.jit(self._run, donate_argnums=0, out_shardings=(spread, self.mesh.replicated))

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
            numbers: [4] f32, see optimizer_state.step_scalars.
            samples: size of the global batch, the denominator of the loss.

        Returns:
            The next state, and [loss, gradient norm] f32.
        """
        weights = self._working(state["weights"])

        def gradient(micro: Any) -> tuple[Array, Arrays]:
            loss, gradients = jax.value_and_grad(self._loss)(weights, frozen, *micro)
            return loss, self._sharded(gradients)

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
        gathered = gather_weights(whole, self.mesh, self.settings.compute_dtype)
        half = jnp.dtype(self.settings.compute_dtype)
        return gathered | {name: masters[name].astype(half) for name in by_block}

    def _loss(self, weights: Arrays, frozen: Arrays, micro: dict[str, Any], seed: Array) -> Array:
        """Sum of the weighted errors of a micro-batch's samples."""
        arrays = frozen | {self.names[name]: array for name, array in weights.items()}
        return jnp.sum(micro["weight"] * errors(self.predict, arrays, seed, micro))

    def _sharded(self, gradients: Arrays) -> Arrays:
        """Gradients, sharded as the weights: each device sums its own shard."""

        def constrain(gradient: Array) -> Array:
            spread = self.mesh.array_sharding(gradient.shape)
            return jax.lax.with_sharding_constraint(gradient.astype(jnp.float32), spread)

        return {name: constrain(gradient) for name, gradient in gradients.items()}


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
    """Mean loss per sample [B] f32, without loss weights."""
    inputs = micro["noisy_latents"], micro["timesteps"], micro["conditioning"]
    prediction = predict(arrays, seed, *inputs).astype(jnp.float32)
    squares = jnp.square(prediction - micro["target"])
    losses = elementwise_loss(squares, micro.get("huber_delta"), micro.get("loss_mask"))
    return losses.mean(axis=(1, 2, 3))


def prior_targets(
    predict: Callable[..., Array], mesh: Mesh, arrays: Arrays, batch: Any, is_prior: Array
) -> Array:
    """Targets [n, B, C, h, w] f32 of stacked micro-batches: of prior rows a base's prediction.

    Args:
        predict: as of Step, without adapters and dropout.
        arrays: the base's, by their names in its network.
        batch: as of Step; without is_prior.
        is_prior: [n, B].
    """

    def target(_: None, micro: Any) -> tuple[None, Array]:
        inputs = micro["noisy_latents"], micro["timesteps"], micro["conditioning"]
        return None, predict(arrays, jnp.uint32(0), *inputs).astype(jnp.float32)

    _, predicted = jax.lax.scan(target, None, batch, unroll=not mesh.has_loops)
    targets = jnp.where(is_prior[:, :, None, None, None], predicted, batch["target"])
    return jax.lax.with_sharding_constraint(targets, mesh.row_sharding(axis=1))


Stacked = dict[str, Any]


def stack_micro_batches(batch: StepBatch, size: int | None, mesh: Mesh, dtype: Any) -> Stacked:
    """Stack this process's batch into n micro-batches of B rows, padded with rows of weight 0.

    Args:
        batch: this process's share of the global batch.
        size: samples per micro-batch; None is the whole batch.
        mesh: B is a multiple of its local device count.
        dtype: dtype of latents and of all conditioning that is not in contract.UNCAST.

    Returns:
        noisy_latents: [n, B, C, h, w] `dtype`.
        timesteps: [n, B].
        target: [n, B, C, h, w] f32.
        weight: [n, B] f32.
        conditioning: keyword to [n, B, ...].
        loss_mask, huber_delta, is_prior: [n, B, ...], those that the batch has.
    """
    count = len(batch.timesteps)
    size = min(size or count, count)
    parts = -(-count // size)
    rows = padded_rows(size, mesh.local)
    # Sample index of each row. Padding rows repeat sample 0.
    places = np.zeros((parts, rows), np.int64)
    weight = np.zeros((parts, rows), np.float32)
    for part in range(parts):
        taken = np.arange(part * size, min((part + 1) * size, count))
        places[part, : len(taken)], weight[part, : len(taken)] = taken, batch.weight[taken]
    conditioning = {
        name: array[places] if name in UNCAST else array[places].astype(dtype)
        for name, array in batch.conditioning.items()
    }
    rows_of = {name: getattr(batch, name) for name in OPTIONAL}
    return {
        **{name: array[places] for name, array in rows_of.items() if array is not None},
        "noisy_latents": batch.noisy_latents[places].astype(dtype),
        "timesteps": batch.timesteps[places],
        "target": batch.target[places],
        "weight": weight,
        "conditioning": conditioning,
    }


def held_out_errors(
    errors: Callable[..., Array], arrays: Any, batch: StepBatch, rows: int, mesh: Mesh, dtype: Any
) -> NDArray[np.float32]:
    """Mean squared error per sample [B] f32 of a batch that every process has.

    Args:
        errors: compiled `step.errors` of a network.
        arrays: the network's, by their names in it.
        batch: with at most `rows` samples.
        rows: number of rows to which every batch is padded, to run one program.
        mesh: devices that share the rows.
        dtype: dtype of latents and conditioning.
    """
    stacked = stack_micro_batches(pad_batch(batch, rows, mesh.count), None, mesh, dtype)
    micro = jax.tree.map(lambda array: mesh.shard_global_rows(array[0]), stacked)
    return mesh.fetch(errors(arrays, jnp.uint32(0), micro))[: len(batch.timesteps)]


log = logging.getLogger("kiln")


def trained_names(network: Network) -> dict[str, str]:
    """State's key of each trained parameter to its name in the network."""
    own = {id(parameter): name for name, parameter in network.named_parameters()}
    return {name: own[id(parameter)] for name, parameter in network.trained().items()}


def initial_state(network: Network, settings: Train, mesh: Mesh) -> Groups:
    """Initial State on the devices: float32 masters, zero moments and, if set, the EMA."""
    trained = {name: to_numpy(p) for name, p in network.trained().items()}
    state = {"weights": {name: mesh.shard(array) for name, array in trained.items()}}
    for group in ("exp_avg", "exp_avg_sq"):
        state[group] = {n: mesh.shard(np.zeros(a.shape, np.float32)) for n, a in trained.items()}
    if settings.ema_decay is not None:
        state["ema"] = {name: mesh.shard(array) for name, array in trained.items()}
    return state


def frozen_arrays(network: Network, mesh: Mesh, dtype: torch.dtype) -> Arrays:
    """Untrained weights and buffers, replicated on every device.

    They have `dtype`, except for frozen text encoders, which keep their own.
    """
    texts = move(network.frozen_clip, mesh)
    own = {f"frozen_clip.{name}": array for name, array in texts.items()}
    but = frozenset(trained_names(network).values()) | own.keys()
    return own | move(network, mesh, dtype, but=but)


def move(
    module: torch.nn.Module, mesh: Mesh, dtype: torch.dtype | None = None, but: Collection[str] = ()
) -> Arrays:
    """Move a module's parameters and buffers to every device, by their names in the module.

    The module's own tensors become `meta` tensors, which frees their memory.

    Args:
        module: on the CPU.
        mesh: mesh of the devices.
        dtype: dtype of floating-point arrays; None keeps each array's dtype.
        but: names to leave out.
    """
    moved: dict[int, Array] = {}  # by tensor id: tied weights have two names and one array
    arrays: dict[str, Array] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *module.named_buffers(remove_duplicate=False)):
        if name not in but:
            if id(tensor) not in moved:
                moved[id(tensor)] = _replicate(tensor, mesh, dtype or tensor.dtype)
            arrays[name] = moved[id(tensor)]
    module.to("meta")
    return arrays


def _replicate(tensor: torch.Tensor, mesh: Mesh, dtype: torch.dtype) -> Array:
    array = to_numpy(tensor) if tensor.is_floating_point() else tensor.cpu().numpy()
    if tensor.is_floating_point():
        array = array.astype(jnp.dtype(str(dtype).removeprefix("torch.")))
    elif array.dtype == np.int64:
        array = array.astype(np.int32)  # JAX has no int64 without jax_enable_x64
    return mesh.replicate(array)


def to_numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().contiguous().cpu().numpy()


def names_without_gradient(
    counter: FlopCounter, network: Network, batch: StepBatch
) -> frozenset[str]:
    """State's keys of trained parameters on which the loss does not depend.

    Examples are the last layer of a text encoder with penultimate hidden states, and the text
    stream of Qwen-Image's last block. PyTorch's optimizers skip parameters without gradient, and
    the compiled step must do the same.

    Args:
        counter: of the network.
        network: the trained network.
        batch: its shapes are used.
    """
    try:
        reached = counter.reached(batch)
    except RuntimeError as error:
        log.warning("weights without gradient are unknown, so weight decay changes them: %s", error)
        return frozenset()
    return frozenset(name for name, own in trained_names(network).items() if own not in reached)
