"""Run flows in the test's process, which is faster than a process per run."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def finetune(home: Path, recipe: str, overrides: dict[str, Any], api: str) -> dict[str, Any]:
    """Run the flow `finetune`; its report, as `kiln run --json` prints it.

    Args:
        home: folder of Prefect's results and our cache.
        api: URL of the Prefect server.
    """
    from flows.finetune import finetune as flow

    with _settings_of(home, api):
        report: dict[str, Any] = flow(recipe, overrides)
    return report


def generate(home: Path, model: str, api: str, **arguments: Any) -> Path:
    """Run the flow `generate`; the folder with its pictures."""
    from flows.generate import generate as flow

    with _settings_of(home, api):
        return Path(flow(model, out=str(home / "outputs"), **arguments)["folder"])


@contextmanager
def _settings_of(home: Path, api: str) -> Iterator[None]:
    from prefect import settings

    values = {
        settings.PREFECT_API_URL: api,
        settings.PREFECT_HOME: home / "prefect",
        settings.PREFECT_LOGGING_LEVEL: "CRITICAL",  # its console would repeat our lines
    }
    with pytest.MonkeyPatch.context() as patch, settings.temporary_settings(values):
        for name in [name for name in os.environ if name.startswith("KILN_")]:
            patch.delenv(name)
        patch.setenv("KILN_CACHE", str(home / "cache"))
        yield
        for handler in logging.getLogger("kiln").handlers:
            handler.flush()  # Prefect's handler sends its records while the server runs
