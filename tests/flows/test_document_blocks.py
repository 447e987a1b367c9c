"""Pages for newcomers: each block of commands runs here, or says what it needs.

tests/test_documents.py checks the command lines of all documents without running them.
"""

from pathlib import Path
from textwrap import indent

import document_blocks
import pytest
from document_blocks import Block, blocks_of
from kiln_command import ROOT

#: Pages whose unmarked blocks a test below runs, in the order that a reader takes.
RUN = ("README.md", "docs/tutorial.md", "docs/server.md")
#: Pages on other machines: none of their commands runs here.
MARKED = (
    *("docs/choose.md", "docs/clusters.md", "docs/cluster-sections.md", "docs/errors.md"),
    "docs/full-finetune.md",
    *("docs/lora.md", "docs/simple-english.md", "docs/ascend.md", "docs/ascend.zh.md"),
    "docs/internals/extending.md",
)
#: What the machine of the tests lacks.
NEEDS = ("a GPU", "a TPU", "an Ascend NPU", "a Gaudi", "the hub", "a cluster", "a server", "a page")


@pytest.mark.parametrize("document", [*RUN, *MARKED])
def test_marks_say_what_a_block_needs_or_what_runs_it(document: str) -> None:
    for block in blocks_of(document):
        if block.mark == "needs":
            assert block.reason.startswith(NEEDS), block.reason
        elif block.mark == "run by":
            assert (ROOT / block.reason).is_file(), block.reason


def test_examples_of_extensions_are_code_of_the_files_they_name() -> None:
    blocks = blocks_of("docs/internals/extending.md")
    shown = [block for block in blocks if block.language == "python" and block.reason]
    assert "tests/made_up/patchwork.py" in {block.reason for block in shown}
    for block in shown:
        source = (ROOT / block.reason).read_text(encoding="utf-8")
        assert block.body in source or indent(block.body, "    ") in source


@pytest.mark.parametrize("document", MARKED)
def test_every_block_of_commands_is_marked(document: str) -> None:
    assert [block.body for block in blocks_of(document) if block.commands and not block.mark] == []


def test_a_mark_belongs_to_the_block_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_blocks, "ROOT", tmp_path)
    text = "```\none\n```\n\n<!-- needs: a GPU -->\n```\ntwo\n```\n\n```sh\nthree\n```\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert blocks_of("page.md") == [
        Block("", "", "", "one\n"),
        Block("needs", "a GPU", "", "two\n"),
        Block("", "", "sh", "three\n"),
    ]


def test_a_failing_command_of_a_page_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        document_blocks, "blocks_of", lambda _: [Block("", "", "", "false\ntrue\n")]
    )
    with pytest.raises(AssertionError, match="false"):
        document_blocks.run("page.md", tmp_path)


@pytest.mark.soak
def test_blocks_of_the_pages_run(tmp_path: Path, api: str) -> None:
    for document in RUN:
        document_blocks.run(document, tmp_path, api)
    for model in ("digits", "mine"):
        assert (tmp_path / f"store/registry/{model}/champion/report.html").is_file()
