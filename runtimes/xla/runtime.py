"""The PyTorch/XLA runtime: one compiled step per batch shape, over all devices.

A step is one graph: forward and backward pass of each micro-batch, and the update (gradient
clipping, AdamW and EMA). The rule of the update is that of torch.optim.AdamW (arXiv 1711.05101).
Numbers that change with each step (learning rate, bias corrections, share of the EMA) are inputs,
so all steps run one program. Gradient checkpointing is PyTorch/XLA's, and gathers sharded weights
where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch_xla
from numpy.typing import NDArray
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from torch_xla.debug import profiler
from torch_xla.utils.checkpoint import checkpoint

from configs.settings.train import Train
from runtimes import contract, optimizer_state
from runtimes.base_runtime import BaseRuntime
from runtimes.data.loader import pad_batch
from runtimes.learning_rate import learning_rate_factors
from runtimes.pipeline_folder.folder import Base
from runtimes.process.collectives import join_hosts
from runtimes.process.job import TrainJob
from runtimes.process.launcher import Ranks
from runtimes.spmd.tpu_sharding import check_rows
from runtimes.torch_models.activation_memory import Inputs, micro_batches
from runtimes.torch_models.loading import trained_scheduler
from runtimes.torch_models.network import (
    FlopCounter,
    Network,
    as_base,
    has_dropout,
    prior_network,
    seed_dropout,
)
from runtimes.xla.device import check, describe, memory_bytes, peak_flops, start, versions
from runtimes.xla.mesh import Mesh

Parameters = Mapping[str, torch.nn.Parameter]


class Update:
    """AdamW on float32 masters that are sharded over a mesh.

    Args:
        parameters: trained parameters by State's keys, on the devices.
        settings: learning rates, AdamW, clipping and EMA.
        mesh: mesh of the devices.
    """

    def __init__(self, parameters: Parameters, settings: Train, mesh: Mesh) -> None:
        self._parameters: dict[str, torch.Tensor] = dict(parameters)
        self._settings = settings
        self._mesh = mesh
        self._first = {name: self._zeros(p) for name, p in parameters.items()}
        self._second = {name: self._zeros(p) for name, p in parameters.items()}
        self._average: dict[str, torch.Tensor] = {}
        if settings.ema_decay is not None:
            self._average = {n: mesh.shard(mesh.fetch(p).clone()) for n, p in parameters.items()}
        self._shares = learning_rate_factors(parameters, settings)
        self._step = 0

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return self._mesh.shard(torch.zeros(like.shape, dtype=torch.float32))

    @torch.no_grad()
    def apply(self, learning_rate: float) -> torch.Tensor:
        """Clip the gradients, update the weights and the EMA, and clear the gradients.

        Args:
            learning_rate: learning rate of the denoiser.

        Returns:
            The global L2 norm of the gradients before clipping, a scalar on the device.
        """
        settings = self._settings
        scalars = optimizer_state.step_scalars(self._step, learning_rate, settings)
        rate, step_size, root, ema_share = torch.from_numpy(scalars).to(torch_xla.device()).unbind()
        gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        norm = torch.stack([g.float().square().sum() for g in gradients.values()]).sum().sqrt()
        factor = None
        if settings.max_grad_norm is not None:
            factor = (settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        beta1, beta2 = settings.adam_betas
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            first = self._first[name]
            second = self._second[name]
            gradient = gradient if factor is None else gradient * factor
            share = self._shares[name]
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            parameter.sub_(parameter * (rate * (share * settings.weight_decay)))
            change = first / (second.sqrt() / root + settings.adam_epsilon)
            parameter.sub_(change * (step_size * share))
            parameter.grad = None
        for name, average in self._average.items():
            average.add_((self._parameters[name] - average) * ema_share)
        self._step += 1
        return norm

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context, the model has the EMA weights, if any. Raises WeightsLost."""
        return optimizer_state.swapped(self._swap, self._swap)

    def _swap(self) -> None:
        for name, average in self._average.items():
            parameter = self._parameters[name]
            self._average[name] = parameter.data
            parameter.data = average

    def shapes(self) -> contract.StateShapes:
        """Shapes of weights, moments and EMA."""
        return optimizer_state.shapes_of(self.tensors())

    def state(self, owners: contract.Owners | None, rank: int) -> contract.State:
        """As Runtime.state: weights, moments and EMA. Collective."""
        return optimizer_state.owned_copies(
            self.tensors(),
            owners,
            rank,
            copy=lambda tensor: self._mesh.copy_to_host(tensor).numpy(),
            gather=lambda name, tensor: self._mesh.gather(tensor),
        )

    def restore(self, state: contract.SavedState, step: int) -> None:
        """Restore a state that was saved after `step` steps.

        Raises:
            Refused: the state has other names or shapes than this model.
        """
        groups = self.tensors()
        torch_xla.sync()  # shardings are known afterwards

        def needed(name: str, shape: tuple[int, ...]) -> Any:
            return self._mesh.local_rows(self._parameters[name])

        for group, name, rows in optimizer_state.read_state_arrays(state, self.shapes(), needed):
            self._mesh.load_rows(groups[group][name], torch.from_numpy(rows))
        self._step = step

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of State on the devices, not copies."""
        groups = {"weights": self._parameters, "exp_avg": self._first, "exp_avg_sq": self._second}
        return groups | ({"ema": self._average} if self._average else {})


@dataclass(frozen=True)
class Step:
    """The training step of a network on a mesh.

    Args:
        network: on the devices.
        update: update of its trained parameters.
        mesh: mesh of the devices.
        settings: micro-batch size, compute dtype and seed.
        prior: the network that predicts targets of prior rows, see `prior_network`.
        hosts: processes of the run, which run one program together.
    """

    network: Network
    update: Update
    mesh: Mesh
    settings: Train
    prior: Network
    hosts: int

    def __call__(self, batch: contract.StepBatch, learning_rate: float) -> contract.StepOutput:
        losses = []
        for inputs in batch.on_device or self.inputs(batch):
            if inputs.has_prior or (self.hosts > 1 and inputs.is_prior is not None):
                with self.autocast(), as_base(self.prior):
                    inputs.set_prior_targets(self.prior)
            if self._has_dropout:
                # Rank 0 on every host: SPMD hosts run one program and must draw equal masks.
                seed_dropout(self.settings.seed, batch.step, inputs.first, rank=0)
                torch_xla.manual_seed(torch.initial_seed() % 2**63)
            with self.autocast():
                errors = inputs.errors(self.network)
            loss = (inputs.weight * errors).sum() / batch.denominator
            loss.backward()
            losses.append(loss.detach())
        figures = torch.stack([torch.stack(losses).sum(), self.update.apply(learning_rate)])
        torch_xla.sync()  # starts the step and does not wait for it
        return contract.lazy_output(lambda: list(self.mesh.fetch(figures).tolist()))

    def inputs(self, batch: contract.StepBatch) -> Iterator[Inputs]:
        """The batch's micro-batches, sharded over the devices."""
        return micro_batches(batch, self.settings.micro_batch_size, self.mesh.shard_rows)

    def autocast(self) -> AbstractContextManager[None]:
        """Context of computation in the compute dtype."""
        half = self.settings.compute_dtype == "bfloat16"
        return torch.autocast("xla", dtype=torch.bfloat16, enabled=half)

    @cached_property
    def _has_dropout(self) -> bool:
        return has_dropout(self.network)


