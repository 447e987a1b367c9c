"""Teams with a model of one name share nothing on a server and in a registry."""

import json
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from kiln_command import ROOT
from prefect_server import Server
from registries import crown
from store_servers import UrlOf

from artifacts.store import KeyParts, Store
from configs.errors import Failed, Refused
from configs.load_recipe import load_recipe
from configs.settings.generate import read_settings
from flows import send_stage, store_commands, work_pools
from tasks import code_version
from tasks.generate import locate
from tasks.progress import artifact_key
from tasks.publish.hub import token_block
from tasks.publish.registry import Registry, model_names

APPLY = ROOT / "deploy/automations/apply.py"
STAGES = load_recipe("digits").stages
TEAMS = ("audio", "vision")


@pytest.mark.parametrize("name", ["digits", "Digits_v2.1", "vision/digits", "vision/v1-large"])
def test_a_name_may_have_a_team(name: str) -> None:
    assert load_recipe("digits", {"publish.name": name}).publish.name == name


@pytest.mark.parametrize(
    "name",
    [
        *("a/b/c", "/digits", "vision/", "../digits", "Vision/digits", "vision/Digits"),
        *("vision/digits.v2", "vi--sion/digits", "vision/-digits", "vision/v1", "vision/champion"),
    ],
)
def test_names_that_could_meet_another_team_are_refused(name: str) -> None:
    with pytest.raises(Refused, match=r"publish(\.|: )name"):
        load_recipe("digits", {"publish.name": name})


def test_no_two_names_with_a_team_have_one_key_in_prefect() -> None:
    names = ("digits", "vision-digits", "vision/digits", "vision-a/digits", "vision/a-digits")
    keys = {artifact_key(name, stage) for name in names for stage in STAGES}
    assert len(keys) == len(names) * len(STAGES)
    assert artifact_key("digits", "train") == "digits-train"
    assert artifact_key("vision/digits", "train") == "vision--digits-train"


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_registry_lists_teams_and_a_model_named_like_one(kind: str, url_of: UrlOf) -> None:
    url = url_of(kind)
    names = ["audio/digits", "vision", "vision/digits"]
    store = Store(url)
    for number, name in enumerate(names, 1):
        crown(store, Registry(f"{url}/registry", name), number, 10 * number)
    place = Store(f"{url}/registry")
    assert model_names(place) == names
    Registry(place.url, "vision").rollback()
    champions = [Registry(place.url, name).champion() for name in names]
    assert [champion and champion.name for champion in champions] == ["v2", "v1", "v2"]
    with pytest.raises(Refused, match=r"no such model in the registry \(did you mean vision/digit"):
        Registry(place.url, "vision/digit").version("v1")


def test_commands_on_a_store_see_the_models_of_teams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(tmp_path / "store"))
    registry = f"{store.root}/registry"
    for team in TEAMS:
        draft = store.draft(KeyParts("publish", 1, {"name": team}, {}))
        draft.write("model_index.json", b"{}")
        own = Registry(registry, f"{team}/digits")
        own.promote(own.publish(draft.commit({}, {"created": "2026-01-01"})).name)
    store_commands.list_store(store.root, None, as_json=True)
    listed = json.loads(capsys.readouterr().out)["models"]
    assert [(one["name"], one["champion"]) for one in listed] == [
        ("audio/digits", True),
        ("vision/digits", True),
    ]
    assert store_commands.is_published(registry, "vision/digits")
    store.fs.pipe_file(f"{registry}/vision/digits/v1/model_index.json", b"[]")
    assert not store_commands.verify_store(store.root, None)
    assert "model     vision/digits v1  model_index.json" in capsys.readouterr().out
    store_commands.collect_garbage(store.root, None, days=0, hours=0, delete=True)
    assert len(list(store.artifacts())) == 2, "what a team's model was made from stays"


def test_a_name_with_a_team_is_drawn_from_the_registry_and_never_mistaken_for_a_hub_id(
    tmp_path: Path,
) -> None:
    def place_of(name: str) -> str:
        return locate(read_settings(name, ["a fox"], {"store": str(tmp_path)}))

    registry = Registry(f"{tmp_path}/registry", "vision/digits")
    crown(Store(str(tmp_path)), registry, 1, 2)
    assert place_of("vision/digits") == f"{tmp_path}/registry/vision/digits/v2"
    assert place_of("vision/digits@v1") == f"{tmp_path}/registry/vision/digits/v1"
    with pytest.raises(Refused, match="did you mean vision/digits"):
        place_of("vision/digitz")
    assert place_of("stabilityai/sdxl-turbo") == "stabilityai/sdxl-turbo"


def test_each_team_has_its_own_hub_token() -> None:
    names = ("digits", "vision/digits", "audio/digits")
    assert [token_block(name) for name in names] == [
        "hub-token",
        "hub-token-vision",
        "hub-token-audio",
    ]


