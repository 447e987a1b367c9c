"""Engine kubernetes against an API server on loopback, whose pods are processes of this machine."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from kiln_command import ROOT
from kubernetes_cluster import VALIDATORS, KubernetesCluster, broken, job_spec
from loopback_server import refusing
from shortest_recipe import shortest_recipe
from waiting import wait_until

from configs.errors import Away, Refused
from configs.settings.clusters import Kubernetes
from configs.settings.recipe import Recipe
from tasks.child_process import JobStopped
from tasks.hosts import kubernetes, kubernetes_api
from tasks.hosts.engine import Agents
from tasks.hosts.kubernetes import KubernetesEngine
from tasks.hosts.kubernetes_manifests import PodGroup

pytestmark = pytest.mark.skipif(
    not VALIDATORS.is_dir(), reason=f"no {VALIDATORS.name}: make setup-deploy"
)
OWNER = "0123456789abcdef0123"
SETTINGS: dict[str, Any] = {
    "image": "registry/kiln-cuda:1",
    "requests": {"cpu": 32, "memory": "256Gi"},
    "limits": {"memory": "256Gi", "nvidia.com/gpu": 8},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}
SLICE = SETTINGS | {
    "image": "registry/kiln-tpu:1",
    "limits": {"google.com/tpu": 4},
    "topology": "2x2x4",
    "node_selector": {"cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice"},
}
PATIENCE = 20  # seconds, for a machine that does much else


@dataclass(frozen=True)
class ShellAgents(Agents):
    """Agents that are a shell script, with $HOST and $ADDRESS."""

    hosts: int = 2
    job: str = "job.json"
    grace: float = 5.0
    python: str = "/none"
    script: str = field(kw_only=True)

    def command(self, host: str, address: str | None, *flags: str) -> list[str]:
        return ["bash", "-c", f"{WORDS}\n{self.script}", host, address or ""]


#: Functions of the scripts; $0 is the host and $1 the address.
WORDS = """ADDRESS=$1
say() { echo "{\\"host\\": $HOST, \\"event\\": \\"$1\\", \\"$2\\": $3}"; }
HOST=$0
leave() { say exit code "$1"; exit "$1"; }
speak() { while :; do say alive time 1; sleep 0.1; done; }"""
SPEAKS = "trap 'leave 143' TERM; speak"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    monkeypatch.syspath_prepend(str(VALIDATORS))
    monkeypatch.setattr(kubernetes, "START_POLL_SECONDS", 0.05)
    monkeypatch.setattr(kubernetes, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(kubernetes, "KILL_POLL_SECONDS", 0.05)
    monkeypatch.setattr(kubernetes, "KILL_SECONDS", 2.0)
    monkeypatch.setattr(kubernetes_api, "RECONNECT_SECONDS", 0.05)
    with KubernetesCluster(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        yield server


@pytest.fixture
def engine(cluster: KubernetesCluster) -> Iterator[KubernetesEngine]:
    made = KubernetesEngine(Kubernetes(**SETTINGS), OWNER)
    yield made
    made.end()


def read(engine: KubernetesEngine, until: str = "") -> list[dict[str, Any]]:
    """The events up to one of a kind of each of the two hosts, or to the end."""
    events = list[dict[str, Any]]()
    end = time.monotonic() + PATIENCE
    while (lines := engine.read(0.5)) is not None:
        assert time.monotonic() < end, events
        events += map(json.loads, lines)
        if len({event["host"] for event in events if event["event"] == until}) == 2:
            break
    return events


def codes(events: list[dict[str, Any]]) -> dict[int, int]:
    return {event["host"]: event["code"] for event in events if event["event"] == "exit"}


def test_pod_n_is_host_n_and_meets_the_others_at_host_0(
    cluster: KubernetesCluster, engine: KubernetesEngine
) -> None:
    script = 'say line text "\\"$ADDRESS\\""; leave 0'
    assert engine.reserve()
    engine.start(ShellAgents(script=script))
    events = read(engine)
    assert codes(events) == {0: 0, 1: 0}
    (address,) = {event["text"] for event in events if event["event"] == "line"}
    assert address.startswith("127.0.0.1:")  # the server found the name among its pods
    assert engine.lost() is None
    engine.end()
    assert not cluster.jobs and not cluster.pods


def test_lines_come_once_over_connections_that_break(
    cluster: KubernetesCluster, engine: KubernetesEngine
) -> None:
    cluster.cut_logs = 8
    count = "for n in $(seq 40); do say line text $n; done; sleep 0.3"
    engine.start(ShellAgents(script=f"{count}; {count}; leave 0"))
    events = read(engine)
    assert cluster.cut_logs == 0
    for host in (0, 1):
        told = [e["text"] for e in events if e["host"] == host and e["event"] == "line"]
        assert told == [*range(1, 41)] * 2


def test_a_stop_gives_every_agent_its_grace(
    cluster: KubernetesCluster, engine: KubernetesEngine
) -> None:
    engine.start(ShellAgents(script=SPEAKS))
    read(engine, until="alive")
    engine.stop()
    assert codes(read(engine)) == {0: 143, 1: 143}
    seconds = cluster.made[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert seconds > ShellAgents(script="").grace


def test_nothing_is_left_after_a_kill(cluster: KubernetesCluster, engine: KubernetesEngine) -> None:
    """Of agents that hang, too."""
    engine.start(ShellAgents(script="trap '' TERM; speak"))
    read(engine, until="alive")
    pids = [pod.process.pid for pod in cluster.pods.values() if pod.process]
    begin = time.monotonic()
    engine.kill()
    assert time.monotonic() < begin + 5
    assert not cluster.jobs and not cluster.pods and len(pids) == 2
    assert all(not Path(f"/proc/{pid}").exists() or "Z" in state(pid) for pid in pids)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_pod_whose_node_is_lost_does_not_keep_the_flow(
    cluster: KubernetesCluster, engine: KubernetesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kubelet confirms its end, so the API server keeps it for ever."""
    monkeypatch.setattr(kubernetes, "KILL_SECONDS", 0.5)
    monkeypatch.setattr(kubernetes, "DELETE_SECONDS", 5.0)
    engine.start(ShellAgents(script=SPEAKS))
    read(engine, until="alive")
    cluster.lose_node(cluster.pod(1))
    engine.kill()
    assert not cluster.jobs and not cluster.pods


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        pytest.param(
            lambda cluster: cluster.evict(cluster.pod(1), "node drained"),
            "host 1: its pod is taken away: node drained",
            id="evicted",
        ),
        pytest.param(
            lambda cluster: cluster.kill(cluster.pod(1)),
            "host 1: its pod was killed (exit code 137)",
            id="killed",
        ),
        pytest.param(
            lambda cluster: cluster.lose_node(cluster.pod(1)),
            "host 1: node node-1 is NotReady",
            id="node lost",
        ),
    ],
)
def test_a_pod_that_is_lost_is_told_with_its_reason(
    harm: Any, reason: str, cluster: KubernetesCluster, engine: KubernetesEngine
) -> None:
    engine.start(ShellAgents(script=SPEAKS))
    read(engine, until="alive")
    assert engine.lost() is None
    harm(cluster)
    wait_until(lambda: engine.lost() == reason, PATIENCE)


