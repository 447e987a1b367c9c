"""Run a flow from the command line, with an embedded Prefect server and a progress display.

Prefect's own server serves one run: it is started before the run, and ended with it. The last lines
of a run are its metrics, where its result is, and the commands to go on with.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from random import Random
from tempfile import TemporaryFile
from typing import Any, Literal, TextIO
from urllib.request import getproxies

from rich import progress as rich_progress
from rich.console import Console

from configs.errors import Failed, Refused
from configs.load_recipe import load_recipe, load_trials
from configs.secrets import hide_secrets, one_line, without_secrets
from configs.settings.generate import Generate, read_settings
from configs.settings.recipe import STAGES, Recipe
from flows.command_errors import error_as_json, import_prefect
from tasks import progress
from tasks.build_or_reuse import GRID, REPORT


def start_server() -> None:
    """Start Prefect's own server in a session of its own.

    Ctrl-C, or SIGTERM to the process group as of `timeout`, would otherwise end the server before
    the run. Prefect's client would then retry its last request for a minute, and the run would stay
    *Running* for good.

    Raises:
        Refused: Prefect's home cannot be written.
        Failed: the server did not answer in time.
    """
    check_home()
    port = _free_port()
    early = [_serve(port)]
    # Prefect's client needs this module, too: seconds in which the server's process starts.
    from prefect.server.api import server

    class Server(server.SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            assert self.port is not None
            return early.pop() if early else _serve(self.port)

    own = Server()  # the one instance that Prefect's client asks for
    own.port = port
    try:
        own.start()
    except RuntimeError as error:
        raise Failed(
            f"Prefect's own server did not start ({str(error).rstrip('.')}): run again, or start "
            "a lasting one (`make ui`) and set PREFECT_API_URL"
        ) from error


def check_home() -> None:
    """Raise Refused unless the folder of the server's database can be written.

    Otherwise the server would print its tracebacks until Prefect's time limit.
    """
    from prefect.settings import get_current_settings

    home = get_current_settings().home
    try:
        home.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=home).close()
    except OSError as error:
        raise Refused(
            f"Prefect's own server cannot write {home} ({error.strerror}): set PREFECT_HOME to a "
            "folder that can be written, or PREFECT_API_URL to a server"
        ) from error


def _free_port() -> int:
    """A port outside the range from which the kernel takes those of clients."""
    for port in Random().sample(range(8000, 9000), 1000):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise Failed("Prefect's own server finds no free port from 8000 to 8999: free one")


def _serve(port: int) -> subprocess.Popen[Any]:
    """The process of a server, with the command and variables of Prefect's SubprocessASGIServer."""
    import prefect
    from prefect.settings import get_current_settings

    serve = ["-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    serve += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    serve += ["--lifespan", "on", "--app-dir", str(prefect.__module_path__.parent)]
    process = subprocess.Popen(
        [sys.executable, *serve],
        env={
            **os.environ,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            **get_current_settings().to_environment_variables(exclude_unset=True),
        },
        start_new_session=True,
    )
    _end_after_us(process.pid)
    return process


def _end_after_us(pid: int) -> None:
    """Have the server terminated once this process has ended, whichever signal ends it.

    Prefect stops its server only at an orderly exit; its own handler of SIGTERM prevents that.
    """
    ours, _ = os.pipe()  # its other end closes with this process: nobody else inherits it
    is_server = f"grep -q prefect.server /proc/{pid}/cmdline"  # a number is given again
    subprocess.Popen(
        ["sh", "-c", f"read _; {is_server} && kill {pid}"],
        stdin=ours,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(ours)


def closing_lines(report: dict[str, Any]) -> Iterator[str]:
    """What a report says in words: changes of the source, trials, metrics, and the outcome."""
    if "changes" in report:
        yield from _changes(report)
    if "trials" in report:
        from tasks.compare_sweep_trials import terminal_lines

        yield from terminal_lines(report["trials"], report["sweep"])
    for name, models in report["metrics"].items():
        values = (f"{model} {metric['value']:<10.4g}" for model, metric in models.items())
        yield f"  {name:24} {' '.join(values)}".rstrip()
    if "candidate" in report:
        yield f"{report['status']}: {report['why']}"
        yield f"model:     {report['model']}"
        yield f"report:    {report['model']}/{REPORT}"
    elif report["status"] in ("rejected", "undecided"):
        failed = [rule["rule"] for rule in report["gate"] if not rule["passed"]]
        yield f"{report['status']} by the gate: {'; '.join(failed)}"
        yield f"verdict:   {report['verdict']['uri']}"
        yield f"pictures:  {report['stages']['evaluate']['uri']}/{GRID}"
    elif report["status"] == "unchanged":
        yield f"unchanged: {report['why']}"
    elif report["status"] == "built":
        for name, stage in report["stages"].items():
            yield f"{name:9} {stage['outcome']}: {stage['uri']}"
    else:
        yield f"published: {report['model']}{_other_champion(report)}"
        yield f"report:    {report['model']}/{REPORT}"


def next_commands(report: dict[str, Any], recipe: Recipe, *, has_server: bool) -> Iterator[str]:
    """The commands that draw with a published model, promote or reject it, and show its run.

    Args:
        has_server: whether a Prefect server shows the run already.
    """
    kiln = "kiln" if shutil.which("kiln") else ".venv/bin/kiln"
    place = _place(recipe.store, recipe.publish.registry)
    if report["status"] == "awaiting":
        decided = [recipe.publish.name, report["candidate"]["version"], *place]
        yield f"next:      {shlex.join([kiln, 'promote', *decided])}   # makes it the champion"
        yield f"           {shlex.join([kiln, 'reject', *decided, '--reason', 'TEXT'])}"
    if report["status"] != "published":
        return
    prompts = (text for own in recipe.evaluate.prompts.values() for text in own.texts)
    # The name is enough in the default store, for the champion.
    name = report["model"] if place or _other_champion(report) else recipe.publish.name
    words = [kiln, "generate", name, next(prompts, "a prompt")]
    yield f"next:      {shlex.join(words)}"
    if _other_champion(report):
        version = report["model"].rpartition("/")[2]
        words = [kiln, "promote", recipe.publish.name, version, *place]
        yield f"           {shlex.join(words)}   # makes it the champion"
    if not has_server:
        yield "           make ui   # this run in a browser"


def _place(store: str, registry: str | None) -> list[str]:
    """The options that name a recipe's registry; none for that of the default store."""
    if registry is not None:
        return ["--registry", registry]
    is_default = store == Generate.model_fields["store"].default
    return [] if is_default else ["--store", store]


def _changes(report: dict[str, Any]) -> Iterator[str]:
    changes = report["changes"]
    yield (
        f"source:    {changes['rows']:,} rows, {changes['new_rows']:,} new and "
        f"{changes['removed_rows']:,} removed since {report['start'] or 'no champion'}; "
        f"{changes['kept_shards']:,} shards reused, {changes['new_shards']:,} to build"
    )
    if "samples" in report:
        samples = report["samples"]
        yield (
            f"training:  {samples['steps']:,} steps on {samples['new']:,} new and "
            f"{samples['replayed']:,} old samples"
        )


def _other_champion(report: dict[str, Any]) -> str:
    """The champion if it is not this run's model, for example after a rollback; else empty."""
    move = report["champion"]
    version = report["model"].rpartition("/")[2]
    if move is None or move["version"] == version:
        return ""
    return f"; the champion is {move['version']} ({move['why']})"


logger = logging.getLogger("kiln")


def run(
    flow: Literal["finetune", "retrain", "sweep"],
    *,
    overrides: dict[str, Any],
    as_json: bool,
    **arguments: Any,
) -> dict[str, Any]:
    """Run a flow and print its report; with `as_json`, as JSON on the last line."""
    out = sys.stderr if as_json else sys.stdout
    _say_first(arguments["recipe"], out)
    _prepare_prefect()
    with error_as_json(as_json):
        recipes = _recipes(flow, arguments["recipe"], overrides)  # the file may change later
        has_server = configured_server() is not None
        if not has_server:  # its start takes longer than a report of wrong input
            from flows.run import enter_before_server

            until = arguments.get("until", STAGES[-1])
            for recipe in recipes:
                enter_before_server(recipe, until, arguments.get("force"))
            if len(recipes) > 1:
                from tasks.compare_sweep_trials import check_metric

                check_metric(recipes[0])
    from prefect import tags

    from flows.task_limits import team_tags

    with tags(*team_tags(recipes[0].publish.name)):
        report = _run_flow(flow, as_json, overrides=hide_secrets(overrides), **arguments)
    for line in closing_lines(report):
        print(line, file=out)
    if as_json:
        print(json.dumps(report), flush=True)
    else:
        for line in next_commands(report, recipes[0], has_server=has_server):
            print(line)
    return report


def _say_first(what: str, out: TextIO) -> None:
    """Say that the command works, before imports that take seconds."""
    print(f"checking {what} …", file=out, flush=True)


def _recipes(flow: str, name: str, overrides: dict[str, Any]) -> list[Recipe]:
    """The recipes that a flow runs; for a sweep, those of its trials."""
    if flow == "sweep":
        return [trial.recipe for trial in load_trials(name, overrides)]
    return [load_recipe(name, overrides)]


def generate(*, settings: dict[str, Any], as_json: bool, **arguments: Any) -> None:
    """Run `generate` and print its report."""
    _say_first(without_secrets(arguments["model"]), sys.stderr if as_json else sys.stdout)
    _prepare_prefect()
    with error_as_json(as_json):
        if configured_server() is None:  # as for `run`
            from flows.generate import output_folder
            from tasks.generate import check_here

            drawing = read_settings(arguments["model"], arguments["prompts"], settings)
            check_here(drawing)
            output_folder(arguments["out"])
    report = _run_flow("generate", as_json, settings=hide_secrets(settings), **arguments)
    from flows.generate import print_report

    print_report(report, as_json=as_json)


def _run_flow(name: str, as_json: bool, **arguments: Any) -> dict[str, Any]:
    """Run the flow `name` of the module of that name, and display its progress.

    It uses the configured Prefect server, else one of its own during the run.
    """
    with _Display(as_json=as_json) as display, error_as_json(as_json):
        if (server := configured_server()) is None:
            display.print("starting Prefect (its own server, for this run) …")
            start_server()
        else:
            check_server(server)
        flow = getattr(import_module(f"flows.{name}"), name)
        try:
            report: dict[str, Any] = flow(**arguments)
        except Exception as error:
            from httpx import HTTPError

            from flows.finetune import reports

            if not reports or not isinstance(error, HTTPError):
                raise
            report = reports[-1]  # the model is published, or measured and rejected: that stands
            logger.warning("Prefect does not show the end of the run: %s", one_line(error))
    return report


def _prepare_prefect() -> None:
    """Set Prefect's settings for our commands; Prefect reads them at its first import."""
    # Our display replaces Prefect's log lines; the console of a server would repeat them.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_INTERNAL_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "true")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    # As in pyproject.toml, which Prefect reads only in the checkout.
    codes = os.environ.get("PREFECT_CLIENT_RETRY_EXTRA_CODES", "").split(",")
    os.environ["PREFECT_CLIENT_RETRY_EXTRA_CODES"] = ",".join(sorted({*codes, "500"} - {""}))
    if os.environ.get("PREFECT_API_URL") == "":  # Prefect would ask a server of no address
        del os.environ["PREFECT_API_URL"]
    _bypass_proxy()
    import_prefect()


def _bypass_proxy() -> None:
    """Ask servers of this machine without the proxy of the environment: it cannot reach them."""
    values = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    hosts = [host.strip() for host in ",".join(values).split(",") if host.strip()]
    if getproxies().keys() - {"no"} and "*" not in hosts:  # with others, * counts for less
        hosts = [*dict.fromkeys([*hosts, "127.0.0.1", "localhost"])]
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def configured_server() -> str | None:
    """URL of the server in the environment or in Prefect's profile; None if there is none."""
    if named := os.environ.get("PREFECT_API_URL"):
        return named
    from prefect.settings import get_current_settings

    return get_current_settings().api.url or None


def lasting_server(needed_by: str, otherwise: str = "") -> str:
    """The configured server, which outlives the command. Raises Refused if there is none."""
    if (server := configured_server()) is None:
        raise Refused(
            f"{needed_by} a lasting Prefect server: start it (`make ui`) and set "
            f"PREFECT_API_URL{otherwise}"
        )
    return server


#: Time limit in seconds of the first request; a busy server answers late.
HEALTH_SECONDS = 60.0


def check_server(url: str) -> None:
    """Raise Refused unless a Prefect server answers there within HEALTH_SECONDS."""
    try:
        error = _asked_once(url)
    except Exception as wrong:  # a URL that is none, or certificates that cannot be read
        error = wrong
    if error is not None:
        why = one_line(error)
        raise Refused(
            f"no Prefect server answers at PREFECT_API_URL={without_secrets(url)} ({why}): "
            "start it (`make ui`), or unset the variable: a run then starts its own"
        )


def _asked_once(url: str) -> Exception | None:
    """The error of a request by Prefect's client, with its settings of TLS, users and headers."""
    from prefect import settings
    from prefect.client.orchestration import SyncPrefectClient

    with (
        settings.temporary_settings({settings.PREFECT_CLIENT_MAX_RETRIES: 0}),
        SyncPrefectClient(
            url,
            auth_string=settings.PREFECT_API_AUTH_STRING.value(),
            api_key=settings.PREFECT_API_KEY.value(),
            httpx_settings={"timeout": HEALTH_SECONDS},
        ) as client,
    ):
        # Prefect lets the transport connect four times, each within the time limit.
        transport: Any = client._client._transport_for_url(client.api_url)
        transport._pool._retries = 0
        return client.api_healthcheck()


class _Display(logging.Handler):
    """Prints log lines above progress bars at a terminal; elsewhere each tenth is a line.

    A stage has several phases, such as drawing and measuring pictures: each has a bar of its own.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(logging.INFO)
        self.console = Console(stderr=as_json, highlight=False, soft_wrap=True)
        self.bar: rich_progress.Progress | None = None
        self.rows: dict[str, rich_progress.TaskID] = {}
        self.last: dict[str, tuple[int, int]] = {}  # stage -> done and total

    def __enter__(self) -> _Display:
        if self.console.is_terminal:
            self.bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description:9}"),
                rich_progress.BarColumn(bar_width=30),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TimeElapsedColumn(),
                rich_progress.TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self.bar.start()
        logger.setLevel(logging.INFO)
        logger.propagate = False  # Prefect's console would repeat each line
        logger.addHandler(self)
        progress.listeners.append(self.update)
        return self

    def __exit__(self, *exc: object) -> None:
        progress.listeners.remove(self.update)
        logger.removeHandler(self)
        logger.propagate = True
        if self.bar is not None:
            self.bar.stop()

    def print(self, line: str) -> None:
        self.console.print(line, markup=False)

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        self.print(level + record.getMessage())

    def update(self, stage: str, done: int, total: int, text: str) -> None:
        before, total_before = self.last.get(stage, (0, -1))
        self.last[stage] = done, total
        is_new = total != total_before or done < before
        if self.bar is not None:
            if is_new:
                self.rows[stage] = self.bar.add_task(stage, total=total, text=text)
            self.bar.update(self.rows[stage], completed=done, total=total, text=text)
            return
        is_next_tenth = 10 * done // max(total, 1) != 10 * before // max(total, 1)
        if is_new or is_next_tenth or before == 0 < done:
            has_count = text.startswith(f"{done:,} of {total:,}")
            self.print(f"{stage}: {text if has_count else f'{done}/{total} {text}'.rstrip()}")
