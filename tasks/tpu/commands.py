"""The gcloud commands for a slice, composed; nothing is run here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.tpu import Tpu

Command = list[str]
#: States (of the TPU API's `Node.State`) that a slice comes out of by itself, ...
COMING = frozenset({"CREATING", "STARTING", "RESTARTING", "REPAIRING"})
#: ... and those that it does not come out of.
GONE = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN"})
#: The same of `QueuedResourceState`: a request that will not be filled any more.
REFUSED = frozenset({"FAILED", "SUSPENDING", "SUSPENDED", "DELETING"})
#: A machine that is gone without a word is noticed within two minutes.
ALIVE = "--ssh-flag=-o ServerAliveInterval=30 -o ServerAliveCountMax=4"


@dataclass(frozen=True)
class Slice:
    """What is said to gcloud about one slice."""

    tpu: Tpu

    def create(self) -> Command:
        """Make it; with `queued`, ask for it and come back at once."""
        tpu = self.tpu
        which = [f"--accelerator-type={tpu.accelerator_type}"]
        if tpu.queued:
            which += [f"--runtime-version={tpu.software}", f"--node-id={tpu.name}"]
        else:
            which += [f"--version={tpu.software}"]
        if tpu.capacity != "on_demand":
            which.append(f"--{tpu.capacity}")
        for name in ("network", "subnetwork", "service_account"):
            if (value := getattr(tpu, name)) is not None:
                which.append(f"--{name.replace('_', '-')}={value}")
        return [*self._about("queued-resources" if tpu.queued else "tpu-vm", "create"), *which]

    def describe(self) -> Command:
        """Print the slice's state, if there is such a slice."""
        return [*self._about("tpu-vm", "describe"), "--format=value(state)"]

    def describe_request(self) -> Command:
        """Print the state of the request for it."""
        return [*self._about("queued-resources", "describe"), "--format=value(state.state)"]

    def delete(self) -> Command:
        """Delete it, and the request that it came from."""
        if self.tpu.queued:
            return [*self._about("queued-resources", "delete"), "--force", "--quiet"]
        return [*self._about("tpu-vm", "delete"), "--quiet"]

    def copy(self, file: Path, target: str) -> Command:
        """Copy a file to every worker."""
        command = self._about("tpu-vm", "scp")
        command[command.index(self.tpu.name)] = str(file)
        return [*command, f"{self.tpu.name}:{target}", "--worker=all"]

    def ssh(self, words: str) -> Command:
        """Have every worker's shell do something."""
        return [*self._about("tpu-vm", "ssh"), "--worker=all", ALIVE, f"--command={words}"]

    def _about(self, kind: str, verb: str) -> Command:
        project = [] if self.tpu.project is None else [f"--project={self.tpu.project}"]
        place = [f"--zone={self.tpu.zone}", *project]
        return ["gcloud", "compute", "tpus", kind, verb, self.tpu.name, *place]
