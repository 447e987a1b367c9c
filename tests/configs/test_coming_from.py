"""Setting names of other tools: the errors, the table and its page."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from configs import explain_errors
from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs/coming-from.md"


def test_page_matches_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == explain_errors.page()


@pytest.mark.parametrize("foreign", explain_errors.TABLE, ids=lambda foreign: foreign.names)
def test_table_names_only_settings_of_a_recipe(foreign: explain_errors.Foreign) -> None:
    model: Any = Recipe
    for part in () if foreign.ours == "none" else foreign.ours.split("."):
        if model is None:  # settings of a source depend on its kind
            return
        assert part in model.model_fields, foreign.ours
        annotation = model.model_fields[part].annotation
        is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation if is_section else None


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.max_train_steps", "unknown setting (called train.steps here)"),
        ("train.network_dim", "unknown setting (called train.lora.rank here)"),
        ("learning_rate", "unknown setting (called train.learning_rate here)"),
        ("retrain.lr", "unknown setting (did you mean retrain.learning_rate?)"),
        ("train.network_alpha", "called train.lora.alpha here: null here is the rank; kohya's "),
        ("train.timestep_sampling", "which also need `distribution: logit_normal`"),
        ("train.optimizer_type", "with `scale_parameter=False relative_step=False`"),
        ("publish.push_to_hub", "called publish.hub here: `{repo: owner/name}`"),
        ("train.scale_lr", "no equivalent here: learning_rate is not scaled"),
    ],
)
def test_error_for_a_setting_of_another_tool_names_ours(key: str, words: str) -> None:
    with pytest.raises(Refused) as caught:
        load_recipe("digits", {key: 1})
    assert words in str(caught.value)


def test_epochs_are_converted_to_steps() -> None:
    train = load_recipe("sdxl", {"train.epochs": 2.5, "train.global_batch_size": 16}).train
    resolved = train.with_steps(100)
    assert (resolved.steps, resolved.epochs) == (16, None)  # 250 samples, rounded up
    assert resolved.with_steps(7) is resolved
    with pytest.raises(Refused, match="epochs and steps exclude each other"):
        load_recipe("digits", {"train.epochs": 1, "train.steps": 5})