def test_a_pod_without_memory_fails_by_itself(
    cluster: KubernetesCluster, engine: KubernetesEngine
) -> None:
    engine.start(ShellAgents(script=SPEAKS))
    read(engine, until="alive")
    cluster.pod(1).reason = "OOMKilled"
    cluster.kill(cluster.pod(1))
    events = read(engine)
    assert codes(events)[1] == 137 and engine.lost() is None
    assert any("raise memory" in event.get("text", "") for event in events if event["host"] == 1)


def test_what_ends_before_its_agent_speaks_is_told(engine: KubernetesEngine) -> None:
    engine.start(ShellAgents(script="echo no module named runtimes; exit 1"))
    events = read(engine)
    assert codes(events) == {0: 1, 1: 1}
    assert {"host": 0, "event": "line", "text": "no module named runtimes"} in events


def test_a_deleted_job_stops_the_training(
    cluster: KubernetesCluster, engine: KubernetesEngine
) -> None:
    engine.start(ShellAgents(script=SPEAKS))
    read(engine, until="alive")
    for job in list(cluster.jobs.values()):  # kubectl delete job
        job["metadata"]["deletionTimestamp"] = "now"
    assert codes(read(engine)) == {0: 143, 1: 143}
    with pytest.raises(JobStopped, match="was deleted"):
        engine.lost()


