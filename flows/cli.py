"""`kiln`: run recipes, and look after what they made.

The commands on a store's artifacts and on published models precede those that run a recipe.
"""

from __future__ import annotations

import atexit
import getpass
import json
import logging
import os
import re
import select
import shlex
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.exceptions import TyperException

from artifacts.errors import classify
from configs import load_recipe as loading
from configs.errors import Refused, UserError
from configs.secrets import one_line, redact_logs, redacted_errors
from configs.settings import recipe as recipe_settings
from configs.settings.generate import read_settings
from flows.command_errors import error_as_json, import_prefect, usage_error
from flows.import_commands import imports
from flows.new_command import new
from runtimes.detect_hardware import collect_garbage_rarely

FAILED = 1
WRONG_INPUT = 2
#: Status of a report -> exit code, of a model that is not the champion.
EXIT_CODES = {"rejected": 3, "undecided": 4, "awaiting": 5}
INTERRUPTED = 130


commands = typer.Typer(rich_markup_mode=None)
DEFAULT_STORE = "store"


def _existing(param: typer.CallbackParam, url: Any) -> Any:
    """Check that a named store or registry exists: a mistyped registry would count as empty.

    The default store may be missing before the first run.
    """
    if url != param.default:
        from flows.store_commands import check_store

        check_store(url, "registry" if param.name == "registry" else "store")
    return url


