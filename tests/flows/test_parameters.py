"""The parameters of the flows are a form in the UI, and hide their secrets from Prefect."""

from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ParameterTypeError
from pydantic import SecretStr

from configs.errors import Refused
from configs.load_recipe import recipe_names
from configs.secrets import hide_secrets
from configs.settings.recipe import STAGES
from flows.finetune import finetune
from flows.generate import generate
from flows.retrain import retrain
from flows.sweep import sweep
from flows.task_limits import revealed
from flows.work_pools import run_stage


def test_the_form_has_every_parameter_and_the_stages() -> None:
    form = finetune.parameters.model_dump()["properties"]
    assert form["recipe"]["type"] == "string" and form["recipe"]["default"] == "digits"
    assert form["recipe"]["examples"] == recipe_names()
    assert form["overrides"]["type"] == "object" and form["overrides"]["default"] == {}
    assert form["until"]["enum"] == list(STAGES) and form["until"]["default"] == "publish"
    assert form["retry_failed"]["type"] == "boolean" and form["retry_failed"]["default"] is False
    assert all(field["description"] for field in form.values())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"overrides": ["train.steps=3"]}, "valid dictionary"),
        ({"until": "encod"}, "'caption', 'encode', 'train', 'evaluate' or 'publish'"),
    ],
)
def test_parameters_of_a_wrong_type_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterTypeError, match=words):
        finetune.validate_parameters({"recipe": "digits", "overrides": {}, **given})


def test_valid_parameters_are_unchanged() -> None:
    given: dict[str, Any] = {"recipe": "digits", "overrides": {"train.steps": 3}}
    given |= {"until": "encode", "retry_failed": True, "force": None}
    assert finetune.validate_parameters(given) == given


SECRET = "https://us:hidden@example.org/a?sig=hidden"
WITH_SECRETS = [
    {"source": {"kind": "urls", "path": SECRET}},
    {"source.path": SECRET, "source.kind": "urls"},
    {"beam.s3_secret_access_key": "hidden"},
    {"beam": {"s3_secret_access_key": "hidden"}},
    {"publish.gate": [f"cmmd < {SECRET}"]},
    {"store": "s3://KEY:hid/hidden@bucket/a"},
    {"beam.azure_connection_string": "AccountName=a;AccountKey=hidden=="},
]


@pytest.mark.parametrize("overrides", WITH_SECRETS)
def test_prefect_stores_asterisks_for_a_secret(overrides: dict[str, Any]) -> None:
    stored = finetune.serialize_parameters({"overrides": hide_secrets(overrides)})
    assert "**********" in str(stored) and "hidden" not in str(stored)


def received(overrides: dict[str, Any]) -> dict[str, Any]:
    """What a flow is given by Prefect, of overrides whose secrets are hidden."""
    return revealed(
        finetune.validate_parameters({"overrides": hide_secrets(overrides)})["overrides"]
    )


def test_a_hidden_secret_reaches_the_flow() -> None:
    overrides = {"source": {"kind": "urls", "path": SECRET}, "train.steps": 3}
    assert received(overrides) == overrides


def test_a_secret_of_digits_is_hidden_and_reaches_the_flow() -> None:
    given = {"beam.s3_secret_access_key": 5550123456, "beam.save_token": False}
    stored = finetune.serialize_parameters({"overrides": hide_secrets(given)})
    assert "5550123456" not in str(stored) and "False" in str(stored)
    assert received(given) == {"beam.s3_secret_access_key": "5550123456", "beam.save_token": False}


@pytest.mark.parametrize("overrides", WITH_SECRETS)
def test_a_secret_that_prefect_has_stored_is_refused(overrides: dict[str, Any]) -> None:
    given = finetune.validate_parameters({"recipe": "digits", "overrides": overrides})
    with pytest.raises(Refused, match="a secret in a parameter is refused") as error:
        revealed(given["overrides"])
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("flow", [finetune, generate, retrain, run_stage, sweep])
def test_every_flow_refuses_a_secret_that_is_not_hidden(
    flow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.flow_process.prepare_process", lambda: None)
    name = next(n for n in ("overrides", "settings") if n in flow.parameters.properties)
    others = {"model": "digits", "stage": "train", "key": "", "before": {}}
    given = {key: value for key, value in others.items() if key in flow.parameters.properties}
    for settings, words in (
        ({"file": SECRET}, "a secret in a parameter is refused"),
        ({"file": SecretStr(SECRET), "tpyo": 1}, "unknown setting"),
    ):
        checked = flow.validate_parameters({**given, name: settings})
        with pytest.raises(Refused, match=words) as error:
            flow.fn(**checked)
        assert "hidden" not in str(error.value)


@pytest.mark.parametrize("flow", [finetune, generate, retrain, sweep])
def test_the_name_of_a_run_has_no_secret(flow: Any) -> None:
    url = "https://us:hidden@models.example/a.safetensors?sig=hidden&name=a"
    given = {"recipe": url, "model": url}
    run = FlowRun.model_construct(id=uuid4())
    with FlowRunContext.model_construct(flow_run=run, parameters=given):
        name = flow.flow_run_name()
    assert name.endswith(" https://models.example/a.safetensors?sig=...&name=a")
