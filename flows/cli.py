"""`kiln`: run recipes, and look after what they made."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from configs.generating import read_settings
from configs.load import RecipeError, dump, json_schema, load_recipe, parse_override, recipe_names
from configs.schema import StageName

app = typer.Typer(
    help="From a list of image URLs to a published, evaluated diffusion model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DEFAULT_STORE = "store"


def _there(store: str) -> str:
    """The store as it was given; where nothing has run yet, only the default one may be missing."""
    if store != DEFAULT_STORE:
        from flows.store_commands import check_store

        check_store(store)
    return store


Store = Annotated[str, typer.Option("--store", help="Folder or URL of the store.", callback=_there)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Name = Annotated[str, typer.Argument(help="Name of the model in the registry (publish.name).")]
RegistryUrl = Annotated[
    str | None, typer.Option("--registry", help="Registry, if it is not in the store.")
]

FAILED = 1
WRONG_INPUT = 2
REJECTED = 3
INTERRUPTED = 130


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or path of a YAML file.")],
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change a setting: dotted."),
    ] = None,
    until: Annotated[StageName, typer.Option("--until", help="The last stage to run.")] = "publish",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object, on the last line.")
    ] = False,
) -> None:
    """Run a recipe: download, encode, train, evaluate, publish; reuse what is there.

    Exit code: 0 published (or all built, up to --until), 3 refused by the gate, 2 wrong input
    (nothing was started), 1 failed.
    """
    overrides = dict(parse_override(text) for text in override or [])
    load_recipe(recipe, overrides)  # wrong input should not wait for imports and servers
    from flows import runner

    report = runner.run(recipe, overrides, until, as_json=as_json)
    if report["status"] == "rejected":
        raise typer.Exit(REJECTED)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="Published model (digits, digits@v2), folder, hub id or URL.")
    ],
    prompts: Annotated[list[str] | None, typer.Argument(help="What to draw.")] = None,
    file: Annotated[
        str | None, typer.Option("--from-file", help="Text file with one prompt a line.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            "--override",
            metavar="KEY=VALUE",
            help="A setting, such as seed=7 or scheduler=ddim (docs/generation.md).",
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="Folder that pictures are copied into.")] = "outputs",
    skip_grid: Annotated[bool, typer.Option("--skip-grid", help="Leave out the grid.")] = False,
    skip_save: Annotated[
        bool, typer.Option("--skip-save", help="Leave out the single pictures.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw prompts with a model; what was drawn before with the same settings is reused."""
    settings = dict(parse_override(text) for text in override or [])
    settings |= {} if file is None else {"file": file}
    read_settings(model, prompts, settings)  # wrong input should not wait for servers
    from flows import runner

    runner.generate(
        model=model,
        prompts=prompts,
        settings=settings,
        out=out,
        skip_grid=skip_grid,
        skip_save=skip_save,
        as_json=as_json,
    )


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or path of a YAML file.")],
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            help="TPU slice, such as v5p-8, v4-32, v5e-8 or v6e-16; else that of the recipe's tpu.",
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change a setting: dotted."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--largest", help="Look for the largest batch that fits, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what training takes on a TPU slice, by compiling its step for it: none is needed.

    Exit code 2 if the recipe's batch does not fit: the message says which one does.
    """
    loaded = load_recipe(recipe, dict(parse_override(text) for text in override or []))
    from flows.plan import tell

    tell(loaded, topology, search=search, as_json=as_json)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe, resolved.")] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change a setting: dotted."),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema.")] = False,
) -> None:
    """List the recipes that come with Kilnworks, or print one with everything it extends."""
    if schema:
        print(json.dumps(json_schema(), indent=1))
    elif name is not None:
        overrides = dict(parse_override(text) for text in override or [])
        print(dump(load_recipe(name, overrides)), end="")
    else:
        _print_recipes()


def _print_recipes() -> None:
    for known in recipe_names():
        try:
            print(f"{known:16} {load_recipe(known).description}")
        except RecipeError as error:
            print(f"{known:16} ({str(error).partition(': ')[2]})")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Tell what this machine has, and what is missing, for every runtime."""
    from flows.doctor import examine

    if not examine(as_json=as_json):
        raise typer.Exit(1)