def recompute(model: Any, mesh: Mesh) -> None:
    """Recompute the activations of a component's blocks in the backward pass.

    Sharded weights are gathered layer by layer in each pass. Without this, GSPMD often gathers the
    activations of all devices instead.

    PyTorch's own checkpoint saves a random state that XLA devices lack. torch_xla's is reentrant:
    it computes gradients only if an input requires them, and inputs of a frozen model's first
    layers do not. A zero that requires gradients is therefore added to the inputs and outputs.
    """
    model._set_gradient_checkpointing(
        enable=True, gradient_checkpointing_func=partial(_recomputed, mesh.device)
    )
    if mesh.fsdp > 1:
        for module in model.modules():
            if module._parameters:
                module.forward = partial(_with_gathered_weights, module, module.forward, mesh)


def _recomputed(device: torch.device, block: Any, *arguments: Any) -> Any:
    """Outputs of a block, whose weights are inputs of the checkpoint.

    XLA merges equal operations on other weights, so that the gathered weights of the forward pass
    would stay in memory for the backward pass.
    """
    weights = dict(block.named_parameters()) if isinstance(block, torch.nn.Module) else {}
    zero = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())

    def run(zero: torch.Tensor, *tensors: Any) -> Any:
        own = dict(zip(weights, tensors, strict=False))
        inputs = tensors[len(own) :]
        outputs = functional_call(block, own, inputs) if own else block(*inputs)
        return tree_map_only(torch.Tensor, lambda t: t + zero.to(t.dtype), outputs)

    # The checkpoint changes its inputs in place in the backward pass.
    copies = [weight.clone() for weight in weights.values()]
    return checkpoint(run, zero, *copies, *arguments, use_reentrant=True)


