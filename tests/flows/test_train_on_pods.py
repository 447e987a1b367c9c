"""Training on the pods of a Kubernetes cluster: whole runs, and pods that are taken away."""

import hashlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import published
import pytest
from kubernetes_cluster import VALIDATORS, KubernetesCluster
from store_servers import UrlOf
from waiting import wait_until

from configs.load_recipe import load_recipe
from tasks.hosts import kubernetes

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not VALIDATORS.is_dir(), reason=f"no {VALIDATORS.name}: make setup-deploy"),
]
Overrides = dict[str, Any]
RunHere = Callable[..., dict[str, Any]]
Train = Callable[[Path], str]
PODS: Overrides = {
    "train.hosts": 2,
    "kubernetes.image": "registry/kiln-workers:1",
    "kubernetes.requests": {"cpu": 1},
}
SECONDS = 120.0  # for a machine that does much else


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    monkeypatch.syspath_prepend(str(VALIDATORS))
    with KubernetesCluster(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        yield server


def test_a_run_trains_on_two_pods_and_publishes(
    cluster: KubernetesCluster, smallest: Overrides, url_of: UrlOf, run_here: RunHere
) -> None:
    fewer = {"train.checkpointing_steps": 6, "train.sample_every_n_steps": 6}
    report = run_here("digits", {**smallest, **PODS, **fewer, "store": url_of("gs")})
    assert report["status"] == "published"
    assert published.outcomes(report) == dict.fromkeys(published.STAGES, "built")
    job, service = cluster.made
    assert (job["kind"], job["spec"]["completions"], service["kind"]) == ("Job", 2, "Service")
    assert not cluster.jobs and not cluster.pods


@pytest.fixture
def train(
    cluster: KubernetesCluster,
    smallest: Overrides,
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Train:
    """`train(store)` trains on two pods; the digest of the trained weights."""
    monkeypatch.setattr(kubernetes, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(kubernetes, "KILL_SECONDS", 2.0)  # of a node that does not answer
    longer = {"train.steps": 40, "train.checkpointing_steps": 4, "train.sample_every_n_steps": 40}
    recipe = load_recipe("digits", {**smallest, **PODS, **longer})
    report = json.loads((published / "report.json").read_text())

    def run(store: Path) -> str:
        from published import train_apart

        folder = train_apart(recipe, report, store)
        weights = folder / "unet/diffusion_pytorch_model.safetensors"
        return hashlib.sha256(weights.read_bytes()).hexdigest()

    return run


@pytest.fixture
def undisturbed(train: Train, once: Callable[..., Path], tmp_path: Path) -> str:
    """The weights of a training on pods that are left alone."""

    def make(folder: Path) -> None:
        (folder / "weights").write_text(train(tmp_path / "undisturbed"))

    return (once("trained-on-pods", make) / "weights").read_text()


def after_checkpoint(cluster: KubernetesCluster, harm: Callable[[], object]) -> threading.Thread:
    """Do harm once the pods of this attempt have written a checkpoint, in a thread."""

    def has_saved() -> bool:
        pods = [pod for pod in [*cluster.pods.values()] if pod.host == 0]
        return any('"event": "checkpoint"' in line for pod in pods for _, line in [*pod.log])

    def work() -> None:
        wait_until(has_saved, SECONDS)
        harm()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def harms(cluster: KubernetesCluster) -> dict[str, Callable[[], object]]:
    return {
        "killed": lambda: cluster.kill(cluster.pod(1)),
        "evicted": lambda: cluster.evict(cluster.pod(1), "node drained"),
        "lost": lambda: cluster.lose_node(cluster.pod(1)),
    }


REASONS = {
    "killed": "host 1: its pod was killed (exit code 137)",
    "evicted": "host 1: its pod is taken away: node drained",
    "lost": "host 1: node node-1 is NotReady",
}


SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in ("evicted", "lost")]


@pytest.mark.parametrize("name", ["killed", *SOAK])
def test_a_training_that_loses_a_pod_ends_with_the_same_weights(
    name: str,
    cluster: KubernetesCluster,
    train: Train,
    undisturbed: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster.made.clear()
    with caplog.at_level(logging.INFO, "kiln"):
        harm = after_checkpoint(cluster, harms(cluster)[name])
        assert train(tmp_path / "store") == undisturbed
    harm.join()
    assert [one["kind"] for one in cluster.made] == ["Job", "Service"] * 2
    assert f"{REASONS[name]}; training goes on from its last checkpoint" in caplog.text
    assert "resuming from step" in caplog.text
    assert not cluster.jobs and not cluster.pods


@pytest.mark.soak
def test_a_cancelled_training_saves_a_checkpoint_and_goes_on(
    cluster: KubernetesCluster,
    train: Train,
    undisturbed: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = tmp_path / "store"
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        harm = after_checkpoint(cluster, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train(store)
        harm.join()
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert not cluster.jobs and not cluster.pods
    with caplog.at_level(logging.INFO, "kiln"):
        assert train(store) == undisturbed
    assert "resuming from step" in caplog.text


@pytest.mark.soak
def test_logs_that_break_lose_no_event(
    cluster: KubernetesCluster, train: Train, undisturbed: str, tmp_path: Path
) -> None:
    """A lost `result` would lose the list of the trained files."""
    cluster.cut_logs = 12
    assert train(tmp_path / "store") == undisturbed
    assert cluster.cut_logs < 12
