"""A shared server, a small recipe, and `kiln` in this process."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import published as checks
import pytest
import two_hosts
from kiln_command import ROOT, command, environment, run_json
from prefect_server import shared_server

from configs.load_recipe import load_recipe
from flows.cli import EXIT_CODES, main


@pytest.fixture(scope="session")
def api(shared: Path) -> Iterator[str]:
    """URL of a server that all runs share: an own one takes ten seconds."""
    with shared_server(shared / "prefect-server") as url:
        yield url


@pytest.fixture(autouse=True)
def _forked(warm: None) -> None:
    """Flows in this process start their jobs and encoders by forks; commands do not."""


@pytest.fixture(scope="session")
def smallest() -> dict[str, object]:
    """Overrides of `digits` for a whole run in seconds, without gate and smoke test."""
    return {
        "source.count": 60,
        "source.rehearsal": 0,
        "download.shard_size": 20,
        "train.steps": 6,
        "train.global_batch_size": 4,
        "train.checkpointing_steps": 2,
        "train.sample_every_n_steps": 3,
        "evaluate.num_inference_steps": 2,
        "evaluate.prompts.new.images_per_prompt": 2,
        "evaluate.prompts.old.images_per_prompt": 1,
        "evaluate.bootstrap": 10,
        "evaluate.holdout_samples": 4,
        "publish.gate": [],
        "publish.smoke_test": False,
        "publish.require_license": False,  # tiny models have no card
    }


@pytest.fixture
def small(smallest: dict[str, object], tmp_path: Path) -> dict[str, object]:
    """The same, with an own store for the test."""
    return {**smallest, "store": str(tmp_path / "store")}


@pytest.fixture(scope="session")
def published(once: Callable[..., Path], smallest: dict[str, object]) -> Path:
    """A folder with the `store` of a `kiln run` and its report, `report.json`.

    The run had a Prefect server of its own, with its files in `prefect`.
    """

    def make(folder: Path) -> None:
        report = run_json(folder, "digits", {**smallest, "store": str(folder / "store")})
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")

    return once("published-digits", make)


@pytest.fixture
def first(published: Path, tmp_path: Path) -> dict[str, Any]:
    """The report of that run, whose artifacts are in the store of `small`, too."""
    shutil.copytree(published / "store", tmp_path / "store", symlinks=True)
    text = (published / "report.json").read_text(encoding="utf-8")
    report: dict[str, Any] = json.loads(text.replace(f"{published}/", f"{tmp_path}/"))
    return report


@pytest.fixture(scope="session")
def published_report(published: Path) -> checks.Report:
    """The report of the run in `published`, whose latents further trainings take."""
    report: checks.Report = json.loads((published / "report.json").read_bytes())
    return report


@pytest.fixture
def train_longer(
    published_report: checks.Report, smallest: dict[str, Any], tmp_path: Path
) -> two_hosts.Run:
    """`train_longer(name, overrides)` trains in a store of that name; the artifact's folder."""

    def run(name: str, overrides: dict[str, Any]) -> Path:
        recipe = load_recipe("digits", {**smallest, **two_hosts.LONGER, **overrides})
        return checks.train_apart(recipe, published_report, tmp_path / name)

    return run


@pytest.fixture(scope="session")
def undisturbed(
    once: Callable[..., Path], published_report: checks.Report, smallest: dict[str, Any]
) -> bytes:
    """The weights of the same training by two processes of this machine."""

    def make(folder: Path) -> None:
        two = {**smallest, **two_hosts.LONGER, "train.processes": 2}
        trained = checks.train_apart(load_recipe("digits", two), published_report, folder / "store")
        shutil.copy(trained / two_hosts.WEIGHTS, folder / "weights")

    return (once("trained-by-two-processes", make) / "weights").read_bytes()


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that `retrying` asks to wait; it does not. Threads of Prefect sleep, too."""
    found: list[float] = []
    monkeypatch.setattr("artifacts.errors.time", SimpleNamespace(sleep=found.append))
    return found


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Prefect's files and our cache are the test's own; `at_home(api)` says which server to use.

    Nothing of the developer's variables and Prefect profile counts, in this process, too.
    """
    given = environment(tmp_path)
    for name in os.environ.keys() - given.keys():
        monkeypatch.delenv(name)
    for name, value in {**given, "PREFECT_LOGGING_LEVEL": "CRITICAL"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(logging, "raiseExceptions", True)  # until `kiln` has failed

    def use(api: str) -> None:
        monkeypatch.setenv("PREFECT_API_URL", api)
        import prefect.context as context  # what it has read before is of other variables

        monkeypatch.setattr(context, "GLOBAL_SETTINGS_CONTEXT", context.root_settings_context())

    logger = logging.getLogger("kiln")
    level, handlers = logger.level, logger.handlers[:]
    yield use
    logging.disable(logging.NOTSET)  # which `kiln` does before it ends
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def here(
    at_home: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """`here(*words)` is `kiln` of tests/kiln_command.py, in this process."""

    def call(
        *words: str, overrides: dict[str, Any] | None = None, code: int = 0, api: str | None = None
    ) -> str:
        if api is not None:
            at_home(api)
        monkeypatch.setattr(sys, "argv", command(*words, overrides=overrides)[2:])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert (end.value.code or 0) == code, said.out + said.err
        if code in EXIT_CODES.values():
            return said.err + said.out
        return said.out if code == 0 else said.err or said.out

    return call


@pytest.fixture
def run_here(here: Callable[..., str], api: str) -> Callable[..., dict[str, Any]]:
    """`run_here(recipe, overrides)` is its report, by a run in this process."""

    def run(recipe: str, overrides: dict[str, Any], until: str = "publish") -> dict[str, Any]:
        said = here("run", recipe, "--json", "--until", until, overrides=overrides, api=api)
        report: dict[str, Any] = json.loads(said.splitlines()[-1])
        return report

    return run
