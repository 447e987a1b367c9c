"""A network's arrays on the devices: what is trained, its optimizer's memory, and the rest."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from numpy.typing import NDArray

from configs.training import Train
from runtimes.contract import State, StepBatch, WrongInput
from runtimes.jax.mesh import Mesh
from runtimes.jax.step import Arrays, Groups
from runtimes.models.network import Network


def trained_names(network: Network) -> dict[str, str]:
    """State's names of what is trained -> the network's own."""
    own = {id(parameter): name for name, parameter in network.named_parameters()}
    return {name: own[id(parameter)] for name, parameter in network.trained().items()}


def initial_state(network: Network, settings: Train, mesh: Mesh) -> Groups:
    """Float32 masters, and an optimizer that has seen nothing."""
    trained = {name: to_numpy(p) for name, p in network.trained().items()}
    state = {"weights": {name: mesh.shard(array) for name, array in trained.items()}}
    for group in ("exp_avg", "exp_avg_sq"):
        state[group] = {n: mesh.shard(np.zeros(a.shape, np.float32)) for n, a in trained.items()}
    if settings.ema_decay is not None:
        state["ema"] = {name: mesh.shard(array) for name, array in trained.items()}
    return state


def frozen_arrays(network: Network, mesh: Mesh, dtype: torch.dtype) -> Arrays:
    """What is not trained, whole on every device: frozen weights, tables of positions."""
    return move(network, mesh, dtype, but=frozenset(trained_names(network).values()))


def move(
    module: torch.nn.Module,
    mesh: Mesh,
    dtype: torch.dtype | None = None,
    but: frozenset[str] = frozenset(),
) -> Arrays:
    """A module's arrays by their names in it, whole on every device; its own are given up.

    Args:
        dtype: of those that hold no integers; None leaves each its own.
        but: names that are left out.
    """
    put: dict[int, Array] = {}  # one that has two names is there once
    arrays: dict[str, Array] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *module.named_buffers(remove_duplicate=False)):
        if name not in but:
            if id(tensor) not in put:
                put[id(tensor)] = _put(tensor, mesh, dtype or tensor.dtype)
            arrays[name] = put[id(tensor)]
    module.to("meta")
    return arrays


def _put(tensor: torch.Tensor, mesh: Mesh, dtype: torch.dtype) -> Array:
    array = to_numpy(tensor) if tensor.is_floating_point() else tensor.cpu().numpy()
    if tensor.is_floating_point():
        array = array.astype(jnp.dtype(str(dtype).removeprefix("torch.")))
    elif array.dtype == np.int64:
        array = array.astype(np.int32)  # JAX has no other, unless it is told to
    return mesh.replicate(array)


def to_numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().contiguous().cpu().numpy()


def check_state(given: State, wanted: Groups) -> None:
    """Raise WrongInput if a state is of another model."""
    for group, arrays in wanted.items():
        found = given.get(group, {})
        if found.keys() != arrays.keys():
            raise WrongInput(f"the checkpoint's {group} does not have this model's weights")
        for name, array in arrays.items():
            if found[name].shape != array.shape:
                raise WrongInput(f"the checkpoint's {group} has another shape for {name}")


def names_without_gradient(
    counted: torch.nn.Module, network: Network, batch: StepBatch
) -> frozenset[str]:
    """State's names of what is trained without an effect on the loss, such as the last layer of a
    text encoder whose penultimate states are taken. PyTorch's optimizers leave it alone.

    Args:
        counted: a copy of the network on `meta`.
        batch: whose shapes are asked for.
    """

    def empty(array: NDArray[Any]) -> torch.Tensor:
        return torch.empty_like(torch.from_numpy(array[:1]), device="meta")

    conditioning = {name: empty(array) for name, array in batch.conditioning.items()}
    counted(empty(batch.noisy_latents), empty(batch.timesteps), conditioning).mean().backward()
    reached = {name for name, p in counted.named_parameters() if p.grad is not None}
    counted.zero_grad(set_to_none=True)
    names = trained_names(network)
    return frozenset(name for name, own in names.items() if own not in reached)
