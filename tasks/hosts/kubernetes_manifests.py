"""The manifests of a training on the pods of a Kubernetes cluster: pod N is host N.

The pods are those of an Indexed Job, whose headless Service gives them names. On a TPU slice they
are those of a JobSet, which makes its Service itself and puts all pods on one slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from configs.errors import Refused
from configs.settings.clusters import Kubernetes

Object = dict[str, Any]
#: The label of a training's Jobs; its value is `PodGroup.owner`.
OWNER_LABEL = "kiln-run"
#: The label of the pods of one attempt; its value is `PodGroup.name`.
ATTEMPT_LABEL = "kiln-attempt"
#: The variable that the Job controller sets to a pod's number; kubelets replace it in arguments.
HOST = "$(JOB_COMPLETION_INDEX)"
PORT = 29500
CONTAINER = "kiln"
REPLICATED_JOB = "slice"  # of a JobSet
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
CHIPS = "google.com/tpu"
#: Seconds that a pod has after the agent's grace, in which the agent ends its ranks by SIGKILL.
MORE_SECONDS = 15


class PodGroup:
    """The pods of one attempt of a training.

    Args:
        owner: names the training, whose attempts share it.
        attempt: names the attempt: names of an earlier one may still lead to its lost pods.
    """

    def __init__(self, settings: Kubernetes, owner: str, attempt: str) -> None:
        self.settings = settings
        self.owner = owner
        self.name = f"kiln-{owner[:12]}-{attempt}"

    @property
    def address(self) -> str:
        """host:port of host 0, as the other pods reach it."""
        middle = "" if self.settings.topology is None else f"-{REPLICATED_JOB}-0"
        return f"{self.name}{middle}-0.{self.name}:{PORT}"

    def job(self, arguments: list[str], hosts: int, grace_seconds: float) -> Object:
        """The Indexed Job or the JobSet.

        Args:
            arguments: the agent's command line, with HOST.
            grace_seconds: in which the agent ends after SIGTERM.

        Raises:
            Refused: `job_template` is not a YAML mapping.
        """
        pod = self._pod(arguments, round(grace_seconds) + MORE_SECONDS)
        spec = {
            "completionMode": "Indexed",
            "completions": hosts,
            "parallelism": hosts,
            "backoffLimit": 0,  # all hosts start again together: the flow does it
            "template": pod,
        }
        if (file := self.settings.job_template) is not None:
            spec = merged(spec, read_template(file))
        if self.settings.topology is not None:
            return self._job_set(spec)
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(),
            "spec": {**spec, "ttlSecondsAfterFinished": 86400},  # of a flow that was killed
        }

    def service(self, job: Object) -> Object:
        """The Service of an Indexed Job, which is deleted with it.

        Args:
            job: as the API server returned it.
        """
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": self.name}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                **self._metadata(),
                "ownerReferences": [{**owner, "uid": job["metadata"]["uid"]}],
            },
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,  # ranks meet before any of them is ready
                "selector": {ATTEMPT_LABEL: self.name},
            },
        }

    def _metadata(self) -> Object:
        queue = {} if self.settings.queue is None else {QUEUE_LABEL: self.settings.queue}
        return {
            "name": self.name,
            "namespace": self.settings.namespace,
            "labels": {OWNER_LABEL: self.owner, **queue},
        }

    def _job_set(self, spec: Object) -> Object:
        metadata = self._metadata()
        one_slice = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {**metadata, "annotations": one_slice},
            "spec": {
                "failurePolicy": {"maxRestarts": 0},
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "ttlSecondsAfterFinished": 86400,
                "replicatedJobs": [
                    {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": spec}}
                ],
            },
        }

    def _pod(self, arguments: list[str], grace_seconds: int) -> Object:
        settings = self.settings
        selector = dict(settings.node_selector)
        if settings.topology is not None:
            selector[TOPOLOGY_LABEL] = settings.topology
        container = {
            "name": CONTAINER,
            "image": settings.image,
            "args": arguments,  # not `command`: the entrypoint of Ascend's image sets CANN up
            "resources": {"requests": settings.requests, "limits": settings.limits},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "cache", "mountPath": "/cache"},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }
        if settings.secret is not None:
            container["env"] = [
                {
                    "name": name,
                    "valueFrom": {"secretKeyRef": {"name": settings.secret, "key": name}},
                }
                for name in settings.environment
            ]
        spec: Object = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace_seconds,
            "securityContext": {
                "runAsNonRoot": True,
                "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "nodeSelector": selector,
            "tolerations": list(settings.tolerations),
            "containers": [container],
            "volumes": [
                {"name": "cache", "emptyDir": {}},
                # NCCL's shared memory; the default of 64 MB is too little
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
        if settings.service_account is not None:
            spec["serviceAccountName"] = settings.service_account
        if settings.topology is None:  # else the JobSet sets it
            spec["subdomain"] = self.name
        labels = {OWNER_LABEL: self.owner, ATTEMPT_LABEL: self.name}
        return {"metadata": {"labels": labels}, "spec": spec}


def read_template(file: str) -> Object:
    """The YAML mapping of a `job_template`. Raises Refused."""
    setting = "kubernetes.job_template"
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(f"{file} cannot be read: {error}", setting=setting) from None
    if not isinstance(content, dict):
        raise Refused(f"{file} is no mapping: it is merged over the spec of a Job", setting=setting)
    return content


def merged(ours: Any, theirs: Any) -> Any:
    """Two parts of a manifest as one: mappings by their keys, and lists of named objects by name.

    Of other values `theirs` replaces `ours`.
    """
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        both = {name: merged(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
        return {**ours, **theirs, **both}
    if _has_names(ours) and _has_names(theirs):
        both = merged({one["name"]: one for one in ours}, {one["name"]: one for one in theirs})
        return list(both.values())
    return theirs


def _has_names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and "name" in one for one in value
    )
