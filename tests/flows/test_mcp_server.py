"""Agents use Kilnworks by the official client of the Model Context Protocol, over stdio."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from kiln_command import ROOT, command, environment
from mcp import Client, StdioServerParameters, stdio_client

from flows import background_commands, mcp_server
from flows.background_commands import Command
from flows.cli import app
from flows.mcp_server import server

#: Tools that change something.
CHANGING = {"new", "run", "generate", "stop"}


async def ask(client: Client, tool: str, **arguments: Any) -> Any:
    """The result of a tool; of an error its one line, after the words of the SDK."""
    answer = await client.call_tool(tool, arguments)
    if not answer.is_error:
        return answer.structured_content
    return answer.content[0].text.removeprefix(f"Error executing tool {tool}: ")  # type: ignore[union-attr]


async def read(client: Client, tool: str, **arguments: Any) -> Any:
    """The same of a tool that only reads, and answers late on a busy machine."""
    answer = await ask(client, tool, **arguments)
    while isinstance(answer, dict) and answer.get("state") == "running":
        answer = await ask(client, "status", id=answer["id"], wait_seconds=50)
    is_late = isinstance(answer, dict) and "state" in answer
    return answer.get("result") or answer["error"] if is_late else answer


def over_stdio(
    talk: Callable[[Client], Awaitable[Any]], home: Path, *options: str, api: str | None = None
) -> Any:
    """What `talk` returns of a client of a new `kiln mcp`, whose cache is below `home`."""

    async def connect() -> Any:
        program, *words = command("mcp", *options)
        env = environment(home, api) | {"PYTHONPATH": str(ROOT)}
        process = StdioServerParameters(command=program, args=words, env=env, cwd=ROOT)
        async with Client(stdio_client(process)) as client:
            return await talk(client)

    return asyncio.run(connect())


def with_client(talk: Callable[[Client], Awaitable[Any]], *, allow_runs: bool = False) -> Any:
    """What `talk` returns of a client of the server, in this process."""

    async def connect() -> Any:
        async with Client(server(allow_runs=allow_runs)) as client:
            return await talk(client)

    return asyncio.run(connect())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_each_tool_is_a_command_and_says_when_to_use_it() -> None:
    tools = with_client(lambda client: client.list_tools()).tools
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {tool.name for tool in tools} - commands.keys() == {"status", "stop"}
    for tool in tools:
        described = (p.get("description") for p in tool.input_schema["properties"].values())
        assert all(described) and len(tool.description.split()) > 10, tool.name
        assert tool.annotations.read_only_hint == (tool.name not in CHANGING)
        assert tool.annotations.open_world_hint == (tool.name in {*CHANGING, "doctor"})


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run", {"recipe": "nowhere"}),
        ("generate", {"model": "./nowhere", "prompts": ["a seven"]}),
        ("new", {"pictures": "./nowhere"}),
        ("stop", {"id": "run-00000000"}),
    ],
)
def test_nothing_changes_unless_runs_are_allowed(
    tool: str, arguments: dict[str, Any], cache: Path
) -> None:
    error = with_client(lambda client: ask(client, tool, **arguments))
    assert error == "this server only reads: start it as `kiln mcp --allow-runs`"
    assert not cache.exists()


def test_a_misspelt_argument_is_refused() -> None:
    """Ignored settings would be a run of others."""
    error = with_client(
        lambda client: ask(client, "run", recipe="nowhere", overrides={"train.steps": 1}),
        allow_runs=True,
    )
    assert "overrides" in error and "not permitted" in error


@pytest.mark.parametrize("argument", ["--help", "--html=/etc/hosts", "-o"])
def test_no_argument_is_an_option(argument: str) -> None:
    """`kiln data --html=FILE` would write a file for a server that only reads."""
    group = typer.main.get_command(app)
    words = mcp_server._words("data", argument, flags=["--skip-page"], settings={"a.b": "--html"})
    context = group.make_context("kiln", words)
    name, data, rest = group.resolve_command(context, words)  # type: ignore[attr-defined]
    parameters = data.make_context(name, rest, parent=context).params
    assert parameters["recipe"] == argument and parameters["override"] == ['a.b="--html"']
    assert parameters["html"] == Path("data.html")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Command]]:
    """`fake(code)` starts Python code instead of `kiln`; it is killed at the end of the test."""
    made: list[Command] = []

    def start(code: str) -> Command:
        popen = background_commands.subprocess.Popen
        with monkeypatch.context() as patch:
            words = [sys.executable, "-c", code]
            patch.setattr(
                background_commands.subprocess, "Popen", lambda _, **more: popen(words, **more)
            )
            made.append(background_commands.start(["run", "digits"]))
        return made[-1]

    yield start
    for one in made:
        if (process := one.process()) is not None:
            process.kill()


def ended(one: Command) -> Any:
    """The state of a command after its end, as the tool `status` tells it."""
    return with_client(lambda client: ask(client, "status", id=one.id, wait_seconds=30))


def test_status_has_the_report_of_the_last_line(fake: Callable[[str], Command]) -> None:
    state = ended(fake("""print('noise\\n{"status": "published"}')"""))
    assert (state["state"], state["result"]) == ("ended", {"status": "published"})


def test_status_has_the_error_of_a_failed_run(fake: Callable[[str], Command]) -> None:
    state = ended(fake("""print('{"status": "failed", "error": "no disk: free 2 GB"}')"""))
    assert (state["state"], state["error"]) == ("failed", "no disk: free 2 GB")


def test_status_has_the_error_of_a_command_without_report(fake: Callable[[str], Command]) -> None:
    state = ended(fake("import sys; sys.exit('kiln: interrupted; run it again')"))
    assert (state["state"], state["error"]) == ("failed", "interrupted; run it again")


def test_a_running_command_shows_its_newest_lines_and_stops(fake: Callable[[str], Command]) -> None:
    code = "import sys, time; print(*range(9), sep='\\n', file=sys.stderr, flush=True)\n"
    one = fake(code + "time.sleep(600)")
    while "8" not in one.log():
        time.sleep(0.05)

    async def talk(client: Client) -> Any:
        return await ask(client, "status", id=one.id), await ask(client, "stop", id=one.id)

    running, stopped = with_client(talk, allow_runs=True)
    assert (running["state"], running["progress"]) == ("running", list("45678"))
    assert stopped["state"] == "failed" and one.process() is None


def test_another_process_of_the_same_number_is_not_the_command(
    fake: Callable[[str], Command],
) -> None:
    one, other = fake(""), fake("import time; time.sleep(600)")
    ended(one)
    path = one.folder / "command.json"
    earlier = {"pid": other.facts["pid"], "created": one.facts["created"] - 1}
    path.write_text(json.dumps({**one.facts, **earlier}), encoding="utf-8")
    assert other.process() is not None and one.process() is None


def test_an_unknown_id_is_refused(fake: Callable[[str], Command]) -> None:
    one = fake("")
    for id in ("run-00000000", f"../commands/{one.id}"):
        error = with_client(lambda client, id=id: ask(client, "status", id=id))
        assert error == f"id {id!r} is unknown: {one.id}"


@pytest.mark.slow
def test_an_agent_asks_over_stdio(tmp_path: Path) -> None:
    async def talk(client: Client) -> Any:
        return await asyncio.gather(
            read(client, "recipes"),
            read(client, "recipes", name="digits", settings={"train.steps": 7}),
            read(client, "plan", recipe="digits", gpu="24GB"),
            read(client, "plan", recipe="digits", gpu="24GB", settings={"train.stpes": 7}),
            read(client, "doctor"),
            read(client, "show", what="--help"),
        )

    listed, digits, plan, wrong, doctor, shown = over_stdio(talk, tmp_path)
    assert "chalk" in listed["recipes"]["digits"]
    assert digits["train"]["steps"] == 7
    assert plan["fits"] and plan["recipe"] == "digits"
    assert wrong == "override train.stpes: unknown setting (did you mean train.steps?)"
    assert doctor["runtimes"]["torch"]["available"] and "problems" in doctor
    assert shown.startswith("--help: no model")  # no argument is an option


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_outlives_the_server_that_started_it(
    tmp_path: Path, small: dict[str, Any], api: str
) -> None:
    async def begin(client: Client) -> Any:
        return await ask(client, "run", recipe="digits", settings=small)

    async def follow(client: Client) -> Any:
        state = {"state": "running"}
        while state["state"] == "running":
            state = await ask(client, "status", id=started["id"], wait_seconds=50)
        model = {"model": state["result"]["model"], "prompts": ["a handwritten seven"]}
        settings = {"store": small["store"], "num_images_per_prompt": 1, "num_inference_steps": 2}
        out = str(tmp_path / "outputs")
        return state["result"], await ask(client, "generate", **model, settings=settings, out=out)

    started = over_stdio(begin, tmp_path, "--allow-runs", api=api)
    report, drawn = over_stdio(follow, tmp_path, "--allow-runs", api=api)
    assert started["state"] == "running" and report["status"] == "published"
    assert len([*Path(drawn["result"]["folder"]).glob("**/*.png")]) == 2  # with the grid
