"""Training on two nodes of a real Ray cluster, whose nodes die and freeze."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import published as checks
import pytest
from kiln_command import environment
from ray_cluster import HOST, RayCluster, ray_cluster
from two_hosts import (
    LONGER,
    SECONDS,
    WEIGHTS,
    Overrides,
    Run,
    cancel_in_training,
    checkpoints,
    weights_of,
)
from waiting import wait_until

from configs.errors import Away, Refused
from configs.load_recipe import load_recipe
from configs.settings.clusters import Ray
from tasks.hosts import ray

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as nodes:
        yield nodes


@pytest.fixture
def on_two(cluster: RayCluster) -> Overrides:
    section = {"address": cluster.address, "resources": {HOST: 1}, "silence_seconds": 10}
    return {"train.hosts": 2, "ray": section}


def test_a_run_on_two_nodes_publishes_the_model_of_two_processes(
    small: Overrides,
    on_two: Overrides,
    run_here: Callable[..., checks.Report],
    train_longer: Run,
    cluster: RayCluster,
) -> None:
    report = run_here("digits", {**small, **on_two})
    checks.assert_published(report, "torch", 6)
    steps = {"train.steps": 6, "train.checkpointing_steps": 2, "train.processes": 2}
    here = train_longer("here", steps)
    assert weights_of(report) == (here / WEIGHTS).read_bytes()
    assert cluster.ranks() == []


def test_a_cluster_that_cannot_train_is_refused_with_what_there_is(
    cluster: RayCluster, on_two: Overrides
) -> None:
    three = load_recipe("digits", {**on_two, "train.hosts": 3, "train.global_batch_size": 3})
    assert three.ray is not None
    with pytest.raises(Refused, match=r"encode\.hosts: 3 nodes with CPU 1, KILN 1 .* 2 of the"):
        ray.check(three.ray, three, 3, "encode.hosts")
    ray.check(three.ray.model_copy(update={"autoscaling": True}), three, 3, "encode.hosts")
    with pytest.raises(Away, match=r"127\.0\.0\.10:1 does not answer"):
        ray.list_nodes(Ray(address="127.0.0.10:1"))


@pytest.mark.extended
@pytest.mark.parametrize(("loss", "known_seconds"), [("kill", 10), ("freeze", 45)])
def test_a_lost_node_is_known_and_training_goes_on_to_the_same_weights(
    tmp_path: Path,
    cluster: RayCluster,
    on_two: Overrides,
    train_longer: Run,
    undisturbed: bytes,
    caplog: pytest.LogCaptureFixture,
    loss: str,
    known_seconds: float,
) -> None:
    """With Ray's default settings, a frozen node is known by its silence, too."""
    caplog.set_level(logging.INFO, "kiln")
    store = tmp_path / "lost"
    youngest = max(cluster.nodes)
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(train_longer, "lost", on_two)
        wait_until(lambda: checkpoints(store) or training.done(), SECONDS)
        getattr(cluster, loss)(youngest)
        lost = time.time()
        wait_until(lambda: "goes on" in caplog.text or training.done(), SECONDS)
        known = time.time()
        cluster.add(youngest + 1)
        trained = training.result(SECONDS)
    assert (trained / WEIGHTS).read_bytes() == undisturbed
    (why,) = [one.getMessage() for one in caplog.records if "goes on" in one.getMessage()]
    if loss == "kill":
        assert f"Ray's node {cluster.node_address(youngest)}" in why
    else:
        cluster.kill(youngest)
    assert known - lost < known_seconds
    assert cluster.ranks() == []


@pytest.mark.extended
def test_a_cancelled_flow_leaves_a_checkpoint_and_no_process(
    tmp_path: Path,
    small: Overrides,
    api: str,
    cluster: RayCluster,
    on_two: Overrides,
    run_here: Callable[..., checks.Report],
    undisturbed: bytes,
) -> None:
    overrides = {**small, **LONGER, **on_two, "train.checkpointing_steps": 24}
    store = Path(small["store"])
    cancel_in_training(overrides, environment(tmp_path, api), tmp_path / "log")
    assert cluster.ranks() == []
    (saved,) = checkpoints(store)
    assert 0 < saved <= 24  # a busy machine stops it at the last step
    report = run_here("digits", overrides)
    assert checks.manifest(report, "train")["run"]["resumed_from"] == saved
    assert weights_of(report) == undisturbed
