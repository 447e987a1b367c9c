"""`kiln mcp`: Kilnworks' commands as tools of the Model Context Protocol, for AI agents.

Each tool is the command of its name with `--json`, in a process of its own. The official SDK
(https://github.com/modelcontextprotocol/python-sdk) speaks the protocol. Tools that only read are
always there; those that use an accelerator or change something need `--allow-runs`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp_types import ToolAnnotations
from pydantic import Field

from configs.errors import Refused
from configs.settings.recipe import StageName
from flows import background_commands
from flows.background_commands import LINES, Command
from tasks.code_version import version

#: Time limit in seconds of an answer: many clients give up after a minute.
ANSWER_SECONDS = 50
#: The same of `run`: within it, wrong input is refused, and a run that reuses all its stages ends.
RUN_SECONDS = 15
POLL_SECONDS = 0.1
NOT_ALLOWED = "this server only reads: start it as `kiln mcp --allow-runs`"
DOCUMENTS = Path(__file__).parents[1]
INSTRUCTIONS = f"""\
Kilnworks fine-tunes diffusion models. A recipe (a name of `recipes`, or the path of a YAML file) \
has all settings of a run: download, encode, train, evaluate, publish.
To train: `recipes` to choose one, or `new` to write one for some pictures, `plan` to see whether \
it fits an accelerator, `doctor` to see what this machine lacks for it, `run` to start it, \
`status` to follow it, `show` for the metrics of the model, `generate` to draw with it.
Write a recipe of your own as a YAML file: `extends: NAME`, then `name` and what differs; or pass \
`settings`. {DOCUMENTS}/docs/settings.md explains each; {DOCUMENTS}/llms.txt lists all pages. \
An answer with `state: running` is no result yet: ask `status` with its id.
Errors are one line: what is wrong, where, and what to do."""

Recipe = Annotated[
    str, Field(description="Name of a recipe, or path of a YAML file, such as mine.yaml.")
]
Settings = Annotated[
    dict[str, Any] | None,
    Field(description='Changed settings by dotted name, such as {"train.steps": 100}.'),
]
StoreUrl = Annotated[str, Field(description="Folder or URL of the store; a recipe's `store`.")]
Id = Annotated[str, Field(description="The id that `run`, `generate` or another tool returned.")]
Function = Callable[..., Awaitable[dict[str, Any]]]
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
ASKS = ToolAnnotations(read_only_hint=True, open_world_hint=True)  # sources, hubs and hosts
WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=True)


async def recipes(
    name: Annotated[str | None, Field(description="Resolve this recipe; none: list all.")] = None,
    settings: Settings = None,
) -> dict[str, Any]:
    """List the recipes with a sentence about each, or return one with every setting it has.

    Use it first, to choose a recipe to extend, and to learn the names and values of settings.
    """
    return await _ask("recipes", name, settings=settings)


async def plan(
    recipe: Recipe,
    gpu: Annotated[
        str | None, Field(description="A GPU's memory, such as 24GB, or name, such as RTX 4090.")
    ] = None,
    topology: Annotated[
        str | None, Field(description="Instead of a GPU: a TPU slice, such as v5e-8.")
    ] = None,
    hosts: Annotated[int | None, Field(description="Machines with such GPUs.", ge=1)] = None,
    settings: Settings = None,
) -> dict[str, Any]:
    """Tell whether a recipe fits a GPU or a TPU slice, which need not be here.

    Use it before `run`, or to choose hardware. Returns memory in GiB, hours, disk and cost, as far
    as known. If `fits` is false, `advice` has settings that fit. It may take minutes.
    """
    options = {"--gpu": gpu, "--topology": topology, "--hosts": hosts}
    return await _ask("plan", recipe, options=options, settings=settings)


async def doctor(
    recipe: Annotated[
        str | None, Field(description="Also check what this recipe needs; name or path.")
    ] = None,
    settings: Settings = None,
) -> dict[str, Any]:
    """Report accelerators, software and free disk of this machine, and what a recipe lacks here.

    Use it before a first run, and when a run fails. Each of `findings` has its remedy (`mend`);
    an empty list `problems` means that `run` works here.
    """
    return await _ask("doctor", recipe, settings=settings)


async def ls(store: StoreUrl = "store") -> dict[str, Any]:
    """List the artifacts and published models of a store.

    Use it to find the models that `show` and `generate` take.
    """
    return await _ask("ls", options={"--store": store})


async def show(
    what: Annotated[
        str,
        Field(
            description="A model (digits: its champion, digits@v2), the beginning of an artifact's "
            "key, or with `recipe` a picture: its URL, file or sha256."
        ),
    ],
    recipe: Annotated[str | None, Field(description="The recipe of a picture.")] = None,
    store: StoreUrl = "store",
) -> dict[str, Any]:
    """Show a published model's metrics beside its base and the champion, or an artifact's lineage.

    Use it after a run, to judge the model; with `recipe`, to learn what became of a picture.
    """
    return await _ask("show", what, options={"--recipe": recipe, "--store": store})


async def data(recipe: Recipe, settings: Settings = None) -> dict[str, Any]:
    """Count the pictures of a recipe's newest runs, by stage and by the reason they were left out.

    Use it when fewer pictures were trained on than expected. `kiln data` also writes a page.
    """
    return await _ask("data", recipe, flags=["--skip-page"], settings=settings)


async def status(
    id: Annotated[
        str | None, Field(description="Id of a run or drawing; none: list all of them.")
    ] = None,
    wait_seconds: Annotated[
        int, Field(description="Wait so long for its end.", ge=0, le=ANSWER_SECONDS)
    ] = 0,
) -> dict[str, Any]:
    """Follow what `run`, `generate` or another tool started: its state, progress and result.

    `state` is running, ended (with `result`) or failed (with `error`). Runs go on when this server
    ends, and later servers know them. Runs that a person started are in the Prefect UI.
    """
    if id is None:
        return {"commands": [_state(command) for command in background_commands.started()]}
    command = _find(id)
    await _wait(command, wait_seconds)
    return _state(command)


async def new(
    pictures: Annotated[
        str,
        Field(
            description="Folder of pictures, list (parquet, csv, json lines), tars, or data set of "
            "the hub (owner/name)."
        ),
    ],
    teach: Annotated[
        Literal["subject", "style", "everything"] | None, Field(description="What to teach.")
    ] = None,
    word: Annotated[
        str | None, Field(description="Word of a subject or style, such as ohwx dog.")
    ] = None,
    machine: Annotated[
        str | None,
        Field(description="The machine that trains, if not this one, such as 24GB or 4 x H100."),
    ] = None,
    base: Annotated[
        str | None, Field(description="Base: sdxl, a shipped recipe, a path, or a hub id.")
    ] = None,
    prompts: Annotated[list[str] | None, Field(description="Prompts to judge by.")] = None,
    output: Annotated[
        str | None, Field(description="File of the recipe; none: NAME.yaml here.")
    ] = None,
) -> dict[str, Any]:
    """Write a recipe for a person's pictures, with a plan that it fits the machine.

    Use it where no shipped recipe is about these pictures; `run` takes the file. It may take
    minutes.
    """
    options = {"--teach": teach, "--word": word, "--machine": machine, "--base": base}
    flags = [f"--prompt={prompt}" for prompt in prompts or ()]
    words = _words("new", pictures, options={**options, "--output": output}, flags=flags)
    return await _start(words, ANSWER_SECONDS)


async def run(
    recipe: Recipe,
    settings: Settings = None,
    until: Annotated[StageName, Field(description="The last stage to run.")] = "publish",
    retry_failed: Annotated[
        bool, Field(description="Fetch rows with transient failures again.")
    ] = False,
) -> dict[str, Any]:
    """Start a run of a recipe, which takes minutes to days; returns its id for `status`.

    Use it after `plan` and `doctor`. Finished stages are reused, and a run that was stopped or has
    failed resumes when it is started again. `result.status` is published, or why it is not:
    rejected or undecided by the gate, or awaiting a person's approval.
    """
    flags = ["--retry-failed"] if retry_failed else []
    words = _words("run", recipe, options={"--until": until}, flags=flags, settings=settings)
    return await _start(words, RUN_SECONDS)


async def generate(
    model: Annotated[
        str, Field(description="Published model (digits, digits@v2), folder, hub id or URL.")
    ],
    prompts: Annotated[list[str], Field(description="What to draw.", min_length=1)],
    settings: Annotated[
        dict[str, Any] | None, Field(description='Settings of the drawing, such as {"seed": 7}.')
    ] = None,
    out: Annotated[str, Field(description="Folder for the pictures.")] = "outputs",
) -> dict[str, Any]:
    """Draw pictures of prompts with a model; `result.folder` has them, and a grid of all.

    Use it to look at a published model. Equal settings reuse earlier pictures.
    """
    words = _words("generate", model, *prompts, options={"--out": out}, settings=settings)
    return await _start(words, ANSWER_SECONDS)


async def stop(id: Id) -> dict[str, Any]:
    """Stop a run or drawing that a tool has started; the same call resumes it later."""
    command = _find(id)
    if not await anyio.to_thread.run_sync(command.stop):
        raise ToolError(f"{id} has not ended yet: ask `status`")
    return _state(command)


def _words(
    name: str,
    *arguments: str | None,
    options: Mapping[str, object] | None = None,
    flags: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> list[str]:
    """A command line of `kiln`; no argument can become an option."""
    chosen = [f"{key}={value}" for key, value in (options or {}).items() if value is not None]
    changed = [f"--override={key}={json.dumps(value)}" for key, value in (settings or {}).items()]
    given = [argument for argument in arguments if argument is not None]
    return [name, "--json", *flags, *chosen, *changed, "--", *given]


async def _ask(
    name: str,
    *arguments: str | None,
    options: Mapping[str, object] | None = None,
    flags: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The result of a command that only reads; its state, if it takes longer than an answer may."""
    words = _words(name, *arguments, options=options, flags=flags, settings=settings)
    command = background_commands.start(words)
    await _wait(command, ANSWER_SECONDS)
    state = _state(command)
    if state["state"] == "running":
        return state
    shutil.rmtree(command.folder)
    if "error" in state:
        raise ToolError(state["error"])
    result: dict[str, Any] = state["result"]
    return result


