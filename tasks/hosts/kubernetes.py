"""Engine `kubernetes`: the hosts of a training are pods of an Indexed Job, or of a JobSet.

Host N is the pod whose completion index is N; its log has the lines of its agent. An attempt has a
Job of its own, which is deleted with its pods: they get SIGTERM, and their grace for a checkpoint.
No pod starts again by itself: a lost one ends the attempt, and `attempts.py` makes the next.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from uuid import uuid4

from artifacts.lock import check_held
from configs.errors import Away, Refused
from configs.settings.clusters import Kubernetes
from configs.settings.recipe import Recipe
from tasks.beam.workers import Workers, out_of_reach
from tasks.child_process import JobStopped
from tasks.hosts.engine import Agents
from tasks.hosts.kubernetes_api import KubernetesApi, Missing, Object, statuses
from tasks.hosts.kubernetes_manifests import ATTEMPT_LABEL, CHIPS, HOST, OWNER_LABEL, PodGroup

log = logging.getLogger("kiln")
INDEX = "batch.kubernetes.io/job-completion-index"  # annotation of a pod
PYTHON = "python"  # of the image
#: Seconds between two looks at the pods: until all of them have started, and after that.
START_POLL_SECONDS = 2.0
POLL_SECONDS = 10.0
#: Seconds between two lines about pods that wait.
TELL_SECONDS = 60.0
#: Seconds for a kubelet to end a killed pod; one that does not has lost its node.
KILL_SECONDS = 30.0
KILL_POLL_SECONDS = 1.0
#: Seconds for the controllers to delete what has ended.
DELETE_SECONDS = 120.0
#: Reasons for which a container waits, and always will.
WRONG = ("InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
#: Reasons for which it waits, that may pass.
NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
#: Exit codes of a container that a signal from outside ended, SIGKILL or SIGTERM.
KILLED = (137, 143)


class KubernetesEngine:
    """Runs the agents of one training, an attempt after the other (see engine.py).

    Args:
        owner: names the training, in labels.
    """

    name = "kubernetes"

    def __init__(self, settings: Kubernetes, owner: str) -> None:
        self._settings = settings
        self._owner = owner
        self._api = KubernetesApi(settings.context)
        self._paths = Paths(settings)
        self._attempt: _Attempt | None = None

    def reserve(self) -> bool:
        """Delete what earlier attempts left; `start` requests the pods."""
        self._attempt = None
        for kind in self._paths.jobs:
            try:
                left = self._api.get(kind, labelSelector=f"{OWNER_LABEL}={self._owner}")
            except Missing:  # no JobSet is installed
                continue
            for job in left["items"]:
                name = job["metadata"]["name"]
                log.info("kubernetes: deleting %s of an earlier attempt", name)
                self._api.delete(f"{kind}/{name}", propagationPolicy="Foreground")
                self._kill_pods(name)
        return True

    def start(self, agents: Agents) -> None:
        """Make the Job, and wait until all pods have started.

        Raises:
            Refused: the cluster does not accept the Job, or can never start a container.
            Away: the API server does not answer, or an image cannot be pulled.
            LockLost: another builder took over while pods waited.
        """
        group = PodGroup(self._settings, self._owner, uuid4().hex[:5])
        self._attempt = _Attempt(self._api, self._paths, group, agents.hosts)
        self._attempt.make(replace(agents, python=PYTHON))
        while self._attempt.waits():
            check_held()
            time.sleep(START_POLL_SECONDS)

    def read(self, seconds: float) -> list[str] | None:
        """New lines of all pods."""
        assert self._attempt is not None
        return self._attempt.read(seconds)

    def stop(self) -> None:
        """Delete the Job: its pods get SIGTERM."""
        if self._attempt is not None:
            self._attempt.delete()

    def kill(self) -> None:
        """Delete the Job and its pods, and wait until they are gone."""
        if self._attempt is not None:
            self._attempt.delete()
            self._kill_pods(self._attempt.group.name)

    def lost(self) -> str | None:
        """Why pods are gone. Raises JobStopped if a person deleted the Job."""
        return None if self._attempt is None else self._attempt.lost()

    def end(self) -> None:
        """Delete what is left of the last attempt."""
        try:
            self.kill()
        finally:
            self._attempt = None
            self._api.close()

    def _kill_pods(self, name: str) -> None:
        """End the pods of an attempt. Raises Away if they remain."""
        pods = {"labelSelector": f"{ATTEMPT_LABEL}={name}"}
        seconds = 1
        begin = time.monotonic()
        while self._api.get(self._paths.pods, **pods)["items"]:
            waited = time.monotonic() - begin
            if waited > DELETE_SECONDS:
                raise Away(f"kubernetes: pods of {name} remain: delete them (kubectl delete pod)")
            if seconds and waited > KILL_SECONDS:
                log.warning("kubernetes: pods of %s do not end: their node is lost", name)
                seconds = 0  # deletes the objects, whatever their nodes do
            self._api.delete(self._paths.pods, **pods, gracePeriodSeconds=str(seconds))
            time.sleep(KILL_POLL_SECONDS)


class Paths:
    """Paths of the API for a namespace."""

    def __init__(self, settings: Kubernetes) -> None:
        namespace = f"namespaces/{settings.namespace}"
        self.pods = f"/api/v1/{namespace}/pods"
        self.services = f"/api/v1/{namespace}/services"
        jobs = f"/apis/batch/v1/{namespace}/jobs"
        job_sets = f"/apis/jobset.x-k8s.io/v1alpha2/{namespace}/jobsets"
        on_slice = settings.topology is not None
        self.job = job_sets if on_slice else jobs  # the kind that is made
        self.jobs = [jobs, job_sets] if on_slice else [jobs]  # the kinds that may be left


class _Attempt:
    """The Job of one attempt, and what was seen of its pods."""

    def __init__(self, api: KubernetesApi, paths: Paths, group: PodGroup, hosts: int) -> None:
        self.group = group
        self._api = api
        self._paths = paths
        self._hosts = range(hosts)
        self._lines: deque[tuple[int, str]] = deque()
        self._is_new = threading.Event()  # there are lines
        self._logs: dict[int, Future[None]] = {}  # host -> its log is read to the end
        self._pods: dict[int, Object] = {}  # host -> its pod, as it was last seen
        self._ended: set[int] = set()  # hosts whose exit is told
        self._disrupted: dict[int, str] = {}  # host -> why the cluster takes its pod away
        self._job_is_over = False
        self._is_deleted = False  # by this flow
        self._was_deleted = False  # by a person
        self._look_at = 0.0  # time.monotonic() of the next look
        self._tell_at = 0.0

    def make(self, agents: Agents) -> None:
        """Make the Job, and its Service. Raises Refused, Away."""
        job = self.group.job(agents.command(HOST, self.group.address), agents.hosts, agents.grace)
        made = self._create(self._paths.job, job)
        if self.group.settings.topology is None:
            self._create(self._paths.services, self.group.service(made))
        log.info("kubernetes: made %s, of %d pods", self.group.name, agents.hosts)

    def _create(self, path: str, manifest: Object) -> Object:
        try:
            return self._api.post(path, manifest)
        except Missing as error:
            raise Refused(str(error), setting="kubernetes.namespace") from None

    def waits(self) -> bool:
        """Whether pods have yet to start. Raises Refused or Away for those that cannot."""
        self._look_patiently()
        waiting = [] if self._job_is_over else self._waiting()
        if waiting and time.monotonic() > self._tell_at:
            self._tell_at = time.monotonic() + TELL_SECONDS
            words = ", ".join(f"host {host}: {self._why_waiting(host)}" for host in waiting)
            log.info("kubernetes: waiting for pods (%s)", words)
        for host in waiting:
            _check_start(self._pods.get(host, {}))
        return bool(waiting)

    def read(self, seconds: float) -> list[str] | None:
        """As `engine.Engine.read`."""
        self._is_new.wait(seconds)
        if time.monotonic() > self._look_at:
            self._look_patiently()
        is_over = self._is_over()  # before the last lines are taken
        ends = self._own_ends()
        self._is_new.clear()
        lines = [self._checked(*self._lines.popleft()) for _ in range(len(self._lines))]
        return lines + ends or (None if is_over else [])

    def delete(self) -> None:
        """Delete the Job; its pods get SIGTERM."""
        self._is_deleted = True
        path = f"{self._paths.job}/{self.group.name}"
        self._api.delete(path, propagationPolicy="Foreground")

    def lost(self) -> str | None:
        """Why pods are gone; None if each has ended by itself, or runs. Raises JobStopped."""
        self._look()
        if self._was_deleted:
            raise JobStopped(f"kubernetes: {self.group.name} was deleted; run again to resume")
        lost = dict(self._disrupted)
        for host, pod in self._pods.items():
            if host not in self._ended and (why := _killed(pod) or _unscheduled(pod)) is not None:
                lost.setdefault(host, why)
        return "; ".join(f"host {host}: {why}" for host, why in sorted(lost.items())) or None

    def _checked(self, host: int, line: str) -> str:
        """A line of a pod as one of an agent; others are of what failed before it or with it."""
        try:
            event = json.loads(line)["event"]
        except (ValueError, TypeError, KeyError):
            return json.dumps({"host": host, "event": "line", "text": line})
        if event == "exit":
            self._ended.add(host)
        return line

    def _own_ends(self) -> list[str]:
        """The last lines for agents that could not write them, unless they were killed."""
        told = {host for host, _ in self._lines}
        silent = [h for h, log in self._logs.items() if log.done() and h not in self._ended | told]
        if not silent:
            return []
        self._look_patiently()
        lines = list[str]()
        for host in silent:
            end = _own_end(host, self._pods[host])
            if end:
                self._ended.add(host)
                lines += end
        return lines

    def _look_patiently(self) -> None:
        """Look; an API server that does not answer is asked again, since the pods run on."""
        try:
            self._look()
        except Away as error:
            log.warning("%s", error)
        self._look_at = time.monotonic() + POLL_SECONDS

    def _look(self) -> None:
        """Read the state of the Job and of its pods, and follow new logs. Raises Away."""
        name = self.group.name
        try:
            job = self._api.get(f"{self._paths.job}/{name}")
        except Missing:
            job = {"metadata": {"deletionTimestamp": "in the past"}}
        is_deleted = "deletionTimestamp" in job["metadata"]
        self._was_deleted = is_deleted and not self._is_deleted
        self._job_is_over = is_deleted or _has_ended(job)
        query = {"labelSelector": f"{ATTEMPT_LABEL}={name}"}
        for pod in self._api.get(self._paths.pods, **query)["items"]:
            self._see(int(pod["metadata"]["annotations"][INDEX]), pod)

    def _see(self, host: int, pod: Object) -> None:
        """Note what takes a pod away; follow the log of a container that has started."""
        self._pods[host] = pod
        if (why := _disruption(pod)) is not None:
            self._disrupted.setdefault(host, why)
        if host not in self._logs and _has_started(pod):
            path = f"{self._paths.pods}/{pod['metadata']['name']}"
            self._logs[host] = self._api.follow(path, lambda line: self._take(host, line))

    def _take(self, host: int, line: str) -> None:
        self._lines.append((host, line))
        self._is_new.set()

    def _waiting(self) -> list[int]:
        """Hosts whose container has not started."""
        return [host for host in self._hosts if host not in self._logs]

    def _why_waiting(self, host: int) -> str:
        if host not in self._pods:
            return "no pod yet"  # of a Job that is queued, too
        return _unscheduled(self._pods[host]) or "its container starts"

    def _is_over(self) -> bool:
        are_read = all(log.done() for log in self._logs.values())
        return are_read and (self._job_is_over or not self._waiting())


def _has_ended(job: Object) -> bool:
    ends = ("Failed", "Complete", "Completed")  # the last is of a JobSet
    conditions = job.get("status", {}).get("conditions", ())
    return any(one["type"] in ends and one["status"] == "True" for one in conditions)


def _unscheduled(pod: Object) -> str | None:
    """Why a pod has no node, if it has none."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"its pod has no node: {condition.get('message') or condition.get('reason')}"
    return None


