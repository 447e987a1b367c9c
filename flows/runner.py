"""Run the flow from the command line, with Prefect embedded and a progress bar for people."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from configs.schema import StageName
from configs.urls import without_secrets
from tasks import progress


def run(
    recipe: str, overrides: dict[str, Any], until: StageName, *, as_json: bool
) -> dict[str, Any]:
    """Run `finetune` and print how it went; with `as_json`, the report as the last line."""

    def start() -> Any:
        from flows.finetune import finetune

        return finetune(recipe, overrides, until)

    report = _with_prefect(start, as_json=as_json)
    _print_summary(report, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(report), flush=True)
    return report


def generate(*, as_json: bool, **arguments: Any) -> None:
    """Run `generate` with its arguments, and print where the pictures are."""

    def start() -> Any:
        from flows.generate import generate

        return generate(**arguments)

    report = _with_prefect(start, as_json=as_json)
    from flows.generate import print_report

    print_report(report, as_json=as_json)


def _with_prefect(start: Callable[[], Any], *, as_json: bool) -> dict[str, Any]:
    """Start a flow, and show how it goes.

    Uses the Prefect server that is configured, else one of its own for the time of the run.
    """
    # Our own lines say it shorter; the server's are for its own console.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "true")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    with _Display(as_json=as_json) as display:
        if (server := configured_server()) is None:
            display.say("starting Prefect (its own server, for this run) …")
            _start_server()
        else:
            check_server(server)
        try:
            found: dict[str, Any] = start()
        except Exception as error:
            if as_json:
                print(json.dumps({"status": "failed", "error": str(error)}), flush=True)
            raise
    return found


def configured_server() -> str | None:
    """URL of the server that the environment or Prefect's profile names."""
    if (named := os.environ.get("PREFECT_API_URL")) is not None:
        return named
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


def _start_server() -> None:
    """Start Prefect's own server where Ctrl-C does not reach it.

    A server that the same Ctrl-C ends cannot be told that the run has ended: Prefect's client asks
    again for a minute.
    """
    from prefect.server.api.server import SubprocessASGIServer

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # its process inherits that
    try:
        SubprocessASGIServer().start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def check_server(url: str) -> None:
    """Raise ServerAway unless a Prefect server answers there within seconds."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5):
            return
    except (OSError, ValueError) as error:
        raise ServerAway(
            f"no Prefect server answers at PREFECT_API_URL={without_secrets(url)} ({error}): start "
            "it (`make ui`), or unset the variable to use one for the time of the run"
        ) from None


class ServerAway(ValueError):
    """The Prefect server that was asked for is not there."""


class _Display:
    """A progress bar at a terminal, plain lines elsewhere; log lines go above it."""

    def __init__(self, *, as_json: bool) -> None:
        self.console = Console(stderr=as_json, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        self.rows: dict[str, TaskID] = {}
        self.tenths: dict[str, int] = {}

    def __enter__(self) -> _Display:
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description:9}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self.bar.start()
        self._handler = _LinesTo(self)
        logger = logging.getLogger("kiln")
        logger.setLevel(logging.INFO)
        logger.propagate = False  # Prefect's console would say each line again
        logger.addHandler(self._handler)
        progress.listeners.append(self.update)
        return self

    def __exit__(self, *exc: object) -> None:
        progress.listeners.remove(self.update)
        logger = logging.getLogger("kiln")
        logger.removeHandler(self._handler)
        logger.propagate = True
        if self.bar is not None:
            self.bar.stop()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def update(self, stage: str, done: int, total: int, text: str) -> None:
        if self.bar is None:
            tenth = 10 * done // max(total, 1)
            if tenth != self.tenths.get(stage):
                self.tenths[stage] = tenth
                self.say(f"{stage}: {done}/{total} {text}".rstrip())
            return
        if stage not in self.rows:
            self.rows[stage] = self.bar.add_task(stage, total=total, text=text)
        self.bar.update(self.rows[stage], completed=done, total=total, text=text)


class _LinesTo(logging.Handler):
    def __init__(self, display: _Display) -> None:
        super().__init__(logging.INFO)
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        self.display.say(mark + record.getMessage())


def _print_summary(report: dict[str, Any], file: Any) -> None:
    for name, models in report["metrics"].items():
        values = "   ".join(f"{model} {found['value']:.4g}" for model, found in models.items())
        print(f"  {name:24} {values}", file=file)
    if report["status"] == "rejected":
        failed = [rule["rule"] for rule in report["gate"] if not rule["passed"]]
        print(f"refused by the gate: {'; '.join(failed)}", file=file)
    elif report["status"] == "built":
        for name, stage in report["stages"].items():
            print(f"{name:9} {stage['outcome']}: {stage['uri']}", file=file)
    else:
        print(f"published: {report['model']}{_other_champion(report)}", file=file)
        print(f"report:    {report['model']}/report.html", file=file)


def _other_champion(report: dict[str, Any]) -> str:
    """Which version is the champion, if it is not the one of this run: after a rollback, say."""
    move, version = report["champion"], report["model"].rpartition("/")[2]
    if move is None or move["version"] == version:
        return ""
    return f"; the champion is {move['version']} ({move['why']})"
