"""Commands on published models: sign, verify, push, history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from artifacts.filesystems import subfolders
from artifacts.models import resolve_model
from artifacts.records import first_fault
from artifacts.store import Store
from configs.load_recipe import RecipeError
from configs.secrets import one_line
from tasks.publish.hub import SIGNATURE, SignatureError, push, sign_version, verify_folder
from tasks.publish.registry import Registry, RegistryError, Version, last


def find_version(url: str, model: str) -> tuple[Registry, Version]:
    """The registry and version of `name`, its champion, `name@v2` or `name@candidate`.

    Raises:
        RegistryError: it does not exist.
    """
    name, _, which = model.partition("@")
    registry = Registry(url, name)
    return registry, registry.find(which)


def is_published(url: str, what: str) -> bool:
    """Whether a word names a model of the registry, and not an artifact's key."""
    return "@" in what or what in _names(url)


def is_model(url: str, what: str) -> bool:
    """Whether a word names a model of the registry, or a folder, and not an artifact's key."""
    return is_published(url, what) or Path(what).is_dir()


def _names(url: str) -> list[str]:
    place = Store(url)
    return subfolders(place.fs, place.root)


def push_model(url: str, model: str, repo: str, *, private: bool) -> None:
    """Push a version to the hub and print the commit's URL. Raises RecipeError for a wrong id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise RecipeError(f"push: {one_line(error)}") from None
    registry, version = find_version(url, model)
    print(push(registry, version, repo, private=private))


def sign_model(url: str, model: str, key: str) -> None:
    """Sign a version."""
    registry, version = find_version(url, model)
    sign_version(registry, version, key)
    print(f"{registry.name} {version.name}: signed ({version.uri}/{SIGNATURE})")


def verify_model(url: str, model: str, key: Path | None, *, as_json: bool = False) -> bool:
    """Check the manifest of a version and, with a key, the signature; print the result.

    Args:
        model: name in the registry, as of `find_version`, or a folder, which requires a key. A
            folder of a model's name is `./name`.

    Raises:
        SignatureError: the signature is missing or wrong.
    """
    folder, checked = Path(model), list[dict[str, Any]]()
    is_folder = folder.is_dir() and model.partition("@")[0] not in _names(url)
    if is_folder and key is None:
        raise SignatureError(f"{folder}: a folder is verified against a public key: add --key")
    if not is_folder:
        registry, version = find_version(url, model)
        root = f"{registry.root}/{version.name}"
        fault = first_fault(registry.fs, root, version.manifest["files"], deep=True)
        name = f"{registry.name} {version.name}"
        checked.append({"kind": "model", "name": name, "fault": fault})
        if not as_json:
            print(f"model     {name}  {fault or 'whole'}")
        folder = folder if fault or key is None else resolve_model(version.uri)
    whole = all(one["fault"] is None for one in checked)
    if whole and key is not None:
        verify_folder(folder, key)
    signed_by = str(key) if whole and key is not None else None
    if as_json:
        print(json.dumps({"whole": whole, "checked": checked, "signed_by": signed_by}))
    elif signed_by is not None:
        print(f"signed by the owner of {signed_by}")
    return whole


def show_history(url: str, name: str, *, as_json: bool = False) -> None:
    """Print every change of the champion, oldest first. Raises RegistryError without one."""
    moves = Registry(url, name).history()
    if not moves:
        known = ", ".join(_names(url)) or "none"
        raise RegistryError(f"{name}: there is no champion (the registry's models are: {known})")
    if as_json:
        shown = [{part: move[part] for part in ("version", "why", "at")} for move in moves]
        print(json.dumps({"name": name, "champion": last(moves), "history": shown}))
        return
    for move in moves:
        print(f"{move['at']}  {move['version']:5} {move['why']}")
