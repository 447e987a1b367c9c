"""The cluster of a recipe: which engine computes a stage, and what must be so before any runs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from artifacts.models import cache_folder
from artifacts.store import Store
from configs.checks import Finding, fine
from configs.errors import Refused
from configs.settings.clusters import AnyCluster, Kubernetes, Ray, Slurm, Ssh, Tpu
from configs.settings.recipe import STAGES, Recipe, StageName
from runtimes.registry import interpreter
from tasks.beam.workers import BEAM_STAGES, Workers, beam_options, workers_of
from tasks.hosts import gcloud, kubernetes, ray, slurm, ssh
from tasks.hosts.engine import Agents, Engine

#: Seconds for a host to end that has no checkpoint to write.
GRACE_SECONDS = 10.0


def _cluster_here(count: int, stage: StageName) -> AnyCluster:
    """The cluster that this machine belongs to. Raises Refused if there is none."""
    if shutil.which("sbatch") is not None:
        return Slurm()
    if "RAY_ADDRESS" in os.environ:
        return Ray()
    raise Refused(
        f"{count} hosts are asked for, but neither a section such as slurm nor "
        "RAY_ADDRESS is set, and sbatch is not on PATH: name the cluster, such as "
        "`-o slurm.partition=gpu`",
        setting=f"{stage}.hosts",
    )


@dataclass(frozen=True)
class Hosts:
    """The machines of a cluster for one stage.

    Attributes:
        count: their number.
        runtime: name of the runtime that computes there.
        grace: seconds from a stop request until what runs there is killed.
    """

    cluster: AnyCluster
    count: int
    runtime: str
    grace: float

    @classmethod
    def of(cls, recipe: Recipe, stage: StageName) -> Hosts | None:
        """Those of a stage; None: the flow's machine computes it. Raises Refused."""
        count = recipe.hosts_of(stage)
        if count is None:
            return None
        cluster = recipe.cluster or _cluster_here(count, stage)
        if isinstance(cluster, Tpu):
            count = gcloud.hosts_of(cluster, count)
        runtime = "torch" if stage in ("describe", "caption") else recipe.runtime
        grace = recipe.train.grace_seconds if stage == "train" else GRACE_SECONDS
        return cls(cluster, count, runtime, grace)

    @property
    def agents(self) -> Agents:
        """Their agents, without a job."""
        on_slice = isinstance(self.cluster, Tpu)  # whose worker script knows the interpreter
        python = "python" if on_slice else interpreter(self.runtime)
        return Agents(self.count, "", self.grace, python)

    def engine(self, work: str, store: Store) -> Engine:
        """What reserves and starts them; it finds again what earlier attempts left.

        Args:
            work: URL of a folder, which names the work in jobs and labels of the cluster.
        """
        owner = hashlib.sha256(work.encode()).hexdigest()[:20]
        match self.cluster:
            case Slurm():
                folder = _shared_folder(self.cluster, store)
                return slurm.SlurmEngine(self.cluster, self.count, owner, folder)
            case Ssh():
                names = self.cluster.hosts[: self.count]
                return ssh.SshEngine(self.cluster.model_copy(update={"hosts": names}), work)
            case Kubernetes():
                return kubernetes.KubernetesEngine(self.cluster, owner)
            case Ray():
                return ray.RayEngine(self.cluster, self.count, owner, self.runtime)
            case Tpu():
                return gcloud.GcloudEngine(gcloud.Slice(self.cluster, owner), self.runtime)


def check(recipe: Recipe, stages: Sequence[StageName] = STAGES) -> list[Finding]:
    """Say which cluster computes which stages. Raises Refused or Away if it cannot.

    Args:
        stages: those that this flow builds.
    """
    hosted = _hosted(recipe, stages)
    if not hosted:
        return []
    cluster = next(iter(hosted.values())).cluster
    store = Store(recipe.store)
    if store.url.startswith("memory://"):
        raise Refused("other machines cannot read memory://: set a folder or URL", setting="store")
    wandb = recipe.train.wandb if "train" in hosted else None
    if wandb and wandb.mode == "online" and "WANDB_API_KEY" not in cluster.environment:
        raise Refused(
            "the hosts do not get your W&B key: list WANDB_API_KEY in the cluster's `environment`, "
            "or set train.wandb.mode offline"
        )
    largest = max(hosted, key=lambda stage: hosted[stage].count)
    most = hosted[largest].count
    match cluster:
        case Slurm():
            slurm.check(cluster, most)
        case Ssh():
            folder = store.root if store.is_local else None
            ssh.check(cluster, interpreter(recipe.runtime), folder)
        case Kubernetes():
            kubernetes.check(cluster, recipe, {hosts.count for hosts in hosted.values()})
        case Ray():
            ray.check(cluster, recipe, most, f"{largest}.hosts")
        case Tpu():
            gcloud.check(cluster, recipe, hosted.keys())
    counts = [f"{stage} on {hosts.count}" for stage, hosts in hosted.items()]
    return [fine(", ".join([f"cluster: {type(cluster).__name__.lower()}", *counts]))]


def _hosted(recipe: Recipe, stages: Sequence[StageName]) -> dict[StageName, Hosts]:
    """The stages that hosts compute, of all sources. Raises Refused."""
    found: dict[StageName, Hosts] = {}
    for part in recipe.by_source.values():
        for stage in stages:
            if (hosts := Hosts.of(part, stage)) is None:
                continue
            if stage in BEAM_STAGES and workers_of(beam_options(part, stage)) is Workers.REMOTE:
                raise Refused(
                    f"workers of beam.runner {stage} already: set one of them to null",
                    setting=f"{stage}.hosts",
                )
            if stage not in found or found[stage].count < hosts.count:
                found[stage] = hosts
    return found


def _shared_folder(settings: Slurm, store: Store) -> Path:
    if settings.folder is not None:
        return Path(settings.folder).expanduser()
    if store.is_local:
        return Path(store.root, "slurm")
    return cache_folder() / "slurm"