def _with_gathered_weights(
    module: torch.nn.Module, forward: Any, mesh: Mesh, *arguments: Any, **options: Any
) -> Any:
    """Outputs of a module's own forward, with its own weights gathered."""
    sharded = dict(module._parameters)
    module._parameters.update({n: mesh.gathered(w) for n, w in sharded.items() if w is not None})
    try:
        return forward(*arguments, **options)
    finally:
        module._parameters.update(sharded)


class TheRuntime(BaseRuntime):
    """Implements contract.Runtime."""

    def load(self, job: TrainJob, base: Base) -> None:
        self._base = base
        self.versions = versions()
        settings = self._settings = Train(**job.train)
        check(settings)
        ranks = self._ranks = Ranks.here()
        self._compile_cache = start(settings.device, job.compiled)
        self.device = describe()
        self._collectives = join_hosts(ranks)
        self.samples_collectively = ranks.world > 1
        self._mesh = Mesh(settings.fsdp, ranks.world)
        self._rows = settings.micro_batch(ranks.world)
        check_rows(settings, ranks.world, self._mesh.local)
        plain = settings.model_copy(update={"gradient_checkpointing": "none"})
        network = self._network = Network.load(job, base, plain)
        self._counter = FlopCounter(network, self._mesh.local)
        prior = prior_network(network, settings) if job.has_prior else network
        networks = dict.fromkeys((network, prior))  # one, if it has adapters
        if settings.gradient_checkpointing == "blocks":
            for each in networks:
                for part in each.parts.values():
                    recompute(part, self._mesh)
        for each in networks:
            self._mesh.shard_module(each)
        network.train()
        self._update = Update(network.trained(), settings, self._mesh)
        self._step = Step(network, self._update, self._mesh, settings, prior, ranks.world)
        torch_xla.sync()

    def put(self, batch: contract.StepBatch) -> contract.StepBatch:
        return replace(batch, on_device=list(self._step.inputs(batch)))

    def peak_flops(self) -> float | None:
        return peak_flops(self._settings.compute_dtype)

    def state(self, owners: contract.Owners | None = None) -> contract.State:
        self._compile_cache.upload()
        return super().state(owners)

    def errors(self, batch: contract.StepBatch) -> NDArray[np.float32]:
        count = len(batch.timesteps)
        whole = pad_batch(batch, self._rows, self._mesh.local)
        with torch.no_grad():
            inputs = Inputs(whole, self._mesh.shard_rows)
            return self._mesh.fetch_rows(inputs.errors(self._network)).numpy()[:count]

    def memory_bytes(self) -> int:
        return memory_bytes()

    def _autocast(self) -> AbstractContextManager[None]:
        return self._step.autocast()

    @contextmanager
    def _trace(self, folder: str) -> Iterator[None]:
        profiler.start_trace(folder)
        try:
            yield
        finally:
            profiler.stop_trace()

    def _open_sampler(self) -> Any:
        from runtimes.xla.sampler import Sampler  # pipelines are slow to import

        sampler = Sampler(self._base, self._mesh, self._settings.compute_dtype)
        sampler.use(self._network, trained_scheduler(self._base, self._settings))
        return sampler
