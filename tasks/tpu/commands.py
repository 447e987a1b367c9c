"""Compose the gcloud commands for a slice; other modules run them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.settings.recipe import Tpu

Command = list[str]
#: States of the TPU API's `Node.State` that lead to READY without intervention.
PENDING_STATES = frozenset({"CREATING", "STARTING", "RESTARTING", "REPAIRING"})
#: States of `Node.State` that never lead to READY.
DEAD_STATES = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN"})
#: States of `QueuedResourceState` of a request that is never fulfilled.
FAILED_REQUESTS = frozenset({"FAILED", "SUSPENDING", "SUSPENDED", "DELETING"})
#: The label of a slice that a run deletes at its end; its value is `Slice.owner`.
LABEL = "kiln_run"
#: Keep-alive of ssh and scp: a lost worker is detected within two minutes.
ALIVE = ("-oServerAliveInterval=30", "-oServerAliveCountMax=4")


@dataclass(frozen=True)
class Slice:
    """The gcloud commands for one slice.

    Attributes:
        owner: names the training, whose attempts share the slice.
    """

    tpu: Tpu
    owner: str

    def create(self) -> Command:
        """Create the slice; with `queued`, request it without waiting."""
        tpu = self.tpu
        which = [f"--accelerator-type={tpu.accelerator_type}"]
        if tpu.queued:
            which += [f"--runtime-version={tpu.software}", f"--node-id={tpu.name}"]
        else:
            which += [f"--version={tpu.software}"]
        if tpu.capacity != "on_demand":
            which.append(f"--{tpu.capacity}")
        if not tpu.keep:
            which.append(f"--labels={LABEL}={self.owner}")
        for name in ("network", "subnetwork", "service_account"):
            if (value := getattr(tpu, name)) is not None:
                which.append(f"--{name.replace('_', '-')}={value}")
        return [*self._about("queued-resources" if tpu.queued else "tpu-vm", "create"), *which]

    def describe(self) -> Command:
        """Print the slice's state, a tab and its owner; fails if it does not exist."""
        return [*self._about("tpu-vm", "describe"), f"--format=value(state,labels.{LABEL})"]

    def describe_request(self) -> Command:
        """Print the state of the queued request for the slice, a tab and its owner."""
        label = f"tpu.nodeSpec[0].node.labels.{LABEL}"
        return [
            *self._about("queued-resources", "describe"),
            f"--format=value(state.state,{label})",
        ]

    def delete(self) -> Command:
        """Delete the slice and its queued request."""
        if self.tpu.queued:
            return [*self._about("queued-resources", "delete"), "--force", "--quiet"]
        return [*self._about("tpu-vm", "delete"), "--quiet"]

    def copy(self, file: Path, target: str) -> Command:
        """Copy a file to every worker."""
        alive = [f"--scp-flag={flag}" for flag in ALIVE]
        return [
            *self._about("tpu-vm", "scp", str(file)),
            *alive,
            f"{self.tpu.name}:{target}",
            "--worker=all",
        ]

    def ssh(self, script: str) -> Command:
        """Run a shell script on every worker."""
        alive = [f"--ssh-flag={flag}" for flag in ALIVE]
        return [*self._about("tpu-vm", "ssh"), "--worker=all", *alive, f"--command={script}"]

    def _about(self, kind: str, verb: str, operand: str | None = None) -> Command:
        operand = operand or self.tpu.name
        project = [] if self.tpu.project is None else [f"--project={self.tpu.project}"]
        location = [f"--zone={self.tpu.zone}", *project]
        return ["gcloud", "compute", "tpus", kind, verb, operand, *location]
