"""Settings of clusters, whose machines train together: how to reserve them and when one is lost."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from configs.settings.base_section import NullDrops, ReadFile, Section, setting

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
#: ssh would read a name that begins with "-" as an option, which can run commands here.
SshHost = Annotated[str, Field(pattern=r"^[^-\s]\S*$")]


class Cluster(Section):
    """What all clusters have."""

    restarts: int = setting(20, ge=0)
    """Maximum restarts in a row without a new checkpoint, after a host is lost or taken away."""
    silence_seconds: PositiveFloat = setting(60.0, ge=10.0)
    """Seconds without a sign of life after which a host is lost; it gives one each second."""
    environment: tuple[VariableName, ...] = ()
    """Names of further environment variables that the hosts get, such as AWS_PROFILE. Others are
    not sent, because they may be secret."""


class Slurm(Cluster):
    """A Slurm cluster; each attempt is a job of `sbatch`, one task a host."""

    partition: str | None = None
    """Partition; null: the cluster's default."""
    account: str | None = None
    """Account to charge; null: the user's default."""
    qos: str | None = None
    """Quality of service; null: the default."""
    constraint: str | None = None
    """Features that hosts must have, such as h100."""
    exclude: str | None = None
    """Hosts to avoid, such as node[07-09]."""
    gpus_per_node: int | str | None = None
    """GPUs of a host, such as 8 or h100:8; null: none is requested."""
    gres: str | None = None
    """Other devices of a host, such as gaudi:8 or npu:8."""
    cpus_per_task: PositiveInt | None = None
    """CPU cores of a host; null: the default."""
    memory: int | str | None = None
    """Memory of a host, such as 500G, or 0 for all; null: the default."""
    time_limit: str | None = setting(
        None, pattern=r"^(\d+-)?\d+(:\d+){0,2}$", examples=["4:00:00", "2-00:00:00"]
    )
    """Time limit of a job, such as 4:00:00; null: the partition's. At the limit training stops with
    a checkpoint, and a new job goes on."""
    stop_before: PositiveInt = setting(120, ge=10)
    """Seconds before the time limit at which training stops."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as --exclusive."""
    setup: tuple[str, ...] = ()
    """Commands of a login shell on each host before training, such as `module load cuda`."""
    folder: str | None = None
    """Folder for the jobs' output on a disk that all hosts share; null: that of the store, or
    ~/.cache/kilnworks/slurm for a store that is a URL."""

    def faults(self) -> Iterator[str]:
        for option in self.options:
            if not option.startswith("-"):
                yield f"options: {option} is no option of sbatch, such as --exclusive"


class Ssh(Cluster):
    """Machines without a scheduler, which this one reaches by ssh without a password."""

    hosts: tuple[SshHost, ...]
    """Names for ssh, the first with rank 0; train.hosts is their number. Other stages with `hosts`
    use the first of them."""
    address: str | None = None
    """Address of the first host in the network of the hosts; null: its name."""
    port: PositiveInt = setting(29500, le=65535)
    """Port of the first host at which the ranks meet."""

    @property
    def rendezvous(self) -> str:
        """HOST:PORT at which rank 0 listens."""
        return f"{self.address or self.hosts[0].rpartition('@')[2]}:{self.port}"

    def faults(self) -> Iterator[str]:
        if len(self.hosts) < 2:
            yield "hosts: name two machines or more"
        if len(set(self.hosts)) < len(self.hosts):
            yield "hosts: a machine is named twice"


class Kubernetes(Cluster):
    """A Kubernetes cluster; each attempt is an Indexed Job, or a JobSet on a TPU slice, and pod N
    of it is host N. `environment` lists the keys of `secret` that the pods get."""

    image: str
    """Image of the pods, with this code, such as that of deploy/cuda/Dockerfile in a registry."""
    namespace: str = "kiln"
    """Namespace of the pods, which exists."""
    context: str | None = None
    """Context of the kubeconfig; null: its current one, or the cluster whose pod runs the flow."""
    service_account: str | None = None
    """Service account of the pods; null: the namespace's default."""
    secret: str | None = None
    """Secret whose keys `environment` lists, such as AWS_SECRET_ACCESS_KEY; null: none."""
    requests: Annotated[dict[str, int | str], NullDrops] = setting({})
    """Resources that the node of a pod must have, such as {cpu: 32, memory: 256Gi}."""
    limits: Annotated[dict[str, int | str], NullDrops] = setting({})
    """Maximum resources of a pod, and its chips, such as {nvidia.com/gpu: 8}."""
    node_selector: Annotated[dict[str, str], NullDrops] = setting({})
    """Labels of the nodes."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Taints that the pods tolerate, such as [{key: nvidia.com/gpu, operator: Exists}]."""
    topology: str | None = setting(None, pattern=r"^\d+(x\d+){1,2}$", examples=["2x2x4"])
    """Topology of a TPU slice of GKE, such as 2x2x4, on which a JobSet puts all pods; null: nodes
    of any kind."""
    queue: str | None = None
    """Queue of Kueue, which starts all pods at once; null: none."""
    job_template: ReadFile | None = None
    """YAML file with parts of a Job's spec, such as further volumes. It is merged over ours:
    mappings by key, named entries of lists by name."""

    def faults(self) -> Iterator[str]:
        if self.environment and self.secret is None:
            yield "environment lists keys of a Secret: set secret to its name"


