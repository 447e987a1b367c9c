"""The output of every short command of `kiln`, with and without a terminal."""

import getpass
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import typer
from kiln_command import environment, python
from store_servers import UrlOf
from terminal import Terminal

from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Away
from configs.load_recipe import load_recipe, recipe_names
from configs.settings.recipe import Model
from flows import doctor
from flows.cli import app, main
from runtimes.contract import Probe
from tasks.publish.registry import Registry

Here = Callable[..., str]  # of conftest.py
SCHEMA = Path(__file__).parents[2] / "docs/recipe.schema.json"
ON_SLICE = """
extends: sd2-v5p
name: on-slice
runtime: xla
store: gs://bucket/store
tpu: {name: kiln, zone: us-east5-a, accelerator_type: v5p-16}
"""
#: What only tells, by its name; {place} is a folder with a store, a recipe and a model in it.
TELLING = {
    "recipes": ["recipes"],
    "recipes NAME": ["recipes", "digits"],
    "recipes --schema": ["recipes", "--schema"],
    "doctor": ["doctor"],
    "tpu": ["tpu", "{place}/on-slice.yaml"],
    "ls": ["ls", "--store", "{place}/store"],
    "show": ["show", "publish/", "--store", "{place}/store"],
    "verify": ["verify", "--store", "{place}/store"],
    "gc": ["gc", "--store", "{place}/store"],
    "import": ["import", "kohya", "{place}/store"],
    "new": ["new", "{place}/nowhere"],
    "plan": ["plan", "digits"],
    "data": ["data", "digits", "--skip-page"],
    "run": ["run", "digits", "-o", "train.stpes=1"],
    "retrain": ["retrain", "digits", "-o", "retrain.reply=1"],
    "sweep": ["sweep", "digits", "--set", "encode.resolution=32,64"],
    "place": ["place", "digits"],
    "generate": ["generate", "digits", "seven", "-o", "n_sample=1"],
    "promote": ["promote", "tiny", "v9", "--store", "{place}/store"],
    "reject": ["reject", "tiny", "v1", "--reason", "thin", "--store", "{place}/store"],
    "rollback": ["rollback", "tiny", "--store", "{place}/store"],
    "history": ["history", "tiny", "--store", "{place}/store"],
    "mcp": ["mcp", "--folder", "{place}/nowhere"],
    "push": ["push", "tiny@v9", "me/tiny", "--store", "{place}/store"],
    "sign": ["sign", "tiny@v9", "--key", "{place}/key", "--store", "{place}/store"],
}
#: Here they are wrong input: nothing is done.
WRONG = {
    *("import", "new", "plan", "data", "run", "retrain", "sweep", "place", "generate"),
    *("promote", "reject", "rollback", "push", "sign", "mcp"),
}


def made(store: Store, stage: str) -> Artifact:
    draft = store.draft(KeyParts(stage, 1, {}, {}))
    draft.write("model_index.json", b"{}")
    facts = {"created": "2026-01-01", "host": "here", "seconds": 1.0, "reason": "none was there"}
    return draft.commit({}, facts)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a published model and garbage, and a recipe for a slice."""
    store = Store(str(tmp_path / "store"))
    registry = Registry(f"{store.root}/registry", "tiny")
    registry.promote(registry.publish(made(store, "publish")).name)
    made(store, "encode")
    (tmp_path / "on-slice.yaml").write_text(ON_SLICE, encoding="utf-8")
    monkeypatch.setattr(doctor, "probe_runtime", lambda name: Probe(True, [f"a chip of {name}"]))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Free())
    return tmp_path


class Free:
    """A disk with constant free space."""

    free = 10**12


def test_every_command_has_a_test() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert known.keys() == {words[0] for words in TELLING.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TELLING)
def test_a_command_prints_the_same_at_a_terminal(
    name: str, place: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word.format(place=place) for word in TELLING[name]]
    said = here(*words, code=2 if name in WRONG else 0)
    assert said.strip() and "\x1b" not in said
    with Terminal() as terminal:
        with open(terminal.end, "w", closefd=False) as stream, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream)
            patched.setattr(sys, "stderr", stream)
            with pytest.raises(SystemExit):
                main()
        terminal.close()
        assert terminal.text == said


def test_a_slash_at_the_end_of_the_store_shows_the_same_models(here: Here, url_of: UrlOf) -> None:
    store = Store(url_of("memory"))
    registry = Registry(store.url_of("registry"), "tiny")
    registry.promote(registry.publish(made(store, "publish")).name)
    told = here("history", "tiny", "--store", store.url)
    assert here("history", "tiny", "--store", f"{store.url}/") == told
    assert here("promote", "tiny", "v1", "--store", f"{store.url}/").startswith("tiny: v1")


def test_a_person_decides_on_a_candidate_and_the_history_names_the_login(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "anna")
    store = Store(str(tmp_path))
    registry = Registry(store.url_of("registry"), "tiny")
    stored = ["--store", store.url]

    def propose(stage: str) -> None:
        version = registry.publish(made(store, stage))
        champion = registry.history().champion
        registry.propose(version, 1.0, expected=champion, bound=True, hub=None)

    propose("publish")
    assert "tiny v1" in here("ls", *stored) and "candidate" in here("ls", *stored)
    said = here("history", "tiny", *stored)
    assert "v1    candidate until " in said and "v1 awaits approval" in said.splitlines()[-1]
    assert here("promote", "tiny", "v1", *stored).startswith("tiny: v1 is the champion")
    propose("encode")
    reject = ["reject", "tiny", "candidate", "--reason", "too thin", "--by", "ben", *stored]
    assert here(*reject) == "tiny: v2 is rejected; the champion stays\n"
    said = here("history", "tiny", *stored)
    assert "v1    approved (by anna)\n" in said and "v2    rejected: too thin (by ben)\n" in said
    told = json.loads(here("history", "tiny", "--json", *stored))
    assert [move["by"] for move in told["history"]] == ["anna"]
    assert told["candidates"][1]["rejected"].keys() == {"by", "why", "at"}
    assert "v2 was rejected by ben" in here("promote", "tiny", "candidate", *stored, code=2)
    monkeypatch.setattr(getpass, "getuser", MagicMock(side_effect=KeyError("uid")))
    assert "--by NAME" in here("promote", "tiny", "v1", *stored, code=2)


def test_a_closed_stdout_is_open_for_the_processes_of_a_run() -> None:
    """Prefect's server, for one, does not start without."""
    child = "import sys; sys.exit(sys.stdout is None)"
    code = f"""
import atexit, os, subprocess, sys
from flows.cli import main
atexit.register(lambda: os._exit(subprocess.call([sys.executable, "-c", {child!r}])))
sys.argv = ["kiln", "--version"]
main()
"""
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code])
    assert done.returncode == 0