async def _start(words: Sequence[str], seconds: float) -> dict[str, Any]:
    """The state of a new command, after its end or some seconds."""
    command = background_commands.start(words)
    await _wait(command, seconds)
    state = _state(command)
    if "error" in state:
        raise ToolError(state["error"])
    return state


async def _wait(command: Command, seconds: float) -> None:
    """Wait for the end of a command, for some seconds."""
    end = time.monotonic() + seconds
    while command.process() is not None and time.monotonic() < end:
        await anyio.sleep(POLL_SECONDS)


def _state(command: Command) -> dict[str, Any]:
    """Id, words, state and progress of a command, and its result or error."""
    facts = command.facts
    shown = {"id": command.id, "command": facts["words"], "started": facts["started"]}
    if command.process() is not None:
        return {**shown, "state": "running", "progress": command.log()[-LINES:]}
    result = command.result()
    if result is None:
        return {**shown, "state": "failed", "error": command.error()}
    if result.get("status") == "failed":
        return {**shown, "state": "failed", "error": result["error"]}
    return {**shown, "state": "ended", "result": result}


def _find(id: str) -> Command:
    try:
        return background_commands.find(id)
    except Refused as error:
        raise ToolError(str(error)) from None


def _refusing(function: Function) -> Function:
    """A function of the same arguments that does nothing."""

    @wraps(function)
    async def refuse(**_: Any) -> dict[str, Any]:
        raise ToolError(NOT_ALLOWED)

    return refuse


def _tool(function: Function, annotations: ToolAnnotations) -> Tool:
    """The tool of a function. Misspelt arguments are refused: the SDK would ignore them."""
    tool = Tool.from_function(function, annotations=annotations)
    arguments = tool.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    tool.parameters = arguments.model_json_schema(by_alias=True)
    return tool


def server(*, allow_runs: bool) -> MCPServer[Any]:
    """The server with its tools; without `allow_runs`, those that change something refuse."""
    reading: list[Function] = [recipes, plan, ls, show, data, status]
    changing: list[Function] = [new, run, generate, stop]
    if not allow_runs:
        changing = [_refusing(function) for function in changing]
    return MCPServer(
        "kilnworks",
        instructions=INSTRUCTIONS,
        version=version(),
        tools=[
            *(_tool(f, READS) for f in reading),
            _tool(doctor, ASKS),
            *(_tool(f, WRITES) for f in changing),
        ],
        log_level="WARNING",
    )