def _has_started(pod: Object) -> bool:
    return any(one["state"].keys() & {"running", "terminated"} for one in statuses(pod))


def _check_start(pod: Object) -> None:
    """Raise Refused or Away for a container that cannot start."""
    for one in statuses(pod):
        waiting = one["state"].get("waiting", {})
        reason = waiting.get("reason")
        if reason not in WRONG + NO_IMAGE:
            continue
        message = f"{pod['metadata']['name']}: {reason}: {waiting.get('message', '')}"
        if reason in WRONG:
            raise Refused(f"{message}: correct image and secret", setting="kubernetes")
        raise Away(message, setting="kubernetes.image", remedy="is the name right?")


def _disruption(pod: Object) -> str | None:
    """Why the cluster takes a pod away, or has lost its node."""
    status = pod.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    target = conditions.get("DisruptionTarget", {})
    if target.get("status") == "True":
        return f"its pod is taken away: {target.get('message') or target.get('reason')}"
    if status.get("reason"):  # such as Evicted, NodeLost, Terminated (a node that shuts down)
        return f"its pod is taken away: {status['reason']}"
    is_running = any("running" in one["state"] for one in statuses(pod))
    if is_running and conditions.get("Ready", {}).get("status") == "False":
        # Without a readiness probe a running container is ready until its node is lost.
        return f"node {pod['spec'].get('nodeName')} is NotReady"
    return None