def test_every_recipe_is_listed_with_its_description(here: Here) -> None:
    lines = here("recipes").splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    for line in lines:
        assert line.split(None, 1)[1] == load_recipe(line.split()[0]).description


def test_a_printed_recipe_can_be_run(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "printed.yaml"
    path.write_text(here("recipes", "digits", "-o", "train.steps=7"), encoding="utf-8")
    assert load_recipe(str(path)) == load_recipe("digits", {"train.steps": 7})


@pytest.mark.parametrize("command", ["recipes", "plan", "tpu"])
def test_a_setting_without_effect_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    planned = []
    monkeypatch.setattr("flows.show_plan.show_plan", lambda given, *_, **__: planned.append(given))
    words, said = [command, str(place / "on-slice.yaml")], []
    for more in ([], ["-o", "train.lora.rank=7"]):
        monkeypatch.setattr("sys.argv", ["kiln", *words, *more])
        with pytest.raises(SystemExit):
            main()
        said.append(capsys.readouterr().err)
    assert said == ["", "warning: train.lora has no effect with train.method: full\n"]
    assert all(given == load_recipe(words[1]) for given in planned)  # as a run trains it


def test_the_printed_schema_is_that_of_the_docs(here: Here) -> None:
    assert json.loads(here("recipes", "--schema")) == json.loads(SCHEMA.read_bytes())


def test_the_gcloud_commands_are_printed(here: Here, place: Path) -> None:
    lines = here("tpu", str(place / "on-slice.yaml")).splitlines()
    reasons, commands = lines[::2], [shlex.split(line) for line in lines[1::2]]
    assert all(reason.startswith("# ") for reason in reasons)
    assert all(command[0] == "gcloud" for command in commands)
    verbs = [command[4] for command in commands]
    assert verbs[:2] == ["describe", "create"] and verbs[-1] == "delete"
    assert "no section `tpu`" in here("tpu", "digits", code=2)


@pytest.mark.parametrize("option", ["--gpu", "--topology"])
def test_a_plan_is_for_one_accelerator(here: Here, option: str) -> None:
    said = here("plan", "digits", option, "24GB", option, "v5p-8", code=2)
    assert f"{option} is given 2 times: plan one after another" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "H100", "--hosts", "3"], "must be a multiple of processes (3, on all hosts)"),
        (["--gpu", "H100", "--network", "100GB"], "write gigabits per second, such as 100Gb"),
        (["--topology", "v5p-8", "--hosts", "2"], "--hosts and --network are for --gpu"),
    ],
)
def test_hosts_of_a_plan_are_those_of_gpus(here: Here, options: list[str], said: str) -> None:
    assert said in " ".join(here("plan", "digits", *options, code=2).split())