Store = Annotated[str, typer.Option("--store", help="Store: folder or URL.", callback=_existing)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Name = Annotated[str, typer.Argument(help="Name of the model in the registry (publish.name).")]
Model = Annotated[
    str,
    typer.Argument(
        help="Published model: name (its champion), name@v2 or name@candidate.", metavar="MODEL"
    ),
]
RegistryUrl = Annotated[
    str | None,
    typer.Option("--registry", help="Registry, if outside the store.", callback=_existing),
]


def _registry_of(store: str, registry: str | None) -> str:
    from tasks.publish.registry import registry_url

    return registry_url(store, registry)


@commands.command(name="ls")
def list_artifacts(
    store: Store = DEFAULT_STORE, registry: RegistryUrl = None, as_json: AsJson = False
) -> None:
    """List artifacts and published models."""
    from flows.store_commands import list_store

    list_store(store, registry, as_json=as_json)


@commands.command()
def show(
    what: Annotated[
        str,
        typer.Argument(
            help="Beginning of an artifact's key or digest, stage/key, model (digits@v2), or with "
            "--recipe a picture: its URL, file or sha256."
        ),
    ],
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Show what this recipe did with a picture.")
    ] = None,
    override: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show an artifact: settings, lineage back to the source, and the reason of its build.

    Of a published model: its metrics beside those of the champion. Of a picture: what became of it
    at each stage of a recipe's newest runs.
    """
    if recipe is not None:
        from flows.data_commands import show_picture

        show_picture(_loaded(recipe, override), recipe, what, as_json=as_json)
        return
    from flows.store_commands import is_published, show_artifact, show_model

    url = _registry_of(store, registry)
    if is_published(url, what):
        show_model(url, what, as_json=as_json)
    else:
        show_artifact(store, what, as_json=as_json)


@commands.command()
def verify(
    what: Annotated[
        str | None,
        typer.Argument(
            help="Beginning of a key or digest, model (digits, digits@v2) or folder; default: "
            "everything."
        ),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="Public key (PEM) that a model must be signed by.")
    ] = None,
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
    as_json: AsJson = False,
) -> None:
    """Re-hash artifacts and published models.

    Exit code: 1 if any is damaged, 2 if a model is not as signed or nothing is there.
    """
    from flows.store_commands import is_published, verify_model, verify_store

    url = _registry_of(store, registry)
    if what is not None and (key is not None or is_published(url, what) or Path(what).is_dir()):
        whole = verify_model(url, what, key, as_json=as_json)
    elif key is not None:
        raise typer.BadParameter("--key needs a model or a folder")
    else:
        whole = verify_store(store, what, registry, as_json=as_json)
    if not whole:
        raise typer.Exit(FAILED)


@commands.command()
def sign(
    model: Model,
    key: Annotated[str, typer.Option("--key", help="Private key (PEM, elliptic curve).")],
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
) -> None:
    """Sign a published model with a local key; KILN_SIGNING_PASSWORD opens an encrypted one."""
    from flows.store_commands import sign_model

    sign_model(_registry_of(store, registry), model, key)


@commands.command()
def push(
    model: Model,
    repo: Annotated[str, typer.Argument(help="Repository on the hub, as owner/name.")],
    public: Annotated[
        bool, typer.Option("--public", help="Create the repository as public, not private.")
    ] = False,
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
) -> None:
    """Push a published model to the Hugging Face hub; only changed files are uploaded.

    The token is that of HF_TOKEN or `hf auth login`.
    """
    from flows.store_commands import push_model

    push_model(_registry_of(store, registry), model, repo, private=not public)


@commands.command()
def history(
    name: Name, store: Store = DEFAULT_STORE, registry: RegistryUrl = None, as_json: AsJson = False
) -> None:
    """List every change of a model's champion, and its candidates."""
    from flows.store_commands import show_history

    show_history(_registry_of(store, registry), name, as_json=as_json)


@commands.command()
def gc(
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
    days: Annotated[float, typer.Option(help="Keep what runs of the last so many days need.")] = 30,
    hours: Annotated[float, typer.Option(help="Keep files of the last so many hours.")] = 24,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is listed.")] = False,
    as_json: AsJson = False,
) -> None:
    """List, or delete with --delete, what no published model and no recent run needs."""
    from flows.store_commands import collect_garbage

    collect_garbage(store, registry, days=days, hours=hours, delete=delete, as_json=as_json)


By = Annotated[str | None, typer.Option("--by", help="Who decides; default: the login name.")]


def _who(by: str | None) -> str:
    try:
        return by or getpass.getuser()
    except KeyError:  # of a user id alone, as in a container
        raise Refused("this user has no login name: say who decides, --by NAME") from None


@commands.command()
def promote(
    name: Name,
    version: Annotated[
        str,
        typer.Argument(help="The version, such as v2; `candidate`: the one that awaits approval."),
    ],
    by: By = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; the history names it.")] = "",
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
) -> None:
    """Make a published version the champion.

    A candidate is refused if another champion came since its gate compared it. Any other version is
    promoted whatever its gate compared it with.
    """
    from tasks.publish.champion_alias import CANDIDATE
    from tasks.publish.register import approve
    from tasks.publish.registry import Registry

    models, who = Registry(_registry_of(store, registry), name), _who(by)
    waiting = models.history().waiting
    if version in (CANDIDATE, waiting and waiting["version"]):
        champion = approve(models, version, who, reason)
    else:
        champion = models.promote(version, reason or "promoted", by=who)
    print(f"{name}: {champion.name} is the champion ({champion.uri})")


@commands.command()
def reject(
    name: Name,
    version: Annotated[str, typer.Argument(help="`candidate`, or its version, such as v2.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; the history names it.")],
    by: By = None,
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
) -> None:
    """Reject the version that awaits approval; runs of its recipe do not offer it again."""
    from tasks.publish.registry import Registry

    models, who = Registry(_registry_of(store, registry), name), _who(by)
    print(f"{name}: {models.reject(version, who, reason)} is rejected; the champion stays")


@commands.command()
def rollback(name: Name, store: Store = DEFAULT_STORE, registry: RegistryUrl = None) -> None:
    """Make the champion before the present one the champion again."""
    from tasks.publish.registry import Registry

    champion = Registry(_registry_of(store, registry), name).rollback()
    print(f"{name}: {champion.name} is the champion again ({champion.uri})")


app = typer.Typer(
    help="From a list of image URLs to a published, evaluated diffusion model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(commands)
RESUME = "interrupted; run the same command to resume"


ReportAsJson = Annotated[
    bool, typer.Option("--json", help="Print the report as one JSON object, on the last line.")
]
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Name of a recipe, or path of a YAML file.")
]


def _overrides(example: str) -> Any:
    words = f"Change a setting, such as {example}; may be repeated."
    return typer.Option("-o", "--override", metavar="KEY=VALUE", help=words)


Overrides = Annotated[list[str] | None, _overrides("train.steps=100")]


def _show_version(asked: bool) -> None:
    if asked:
        from tasks.code_version import version

        print(f"kiln {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version, a digest of the code and, in a checkout, the git commit.",
        ),
    ] = False,
) -> None:
    pass


def _parsed(override: list[str] | None) -> dict[str, Any]:
    return dict(loading.parse_override(text) for text in override or [])


def _loaded(recipe: str, override: list[str] | None) -> recipe_settings.Recipe:
    """A valid recipe, of a command that runs no flow; stderr names its settings without effect."""
    loaded = loading.load_recipe(recipe, _parsed(override))
    for line in recipe_settings.warnings_without_effect(loaded):
        print(f"warning: {line}", file=sys.stderr)
    return loaded


