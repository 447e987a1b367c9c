"""`kiln new` at a terminal and without one; its recipe runs to a published model."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeOnce
from kiln_command import command, environment, kiln, python
from picture_bytes import noise_picture
from picture_sources import make_pictures
from terminal import Terminal
from toy_recipes import OPEN_GATE

from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe

pytestmark = pytest.mark.slow
PATIENCE = 240  # seconds, for a machine that does much else
ENTER = ""  # takes the ready answer
QUESTIONS = ("1. Pictures", "2. Teach", "Its word", "3. Machine", "4. Base", "5. Prompts")
PICTURES, TEACH, WORD, MACHINE, BASE, PROMPTS = QUESTIONS


@pytest.fixture(scope="module")
def folder(once: MakeOnce) -> Path:
    """A working directory with pictures of several kinds, and the plans of earlier tests."""

    def write(path: Path) -> None:
        for number, one in enumerate(make_pictures(60)):
            (path / "photos").mkdir(exist_ok=True)
            (path / f"photos/{number:02}.png").write_bytes(one.png)
        unicode = path / "Фото 写真"
        unicode.mkdir()
        for number in range(80):
            picture = noise_picture(100 + number, 40 + 3 * number, 280 - 3 * number)
            (unicode / f"été {number} 🦊.png").write_bytes(picture)
        (path / "set").mkdir()
        shutil.copytree(path / "photos", path / "set/10_ohwx dog")
        shutil.copytree(unicode, path / "set/1_dog")
        (path / "empty").mkdir()
        rows = [f"http://h/{n},a thing of kind {n % 50}" for n in range(200)]
        text = "\n".join(["url,caption", *rows])
        (path / "list.csv").write_text(text, encoding="utf-8")
        code = "import duckdb; duckdb.sql(\"copy 'list.csv' to 'list.parquet'\")"
        python("-c", code, cwd=path)

    return once("new-recipe", write)


def at_terminal(folder: Path, tmp_path: Path, answers: Sequence[tuple[str, str]]) -> str:
    """Answer the questions of `kiln new` at a terminal, in order; what it showed."""
    with Terminal() as terminal:
        run = subprocess.Popen(
            [*command("new"), "--output", str(folder / f"{tmp_path.name}.yaml")],
            env={**environment(tmp_path), "TERM": "dumb", "PYTHONPATH": os.getcwd()},
            cwd=folder,
            stdin=terminal.end,
            stdout=terminal.end,
            stderr=terminal.end,
            start_new_session=True,
        )
        try:
            for question, answer in answers:
                terminal.wait(rf"{question}[^\n]*: \Z", lambda: run.poll() is None, PATIENCE)
                terminal.press(answer.encode() + b"\n")
            code = run.wait(PATIENCE)
        finally:
            run.kill()
        terminal.close()
    assert code == 0, terminal.text
    return terminal.text


def recipe_of(folder: Path, tmp_path: Path) -> Recipe:
    return load_recipe(str(folder / f"{tmp_path.name}.yaml"))


def test_wrong_answers_are_asked_again_with_the_reason(folder: Path, tmp_path: Path) -> None:
    """Sixty photos without captions."""
    answers = [
        *((PICTURES, place) for place in ("nowhere", "empty", "photos")),
        *((TEACH, goal) for goal in ("cats", ENTER)),
        (WORD, "ohwx  fox"),
        *((MACHINE, machine) for machine in ("RTX 9999", "cpu")),
        *((BASE, base) for base in ("sdxl", ENTER)),
        *((PROMPTS, prompts) for prompts in ("a fox | a dog", ENTER)),
    ]
    text = at_terminal(folder, tmp_path, answers)
    reasons = (
        "no such file or folder",
        "the folder is empty",
        "write subject, style or everything",
    )
    reasons += ("gpu RTX 9999: set its memory", "sdxl does not fit the CPU", "write 5 or more")
    for reason in reasons:
        assert f"Error: {reason}" in text or reason in text.replace("\n", " ")
    assert text.count("Error: ") == len(reasons)
    assert "60 pictures, shorter sides of 36 to 48 pixels, no captions" in text
    assert "fits: 0.1 GiB of" in text and "hold back" in text
    recipe = recipe_of(folder, tmp_path)
    assert recipe.encode.captions is not None
    assert recipe.encode.captions.prompts == ("a photo of ohwx fox",)
    assert recipe.source.path == str(folder / "photos")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("Фото 写真", "80 pictures, shorter sides of 40 to 160 pixels, no captions"),
        ("set", "140 pictures"),
        ("list.parquet", "200 rows, columns url, caption"),
    ],
)
def test_ready_answers_make_a_planned_recipe(
    folder: Path, tmp_path: Path, place: str, shown: str
) -> None:
    word = [] if place == "list.parquet" else [(WORD, ENTER)]
    answers = [(PICTURES, place), (TEACH, ENTER), *word, (MACHINE, "cpu"), (BASE, ENTER)]
    text = at_terminal(folder, tmp_path, [*answers, (PROMPTS, ENTER)])
    assert shown in text and "fits: 0.1 GiB of" in text and "Error" not in text
    recipe = recipe_of(folder, tmp_path)
    assert set(recipe.by_source) == ({"ohwx_dog", "dog"} if place == "set" else {""})
    assert recipe.train.method == "lora"


def test_without_a_terminal_a_question_names_its_option(folder: Path, tmp_path: Path) -> None:
    error = kiln(tmp_path, "new", str(folder / "photos"), code=2)
    assert "there is no terminal to ask at: add --teach, or --yes" in error
    error = kiln(tmp_path, "new", str(folder / "photos"), "--yes", code=2)
    assert "Machine" in error and "no answer is ready: add --gpu" in error
    assert not [*tmp_path.glob("*.yaml")]


def test_what_does_not_fit_is_not_written(folder: Path, tmp_path: Path) -> None:
    """A GPU without room for the demo's weights."""
    options = ("--yes", "--base", "digits-lora", "--gpu", "0.01GB")
    output = tmp_path / "small.yaml"
    photos = str(folder / "photos")
    error = kiln(tmp_path, "new", photos, *options, "--output", str(output), code=2)
    assert "digits-lora does not fit 0.01 GB" in error and not output.exists()


@pytest.mark.extended
def test_a_new_recipe_runs_to_a_published_model(folder: Path, tmp_path: Path, api: str) -> None:
    """Sixty photos, on the CPU with the demo's base, by scripts."""
    if (folder / "store").exists():  # with the plans of earlier tests
        shutil.copytree(folder / "store", tmp_path / "store")
    output = tmp_path / "fox.yaml"
    options = ("--gpu", "cpu", "--word", "ohwx fox", "--output", str(output), "--json")
    said: dict[str, Any] = json.loads(
        kiln(tmp_path, "new", str(folder / "photos"), *options).splitlines()[-1]
    )
    assert said["plan"]["fits"] and said["problems"] == [] and said["pictures"]["count"] == 60
    small = {**OPEN_GATE, "train.steps": 4, "evaluate.prompts.new.images_per_prompt": 1}
    small |= {"store": str(tmp_path / "store"), "evaluate.num_inference_steps": 2}
    small |= {"evaluate.bootstrap": 5, "train.sample_every_n_steps": 0}
    ran = kiln(tmp_path, *said["next"][1:], "--json", overrides=small, api=api)
    assert json.loads(ran.splitlines()[-1])["status"] == "published"
