"""Deployments, pools and automations of a Prefect server: those that pages and flows name."""

import json
import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from uuid import UUID

import pytest
import yaml
from deploy_files import DEPLOY, run, write_program
from kiln_command import ROOT
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import Settings

from flows.finetune import AWAITING, NOT_PUBLISHED, PUBLISHED


def test_servers_ask_no_analytics_host(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_SERVER_UI_V2_ENABLED": "false"}
    compose = yaml.safe_load((DEPLOY / "server/compose.yaml").read_text(encoding="utf-8"))
    assert off.items() <= compose["services"]["server"]["environment"].items()
    text = (DEPLOY / "kubernetes/server.values.yaml").read_text(encoding="utf-8")
    named = yaml.safe_load(text)["global"]["prefect"]["env"]
    assert off.items() <= {one["name"]: one["value"] for one in named}.items()
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    server = Settings().server
    assert not server.analytics_enabled and not server.ui.v2_enabled


def test_a_retraining_has_a_schedule_and_no_slot() -> None:
    """Prefect ends a run whose slot it cannot renew, as after minutes without the server."""
    listed = yaml.safe_load((DEPLOY / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    scheduled = {e["entrypoint"].partition(":")[2] for e in listed if "schedules" in e}
    assert scheduled == {"retrain"}
    assert not [e["name"] for e in listed if "concurrency_limit" in e]


def test_every_deployment_has_a_pool_that_the_pages_create() -> None:
    listed = yaml.safe_load((DEPLOY / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    used = {entry["work_pool"]["name"] for entry in listed}
    for file in ("docs/orchestration.md", "deploy/server/set_up.sh", "deploy/prefect.yaml"):
        (pools,) = re.findall(r"for pool in ([\w ]+);", (ROOT / file).read_text(encoding="utf-8"))
        assert set(pools.split()) == used, file
    anyone = {e["name"]: e["work_pool"]["name"] for e in listed if e["name"] in used}
    assert anyone == {pool: pool for pool in used}


def test_a_run_on_kubernetes_has_a_store_beyond_its_pod_and_a_process_per_gpu() -> None:
    page = (DEPLOY / "kubernetes/README.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if "--job-variable gpus=" in line]
    for line in lines:
        overrides = json.loads(re.findall(r"overrides='(.*?)'", line)[0])
        assert "://" in overrides["store"]
        assert [str(overrides["train.processes"])] == re.findall(r"gpus=(\d+)", line)
    assert lines and "AWS_SECRET_ACCESS_KEY" in page


@pytest.mark.parametrize("enabled", [True, False, None])
def test_an_automation_without_notification_needs_no_block_and_stays_as_it_is(
    enabled: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    get_client = MagicMock()
    monkeypatch.setattr("prefect.client.orchestration.get_client", get_client)
    client = get_client.return_value.__enter__.return_value
    same = [] if enabled is None else [SimpleNamespace(id="known", enabled=enabled)]
    client.read_automations_by_name.return_value = same
    main = runpy.run_path(str(DEPLOY / "automations/apply.py"))["main"]
    assert main([str(DEPLOY / "automations/run-without-heartbeat.yaml")]) == 0
    if enabled is None:
        (made,) = client.create_automation.call_args.args
    else:
        (name, made) = client.update_automation.call_args.args
        assert (name, made.enabled) == ("known", enabled)
    assert made.name == "kiln: run without heartbeat"
    assert main([str(DEPLOY / "automations/run-late.yaml")]) == 2
    assert main(["a-block-without-name"]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.fixture
def set_up(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs set_up.sh; the commands of prefect and python that it gives. No pool exists yet."""
    write_program(
        tmp_path / "prefect", '#!/bin/sh\ncase "$*" in *inspect*) exit 1; esac\necho prefect "$@"\n'
    )
    write_program(tmp_path / "python", '#!/bin/sh\necho python "$@"\n')
    return partial(run, DEPLOY / "server/set_up.sh", programs=tmp_path)


def test_set_up_makes_bucket_pools_deployments_and_the_end_of_lost_runs(
    set_up: Callable[..., list[str]],
) -> None:
    pools = ("cpu", "gpu", "tpu", "ascend", "gaudi")
    assert set_up("s3://kiln") == [
        "python - s3://kiln",
        *(f"prefect --no-prompt work-pool create {pool} --type process" for pool in pools),
        "prefect --no-prompt deploy --all --prefect-file deploy/prefect.yaml",
        "python deploy/automations/apply.py deploy/automations/run-without-heartbeat.yaml",
    ]


def test_pools_of_a_cluster_start_jobs_where_there_is_a_template(
    set_up: Callable[..., list[str]],
) -> None:
    made = [line.partition("create ")[2] for line in set_up("s3://kiln", "kubernetes")]
    template = "--type kubernetes --base-job-template deploy/kubernetes/{0}_job_template.json"
    kubernetes = [f"{pool} {template.format(pool)}" for pool in ("cpu", "gpu")]
    process = [f"{pool} --type process" for pool in ("tpu", "ascend", "gaudi")]
    assert [line for line in made if line] == [*kubernetes, *process]


def test_the_backup_of_the_bucket_has_its_address_and_a_restore() -> None:
    page = (DEPLOY / "server/README.md").read_text(encoding="utf-8")
    backup, restore = (page.partition(f"\n## {part}\n")[2] for part in ("Backup", "Restore"))
    (copy,) = re.findall(r"^aws s3 sync (s3://\S+) (/\S+)", backup.partition("\n## ")[0], re.M)
    before = backup.partition("aws s3 sync")[0]
    variables = ("AWS_ENDPOINT_URL=", "AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY=")
    assert all(name in before for name in variables)
    back = restore.partition(f"\naws s3 sync {copy[1]} {copy[0]}")[2].partition("\n## ")[0]
    assert "kiln verify" in back and f"--store {copy[0]}/" in back


def test_automations_react_to_events_that_flows_emit() -> None:
    emitted = {PUBLISHED, AWAITING, *(f"kiln.model.{outcome}" for outcome in NOT_PUBLISHED)}
    expected = set()
    for path in (DEPLOY / "automations").glob("*.yaml"):
        text = path.read_text(encoding="utf-8").replace("${BLOCK}", str(UUID(int=0)))
        automation = AutomationCore.model_validate(yaml.safe_load(text))
        expected |= {name for name in automation.trigger.expect if name.startswith("kiln.")}
    assert expected == emitted