def test_automations_of_a_team_see_its_models_and_its_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    get_client = MagicMock()
    monkeypatch.setattr("prefect.client.orchestration.get_client", get_client)
    client = get_client.return_value.__enter__.return_value
    client.read_automations_by_name.return_value = []
    client.read_block_document_by_name.return_value.id = "00000000-0000-0000-0000-000000000000"
    main = runpy.run_path(str(APPLY))["main"]
    assert main(["--team", "Vision", "slack-webhook/vision"]) == 2
    assert main(["--team", "vision", "slack-webhook/vision"]) == 0
    made = [call.args[0] for call in client.create_automation.call_args_list]
    assert len(made) == len(list(APPLY.parent.glob("*.yaml")))
    of_runs = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.team:vision"}
    for automation in made:
        assert automation.name.endswith(" (vision)")
        trigger = automation.trigger
        if next(iter(trigger.expect)).startswith("kiln.model."):
            assert trigger.match.root == {"prefect.resource.id": "kiln.model.vision/*"}
        else:
            assert trigger.match_related.root == of_runs


@pytest.mark.parametrize(("name", "tags"), [("digits", []), ("vision/digits", ["team:vision"])])
def test_a_sent_stage_has_the_tag_of_its_team(
    name: str, tags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_stage, "run_deployment", lambda *_, **given: given)
    sent: Any = send_stage._start("train", name, "gpu", {})
    assert (sent["tags"], sent["flow_run_name"]) == (tags, f"train of {name}")


def test_a_pool_with_other_code_is_refused_before_the_run_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployed = SimpleNamespace(version="0123456789ab")
    server = SimpleNamespace(read_deployment_by_name=lambda _: deployed)
    monkeypatch.setattr(send_stage, "get_client", lambda **_: nullcontext(server))
    place = load_recipe("digits", {"place.train": "gpu"}).place
    with pytest.raises(Refused, match=f"kiln-stage/gpu has code 0123.*code {code_version.CODE}"):
        send_stage.check_deployments(place, ("train",))
    deployed.version = code_version.CODE
    send_stage.check_deployments(place, ("train",))


def test_a_deployment_has_the_version_of_the_code_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/panels.py").write_text("other = 1\n")
    client = MagicMock()
    for folder in (ROOT, tmp_path, tmp_path / "on another machine"):
        work_pools._deploy(client, "gpu", str(folder))
    versions = [call.kwargs["version"] for call in client.create_deployment.call_args_list]
    other = code_version.code_digest(tmp_path)
    assert versions == [code_version.CODE, other, code_version.CODE]


def test_a_worker_whose_code_changed_since_its_deployment_builds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work_pools.flow_process, "prepare_process", lambda: None)
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__VERSION", "0123456789ab")
    with pytest.raises(Failed, match=f"has code {code_version.CODE}, and its deployment code 0123"):
        work_pools.run_stage.fn("train", {}, "key", {})


@pytest.mark.slow
def test_two_teams_with_one_model_name_on_one_server(
    first: dict[str, Any],  # the store has all stages but the publication
    small: dict[str, Any],
    here: Callable[..., str],
    run_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    api: str,
) -> None:
    server = Server(tmp_path, api)
    for team in TEAMS:
        report = run_here("digits", {**small, "publish.name": f"{team}/digits"})
        assert report["model"] == f"{small['store']}/registry/{team}/digits/v1"
        assert report["champion"]["version"] == "v1"
    listed = here("ls", "--store", str(small["store"])).splitlines()
    models = [line.split()[1:3] for line in listed if line.startswith("model ")]
    assert models == [["audio/digits", "v1"], ["digits", "v1"], ["vision/digits", "v1"]]
    for team in TEAMS:
        tagged = {"flow_runs": {"tags": {"all_": [f"team:{team}"]}}}
        (run,) = server.ask("/flow_runs/filter", tagged)
        assert run["name"] == f"finetune {team}/digits"
        keys = {one["key"] for one in server.ask("/artifacts/filter", tagged)}
        assert {f"{team}--digits-{stage}" for stage in (*STAGES, "model")} <= keys
        assert all(key.startswith(f"{team}--digits-") for key in keys)

        events = server.wait("its events", partial(events_of, server, team), 60)
        assert events == {
            "kiln.model.published": f"kiln.model.{team}/digits",
            "prefect.flow-run.Completed": f"prefect.flow-run.{run['id']}",
        }


def events_of(server: Server, team: str) -> dict[str, str]:
    """Event -> resource, of what a team's automations see; empty until both are there."""
    names = ["kiln.model.published", "prefect.flow-run.Completed"]
    tagged = {"related": {"id": [f"prefect.tag.team:{team}"]}, "event": {"name": names}}
    events = server.ask("/events/filter", {"filter": tagged})["events"]
    found = {one["event"]: one["resource"]["prefect.resource.id"] for one in events}
    return found if len(events) == len(names) else {}
