"""A Kubernetes API server on loopback, whose pods are processes of this machine.

It has what the engine asks for: Jobs, JobSets, Services, pods and their logs, access reviews. Each
manifest is checked against the schemas of Kubernetes. Arguments of a pod are expanded as a kubelet
does it, and a pod's name in the cluster's DNS becomes a port of loopback.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

from kiln_command import ROOT, processes_below
from loopback_server import LoopbackServer, free_port

Object = dict[str, Any]
VALIDATORS = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-deploy")
INDEX = "batch.kubernetes.io/job-completion-index"
VERSION = "1.33"  # of the schemas
#: Seconds between the looks of the controllers.
TICK = 0.05
#: Seconds for which the object of a deleted pod outlives its container.
FORGET_SECONDS = 0.3


@dataclass
class Pod:
    """A pod with one container, which is a process once it has started."""

    manifest: Object
    process: subprocess.Popen[bytes] | None = None
    log: list[tuple[str, str]] = field(default_factory=list)  # (time, line)
    conditions: list[Object] = field(default_factory=list)
    waiting: Object = field(default_factory=lambda: {"reason": "ContainerCreating"})
    ended: Object | None = None
    reason: str = ""  # of the ended pod, such as OOMKilled for the container
    kill_at: float | None = None  # time.monotonic() at which a deleted pod is killed
    is_lost: bool = False  # its node does not answer: only a deletion without grace removes it
    is_read: bool = False  # the process's output is in the log
    forget_at: float = 0.0  # time.monotonic() at which a deleted pod that ended is gone

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def host(self) -> int:
        return int(self.manifest["metadata"]["annotations"][INDEX])

    def as_object(self) -> Object:
        state: Object = {"waiting": self.waiting}
        phase = "Pending"
        if self.ended is not None:
            state, phase = {"terminated": self.ended}, "Failed"
            if self.ended["exitCode"] == 0:
                phase = "Succeeded"
        elif self.process is not None:
            state, phase = {"running": {}}, "Running"
        status = {"phase": phase, "conditions": self.conditions}
        if self.process is not None or self.waiting["reason"] != "Unschedulable":
            status["containerStatuses"] = [{"name": "kiln", "state": state}]
        return {**self.manifest, "status": status}


class KubernetesCluster(LoopbackServer):
    """The API server, the controllers and the kubelets.

    Attributes:
        jobs: name -> Job or JobSet.
        made: every manifest that was accepted, in order.
        secrets: name -> key -> value.
        denied: verbs and resources that the caller may not use, such as `create jobs`.
        starts: whether pods get a node and start.
        cut_logs: number of connections to logs that break after some lines.
        outage: whether every request is answered 503, and open logs break.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(_Handler)
        self.folder = folder
        self.lock = threading.RLock()
        self.jobs: dict[str, Object] = {}
        self.made: list[Object] = []
        self.pods: dict[str, Pod] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.denied: set[str] = set()
        self.namespaces = {"kiln"}
        self.starts = True
        self.cut_logs = 0
        self.outage = False
        self._ports: dict[str, int] = {}
        self._is_closed = threading.Event()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(self._kubeconfig()))

    def __enter__(self) -> KubernetesCluster:
        super().__enter__()
        threading.Thread(target=self._control, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        for pod in list(self.pods.values()):
            self.kill(pod)
        super().__exit__()

    def pod(self, host: int) -> Pod:
        """The newest pod of a host."""
        return [pod for pod in self.pods.values() if pod.host == host][-1]

    def kill(self, pod: Pod, number: int = signal.SIGKILL) -> None:
        """Signal all processes of a pod, as the kernel does that has no more memory."""
        if pod.process is not None and pod.process.poll() is None:
            for pid in [pod.process.pid, *processes_below(pod.process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def evict(self, pod: Pod, message: str = "Eviction API: evicting") -> None:
        """Take a pod away as the drain of its node does."""
        with self.lock:
            target = {"type": "DisruptionTarget", "status": "True", "message": message}
            pod.conditions.append({**target, "reason": "EvictionByEvictionAPI"})
            self.delete_pod(pod)

    def lose_node(self, pod: Pod) -> None:
        """Stop a pod's processes, as its node does without power; the cluster notices it."""
        self.kill(pod, signal.SIGSTOP)
        with self.lock:
            pod.is_lost = True
            pod.conditions[0]["status"] = "False"

    def delete_pod(self, pod: Pod, grace: float | None = None) -> None:
        """Send SIGTERM to a pod's first process, and SIGKILL after the grace."""
        with self.lock:
            if grace is None:
                grace = pod.manifest["spec"]["terminationGracePeriodSeconds"]
            if pod.kill_at is None and pod.process is not None:
                pod.process.terminate()
            kill_at = time.monotonic() + grace
            pod.kill_at = kill_at if pod.kill_at is None else min(pod.kill_at, kill_at)
            pod.manifest["metadata"]["deletionTimestamp"] = now()
            if grace == 0:
                self.kill(pod)
                del self.pods[pod.name]

    def create(self, manifest: Object, is_trial: bool) -> Object:
        """A Job, JobSet or Service, after a check of its schema. Raises _Answer."""
        problem = broken(manifest)
        if problem:
            raise _Answer(422, problem)
        made = copy.deepcopy(manifest)
        made["metadata"]["uid"] = str(uuid4())
        if not is_trial:
            with self.lock:
                self.made.append(manifest)
                if made["kind"] != "Service":
                    self.jobs[made["metadata"]["name"]] = made
                    for index in range(job_spec(made)["completions"]):
                        self._add_pod(made, index)
        return made

    def _add_pod(self, job: Object, index: int) -> None:
        spec = job_spec(job)
        name = job["metadata"]["name"]
        dns = f"{name}-{index}.{name}"
        if job["kind"] == "JobSet":
            (part,) = job["spec"]["replicatedJobs"]
            dns = f"{name}-{part['name']}-0-{index}.{name}"
        manifest = copy.deepcopy(spec["template"])
        labels = manifest["metadata"]["labels"]
        own = {"name": f"{name}-{index}-{uuid4().hex[:5]}", "labels": labels}
        manifest["metadata"] = {**own, "annotations": {INDEX: str(index)}, "job": name, "dns": dns}
        manifest["spec"]["nodeName"] = f"node-{index}"
        self.pods[own["name"]] = Pod(manifest)

    def _control(self) -> None:
        """Start, end and delete pods; fail Jobs with a failed pod."""
        while not self._is_closed.wait(TICK):
            with self.lock:
                for pod in list(self.pods.values()):
                    self._look_at(pod)
                for job in list(self.jobs.values()):
                    self._look_at_job(job)

    def _look_at(self, pod: Pod) -> None:
        if pod.is_lost:
            return
        if pod.kill_at is not None and time.monotonic() > pod.kill_at:
            self.kill(pod)
        if pod.process is None:
            if pod.kill_at is not None:
                del self.pods[pod.name]
            elif self.starts:
                self._start(pod)
        elif pod.ended is None and pod.process.poll() is not None and pod.is_read:
            code = pod.process.returncode
            code = 128 - code if code < 0 else code
            pod.ended = {
                "exitCode": code,
                "reason": pod.reason or ("Error" if code else "Completed"),
            }
            pod.forget_at = time.monotonic() + FORGET_SECONDS
        elif pod.ended and pod.kill_at is not None and time.monotonic() > pod.forget_at:
            del self.pods[pod.name]

    def _look_at_job(self, job: Object) -> None:
        name = job["metadata"]["name"]
        pods = [pod for pod in self.pods.values() if pod.manifest["metadata"]["job"] == name]
        if "deletionTimestamp" in job["metadata"]:
            for pod in pods:
                if pod.kill_at is None:
                    self.delete_pod(pod)
            if not pods:  # a deletion in the foreground
                del self.jobs[name]
            return
        failed = [pod for pod in pods if pod.ended and pod.ended["exitCode"]]
        failed += [pod for pod in pods if pod.kill_at is not None]
        if failed and "status" not in job:  # backoffLimit: 0
            job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
            for pod in pods:
                if pod.ended is None and pod.kill_at is None:
                    self.delete_pod(pod)
        if pods and all(pod.ended and not pod.ended["exitCode"] for pod in pods):
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

    def _start(self, pod: Pod) -> None:
        (container,) = pod.manifest["spec"]["containers"]
        env = {"JOB_COMPLETION_INDEX": str(pod.host)}
        for one in container.get("env", ()):
            ref = one["valueFrom"]["secretKeyRef"]
            try:
                env[one["name"]] = self.secrets[ref["name"]][ref["key"]]
            except KeyError:
                message = f"couldn't find key {ref['key']} in Secret kiln/{ref['name']}"
                pod.waiting = {"reason": "CreateContainerConfigError", "message": message}
                return
        expanded = [re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], word) for word in container["args"]]
        words = [self._resolved(word) for word in expanded]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        pod.process = subprocess.Popen(
            words,
            env={**os.environ, **env, "PATH": path},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        pod.conditions.append({"type": "Ready", "status": "True"})
        threading.Thread(target=self._read, args=(pod,), daemon=True).start()

    def _resolved(self, word: str) -> str:
        """HOST:PORT of a pod as one of loopback."""
        match = re.fullmatch(r"([\w-]+\.[\w-]+):\d+", word)
        if not match:
            return word
        names = {pod.manifest["metadata"]["dns"] for pod in self.pods.values()}
        assert match[1] in names, f"{match[1]} is no name of a pod: {names}"
        return f"127.0.0.1:{self._ports.setdefault(match[1], free_port())}"

    def _read(self, pod: Pod) -> None:
        assert pod.process is not None
        assert pod.process.stdout is not None
        for line in pod.process.stdout:
            pod.log.append((now(), line.decode(errors="replace").rstrip("\n")))
        pod.is_read = True

    def log_lines(self, pod: Pod, since: str) -> Iterator[str]:
        """The log from a second on, until the container has ended."""
        position = 0
        while True:
            is_over = pod.ended is not None
            while position < len(pod.log):
                stamp, line = pod.log[position]
                position += 1
                if f"{stamp[:19]}Z" >= since:
                    yield f"{stamp} {line}\n"
            if is_over:
                return
            time.sleep(TICK)

    def _kubeconfig(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "secret-token"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }


def now() -> str:
    """The time as container runtimes write it: without trailing zeros."""
    ns = time.time_ns()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ns // 10**9))
    decimals = f"{ns % 10**9:09}".rstrip("0")
    return f"{whole}.{decimals}Z" if decimals else f"{whole}Z"


def job_spec(job: Object) -> Object:
    """The spec of a Job, or of the one Job of a JobSet."""
    if job["kind"] == "JobSet":
        (part,) = job["spec"]["replicatedJobs"]
        return dict(part["template"]["spec"])
    return dict(job["spec"])


def broken(manifest: Object) -> str:
    """What the schemas of Kubernetes say against a manifest."""
    if manifest["kind"] == "JobSet":  # its own schema is not there: that of its Job
        head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "slice"}}
        manifest = {**head, "spec": job_spec(manifest)}
    if str(VALIDATORS) not in sys.path:
        sys.path.insert(0, str(VALIDATORS))
    kubernetes = importlib.import_module("kubernetes_validate")
    try:
        kubernetes.validate(manifest, VERSION, strict=True)
    except kubernetes.ValidationError as error:
        return str(error.message)
    return ""


