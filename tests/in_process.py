"""Run flows in the test's own process, where what is proved is not how a process starts or ends."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def finetune(home: Path, recipe: str, overrides: dict[str, Any], api: str) -> dict[str, Any]:
    """The report of a run, as `kiln run --json` prints it.

    Args:
        home: folder of Prefect's results and of our cache.
        api: URL of the Prefect server to use.
    """
    from flows.finetune import finetune as flow

    with _surroundings(home, api):
        report: dict[str, Any] = flow(recipe, overrides)
    return report


def generate(home: Path, model: str, api: str, **arguments: Any) -> Path:
    """The folder of what `kiln generate` has drawn."""
    from flows.generate import generate as flow

    with _surroundings(home, api):
        return Path(flow(model, out=str(home / "outputs"), **arguments)["folder"])


@contextmanager
def _surroundings(home: Path, api: str) -> Iterator[None]:
    from prefect import settings

    here = {
        settings.PREFECT_API_URL: api,
        settings.PREFECT_HOME: home / "prefect",
        settings.PREFECT_LOGGING_LEVEL: "CRITICAL",  # its console says each line of ours again
    }
    with pytest.MonkeyPatch.context() as patch, settings.temporary_settings(here):
        for name in [name for name in os.environ if name.startswith("KILN_")]:
            patch.delenv(name)
        patch.setenv("KILN_CACHE", str(home / "cache"))
        yield
        for handler in logging.getLogger("kiln").handlers:
            handler.flush()  # Prefect's sends what it has while the server is there
