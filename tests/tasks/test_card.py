"""The card's numbers are those of the model that they stand under."""

import time
from pathlib import Path

from tasks.evaluate.measure import metric_rows
from tasks.publish.card import base_card


def test_each_model_has_its_own_column() -> None:
    measured = {
        "base": {"value": 5.0, "n": 10, "ci": [4.0, 6.0]},
        "tuned": {"value": 1.0, "n": 12, "ci": [0.5, 1.5]},
    }
    assert metric_rows({"cmmd": measured, "fd": {"tuned": measured["tuned"]}}) == [
        {"metric": "cmmd", "base": "5 [4, 6]", "tuned": "1 [0.5, 1.5]", "samples": 12},
        {"metric": "fd", "base": "—", "tuned": "1 [0.5, 1.5]", "samples": 12},
    ]


def test_aliases_in_a_base_s_card_do_not_expand(tmp_path: Path) -> None:
    """Nine levels of ten aliases are a gigabyte of text."""
    levels = ["a0: &a0 lol"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    text = "\n".join(["---", *levels, "license: *a9", "license_name: x", "---", ""])
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    begun = time.monotonic()
    assert base_card(tmp_path) == {"license_name": "x"}
    assert time.monotonic() - begun < 5
