"""Data parallelism over processes, with replicated or fully sharded weights.

Every process computes the gradients of its share of a batch. DistributedDataParallel replicates the
weights; FSDP2 (`fully_shard`) shards arrays, and gathers a block's weights while it computes:
over all processes, or within groups of them that hold replicas. Both update plain float32 tensors
of this process, the `masters`, by gradients that are summed over all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from configs.settings.train import Train
from runtimes.families import repeated_blocks
from runtimes.pipeline_folder.folder import Base
from runtimes.process.collectives import TIMEOUT, join
from runtimes.process.job import TrainJob
from runtimes.process.launcher import Ranks
from runtimes.torch_models.network import Network

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl", "hpu": "cpu:gloo,hpu:hccl"}


class SingleProcess:
    """A run with one process; base class of the parallel runs."""

    world = 1  # number of processes
    sharded = False  # whether this process stores shards of arrays
    frees_gradients = True  # whether a cleared gradient is None instead of zeros

    def load(self, job: TrainJob, base: Base, settings: Train) -> Network:
        """Load the network to the CPU. Raises Refused."""
        return Network.load(job, base, settings)

    def wrap(self, network: Network) -> Callable[..., torch.Tensor]:
        """Parallelize a network that is on its device.

        Returns:
            The function to call for a training forward pass, with the network's signature.
        """
        self._masters = network.trained()
        return network

    def wrap_frozen(self, network: Network) -> None:
        """Prepare a frozen copy of the network that is on its device; before `wrap`."""

    def masters(self) -> dict[str, torch.nn.Parameter]:
        """Float32 tensors that this process updates, by State's keys."""
        return self._masters

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch's forward and backward pass.

        Args:
            last: whether it is the step's last micro-batch, which reduces the gradients.
        """
        return nullcontext()

    def gather_gradients(self) -> None:
        """Assign the gradients of a complete step to the masters."""

    def total_norm(self, masters: Iterable[torch.Tensor], *, foreach: bool | None) -> torch.Tensor:
        """The global L2 norm of the masters' gradients, a scalar on the device.

        Args:
            foreach: as in `torch.nn.utils.get_total_norm`.
        """
        gradients = [master.grad for master in masters if master.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, foreach=foreach)

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, reduced in place."""
        return value

    def gather_full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a full array from the shards of all processes; a collective call.

        Args:
            name: key of the master that has the array's shape.
            tensor: this process's shard.
        """
        return tensor

    def full_shape(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Shape of the full array of a shard, as for `gather_full`."""
        return tuple(tensor.shape)

    def local_rows(self, name: str, shape: tuple[int, ...]) -> Any:
        """Index of this process's shard in a full array, as for `gather_full`."""
        return ...


class DataParallel(SingleProcess):
    """Replicated weights: every process computes the same update.

    Gradients are views of DDP's buckets, from the first micro-batch of the run on.
    """

    frees_gradients = False  # no_sync would allocate the next ones beside the buckets

    def __init__(self, ranks: Ranks) -> None:
        self.world = ranks.world

    def wrap(self, network: Network) -> Callable[..., torch.Tensor]:
        """Wrap the network in DistributedDataParallel.

        Weights are not broadcast: all processes have read or initialized identical weights.

        `find_unused_parameters` permits the unused last layer of a text encoder. It also prevents
        DDP from rebuilding its buckets after the first step. Rebuilt buckets would change the
        order of summation, so a resumed run would differ in the last bits.
        """
        self._masters = network.trained()
        self._replica = DistributedDataParallel(
            network,
            find_unused_parameters=True,
            forward_sync_buffers=False,
            init_sync=False,
            gradient_as_bucket_view=True,
        )
        self._has_gradients = False
        return self._forward

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._replica.no_sync()

    def _forward(self, *inputs: Any) -> torch.Tensor:
        if not (self._has_gradients or self._replica.require_backward_grad_sync):
            self._allocate_gradients(*inputs)
        self._has_gradients = True
        return self._replica(*inputs)

    def _allocate_gradients(self, *inputs: Any) -> None:
        """Let DDP turn the gradients into views of its buckets, then clear them. Collective.

        DDP does so in a reduced backward pass only. A parameter that the loss does not depend on
        has no gradient afterwards either.
        """
        devices = [t.device for t in inputs[:1] if t.device.type != "cpu"]
        self._replica.require_backward_grad_sync = True
        with torch.random.fork_rng(devices, device_type=inputs[0].device.type):
            self._replica(*inputs).sum().backward()
        self._replica.require_backward_grad_sync = False
        for parameter in self._masters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value


