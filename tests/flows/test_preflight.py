"""An objective that cannot be trained is found before work starts, in one clear line."""

import re
from typing import Any

import pytest

from configs.load import load_recipe
from flows.preflight import prepare


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"train.prediction_type": "epsilon"}, "set train.prediction_type to v_prediction"),
        ({"train.prediction_type": "flow"}, "flow needs a base with a FlowMatch scheduler"),
        ({"train.flow_weighting": "cosmap"}, "train.flow_weighting: cosmap is for flow matching"),
        (
            {"train.timesteps.bias": "range", "train.timesteps.end": 1001},
            "train.timesteps.begin and end: 0 to 1001 is no range",
        ),
        ({"train.optimizer": "adamw_8bit", "train.device": "cpu"}, "needs a CUDA device"),
        (
            {"train.prediction_type": "sample", "publish.gate": ["holdout_loss < base"]},
            "publish.gate: 'holdout_loss < base' compares errors of different predictions",
        ),
    ],
)
def test_an_objective_that_does_not_go(
    small: dict[str, Any], overrides: dict[str, Any], line: str
) -> None:
    """The digits' base is of v-prediction and zero terminal SNR."""
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        prepare(load_recipe("digits", {**small, **overrides}))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        {"publish.gate": ["holdout_loss < base"]},
        {"train.prediction_type": "sample"},
        {"train.prediction_type": "epsilon", "train.zero_terminal_snr": False},
        {"train.snr_gamma": None, "train.debiased": True},
    ],
)
def test_an_objective_that_does(small: dict[str, Any], overrides: dict[str, Any]) -> None:
    assert prepare(load_recipe("digits", {**small, **overrides})).model.is_dir()