def test_the_job_of_a_killed_flow_is_deleted_and_no_other(
    cluster: KubernetesCluster, engine: KubernetesEngine
) -> None:
    other = KubernetesEngine(Kubernetes(**SETTINGS), "f" * 20)
    other.start(ShellAgents(script=SPEAKS))
    before = KubernetesEngine(Kubernetes(**SETTINGS), OWNER)  # whose flow is killed now
    before.start(ShellAgents(script=SPEAKS))
    assert engine.reserve()
    (left,) = cluster.jobs.values()
    assert left["metadata"]["labels"]["kiln-run"] == "f" * 20
    assert {pod.manifest["metadata"]["job"] for pod in cluster.pods.values()} == {
        left["metadata"]["name"]
    }
    other.end()


def test_an_outage_of_the_api_server_is_waited_for(
    cluster: KubernetesCluster, engine: KubernetesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "WAITS", ())
    engine.start(ShellAgents(script=SPEAKS))
    read(engine, until="alive")
    cluster.outage = True
    time.sleep(0.3)
    assert engine.read(0.1) is not None
    cluster.outage = False
    engine.stop()
    assert codes(read(engine)) == {0: 143, 1: 143}


def test_a_key_that_the_secret_lacks_is_refused(cluster: KubernetesCluster) -> None:
    keys = {"secret": "kiln-credentials", "environment": ["AWS_SECRET_ACCESS_KEY"]}
    cluster.secrets["kiln-credentials"] = {"OTHER": "value"}
    engine = KubernetesEngine(Kubernetes(**SETTINGS, **keys), OWNER)
    with pytest.raises(Refused, match="couldn't find key AWS_SECRET_ACCESS_KEY"):
        engine.start(ShellAgents(script=SPEAKS))
    engine.end()
    cluster.secrets["kiln-credentials"] = {"AWS_SECRET_ACCESS_KEY": "s3cret"}
    engine = KubernetesEngine(Kubernetes(**SETTINGS, **keys), OWNER)
    engine.start(ShellAgents(script="[ ${#AWS_SECRET_ACCESS_KEY} = 6 ]; leave $?"))
    assert codes(read(engine)) == {0: 0, 1: 0}
    assert "s3cret" not in json.dumps(cluster.made)
    engine.end()


@pytest.mark.parametrize("settings", [SETTINGS, SLICE], ids=["job", "job set"])
def test_manifests_are_of_kubernetes_and_run_without_root(settings: dict[str, Any]) -> None:
    more = {"service_account": "trainer", "queue": "team", "secret": "keys", "environment": ["A"]}
    group = PodGroup(Kubernetes(**settings, **more), OWNER, "abcde")
    job = group.job(["agent"], 4, 60.0)
    assert broken(job) == ""
    spec = job_spec(job)
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (4, 4, 0)
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["restartPolicy"] == "Never"
    assert pod["serviceAccountName"] == "trainer"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == settings["limits"]
    made = {**job, "metadata": {**job["metadata"], "uid": "1"}}
    assert broken(group.service(made)) == ""
    container["volumeMountz"] = []
    assert "volumeMountz" in broken(job)


