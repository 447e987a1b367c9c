"""Command lines, recipes, links and quoted messages in the documents are valid.

Nothing is executed: `kiln` parses its command lines, the schema checks overrides. Targets of make,
modules, scripts, deployments and the names that Python blocks take from our packages must exist.
"""

import ast
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
import typer
import yaml
from kiln_command import ROOT
from typer.exceptions import TyperException

from artifacts.records import without_collections
from configs.load_recipe import load_recipe, parse_override
from configs.settings.generate import read_settings
from flows.cli import app
from tasks.publish.gate_power import undecidable
from tasks.publish.promotion_gate import check_prompts

#: Packages of the product.
PACKAGES = ("artifacts", "configs", "demo", "flows", "runtimes", "tasks")

pytestmark = pytest.mark.slow
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "*/README.md", "*/*/README.md")
DOCUMENTS = sorted(
    {
        str(path.relative_to(ROOT))
        for pattern in PAGES
        for path in ROOT.glob(pattern)
        if not path.relative_to(ROOT).parts[0].startswith(".")  # an environment
    }
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
SPAN = re.compile(r"`([^`]+)`")
#: File name of a recipe that a document shows and its command lines use.
MINE = "mine.yaml"
#: Containers whose entry point is `kiln`.
CONTAINERS = {"kiln-ascend", "kiln-cuda", "kiln-gaudi"}
#: Commands whose first argument is a recipe.
OF_RECIPES = {"run", "sweep", "retrain", "plan", "recipes", "tpu"}


#: Python files in documents that are others' or the reader's.
FOREIGN = re.compile(
    r"(train_text_to_image\w*|train_controlnet\w*|gaudi_spawn|graphs|Fused\w+|NAME|txt2img|make_pictures)\.py$"
)
#: Messages in docs/errors.md that are others'.
FOREIGN_MESSAGES = {"CUDA out of memory"}


@dataclass(frozen=True)
class Line:
    """A command line, or a code span, which may omit arguments."""

    text: str
    is_whole: bool

    def words(self) -> list[str]:
        """The words without environment variables, with optional arguments."""
        text = self.text if self.is_whole else re.sub(r"\[([^]]*)\]|…", r" \1 ", self.text)
        words = shlex.split(text.replace("…", ""), comments=self.is_whole)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        return words


def lines_of(document: str) -> list[Line]:
    text = (ROOT / document).read_text(encoding="utf-8")
    shown = [body for language, body in FENCED.findall(text) if language in ("", "bash", "sh")]
    whole = [line for body in shown for line in body.replace("\\\n", " ").splitlines()]
    spans = (" ".join(span.split()) for span in SPAN.findall(FENCED.sub("", text)))
    return [*(Line(line, True) for line in whole), *(Line(span, False) for span in spans)]


def recipes_of(document: str, folder: Path) -> Iterator[Path]:
    """Write the YAML blocks of a document; settings alone become a recipe that extends `sdxl`."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for number, (language, body) in enumerate(FENCED.findall(text)):
        if language == "yaml":
            whole = "extends" in yaml.safe_load(body)
            path = folder / (MINE if whole else f"settings-{number}.yaml")
            path.write_text(body if whole else f"extends: sdxl\nname: settings\n{body}")
            yield path


def check_kiln(words: list[str], line: Line, folder: Path) -> None:
    """Check a `kiln` command line and its overrides."""
    group = typer.main.get_command(app)
    try:
        context = group.make_context("kiln", list(words))
        name, command, rest = group.resolve_command(context, list(words))  # type: ignore[attr-defined]
        parameters = command.make_context(name, list(rest), parent=context).params
    except typer.Exit:  # --version
        return
    except TyperException as error:
        names_only = not line.is_whole and "Missing parameter" in str(error)
        assert names_only, f"{line.text}: {error}"
        return
    settings = dict(parse_override(text) for text in parameters.get("override") or [])
    if name == "generate" and "key" not in settings:
        read_settings(parameters["model"], parameters["prompts"], settings)
    recipe = (parameters.get("recipe") or parameters.get("name")) if name in OF_RECIPES else None
    if recipe is not None and not recipe.isupper():  # RECIPE is a placeholder
        load_recipe(str(folder / recipe) if recipe == MINE else recipe, settings)


def check_make(targets: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    names = {word for word in targets if "=" not in word and not word.startswith("-")}
    assert names <= known, names - known


def check_module(words: list[str]) -> None:
    """Check that a module exists and has the options."""
    module, rest = words[0], words[1:]
    if module != "bench.NAME":
        assert find_spec(module) is not None, module
    if module.startswith("bench."):
        source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bench").glob("*.py"))
        for option in (word for word in rest if word.startswith("-")):
            assert f'"{option}"' in source, f"{module} {option}"


def check_deployment(words: list[str]) -> None:
    """Check that a deployment exists and its recipe accepts the overrides."""
    listed = yaml.safe_load((ROOT / "deploy/prefect.yaml").read_text(encoding="utf-8"))
    known = {
        f"{entry['entrypoint'].partition(':')[2]}/{entry['name']}": entry["parameters"]
        for entry in listed["deployments"]
    }
    assert words[0] in known, words[0]
    for word in words:
        if word.startswith("overrides="):
            load_recipe(known[words[0]]["recipe"], yaml.safe_load(word.partition("=")[2]))


def check_container(image: str, words: list[str], line: Line, folder: Path) -> None:
    """Check the `kiln` command line of a container."""
    inside = words[words.index(image) + 1 :]
    inside = inside[inside[0] == "deploy/wait_for_checkpoints.sh" :]  # it runs the rest
    assert inside[0] in ("kiln", "prefect"), inside[0]  # the images have no entry point
    if inside[0] == "kiln":
        check_kiln(inside[1:], line, folder)


def check_script(script: str) -> None:
    """Check that a script of the repository exists."""
    assert (ROOT / script).is_file() or script.startswith("/") or "/" not in script, script


def check_of(line: Line, folder: Path) -> tuple[str, Callable[[], None]] | None:
    """The program of a command line, and its check, which raises; None for other programs."""
    try:
        words = line.words()
    except ValueError:  # an unbalanced quotation mark in a code span
        return None
    program = words[0].rpartition("/")[2] if words else ""
    if program == "kiln" and len(words) > 1:
        return program, partial(check_kiln, words[1:], line, folder)
    if program == "docker" and (image := CONTAINERS & set(words)) and "run" in words:
        return program, partial(check_container, *image, words, line, folder)
    if program == "make":
        return program, partial(check_make, words[1:])
    if "-m" in words and re.search(r"python[\d.]*$|torchrun$|^ms?run$", program):
        return program, partial(check_module, words[words.index("-m") + 1 :])
    if program == "prefect" and words[1:3] == ["deployment", "run"]:
        return program, partial(check_deployment, words[3:])
    if program.endswith(".sh") or (program == "bash" and words[1:]):
        return program, partial(check_script, words[0] if program.endswith(".sh") else words[1])
    return None


def check(line: Line, folder: Path) -> None:
    """Raise if a command line of a known program is invalid."""
    if found := check_of(line, folder):
        found[1]()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_command_lines_of_documents_are_valid(document: str, tmp_path: Path) -> None:
    list(recipes_of(document, tmp_path))
    for line in lines_of(document):
        check(line, tmp_path)


def test_documents_have_command_lines_of_every_kind() -> None:
    lines = (line for document in DOCUMENTS for line in lines_of(document))
    found = Counter(known[0] for line in lines if (known := check_of(line, Path())))
    least = {"kiln": 40, "make": 10, "python": 8, "docker": 2, "prefect": 3}
    assert all(found[program] >= number for program, number in least.items()), found


@pytest.mark.parametrize(
    "text",
    [
        "kiln run digits --nowhere",
        "kiln show",
        "kiln runs digits",
        ".venv/bin/kiln run digits -o train.learning_rat=1e-4",
        "kiln plan sd3-v5p --topology v5p-8",
        'kiln generate digits "a seven" -o guidance=3',
        "kiln gc --remove",
        "make setups",
        ".venv/bin/python -m bench.trained",
        "OMP_NUM_THREADS=2 .venv/bin/python -m bench.train --peer python",
        "prefect deployment run finetune/digit",
        "prefect deployment run finetune/digits -p overrides='{\"train.step\": 1}'",
        "docker run --rm kiln-gaudi kiln run sdxl -o train.devices=hpu",
        "docker run --rm kiln-gaudi run sdxl",
        "deploy/gaudi/start.sh JOB.json",
    ],
)
def test_invalid_command_line_raises(text: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(Line(text, True), tmp_path)


def unknown_names(source: str) -> list[str]:
    """Imports from our packages, and attributes of imported modules, that do not exist."""
    tree = ast.parse(source)
    ours, unknown = dict[str, object](), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (ROOT / str(node.module).split(".")[0]).is_dir():
            module = import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                with suppress(ImportError):  # a name of the module, or none
                    import_module(f"{module.__name__}.{name}")
                ours[name] = getattr(module, name, None)
                unknown += [] if hasattr(module, name) else [f"{module.__name__}.{name}"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = ours.get(node.value.id)
            if isinstance(owner, ModuleType) and not hasattr(owner, node.attr):
                unknown.append(f"{owner.__name__}.{node.attr}")
    return unknown


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_of_documents_uses_names_that_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = [body for language, body in FENCED.findall(text) if language == "python"]
    assert [name for body in blocks for name in unknown_names(dedent(body))] == []


@pytest.mark.parametrize(
    ("source", "unknown"),
    [
        ("from demo import dataset\ndataset.caption", "demo.dataset.caption"),
        ("from demo.dataset import caption", "demo.dataset.caption"),
        ("from demo import digit", "demo.digit"),
    ],
)
def test_a_missing_name_is_found(source: str, unknown: str) -> None:
    assert unknown_names(source) == [unknown]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_recipes_of_documents_are_valid(document: str, tmp_path: Path) -> None:
    for path in recipes_of(document, tmp_path):
        recipe = load_recipe(str(path))
        assert recipe.name == path.stem.partition("-")[0]
        assert [*check_prompts(recipe.publish.gate, recipe.evaluate)] == []
        assert [*undecidable(recipe, {})] == []


@pytest.mark.parametrize("document", ["README.md", "docs/recipes.md"])
def test_recipe_of_a_document_extends_the_prompts_of_its_parent(
    document: str, tmp_path: Path
) -> None:
    path, *_ = recipes_of(document, tmp_path)
    assert {"new"} < set(load_recipe(str(path)).evaluate.prompts)


def test_the_readme_names_the_tasks_as_the_log_and_the_ui_do() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"a Prefect flow of five tasks: ([^.]+)\.", text)
    assert found
    named = re.split(r",\s|\sand\s", re.sub(r"\s\([^)]*\)", "", found[1]))
    assert tuple(named) == load_recipe("digits").stages


def test_page_of_commands_has_each_command() -> None:
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in known if f"`kiln {name} " not in text + "`"] == ["ls"]
    assert "`kiln ls`" in text


def test_the_page_of_failures_names_tests_that_exist() -> None:
    text = (ROOT / "docs/internals/failures.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+/test_\w+\.py)(?:::(\w+))?`", text)
    assert len(named) > 100
    for file, test in named:
        assert f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), file


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_files_that_a_document_names_exist(document: str) -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    ours = {str(path.relative_to(ROOT)) for one in folders for path in one.rglob("*.py")}
    text = (ROOT / document).read_text(encoding="utf-8")
    for named in re.findall(r"[\w./-]*\w\.py\b", text):
        known = any(f"/{path}".endswith("/" + named.lstrip("./")) for path in ours)
        assert known or FOREIGN.search(named), f"{document} names {named}"


def anchors_of(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_a_document_lead_to_files_and_headings(document: str) -> None:
    text = FENCED.sub("", (ROOT / document).read_text(encoding="utf-8"))
    for file, anchor in LINK.findall(text):
        if not file.startswith(("http://", "https://", "mailto:")):
            target = (ROOT / document).parent / file if file else ROOT / document
            assert target.exists(), f"{document} links to {file}"
            assert not anchor or anchor in anchors_of(target), f"{document} links to #{anchor}"


def test_messages_on_the_page_of_errors_are_those_of_the_code() -> None:
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    messages = re.findall(r"\*\*`(.+?)`\*\*", page)
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    with without_collections():  # CPython before 3.11.8 may fail to parse during one (gh-106905)
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts = "\n".join(node.value for node in nodes if isinstance(node.value, str))
    # An error joins its setting and its remedy by colons.
    pieces = [(text, piece.strip(" :")) for text in messages for piece in text.split("…")]
    unknown = {text for text, piece in pieces if piece not in texts}
    assert len(messages) > 40 and unknown == FOREIGN_MESSAGES