class _Answer(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_KIND = r"(?P<kind>jobs|jobsets|services|pods)"
_PATH = re.compile(
    rf"/(?:api/v1|apis/[\w./-]+)/namespaces/(?P<namespace>[\w-]+)/{_KIND}"
    r"(?:/(?P<name>[\w-]+))?(?P<log>/log)?$"
)


class _Handler(BaseHTTPRequestHandler):
    server: KubernetesCluster
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, url.path))
        try:
            if self.server.outage:
                raise _Answer(503, "the server is currently unable to handle the request")
            if self.headers.get("Authorization") != "Bearer secret-token":
                raise _Answer(401, "Unauthorized")
            if url.path.endswith("/selfsubjectaccessreviews"):
                self._send(201, self._review(json.loads(body)))
                return
            match = _PATH.match(url.path)
            if match is None:
                raise _Answer(404, "the server could not find the requested resource")
            if match["log"]:
                self._send_log(match["name"], query)
                return
            self._send(200, self._objects(match, query, json.loads(body) if body else {}))
        except _Answer as answer:
            self._send(answer.status, {"kind": "Status", "message": str(answer)})

    do_POST = do_GET  # noqa: N815  # names of the base class
    do_DELETE = do_GET  # noqa: N815

    def _review(self, review: Object) -> Object:
        asked = review["spec"]["resourceAttributes"]
        what = f"{asked['verb']} {asked['resource']}"
        return {**review, "status": {"allowed": what not in self.server.denied}}

    def _objects(self, match: re.Match[str], query: Object, body: Object) -> Object:
        cluster = self.server
        kind, name = match["kind"], match["name"]
        with cluster.lock:
            if self.command == "POST":
                if match["namespace"] not in cluster.namespaces:
                    raise _Answer(404, f'namespaces "{match["namespace"]}" not found')
                return cluster.create(body, query.get("dryRun") == "All")
            if kind == "pods":
                return self._pods(name, query)
            if name is None:
                jobs = [job for job in cluster.jobs.values() if selects(query, job)]
                return {"items": [job for job in jobs if f"{job['kind'].lower()}s" == kind]}
            if name not in cluster.jobs:
                raise _Answer(404, f'{kind} "{name}" not found')
            if self.command == "DELETE":
                assert query["propagationPolicy"] == "Foreground"
                cluster.jobs[name]["metadata"]["deletionTimestamp"] = now()
            return cluster.jobs[name]

    def _pods(self, name: str | None, query: Object) -> Object:
        cluster = self.server
        if name is not None:
            if name not in cluster.pods:
                raise _Answer(404, f'pods "{name}" not found')
            return cluster.pods[name].as_object()
        pods = [pod for pod in cluster.pods.values() if selects(query, pod.manifest)]
        if self.command == "DELETE":
            for pod in pods:
                cluster.delete_pod(pod, float(query["gracePeriodSeconds"]))
        return {"items": [pod.as_object() for pod in pods]}

    def _send(self, status: int, content: Object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_log(self, name: str, query: Object) -> None:
        pod = self.server.pods.get(name)
        if pod is None:
            raise _Answer(404, f'pods "{name}" not found')
        if pod.process is None:
            raise _Answer(400, f"container kiln in pod {name} is waiting to start")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, line in enumerate(self.server.log_lines(pod, query.get("sinceTime", ""))):
            data = line.encode()
            is_cut = number == 2 and self.server.cut_logs > 0
            if is_cut or self.server.outage:
                self.server.cut_logs -= is_cut
                half = data[: len(data) // 2]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(half), half))
                self.close_connection = True
                return
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


def selects(query: Object, manifest: Object) -> bool:
    """Whether a label selector of one label selects an object."""
    label, _, value = query["labelSelector"].partition("=")
    labels = manifest["metadata"]["labels"]
    return label in labels and value in ("", labels[label])