class Ray(Cluster):
    """A running Ray cluster, KubeRay's included, which this machine is a node of.

    All nodes need Kilnworks with the runtime's environment: nothing is sent to them.
    """

    address: str | None = setting(None, pattern=r"^[^/]+:\d+$", examples=["10.0.0.1:6379"])
    """HOST:PORT of the cluster's head, such as 10.0.0.1:6379; null: RAY_ADDRESS, or the cluster
    of this machine."""
    resources: dict[str, PositiveFloat] = setting({})
    """Resources to reserve on each host, such as {GPU: 8}, {TPU: 4}, {HPU: 8} or {NPU: 8}, by
    Ray's names."""
    cpus: PositiveFloat = 1.0
    """CPU cores to reserve on each host."""
    autoscaling: bool = False
    """Let the cluster start nodes: fewer than train.hosts are then no error."""

    @property
    def bundle(self) -> dict[str, float]:
        """All resources of a host, by Ray's names."""
        return {"CPU": self.cpus, **self.resources}

    def faults(self) -> Iterator[str]:
        if "CPU" in self.resources:
            yield "resources: set cpus, not CPU"


#: Default software version by kind of accelerator, from Cloud TPU's page "TPU software versions".
#: A version is valid for its own kinds only.
SOFTWARE = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


class Tpu(Cluster):
    """A Cloud TPU slice, which gcloud creates for a stage and deletes after it."""

    name: str = setting(pattern=r"^[a-z][-a-z0-9]*$", max_length=60)
    """Name of the slice."""
    zone: str
    """Google Cloud zone, such as us-east5-a."""
    project: str | None = None
    """Google Cloud project; null: gcloud's configured one."""
    accelerator_type: str
    """Kind and size of the slice, such as v5p-8."""
    version: str | None = None
    """Software version of the workers; null: the default of the kind."""
    capacity: Literal["on_demand", "reserved", "spot"] = "on_demand"
    """Provisioning model; a spot slice can be preempted."""
    queued: bool = False
    """Request the slice as a queued resource and wait."""
    network: str | None = None
    """VPC network; null: the project's default."""
    subnetwork: str | None = None
    """Subnetwork; null: the network's default."""
    service_account: str | None = None
    """Service account of the workers, with read and write access to the store; null: the project's
    default."""
    libtpu_args: str = ""
    """LIBTPU_INIT_ARGS of the training processes."""
    keep: bool = False
    """Keep the slice after a stage, for the next one; nobody else deletes it."""

    @property
    def kind(self) -> str:
        """The prefix of the accelerator type, such as v5p."""
        return self.accelerator_type.partition("-")[0]

    @property
    def software(self) -> str:
        """The software version for gcloud. Raises KeyError if an unknown kind has no version."""
        return self.version or SOFTWARE[self.kind]

    def faults(self) -> Iterator[str]:
        if self.kind == "v5e":
            name = self.accelerator_type.replace("v5e", "v5litepod")
            yield f"accelerator_type {self.accelerator_type}: gcloud calls it {name}"
        known = SOFTWARE.get(self.kind)
        if known is None and self.version is None:
            yield (
                f"accelerator_type {self.accelerator_type}: set version too "
                f"(only {', '.join(SOFTWARE)} have a default)"
            )
        if known is not None and self.version in {*SOFTWARE.values()} - {known}:
            yield (
                f"version {self.version} does not support {self.accelerator_type}: "
                f"leave it at null ({known})"
            )


AnyCluster = Slurm | Ssh | Kubernetes | Ray | Tpu
