"""What a training step sends from host to host, and for how long, by arithmetic.

Runtime torch sums gradients in float32, once per step. FSDP gathers the weights of a shard group
twice per micro-batch, before the forward and before the backward pass, and reduces its gradients
once per micro-batch. Each host has one network, which sends and receives at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from configs.checks import Finding, note
from configs.settings.train import Train

FLOAT32 = 4  # bytes
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a value, in bytes
#: Gathers of a shard group's weights per micro-batch.
GATHERS = 2


@dataclass(frozen=True)
class Crossing:
    """Bytes that each host sends to others in a step."""

    gradients: float
    weights: float = 0.0  # only of shard groups that span hosts

    @property
    def bytes(self) -> float:
        return self.gradients + self.weights

    def seconds(self, gbits: float) -> float:
        """Seconds on a network of `gbits` Gbit/s per host, at its full rate."""
        return self.bytes * 8 / (gbits * 1e9)


def crossing(train: Train, parameters: int, weights: int) -> Crossing:
    """What a host sends per step, in rings of hosts.

    A ring of n hosts sums B bytes if each host sends 2 (n - 1) / n x B bytes. It gathers or
    reduces B bytes by half of that (Patarasuk and Yuan, doi 10.1016/j.jpdc.2008.09.002).

    Args:
        parameters: number of trained parameters.
        weights: bytes of all weights as they are gathered, `gathered_bytes`.
    """
    gradients = FLOAT32 * parameters
    spanned = train.hosts_of_group
    replicas = train.hosts // spanned
    others = (spanned - 1) / spanned
    share = train.global_batch_size // train.world_size
    micro_batches = -(-share // train.micro_batch(train.world_size))
    summed = 2 * (replicas - 1) / replicas * gradients / spanned
    reduced = others * gradients * micro_batches
    return Crossing(summed + reduced, GATHERS * others * weights * micro_batches)


def notes_of_groups(train: Train) -> Iterator[Finding]:
    """A note for shard groups of several hosts, with what they send in full training."""
    if train.hosts_of_group == 1:
        return
    words = f"train.fsdp: {train.fsdp} gathers weights from host to host for each micro-batch"
    if train.method == "full":
        within = train.model_copy(update={"fsdp": train.processes})
        size = gathered_bytes(train, 1, FLOAT32)
        times = crossing(train, 1, size).bytes / crossing(within, 1, size).bytes
        words += f", {times:.3g} times the bytes of groups within a host"
    mend = f"-o train.fsdp={train.processes}, if a host has the memory (kiln plan --gpu --hosts)"
    yield note(words, mend)


def gathered_bytes(train: Train, parameters: int, weights: int) -> int:
    """Bytes of all weights as FSDP gathers them: trained float32 ones in the compute dtype.

    The few weights outside of the denoiser's blocks, which are gathered in float32, count alike.

    Args:
        parameters: number of trained parameters, each four of the `weights`.
        weights: bytes of the network's weights.
    """
    size = SIZES[train.compute_dtype] if train.method == "full" else FLOAT32
    return weights - (FLOAT32 - size) * parameters
