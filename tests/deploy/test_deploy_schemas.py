"""Files of deploy/ against the validators of requirements/deploy.txt (`make setup-deploy`)."""

import asyncio
import copy
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kiln_command import ROOT

DEPLOY = ROOT / "deploy"
VALIDATORS = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-deploy")
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = [DEPLOY / "server/compose.yaml", DEPLOY / "workers/compose.yaml"]
DOCKERFILES = sorted(DEPLOY.glob("*/Dockerfile"))
TEMPLATES = sorted(KUBERNETES.glob("*_job_template.json"))
SERVER = COMPOSE[0]
#: Images of ours, which a team builds.
OWN = re.compile(r"kiln-\w+(:latest)?$")
PINNED = re.compile(r"[\w./-]+:[\w.-]*\d[\w.-]*$")

pytestmark = pytest.mark.skipif(
    not VALIDATORS.is_dir(), reason=f"no {VALIDATORS.name}: make setup-deploy"
)


@pytest.fixture(autouse=True)
def validators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(VALIDATORS))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def load_compose(path: Path) -> Any:
    """A compose file with its variables replaced by their defaults, as Compose does it."""
    text = re.sub(r"(?<!\$)\$\{\w+(?::-([^}]*)|:\?)?\}", r"\1", path.read_text(encoding="utf-8"))
    return yaml.safe_load(text)


def check_compose(compose: dict[str, Any]) -> None:
    importlib.import_module("compose_spec").PyCompose.from_json(json.dumps(compose))


def check_manifest(manifest: dict[str, Any]) -> None:
    kubernetes = importlib.import_module("kubernetes_validate")
    kubernetes.validate(manifest, "1.33", strict=True)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_dockerfile_passes_the_linter(path: Path) -> None:
    hadolint = VALIDATORS / "bin/hadolint"
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.parent.name)
def test_compose_file_is_of_the_specification(path: Path) -> None:
    compose = load_compose(path)
    check_compose(compose)
    for name, service in compose["services"].items():
        assert OWN.match(service["image"]) or PINNED.match(service["image"]), name
        for needed in service.get("depends_on", {}):
            assert needed in compose["services"], f"{name} needs {needed}"
    broken = copy.deepcopy(compose)
    next(iter(broken["services"].values()))["portz"] = []
    with pytest.raises(Exception, match="portz"):
        check_compose(broken)


def test_every_variable_of_the_server_is_in_the_template_of_its_secrets() -> None:
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", SERVER.read_text(encoding="utf-8")))
    lines = (DEPLOY / "server/env.example").read_text(encoding="utf-8").splitlines()
    given = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    assert used == given
    secret = {line.partition("=")[0] for line in lines if line.endswith("=")}
    assert {"POSTGRES_PASSWORD", "REDIS_PASSWORD", "PREFECT_AUTH", "S3_SECRET"} <= secret


def test_services_that_stay_up_have_a_health_check_and_a_version_of_prefect() -> None:
    services = load(SERVER)["services"]
    once, silent = {"migrate", "set-up"}, {"background", "worker"}
    for name in services.keys() - once - silent:
        found = services[name]
        if "extends" in found:
            found = load(DEPLOY / "workers/compose.yaml")["services"][found["extends"]["service"]]
        assert found["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name
    (version,) = re.findall(r"^prefect==(.*)$", (ROOT / "requirements/base.txt").read_text(), re.M)
    assert load(DEPLOY / "prefect.yaml")["prefect-version"] == version
    assert services["server"]["image"].startswith(f"prefecthq/prefect:{version}-")
    for path in KUBERNETES.glob("*.values.yaml"):
        assert f"prefectTag: {version}-" in path.read_text(encoding="utf-8"), path.name


def dask_schema() -> dict[str, Any]:
    """The schema of the operator's DaskCluster, which allows no unknown field."""
    (chart,) = VALIDATORS.glob("dask_kubernetes/operator/deployment/helm/*/crds/daskcluster.yaml")
    # PyYAML's own parser takes seconds for it.
    definition = yaml.load(chart.read_text(encoding="utf-8"), yaml.CSafeLoader)
    (version,) = definition["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"] |= {key: {} for key in ("apiVersion", "kind", "metadata")}
    todo = [schema]
    while todo:
        part = todo.pop()
        if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
            part["additionalProperties"] = False
        todo += part.get("properties", {}).values()
        todo += [part["items"]] if "items" in part else []
    return dict(schema)


def test_dask_cluster_is_of_the_operators_definition() -> None:
    manifest = load(KUBERNETES / "dask_cluster.yaml")
    schema = dask_schema()
    jsonschema.validate(manifest, schema)
    for part in ("scheduler", "worker"):
        pod = manifest["spec"][part]["spec"]
        check_manifest({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": part}, "spec": pod})
        (found,) = pod["containers"]
        assert found["command"][:2] == ["dask", part] and OWN.match(found["image"])
        assert pod["securityContext"]["runAsNonRoot"] is True
    name, place = (manifest["metadata"][key] for key in ("name", "namespace"))
    assert f"tcp://{name}-scheduler.{place}:8786" in (KUBERNETES / "dask_cluster.yaml").read_text()
    broken = copy.deepcopy(manifest)
    broken["spec"]["worker"]["spec"]["containers"][0]["volumeMountz"] = []
    with pytest.raises(jsonschema.ValidationError, match="volumeMountz"):
        jsonschema.validate(broken, schema)


def test_set_up_of_a_cluster_has_credentials_and_makes_its_pools() -> None:
    job = load(KUBERNETES / "set_up.yaml")
    check_manifest({**job, "metadata": {"name": "set-up"}})
    runs = container(job)
    assert runs["command"] == ["bash", "deploy/server/set_up.sh", "s3://BUCKET", "kubernetes"]
    assert runs["envFrom"] == [{"secretRef": {"name": "kiln-credentials"}}]
    server = load(KUBERNETES / "worker.values.yaml")["worker"]["selfHostedServerApiConfig"]
    assert {"name": "PREFECT_API_URL", "value": server["apiUrl"]} in runs["env"]


def container(job: dict[str, Any]) -> Any:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_job_template_makes_a_job_that_resumes_after_an_eviction(path: Path) -> None:
    """As prefect-kubernetes does it, from the variables of prefect.yaml and a run."""
    worker = importlib.import_module("prefect_kubernetes.worker")
    pool = path.stem.partition("_")[0]
    entry = next(
        one for one in load(DEPLOY / "prefect.yaml")["deployments"]
        if one["work_pool"]["name"] == pool
    )  # fmt: skip
    template = json.loads(path.read_text(encoding="utf-8"))
    values = {**entry["work_pool"]["job_variables"], "name": "a-run"}
    make = worker.KubernetesWorkerJobConfiguration.from_template_and_values
    client = object()  # nothing of the template is looked up on a server
    made = asyncio.run(make(base_job_template=template, values=values, client=client))
    made.command = "prefect flow-run execute"
    made._populate_command_if_not_present()
    manifest = made.job_manifest
    assert manifest["spec"]["backoffLimit"] == 0  # Prefect then schedules an evicted run again
    (runs,) = manifest["spec"]["template"]["spec"]["containers"]
    assert ("nvidia.com/gpu" in runs["resources"]["limits"]) == (pool == "gpu")
    assert manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 60
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == template["variables"]["properties"].keys()
    runs.pop("env", None), runs.pop("args", None)
    check_manifest({**manifest, "metadata": {"name": "a-run"}})