class FullySharded(DataParallel):
    """Weights sharded along dimension 0 within a group of ranks, in the chunks of torch.chunk.

    Every group of `train.fsdp` consecutive ranks holds a replica, and computes its share of the
    batch. Float32 weights that autocast casts at each use are gathered in the compute dtype; the
    few others of the same blocks, such as those of norms, are not sharded.
    """

    sharded = True
    frees_gradients = True

    def __init__(self, ranks: Ranks, device: torch.device, settings: Train) -> None:
        super().__init__(ranks)
        self._device = device
        self._group = ranks.world if settings.fsdp == "all" else settings.fsdp
        self._rank_in_group = ranks.rank % self._group
        self._mesh = _shard_mesh(device, ranks.world, self._group)
        # The base under adapters has the compute dtype already.
        dtype = settings.compute_dtype if settings.method == "full" else "float32"
        self._gathered = getattr(torch, dtype)

    def load(self, job: TrainJob, base: Base, settings: Train) -> Network:
        network, self._unread = Network.load_unread(job, base, settings)
        return network

    def wrap(self, network: Network) -> Callable[..., torch.Tensor]:
        """Shard the network by FSDP2, then read this process's rows of the base's denoiser.

        FSDP moves the other weights to the device, one block after another.

        Each component is a root module, because sampling calls it separately. Weights are resharded
        after every forward pass, because they may change before the next pass.
        """
        self._modules: list[FSDPModule] = []
        self._shard_part(network.denoiser, self._gathered)
        others = [part for part in network.parts.values() if part is not network.denoiser]
        for part in (*others, *network.frozen_clip):
            self._shard_part(part, torch.float32)
        self._read(network)
        self._unread = {}
        self._arrays = network.trained()
        self._masters = {
            name: torch.nn.Parameter(_local(p)) if isinstance(p, DTensor) else p
            for name, p in self._arrays.items()
        }
        return network

    def wrap_frozen(self, network: Network) -> None:
        self._modules = []
        for part in network.parts.values():  # `wrap` shards text encoders that both have
            self._shard_part(part, torch.float32)
        self._read(network)

    def _shard_part(self, part: torch.nn.Module, gathered: torch.dtype) -> None:
        """Shard a component, its blocks one by one; `gathered` is of their weights."""
        blocks = repeated_blocks()
        for module in (m for m in part.modules() if type(m).__name__ in blocks):
            self._shard(module, gathered)
        self._shard(part, torch.float32)
        if isinstance(part, PreTrainedModel):
            # fully_shard changes the class, by which transformers finds its output hooks.
            _CAN_RECORD_REGISTRY[part] = part._can_record_outputs

    def _shard(self, module: torch.nn.Module, gathered: torch.dtype) -> None:
        """Shard a module's weights, except those of its sharded children.

        Args:
            gathered: dtype in which weights are gathered. If it is not float32, those that autocast
                does not cast are replicated: gathered in this dtype, they would be rounded.
        """
        kept = set[torch.nn.Parameter]()
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if gathered != torch.float32:
            policy = replace(policy, param_dtype=gathered, reduce_dtype=torch.float32)
            kept = _not_cast(module)
        for parameter in kept:  # FSDP moves the others
            if not parameter.is_meta:
                parameter.data = parameter.data.to(self._device)
        sharded = fully_shard(
            module,
            mesh=self._mesh,
            mp_policy=policy,
            reshard_after_forward=True,
            ignored_params=kept,
        )
        self._modules.append(sharded)

    def _read(self, network: Network) -> None:
        tensors = network.state_dict(keep_vars=True)
        weights = dict[str, torch.Tensor]()
        for name, stored in self._unread.items():
            like = tensors[name]
            sharded = isinstance(like, DTensor)
            rows = stored[self._own_rows(stored.shape) if sharded else ...]
            local = rows.to(self._device, like.dtype, copy=True)  # not a view of the file
            weights[name] = self._as_sharded(local, like) if sharded else local
        network.load_state_dict(weights, strict=False, assign=True)

    def _as_sharded(self, local: torch.Tensor, like: torch.Tensor) -> DTensor:
        """A DTensor with the shape of `like` from this process's shard of it."""
        size: Any = {"shape": like.shape, "stride": like.stride()}
        placements = [*[Replicate()] * (self._mesh.ndim - 1), Shard(0)]
        return DTensor.from_local(local, self._mesh, placements, run_check=False, **size)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        # Every micro-batch is reduced within the group: gradients of sharded weights are stored as
        # shards. The last is also reduced across groups, which may be on different hosts.
        for module in self._modules:
            module.set_requires_all_reduce(last, recurse=False)
        return nullcontext()

    def gather_gradients(self) -> None:
        replicated = []
        for name, array in self._arrays.items():
            if array.grad is None:
                self._masters[name].grad = None
            elif isinstance(array, DTensor):
                self._masters[name].grad = _local(array.grad)
                array.grad = None
            else:
                replicated.append(array.grad)
        if replicated:
            # Reduced in one message and averaged, as FSDP reduces sharded gradients.
            mean = self.sum_over_ranks(torch.cat([g.flatten() for g in replicated])) / self.world
            parts = mean.split([g.numel() for g in replicated])
            for gradient, part in zip(replicated, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def total_norm(self, masters: Iterable[torch.Tensor], *, foreach: bool | None) -> torch.Tensor:
        masters = list(masters)
        replicated = {id(array) for array in self._arrays.values()}
        sharded = [master for master in masters if id(master) not in replicated]
        own = super().total_norm(sharded, foreach=foreach).square()
        # Summed over all groups: groups might round differently, and their replicas then differ.
        replicas = self.world // self._group
        total = self.sum_over_ranks(own / replicas)
        once = [master for master in masters if id(master) in replicated]
        return (total + super().total_norm(once, foreach=foreach).square()).sqrt()

    def gather_full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        like = self._arrays[name]
        if not isinstance(like, DTensor):
            return tensor
        return self._as_sharded(tensor.detach(), like).full_tensor()

    def full_shape(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def local_rows(self, name: str, shape: tuple[int, ...]) -> Any:
        return self._own_rows(shape) if isinstance(self._arrays[name], DTensor) else ...

    def _own_rows(self, shape: tuple[int, ...]) -> slice:
        return chunk_rows(shape[0], self._rank_in_group, self._group)


def _not_cast(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The parameters that autocast does not cast: those of no linear layer or convolution."""
    return {
        parameter
        for child in module.modules()
        if not isinstance(child, torch.nn.Linear | torch.nn.modules.conv._ConvNd)
        for parameter in child.parameters(recurse=False)
    }


def chunk_rows(count: int, rank: int, world: int) -> slice:
    """The rows of `count` in a rank's chunk of torch.chunk; the last chunks can be empty."""
    size = -(-count // world)
    return slice(size * rank, size * (rank + 1))


def _shard_mesh(device: torch.device, world: int, group: int) -> DeviceMesh:
    """All ranks in one row; or a row per shard group, and replicas of a shard in a column."""
    if group == world:
        return init_device_mesh(device.type, (world,))
    ranks = torch.arange(world).view(-1, group)
    # init_device_mesh gives new process groups PyTorch's time limit, which is shorter.
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=TIMEOUT)[0]
        for rows in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("replicate", "shard"))


def open_parallel(settings: Train, ranks: Ranks, device: torch.device) -> SingleProcess:
    """Join the process group of the run, if it has several processes."""
    if ranks.world == 1:
        return SingleProcess()
    # gloo serves host tensors, which NCCL and HCCL do not support.
    join(ranks, BACKENDS.get(device.type, "gloo"))
    return DataParallel(ranks) if settings.fsdp == 1 else FullySharded(ranks, device, settings)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a DTensor; it shares the DTensor's memory."""
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()