def _end_of(pod: Object) -> Object:
    """How a pod's container ended: exitCode, reason, message; empty while it runs."""
    ends = (one["state"].get("terminated") for one in statuses(pod))
    return next((dict(end) for end in ends if end), {})


def _killed(pod: Object) -> str | None:
    """Why a pod whose agent said no end has ended, if from outside."""
    end = _end_of(pod)
    if end.get("exitCode") in KILLED and end.get("reason") != "OOMKilled":
        return f"its pod was killed (exit code {end['exitCode']})"
    return None


def _own_end(host: int, pod: Object) -> list[str]:
    """The last lines of an agent that could not write them, unless it was killed from outside."""
    end = _end_of(pod)
    if not end or _killed(pod) is not None:
        return []
    why = end.get("message") or end.get("reason", "")
    if end.get("reason") == "OOMKilled":
        why = "OOMKilled: raise memory in kubernetes.requests and kubernetes.limits"
    line = {"host": host, "event": "line", "text": f"{pod['metadata']['name']}: {why}"}
    return [json.dumps(line), json.dumps({"host": host, "event": "exit", "code": end["exitCode"]})]


def check(settings: Kubernetes, recipe: Recipe, counts: Collection[int]) -> None:
    """Raise Refused if the cluster or the recipe does not support training on pods.

    The API server checks the very Job, without making it. Raises Away if it does not answer.

    Args:
        counts: numbers of hosts of the stages that pods compute.
    """
    why = out_of_reach(recipe.store, Workers.REMOTE, recipe.shared_folders)
    if why is not None:
        raise Refused(f"pods cannot reach {recipe.store}, {why}", setting="store")
    for count in sorted(counts):
        _check_topology(settings, count)
    group = PodGroup(settings, "check", "0")
    job = group.job(["true"], max(counts), recipe.train.grace_seconds)
    api = KubernetesApi(settings.context)
    try:
        _check_permissions(api, settings)
        paths = Paths(settings)
        try:
            api.post(paths.job, job, dryRun="All")
        except Missing as error:  # the namespace, or the kind JobSet
            raise Refused(str(error), setting="kubernetes") from None
    finally:
        api.close()


