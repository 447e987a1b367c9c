"""SQL conditions of recipes: what they read, and which ones are refused before work."""

import re

import pytest

from configs.errors import Refused
from tasks.sql_condition import Threshold, check_expression, columns_of, conjuncts, thresholds_of

COLUMNS = {"aesthetic": "DOUBLE", "width": "INTEGER", "label": "VARCHAR", "a b": "BOOLEAN"}


def test_an_expression_names_the_columns_that_it_reads() -> None:
    text = "Aesthetic > 5 and (label like '%width%' or \"a b\") -- and rows"
    assert columns_of(text, "select.where") == ["Aesthetic", "label", "a b"]
    check_expression(text, COLUMNS, "select.where")
    assert columns_of("list_filter(labels, lambda q: q > width) = []", "x") == ["labels", "width"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("aestetic > 5", "did you mean 'aesthetic'"),
        ("height > 5", "there are: aesthetic, width, label, a b"),
        ("aesthetic >", "syntax error"),
        ("aesthetic", "type DOUBLE: compare it"),
        ("label > 5 or", "syntax error"),
        ("width > date '2020-01-01'", "Cannot compare"),
        ("true; drop table entries", "syntax error"),
        ("true) group by (label", "no single expression"),
        ("true) union all select 1 from '/etc/passwd' where (true", "no single expression"),
        ("label in (select content from read_text('/etc/passwd'))", "a subquery"),
        ("row_number() over () = 1", "a window function"),
        ("count(*) > 1", "aggregates"),
        ("random() > 0.5", "another value at each run"),
        ("ago(interval 1 day) > '2026-01-01'", "another value at each run"),
        ("current_setting('home_directory') = label", "another value at each run"),
        ("read_text('/etc/passwd') = label", "table function"),
        ("columns('a.*') > 1", "a star"),
        ("aesthetic > ?", "no single expression"),
        ("+".join(["width"] * 900) + " > 1", "nested too deep"),
    ],
)
def test_another_text_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(Refused, match="(?i)" + re.escape(words)) as refusal:
        check_expression(text, COLUMNS, "select.where")
    assert refusal.value.setting == "select.where"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("width > 1 AND\nlabel = 'x and y'", ["width > 1", "label = 'x and y'"]),
        ('width between 1 and 2 and ("a b" or width > 5)', None),
        ('width > 1 or width < 3 and "a b"', ['width > 1 or width < 3 and "a b"']),
        ('(width > 1 and "a b")', ['(width > 1 and "a b")']),
    ],
)
def test_the_parts_of_a_condition_are_what_its_outermost_ands_join(
    text: str, parts: list[str] | None
) -> None:
    if parts is None:
        parts = ["width between 1 and 2", '("a b" or width > 5)']
    assert conjuncts(text, "select.where") == parts


def test_an_order_is_a_number() -> None:
    check_expression("aesthetic - width", COLUMNS, "select.prefer", is_condition=False)
    with pytest.raises(Refused, match="no number"):
        check_expression("label", COLUMNS, "select.prefer", is_condition=False)


def test_thresholds_of_a_condition_are_its_comparisons_with_numbers() -> None:
    text = "aesthetic > 5.5 and not (10 >= width or label = 'x') or try_cast(label as int) < -1"
    assert thresholds_of(text, "select.where") == [
        Threshold("aesthetic", ">", 5.5),
        Threshold("width", "<=", 10.0),
        Threshold("label", "<", -1.0),
    ]
    assert thresholds_of("width between 1 and 2", "select.where") == [
        Threshold("width", ">=", 1.0),
        Threshold("width", "<=", 2.0),
    ]
