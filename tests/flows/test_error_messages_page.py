"""docs/troubleshooting.md has the errors of the code, with remedies."""

import ast
import re
from collections.abc import Iterator

import pytest
from kiln_command import ROOT

from configs.load_recipe import RecipeError, load_recipe
from flows import error_messages_page
from flows.error_remedies import FREQUENT, REMEDIES

PAGE = ROOT / "docs/troubleshooting.md"


@pytest.mark.slow
def test_page_matches_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == error_messages_page.page()


@pytest.mark.slow
def test_every_class_of_errors_has_a_remedy_and_a_cause() -> None:
    classes = error_messages_page.error_classes()
    assert {name: found.about for name, found in classes.items() if not found.about} == {}
    assert set(classes) == set(REMEDIES)  # else: flows/error_remedies.py


def _every_string() -> Iterator[str]:
    """Strings of the code with placeholders: messages of logs, too."""
    for path in error_messages_page._files():
        if path.name != "error_remedies.py":
            for node in ast.walk(error_messages_page._parsed(path)):
                if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                    yield from error_messages_page._texts(node)


@pytest.mark.slow
def test_frequent_messages_are_those_of_the_code() -> None:
    texts = "\n".join(_every_string())
    assert [one.text for one in FREQUENT if one.text not in texts and not one.foreign] == []


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.init": "random", "train.method": "lora"},
        {"tpu": {"name": "t", "zone": "z", "accelerator_type": "v5p-8"}},
        {"train.mindspore.mode": "graph"},
        {"encode.masks": 4},
    ],
)
def test_a_readers_message_is_on_the_page(overrides: dict[str, object]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", overrides)
    shown = re.findall(r"^\| `(.+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    patterns = [re.sub(r"<\w+>|\\\.\\\.\\\.", ".+", re.escape(text)) for text in shown]
    assert any(len(p) > 20 and re.search(p, str(caught.value)) for p in patterns), caught.value


@pytest.mark.parametrize(
    ("name", "code"), [("RecipeError", 2), ("JobFailed", 1), ("Rejected", 3), ("StorageAway", 1)]
)
def test_exit_code_of_a_class(name: str, code: int) -> None:
    assert error_messages_page.exit_code(name, error_messages_page.error_classes()) == code
