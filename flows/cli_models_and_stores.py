"""Commands of `kiln` on a store's artifacts and on published models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.exit_codes import FAILED

commands = typer.Typer(rich_markup_mode=None)
DEFAULT_STORE = "store"


def _existing(store: str) -> str:
    """Check that the store exists; the default one may be missing before the first run."""
    if store != DEFAULT_STORE:
        from flows.store_commands import check_store

        check_store(store)
    return store


def _existing_registry(registry: str | None) -> str | None:
    """Check that a named registry exists: a mistyped one would count as empty."""
    if registry is not None:
        from flows.store_commands import check_store

        check_store(registry, "registry")
    return registry


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
    typer.Option("--registry", help="Registry, if outside the store.", callback=_existing_registry),
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
            help="Beginning of an artifact's key or digest, stage/key, or model (digits@v2)."
        ),
    ],
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show an artifact: settings, lineage back to the source, and the reason of its build.

    Of a published model: its metrics beside those of the champion.
    """
    from flows.model_commands import is_published
    from flows.show_model import show_model
    from flows.store_commands import show_artifact

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
    from flows.model_commands import is_model, verify_model
    from flows.store_commands import verify_store

    url = _registry_of(store, registry)
    if what is not None and (key is not None or is_model(url, what)):
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
    from flows.model_commands import sign_model

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
    from flows.model_commands import push_model

    push_model(_registry_of(store, registry), model, repo, private=not public)


@commands.command()
def history(
    name: Name, store: Store = DEFAULT_STORE, registry: RegistryUrl = None, as_json: AsJson = False
) -> None:
    """List every change of a model's champion."""
    from flows.model_commands import show_history

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


@commands.command()
def promote(
    name: Name,
    version: Annotated[str, typer.Argument(help="Version to make the champion, such as v2.")],
    store: Store = DEFAULT_STORE,
    registry: RegistryUrl = None,
) -> None:
    """Make a published version the champion."""
    from tasks.publish.registry import Registry

    found = Registry(_registry_of(store, registry), name).promote(version)
    print(f"{name}: {found.name} is the champion ({found.uri})")


@commands.command()
def rollback(name: Name, store: Store = DEFAULT_STORE, registry: RegistryUrl = None) -> None:
    """Make the champion before the present one the champion again."""
    from tasks.publish.registry import Registry

    found = Registry(_registry_of(store, registry), name).rollback()
    print(f"{name}: {found.name} is the champion again ({found.uri})")
