"""The parameters of the flow `finetune` are a form in the UI, and are checked before a run."""

from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError

from configs.hide_secrets import hide_secrets
from configs.load_and_extend_recipe import recipe_names
from configs.settings.recipe import STAGES
from flows.finetune import finetune
from flows.generate import generate


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
        ({"recipe": "digit"}, "did you mean digits"),
        ({"overrides": {"train.stpes": 3}}, "did you mean train.steps"),
        ({"overrides": {"train.steps": "x"}}, "train.steps"),
        ({"overrides": ["train.steps=3"]}, "valid dictionary"),
        ({"until": "encod"}, "'download', 'encode', 'train', 'evaluate' or 'publish'"),
    ],
)
def test_wrong_parameters_are_refused(given: dict[str, Any], words: str) -> None:
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


def test_a_hidden_secret_reaches_the_flow() -> None:
    overrides = {"source": {"kind": "urls", "path": SECRET}, "train.steps": 3}
    given = {"recipe": "sd2", "overrides": hide_secrets(overrides)}
    assert finetune.validate_parameters(given)["overrides"] == overrides


def test_a_secret_of_digits_is_hidden_and_reaches_the_flow() -> None:
    hidden = hide_secrets({"beam.s3_secret_access_key": 5550123456, "beam.save_token": False})
    stored = finetune.serialize_parameters({"overrides": hidden})
    assert "5550123456" not in str(stored) and "False" in str(stored)
    given = finetune.validate_parameters({"recipe": "digits", "overrides": hidden})
    assert given["overrides"] == {
        "beam.s3_secret_access_key": "5550123456",
        "beam.save_token": False,
    }


@pytest.mark.parametrize("overrides", WITH_SECRETS)
def test_a_secret_that_prefect_has_stored_is_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(ParameterTypeError, match="a secret in a parameter is refused") as error:
        finetune.validate_parameters({"recipe": "digits", "overrides": overrides})
    assert "hidden" not in str(error.value)


def test_the_settings_of_generate_are_checked_for_secrets() -> None:
    with pytest.raises(ParameterTypeError, match="a secret in a parameter is refused"):
        generate.validate_parameters({"model": "digits", "settings": {"file": SECRET}})
    given = {"model": "digits", "settings": hide_secrets({"file": SECRET, "seed": 7})}
    assert generate.validate_parameters(given)["settings"] == {"file": SECRET, "seed": 7}
