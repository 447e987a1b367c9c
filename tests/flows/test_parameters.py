"""The parameters of the flow `finetune` are a form in the UI, and are checked before a run."""

from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError

from configs.load import recipe_names
from configs.recipe import STAGES
from flows.finetune import finetune


def test_the_form_has_every_parameter_and_the_stages() -> None:
    form = finetune.parameters.model_dump()["properties"]
    assert form["recipe"]["type"] == "string" and form["recipe"]["default"] == "digits"
    assert form["recipe"]["examples"] == recipe_names()
    assert form["overrides"]["type"] == "object" and form["overrides"]["default"] == {}
    assert form["until"]["enum"] == list(STAGES) and form["until"]["default"] == "publish"
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
    given = {"recipe": "digits", "overrides": {"train.steps": 3}, "until": "encode"}
    assert finetune.validate_parameters(given) == given
