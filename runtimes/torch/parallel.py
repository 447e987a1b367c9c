"""Several processes at one run: who holds which weights, and how gradients come together.

Every process computes its share of a batch. With `data` each holds all weights
(DistributedDataParallel); with `fsdp` each holds a share of every array, and a block's weights are
gathered while it is in use (FSDP2, `fully_shard`). Either way the update works on plain float32
tensors of this process, the `masters`, and on gradients that are sums over all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from configs.training import Train
from runtimes.contract import WrongInput
from runtimes.families import repeated_blocks
from runtimes.models.network import Network
from runtimes.process.collectives import join
from runtimes.process.ranks import Ranks

BACKENDS = {
    "cuda": "cpu:gloo,cuda:nccl",
    "npu": "cpu:gloo,npu:hccl",
    "hpu": "cpu:gloo,hpu:hccl",
}
Masters = dict[str, torch.nn.Parameter]


class SingleProcess:
    """One process that holds everything; the others' base."""

    world = 1
    first = True  # whether this process keeps what is whole
    sharded = False  # whether this process holds a share of every array

    def wrap(self, network: Network) -> Callable[..., torch.Tensor]:
        """Take over a network that is on its device; what to call for a training forward."""
        self._masters = network.trained()
        return network

    def masters(self) -> Masters:
        """What this process updates, by the names that State has."""
        return self._masters

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of each micro-batch; gradients come together in the last."""
        return nullcontext()

    def gather_gradients(self) -> None:
        """Hand the gradients of a whole step to the masters."""

    def total_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The L2 norm of all gradients, from that of this process's."""
        return norm

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return value

    def gather_full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An array of master `name`'s shape, whole, on every process."""
        return tensor

    def local_shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this process holds of a whole array of master `name`'s shape."""
        return tensor


class DataParallel(SingleProcess):
    """Every process holds everything and updates it alike."""

    def __init__(self, ranks: Ranks) -> None:
        self.world, self.first = ranks.world, ranks.first

    def wrap(self, network: Network) -> Callable[..., torch.Tensor]:
        """Weights are not broadcast: all processes have read, or drawn, the same.

        To look for unused parameters at every step costs little, lets a text encoder's last layer
        be unused, and keeps the buckets as they are: DDP would else rearrange them after a first
        step, and a run that resumes would add up in another order.
        """
        self._masters = network.trained()
        self._replica = DistributedDataParallel(
            network,
            find_unused_parameters=True,
            forward_sync_buffers=False,
            init_sync=False,
            gradient_as_bucket_view=True,
        )
        return self._replica

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._replica.no_sync()

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value


class FullySharded(DataParallel):
    """Every process holds a share of every array: rows, as torch.chunk cuts them."""

    sharded = True

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(ranks)
        self._rank = ranks.rank
        self._mesh = init_device_mesh(device.type, (ranks.world,))
        # What is gathered stays float32 and is cast where autocast does so: in bfloat16 the weights
        # of norms and embeddings would be rounded, which they are not on one process.
        self._policy = MixedPrecisionPolicy(cast_forward_inputs=False)

    def wrap(self, network: Network) -> Callable[..., torch.Tensor]:
        """Each part of the pipeline is a root: it is called alone when pictures are drawn.

        Nothing stays gathered after a forward without backward: the weights may change before the
        next.
        """
        blocks = repeated_blocks()
        for part in network.children():
            for module in (*(m for m in part.modules() if type(m).__name__ in blocks), part):
                fully_shard(
                    module, mesh=self._mesh, mp_policy=self._policy, reshard_after_forward=True
                )
            if isinstance(part, PreTrainedModel):
                # It knows by its class's name which hidden states to give: that is another now.
                _CAN_RECORD_REGISTRY[part] = part._can_record_outputs
        self._arrays = network.trained()
        self._masters = {name: torch.nn.Parameter(_local(p)) for name, p in self._arrays.items()}
        return network

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # each micro-batch is reduced: only shares of gradients are kept

    def gather_gradients(self) -> None:
        for name, array in self._arrays.items():
            self._masters[name].grad = None if array.grad is None else _local(array.grad)
            array.grad = None

    def total_norm(self, norm: torch.Tensor) -> torch.Tensor:
        return self.sum_over_ranks(norm.square()).sqrt()

    def gather_full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        like = self._arrays[name]
        array = DTensor.from_local(
            tensor.detach(),
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return array.full_tensor()

    def local_shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.chunk(self.world)
        return parts[self._rank] if self._rank < len(parts) else tensor[:0]


def open_parallel(settings: Train, ranks: Ranks, device: torch.device) -> SingleProcess:
    """Meet the other processes, if there are any.

    Raises:
        WrongInput: the settings do not go together with several processes.
    """
    if ranks.world == 1:
        return SingleProcess()
    if settings.fsdp not in (1, "all", ranks.world):
        raise WrongInput(
            f"train.fsdp: {settings.fsdp} is not for runtime torch with {ranks.world} processes: "
            "set 1 or all"
        )
    if settings.fsdp != 1 and settings.optimizer != "adamw":
        raise WrongInput(
            f"train.optimizer {settings.optimizer} needs whole arrays: with train.fsdp "
            "it must be adamw"
        )
    if device.index is not None:
        torch.get_device_module(device).set_device(device)
    # gloo is for what lies on the host, which NCCL and HCCL cannot pass on.
    join(ranks, BACKENDS.get(device.type, "gloo"))
    return FullySharded(ranks, device) if settings.fsdp != 1 else DataParallel(ranks)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's share of a DTensor, in the same memory."""
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()
