"""A network's arrays on the devices: trained parameters, optimizer state and frozen arrays."""

from __future__ import annotations

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from numpy.typing import NDArray

from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.jax.clip_update_and_ema import Arrays, Groups
from runtimes.jax.mesh import Mesh
from runtimes.torch_models.network import Network

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
    module: torch.nn.Module,
    mesh: Mesh,
    dtype: torch.dtype | None = None,
    but: frozenset[str] = frozenset(),
) -> Arrays:
    """Move a module's parameters and buffers to every device, by their names in the module.

    The module's own tensors become `meta` tensors, which frees their memory.

    Args:
        module: on the CPU.
        mesh: of the devices.
        dtype: of floating-point arrays; None keeps each array's dtype.
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
    counted: torch.nn.Module, network: Network, batch: StepBatch
) -> frozenset[str]:
    """State's keys of trained parameters on which the loss does not depend.

    Examples are the last layer of a text encoder with penultimate hidden states, and the text
    stream of Qwen-Image's last block. PyTorch's optimizers skip parameters without gradient, and
    the compiled step must do the same.

    Args:
        counted: a copy of the network on `meta`.
        network: the trained network.
        batch: its shapes are used.
    """

    def empty(array: NDArray[Any]) -> torch.Tensor:
        return torch.empty_like(torch.from_numpy(array[:1]), device="meta")

    conditioning = {name: empty(array) for name, array in batch.conditioning.items()}
    given = empty(batch.noisy_latents), empty(batch.timesteps), conditioning
    try:
        counted(*given).mean().backward()
    except RuntimeError as error:
        log.warning("weights without gradient are unknown, so weight decay changes them: %s", error)
        return frozenset()
    reached = {name for name, p in counted.named_parameters() if p.grad is not None}
    counted.zero_grad(set_to_none=True)
    names = trained_names(network)
    return frozenset(name for name, own in names.items() if own not in reached)
