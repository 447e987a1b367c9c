"""The card's numbers are those of the model that they stand under."""

from tasks.publish.card import metric_rows


def test_each_model_has_its_own_column() -> None:
    measured = {
        "base": {"value": 5.0, "n": 10, "ci": [4.0, 6.0]},
        "tuned": {"value": 1.0, "n": 12, "ci": [0.5, 1.5]},
    }
    assert metric_rows({"cmmd": measured, "fd": {"tuned": measured["tuned"]}}) == [
        {"metric": "cmmd", "base": "5 [4, 6]", "tuned": "1 [0.5, 1.5]", "samples": 12},
        {"metric": "fd", "base": "—", "tuned": "1 [0.5, 1.5]", "samples": 12},
    ]