def _run(
    flow: Literal["finetune", "retrain", "sweep"],
    recipe: str,
    override: list[str] | None,
    values: list[str] | None = None,
    *,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a flow; a model that the gate does not let pass is an exit code.

    Wrong input is reported before slow imports and servers.
    """
    with error_as_json(as_json):
        overrides = _parsed(override)
        if flow == "sweep":
            overrides = loading.add_values(overrides, values or ())
            loading.load_trials(recipe, overrides)
        elif flow == "retrain":
            loading.load_retrained(recipe, overrides)
        else:
            loading.load_recipe(recipe, overrides)
    from flows.run_in_terminal import run

    report = run(flow, recipe=recipe, overrides=overrides, as_json=as_json, **options)
    if report["status"] in EXIT_CODES:
        raise typer.Exit(EXIT_CODES[report["status"]])


@app.command()
def run(
    recipe: RecipeArgument,
    override: Overrides = None,
    until: Annotated[
        recipe_settings.StageName, typer.Option("--until", help="The last stage to run.")
    ] = "publish",
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Fetch rows with transient failures again (timeout)."),
    ] = False,
    force: Annotated[
        str | None,
        typer.Option(help="Reason to publish a model that fails the gate; its card names it."),
    ] = None,
    as_json: ReportAsJson = False,
) -> None:
    """Run a recipe: download, encode, train, evaluate, publish; finished stages are reused.

    Exit code: 0 published (or all stages up to --until built), 3 rejected by the gate, 4 undecided
    (too few pictures), 5 awaiting approval, 2 wrong input (nothing was started), 1 failed.
    """
    options: dict[str, Any] = {"until": until, "retry_failed": retry_failed, "force": force}
    _run("finetune", recipe, override, as_json=as_json, **options)


@app.command()
def retrain(
    recipe: RecipeArgument, override: Overrides = None, as_json: ReportAsJson = False
) -> None:
    """Train on new rows of a recipe's source, from the champion; the gate decides on promotion.

    Exit code: 0 published or unchanged, 3 rejected by the gate, 4 undecided (too few pictures), 5
    awaiting approval, 2 wrong input (nothing was started), 1 failed.
    """
    _run("retrain", recipe, override, as_json=as_json)


@app.command()
def sweep(
    recipe: RecipeArgument,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,...",
            help="Values to try, such as train.learning_rate=1e-4,3e-5; may be repeated.",
        ),
    ] = None,
    override: Overrides = None,
    as_json: ReportAsJson = False,
) -> None:
    """Train a recipe once per combination of values; the best model goes to the gate.

    --set adds to the recipe's `sweep.values`. Exit codes are those of `kiln run`.
    """
    _run("sweep", recipe, override, values, as_json=as_json)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="Published model (digits, digits@v2), folder, hub id or URL.")
    ],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts to sample.")] = None,
    file: Annotated[
        str | None, typer.Option("--from-file", help="Text file with one prompt per line.")
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            help="Reference picture of every prompt, for edit models; repeat it for more.",
            metavar="FILE",
        ),
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            "--control",
            help="Control picture of a ControlNet; several times: one for each prompt.",
            metavar="FILE",
        ),
    ] = None,
    override: Annotated[list[str] | None, _overrides("seed=7")] = None,
    out: Annotated[str, typer.Option(help="Output folder for the pictures.")] = "outputs",
    skip_grid: Annotated[bool, typer.Option("--skip-grid", help="Leave out the grid.")] = False,
    skip_save: Annotated[
        bool, typer.Option("--skip-save", help="Leave out the single pictures.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Sample pictures of prompts from a model; equal settings reuse earlier pictures.

    docs/settings.md lists the settings of -o.
    """
    with error_as_json(as_json):  # report wrong input before servers start
        settings = _parsed(override)
        if file is not None and "file" in settings:
            raise Refused("generate: --from-file and -o file exclude each other")
        if reference and "references" in settings:
            raise Refused("generate: --reference and -o references exclude each other")
        settings |= {} if file is None else {"file": file}
        settings |= {"references": reference} if reference else {}
        if control and "control" in settings:
            raise Refused("generate: --control and -o control exclude each other")
        settings |= {"control": control} if control else {}
        if not prompts and "file" not in settings:
            raise Refused("generate: it has no prompt: give one, or --from-file")
        read_settings(model, prompts, settings)
    from flows import run_in_terminal

    skipped = {"skip_grid": skip_grid, "skip_save": skip_save}
    run_in_terminal.generate(
        model=model, prompts=prompts, settings=settings, out=out, as_json=as_json, **skipped
    )


@app.command()
def plan(
    recipe: RecipeArgument,
    topology: Annotated[
        list[str] | None,
        typer.Option(
            "--topology",
            help="TPU slice, such as v5p-8, v4-32, v5e-8 or v6e-16; default: that of recipe.tpu.",
            metavar="NAME",
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            help="GPU instead: its memory, such as 24GB, or name, such as H100.",
            metavar="GPU",
        ),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Machines with such GPUs, each with train.processes of them.")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Network of each machine, in bits per second; default: plan.network_gbits.",
            metavar="100Gb",
        ),
    ] = None,
    override: Overrides = None,
    search: Annotated[
        bool, typer.Option("--largest", help="Search for the largest batch that fits.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan training for a TPU slice or a GPU, which need not be here: memory, time and cost.

    Exit code: 0 it fits, 2 it does not; the message has the largest batch, or settings, that do.
    """
    places = _once("--topology", topology), _once("--gpu", gpu)
    if places[1] is None and (hosts is not None or network is not None):
        raise typer.BadParameter(
            "--hosts and --network are for --gpu; a slice's name has its hosts"
        )
    changed = [*(override or [])]
    if hosts is not None:
        changed.append(f"train.hosts={hosts}")
    if network is not None:
        changed.append(f"plan.network_gbits={_gbits(network)}")
    loaded = recipe_settings.with_defaults_without_effect(_loaded(recipe, changed))
    from flows.show_plan import show_plan

    show_plan(loaded, *places, search=search, as_json=as_json)


def _gbits(text: str) -> str:
    """The number of a network's rate, in Gbit/s. Raises BadParameter for bytes and other units."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:Gb|Gbit|Gbps)(?:/s)?", text)
    if number is None:
        raise typer.BadParameter(f"--network {text}: write gigabits per second, such as 100Gb")
    return number[1]


def _once(option: str, values: list[str] | None) -> str | None:
    """The value of an option; Typer would take the last of several without a word."""
    if values and len(values) > 1:
        raise typer.BadParameter(f"{option} is given {len(values)} times: plan one after another")
    return values[0] if values else None


@app.command()
def data(
    recipe: RecipeArgument,
    override: Overrides = None,
    html: Annotated[Path, typer.Option("--html", help="File of the page.")] = Path("data.html"),
    skip_page: Annotated[bool, typer.Option("--skip-page", help="Print the counts alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count pictures by stage and reason, and write a page with examples; nothing is built.

    They are those of the recipe's newest runs.
    """
    loaded = _loaded(recipe, override)
    from flows.data_commands import show_data

    show_data(loaded, recipe, None if skip_page else html, as_json=as_json)


@app.command()
def place(
    recipe: RecipeArgument,
    override: Overrides = None,
    folder: Annotated[
        str | None,
        typer.Option(help="Folder of Kilnworks on the workers' machines; default: this checkout."),
    ] = None,
    accelerators: Annotated[
        int | None, typer.Option(min=1, help="Stages with an accelerator at a time, of all runs.")
    ] = None,
) -> None:
    """Deploy stages to the work pools of a recipe's `place`; runs then send them there."""
    loaded = loading.load_recipe(recipe, _parsed(override))
    import_prefect()
    from flows.work_pools import deploy_stages

    deploy_stages(loaded.place, folder, accelerators)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe, resolved.")] = None,
    override: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with Kilnworks, or print one with everything it extends."""
    if name is None and override:
        raise typer.BadParameter("-o needs a recipe: kiln recipes NAME -o KEY=VALUE")
    if schema and name is not None:
        raise typer.BadParameter("--schema is of all recipes: give no name")
    if schema:
        print(json.dumps(loading.json_schema(), indent=1))
    elif name is not None:
        text = loading.dump(_loaded(name, override))
        print(json.dumps(loading.parse_yaml(text)) + "\n" if as_json else text, end="")
    else:
        known = {n: loading.load_recipe(n).description for n in loading.recipe_names()}
        lines = (f"{name:16} {description}" for name, description in known.items())
        print(json.dumps({"recipes": known}) if as_json else "\n".join(lines))


app.add_typer(imports, name="import")
app.command()(new)


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Also check what this recipe needs.")
    ] = None,
    override: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and a recipe's model, source and store; problems have a remedy.

    Neither pictures nor weights are fetched. Exit code: 0 ready, 1 a problem, 2 wrong input.
    """
    checked = None if recipe is None else loading.load_recipe(recipe, _parsed(override))
    if recipe is None and override:
        raise typer.BadParameter("-o needs a recipe: kiln doctor RECIPE -o KEY=VALUE")
    import_prefect()
    from flows.doctor import examine

    arguments = [recipe or "", *(word for setting in override or () for word in ("-o", setting))]
    if not examine(checked, arguments, as_json=as_json):
        raise typer.Exit(FAILED)


@app.command()
def tpu(recipe: RecipeArgument, override: Overrides = None) -> None:
    """Print the gcloud commands of a recipe's run on a slice; none is executed."""
    loaded = _loaded(recipe, override)
    if loaded.tpu is None:
        raise Refused(f"recipe {loaded.name}: no section `tpu` (see docs/tpu.md)")
    from tasks.hosts.gcloud import hosts_of, list_commands

    hosts = hosts_of(loaded.tpu, loaded.train.hosts)
    grace = loaded.train.grace_seconds
    for why, command in list_commands(loaded.tpu, loaded.runtime, hosts, grace):
        print(f"# {why}\n{shlex.join(command)}")


@app.command()
def mcp(
    allow_runs: Annotated[
        bool, typer.Option("--allow-runs", help="Also allow runs, drawing and new recipes.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Working folder, with recipes and store; default: this one.")
    ] = None,
) -> None:
    """Serve the commands to an AI agent, by the Model Context Protocol on stdin and stdout.

    The agent's program starts this command. It only reads without --allow-runs.
    """
    if folder is not None:
        try:
            os.chdir(folder)
        except OSError as error:
            raise Refused(f"--folder {folder}: {error.strerror}: name an existing folder") from None
    from flows.mcp_server import server

    server(allow_runs=allow_runs).run()


def _open_closed_streams() -> None:
    """Discard what goes to a stream that the caller has closed (`>&-`).

    A file of ours, or a socket, would get its number, and what a child process prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(nothing, nothing == number)
            setattr(sys, name, os.fdopen(nothing, "w" if number else "r"))


def _print_any_character() -> None:
    """Write as an escape what a terminal's encoding lacks, here and in child processes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Their encoding is the locale's, in which this process reads their pipes.
    os.environ["PYTHONIOENCODING"] = ":backslashreplace"


def _close_stderr() -> None:
    """Discard what native libraries write to stderr when the interpreter ends.

    Beam's threads keep modules of DuckDB alive, and its bindings would list them as leaks.
    """
    sys.stderr.flush()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)


def main() -> None:
    """Entry point: an error of ours is one line and an exit code, a bug keeps its traceback."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    _open_closed_streams()
    _print_any_character()
    atexit.register(_close_stderr)
    collect_garbage_rarely()
    redact_logs()
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _say_and_end)
    try:
        with redacted_errors():
            if (code := app(standalone_mode=False)) == INTERRUPTED:  # Typer has caught it
                raise KeyboardInterrupt
            sys.exit(code)
    except TyperException as error:
        if len(sys.argv) == 1:  # the help is no error
            error.show()  # type: ignore[attr-defined]
            sys.exit(WRONG_INPUT)
        _fail(usage_error(error), WRONG_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        _fail(RESUME, INTERRUPTED)
    except Exception as error:
        from flows.command_errors import wrong_prefect_setting

        if (why := wrong_prefect_setting(error)) is not None:
            _fail(why, WRONG_INPUT)
        kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if "httpx" in kinds:  # no store's client has it
            why = f"Prefect's server does not answer ({one_line(error)})"
            _fail(f"{why}: run the same command to resume", FAILED)
        meaning = classify(error)
        if not isinstance(meaning, UserError):
            raise
        _fail(str(meaning), WRONG_INPUT if isinstance(meaning, Refused) else FAILED)


def _say_and_end(number: int, _: object) -> None:
    """Say how to resume, then end as by default; Prefect sends the signal again after the run."""
    signal.signal(number, signal.SIG_DFL)
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:  # not a full pipe
            os.write(2, f"kiln: {RESUME}\n".encode())
    os.kill(os.getpid(), number)


def _fail(message: Any, code: int) -> None:
    print(f"kiln: {message}", file=sys.stderr)
    # The error stays the last line: loggers would add lines while a server shuts down.
    logging.disable()
    logging.raiseExceptions = False
    sys.exit(code)


if __name__ == "__main__":
    main()
