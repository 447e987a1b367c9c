"""Push a published model to the Hugging Face hub."""

from __future__ import annotations

import glob
import logging
import os
from typing import TYPE_CHECKING, Any

from artifacts.models import resolve_model, was_not_reached
from artifacts.records import first_fault
from tasks.publish.model_card import TAG
from tasks.publish.model_registry import Registry, Version
from tasks.publish.sign_model import SIGNATURE

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

TOKEN_BLOCK = "hub-token"
CARD = "README.md"
MADE_BY_HUB = {".gitattributes"}  # with each repository
log = logging.getLogger("kiln")


class PushFailed(RuntimeError):
    """The hub did not accept a model."""


def push(registry: Registry, version: Version, repo: str, *, private: bool = True) -> str:
    """Upload a version's files that the repository lacks, and delete what the version lacks.

    An interrupted push continues where it stopped. The registry's own files stay here: the report
    shows pictures of the source.

    Returns the URL of the repository's newest commit.

    Raises:
        PushFailed: the hub refused, or could not be reached; or the repository has files, and no
            model card of Kilnworks.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi

    paths = [entry.path for entry in version.manifest["files"]] + [SIGNATURE]
    fault = first_fault(
        registry.fs, f"{registry.root}/{version.name}", version.manifest["files"], deep=True
    )
    if fault is not None:
        raise PushFailed(f"{registry.name} {version.name} is damaged: {fault}")
    folder = resolve_model(version.uri)  # its errors are none of the hub
    api = HfApi(token=_token(), library_name="kilnworks")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        found = api.model_info(repo)
        if private and not found.private:
            raise PushFailed(f"the repository {repo} is public: make it private, or use --public")
        _check_own(api, found)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[glob.escape(path) for path in paths],
            delete_patterns="*",
            parent_commit=found.sha,  # of the files that were checked
            commit_message=f"{registry.name} {version.name}, {version.manifest['digest'][:12]}",
        )
    except (OSError, HTTPError, ValueError, RuntimeError) as error:
        if isinstance(error, PushFailed):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        happened = "cannot be reached for" if was_not_reached(error) else "refused"
        raise PushFailed(f"the hub {happened} {repo}: {reason.strip()}") from error
    return str(done.commit_url)


def _check_own(api: HfApi, found: ModelInfo) -> None:
    """Raise PushFailed if a push would delete files that Kilnworks did not write."""
    from huggingface_hub import ModelCard

    names = sorted({file.rfilename for file in found.siblings or []} - MADE_BY_HUB)
    if CARD in names:
        path = api.hf_hub_download(found.id, CARD, revision=found.sha)
        if TAG in (ModelCard.load(path, ignore_metadata_errors=True).data.tags or []):
            return
    if names:
        raise PushFailed(
            f"the repository {found.id} has files that Kilnworks did not write, such as "
            f"{names[0]}, and a push would delete them: name another repository, or empty this one"
        )


def command(registry: Registry, version: Version, repo: str, *, private: bool) -> str:
    """The command that repeats a push."""
    public = "" if private else " --public"
    return (
        f"kiln push {registry.name}@{version.name} {repo} --registry {registry.store.url}{public}"
    )


def _token() -> str | None:
    """The token of HF_TOKEN, else of Prefect's block in a flow, else None: that of the login."""
    from prefect.context import FlowRunContext

    if os.environ.get("HF_TOKEN") or FlowRunContext.get() is None:
        return None
    from prefect.blocks.system import Secret

    try:
        block: Any = Secret.load(TOKEN_BLOCK)
        return str(block.get())
    except ValueError:  # no such block
        return None