def _check_topology(settings: Kubernetes, hosts: int) -> None:
    """Raise Refused unless the chips of the pods are those of the slice."""
    if settings.topology is None:
        return
    chips = 1
    for size in settings.topology.split("x"):
        chips *= int(size)
    each = settings.limits.get(CHIPS)
    if each is None or hosts * int(each) != chips:
        raise Refused(
            f"{settings.topology} has {chips} chips, and {hosts} hosts have {each or 0} each: set "
            f"each stage's hosts and kubernetes.limits ({CHIPS})",
            setting="kubernetes.topology",
        )


#: (group of the API, resource, subresource) -> verbs that the engine uses.
PERMISSIONS: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("batch", "jobs", ""): ("create", "get", "list", "delete"),
    ("", "services", ""): ("create",),
    ("", "pods", ""): ("get", "list", "deletecollection"),
    ("", "pods", "log"): ("get",),
}
JOB_SETS = ("jobset.x-k8s.io", "jobsets", "")


def _check_permissions(api: KubernetesApi, settings: Kubernetes) -> None:
    """Raise Refused for the first permission that is missing."""
    needed = dict(PERMISSIONS)
    if settings.topology is not None:
        needed[JOB_SETS] = needed["batch", "jobs", ""]
    for (group, resource, subresource), verbs in needed.items():
        for verb in verbs:
            attributes: dict[str, Any] = {"namespace": settings.namespace, "verb": verb}
            attributes |= {"group": group, "resource": resource, "subresource": subresource}
            review = api.post(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                {
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": attributes},
                },
            )
            if not review["status"]["allowed"]:
                what = f"{resource}/{subresource}".rstrip("/")
                raise Refused(
                    f"this account may not {verb} {what} in namespace {settings.namespace}: apply "
                    "deploy/kubernetes/train_role.yaml",
                    setting="kubernetes",
                )