@app.command()
def tpu(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or path of a YAML file.")],
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change a setting: dotted."),
    ] = None,
) -> None:
    """Print what a run of a recipe would tell gcloud about its slice; nothing is done."""
    from flows.store_commands import show_tpu

    show_tpu(load_recipe(recipe, dict(parse_override(text) for text in override or [])))


@app.command(name="ls")
def list_artifacts(
    store: Store = DEFAULT_STORE, registry: RegistryUrl = None, as_json: AsJson = False
) -> None:
    """List artifacts and published models."""
    from flows.store_commands import list_store

    list_store(store, registry, as_json=as_json)


@app.command()
def show(
    what: Annotated[str, typer.Argument(help="Beginning of an artifact's key, or stage/key.")],
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Show an artifact: settings, lineage back to the source, and why it was built."""
    from flows.store_commands import show_artifact

    show_artifact(store, what, as_json=as_json)


@app.command()
def verify(
    what: Annotated[
        str | None, typer.Argument(help="Beginning of a key; everything without it.")
    ] = None,
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
) -> None:
    """Re-hash artifacts and published models; exit code 1 if any is damaged."""
    from flows.store_commands import verify_store

    if not verify_store(store, what, registry):
        raise typer.Exit(1)


@app.command()
def gc(
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
    days: Annotated[float, typer.Option(help="Runs younger than this keep their artifacts.")] = 30,
    delete: Annotated[bool, typer.Option("--delete", help="Delete; otherwise only tell.")] = False,
) -> None:
    """Delete what no published model and no recent run needs (without --delete: list it)."""
    from flows.store_commands import collect_garbage

    collect_garbage(store, registry, days=days, delete=delete)


@app.command()
def promote(
    name: Name,
    version: Annotated[str, typer.Argument(help="Version to make the champion, such as v2.")],
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
) -> None:
    """Make a published version the champion."""
    from tasks.publish.model_registry import Registry

    found = Registry(registry or f"{store}/registry", name).promote(version)
    print(f"{name}: {found.name} is the champion ({found.uri})")


@app.command()
def rollback(name: Name, store: Store = DEFAULT_STORE, registry: RegistryUrl = None) -> None:
    """Make the champion before the present one the champion again."""
    from tasks.publish.model_registry import Registry

    found = Registry(registry or f"{store}/registry", name).rollback()
    print(f"{name}: {found.name} is the champion again ({found.uri})")


def main() -> None:
    """Entry point: one clear line and an exit code for what can be told, a traceback for bugs."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    try:
        if (code := app(standalone_mode=False)) == INTERRUPTED:  # which Typer has caught
            raise KeyboardInterrupt
        sys.exit(code)
    except TyperException as error:
        error.show()  # type: ignore[attr-defined]  # wrong usage prints itself
        sys.exit(WRONG_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; run the same command to go on from here", INTERRUPTED)
    except Exception as error:
        # Errors of ours say what to do; any other is a bug, and keeps its trace.
        from artifacts.commit import is_of_client
        from tasks.stage import is_ours

        if is_of_client(error):
            _fail(f"the store cannot be used now ({' '.join(str(error).split())[:300]})", FAILED)
        if not is_ours(error):
            raise
        _fail(str(error), WRONG_INPUT if isinstance(error, ValueError) else FAILED)


def _fail(message: Any, code: int) -> None:
    print(f"kiln: {message}", file=sys.stderr)
    # What is said last is what went wrong, not how a server shuts down, or cannot be told.
    logging.disable()
    logging.raiseExceptions = False
    sys.exit(code)


if __name__ == "__main__":
    main()