@pytest.mark.slow
def test_a_recipe_of_a_shipped_base_is_planned_without_the_hub(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the configs that come with it, with any settings."""

    def away(model: Model, **_: object) -> Path:
        raise Away(f"model {model.path}: the hub cannot be reached")

    monkeypatch.setattr("tasks.plan.plan.resolve_base", away)
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: sd15-lora\nname: mine\ntrain: {sample_every_n_steps: 0}\n")
    to_gpu = ("--gpu", "8GB", "-o", f"store={tmp_path}/store")
    found = here("plan", str(mine), *to_gpu)
    assert re.search(r"^memory    [\d.]+ GiB of 7.36 GiB: fits, [\d.]+ GiB spare$", found, re.M)
    fork = here("plan", str(mine), *to_gpu, "-o", "model.path=someone/else", code=1)
    assert fork.endswith("model someone/else: the hub cannot be reached\n")


@pytest.mark.slow
def test_a_plan_for_many_chips_needs_libtpu(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.plan.tpu.compiler_folder", lambda: None)
    said = here("plan", "digits", "--topology", "v5p-64", "-o", f"store={tmp_path}", code=2)
    assert said.splitlines()[-1] == ("kiln: topology v5p-64: 32 chips need libtpu: make setup-plan")


def stages(store: Store) -> set[str]:
    return {artifact.stage for artifact in store.artifacts()}


def test_garbage_is_listed_and_then_deleted(here: Here, place: Path) -> None:
    store = Store(str(place / "store"))
    told = here("gc", "--hours", "0", "--store", store.root).splitlines()
    assert told[-1].startswith("1 thing, ") and told[0].split()[:2] == ["artifact", "encode"]
    assert stages(store) == {"encode", "publish"}
    assert (
        here("gc", "--hours", "0", "--delete", "--store", store.root)
        .splitlines()[-1]
        .startswith("deleted 1")
    )
    assert stages(store) == {"publish"}
    told = here("gc", "--hours", "0", "--delete", "--store", store.root).splitlines()
    assert told[0].startswith("kept: 1 artifact that published models or runs of the last 30 days ")
    assert told[1:] == ["deleted 0 things, 0 B"]


def test_the_exit_code_reports_a_damaged_store(here: Here, place: Path) -> None:
    assert "damaged" not in here("verify", "--store", f"{place}/store")
    (victim,) = (place / "store/encode").glob("*/model_index.json")
    victim.write_bytes(b"[]")
    said = here("verify", "--store", f"{place}/store", code=1)
    told = [line for line in said.splitlines() if not line.endswith("whole")]
    assert [line.split()[0] for line in told[:-1]] == ["encode"]
    assert told[-1] == "3 checked: 1 damaged"


def test_commands_on_a_store_speak_json(here: Here, place: Path) -> None:
    stored = ["--json", "--store", f"{place}/store"]
    (found,) = (place / "store/encode").glob("*")

    told = json.loads(here("history", "tiny", *stored))
    assert (told["name"], told["champion"]) == ("tiny", "v1")
    assert [move["version"] for move in told["history"]] == ["v1"]

    told = json.loads(here("verify", *stored))
    names = [(one["kind"], one["name"]) for one in told["checked"]]
    assert ("encode", found.name) in names and ("model", "tiny v1") in names and told["whole"]
    told = json.loads(here("verify", "tiny", *stored))
    only = {"kind": "model", "name": "tiny v1", "fault": None}
    assert told == {"whole": True, "checked": [only], "signed_by": None}

    told = json.loads(here("gc", "--hours", "0", *stored))
    (garbage,) = told["garbage"]
    assert (garbage["stage"], garbage["key"]) == ("encode", found.name)
    assert told["bytes"] == garbage["bytes"] > 0 and not told["deleted"]
    assert (told["days"], told["hours"], told["kept"]) == (30, 0, 1)
    assert told["kept_bytes"] > 0
    assert (found / "manifest.json").exists()
    assert json.loads(here("gc", "--hours", "0", "--delete", *stored))["deleted"]
    assert not (found / "manifest.json").exists()

    (place / "store/registry/tiny/v1/model_index.json").write_bytes(b"[]")
    for words in (["verify"], ["verify", "tiny"]):
        told = json.loads(here(*words, *stored, code=1))
        (fault,) = [one["fault"] for one in told["checked"] if one["fault"] is not None]
        assert "model_index.json" in fault and not told["whole"]


#: `kiln`, then a child process that prints as little careful code does.
PRINTING = """
import subprocess, sys
from contextlib import suppress
from flows.cli import main
with suppress(SystemExit):
    main()
subprocess.run([sys.executable, "-c", "print(chr(0x65e5))"], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "terminal",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}],
    ids=["latin-1", "ascii"],
)
def test_no_character_ends_a_command_or_its_child_process(
    tmp_path: Path, terminal: dict[str, str]
) -> None:
    recipe = tmp_path / "sun.yaml"
    recipe.write_text("extends: digits\nname: sun\ndescription: \u65e5\n", encoding="utf-8")
    env = {**environment(tmp_path), **terminal}
    done = python("-c", PRINTING, "recipes", str(recipe), env=env)
    assert done.returncode == 0, done.stderr
    assert "description: \\u65e5\n" in done.stdout
    printed = done.stdout.splitlines()[-1]
    assert printed == ("\\u65e5" if "LC_ALL" in terminal else "\u65e5")