def test_a_template_is_merged_over_the_spec(tmp_path: Path) -> None:
    template = tmp_path / "template.yaml"
    volume = {"name": "cache", "hostPath": {"path": "/scratch"}}
    env = [{"name": "NCCL_SOCKET_IFNAME", "value": "eth1"}]
    pod = {"hostNetwork": True, "volumes": [volume], "containers": [{"name": "kiln", "env": env}]}
    template.write_text(yaml.safe_dump({"template": {"spec": pod}}))
    settings = Kubernetes(**SETTINGS, job_template=str(template))
    job = PodGroup(settings, OWNER, "abcde").job(["agent"], 2, 60.0)
    assert "hostPath" not in broken(job)
    made = job["spec"]["template"]["spec"]
    assert made["hostNetwork"] and made["containers"][0]["env"] == env
    assert made["containers"][0]["image"] == SETTINGS["image"]
    assert [one["name"] for one in made["volumes"]] == ["cache", "shm"]


def recipe(**train: Any) -> Recipe:
    return shortest_recipe(store="s3://bucket/store", train={"hosts": 2, **train})


def test_check_makes_nothing_and_asks_what_the_engine_needs(cluster: KubernetesCluster) -> None:
    kubernetes.check(Kubernetes(**SETTINGS), recipe(), {2})
    assert not cluster.made and not cluster.jobs


@pytest.mark.parametrize(
    ("settings", "harm", "message"),
    [
        ({}, {"denied": {"create jobs"}}, "may not create jobs in namespace kiln"),
        ({}, {"denied": {"deletecollection pods"}}, "train_role.yaml"),
        ({"namespace": "none"}, {}, 'namespaces "none" not found'),
        ({"tolerations": [{"keyy": "a"}]}, {}, "answers 422.*keyy"),
        ({"context": "other"}, {}, "no cluster is known here.*other"),
        ({"job_template": "/none.yaml"}, {}, "kubernetes.job_template: /none.yaml"),
    ],
)
def test_check_refuses_what_the_cluster_lacks(
    settings: dict[str, Any], harm: dict[str, Any], message: str, cluster: KubernetesCluster
) -> None:
    for name, value in harm.items():
        setattr(cluster, name, value)
    with pytest.raises(Refused, match=message):
        kubernetes.check(Kubernetes(**SETTINGS | settings), recipe(), {2})


def test_check_refuses_a_store_that_pods_cannot_reach(cluster: KubernetesCluster) -> None:
    with pytest.raises(Refused, match="store: pods cannot reach"):
        kubernetes.check(Kubernetes(**SETTINGS), shortest_recipe(store="/disk/store"), {1})
    assert not cluster.requests


def test_check_refuses_hosts_that_are_not_those_of_the_slice(cluster: KubernetesCluster) -> None:
    with pytest.raises(Refused, match="2x2x4 has 16 chips, and 2 hosts have 4 each"):
        kubernetes.check(Kubernetes(**SLICE), recipe(), {2})
    kubernetes.check(Kubernetes(**SLICE), recipe(hosts=4), {4})


def test_an_api_server_that_does_not_answer_is_away(
    cluster: KubernetesCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing() as host:
        text = cluster.kubeconfig.read_text().replace(cluster.host, host)
        (tmp_path / "other").write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "other"))
        with pytest.raises(Away, match="does not answer"):
            kubernetes.check(Kubernetes(**SETTINGS), recipe(), {2})


def test_the_role_of_the_pages_has_every_permission() -> None:
    text = (ROOT / "deploy/kubernetes/train_role.yaml").read_text(encoding="utf-8")
    assert [broken(one) for one in yaml.safe_load_all(text)] == ["", ""]
    role = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Role")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    jobs = kubernetes.PERMISSIONS["batch", "jobs", ""]
    needed = {**kubernetes.PERMISSIONS, kubernetes.JOB_SETS: jobs}
    assert granted == {
        (group, f"{resource}/{part}".rstrip("/"), verb)
        for (group, resource, part), verbs in needed.items()
        for verb in verbs
    }
