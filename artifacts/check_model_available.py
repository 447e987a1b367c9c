"""Check that a model can be fetched, without fetching its weights."""

from __future__ import annotations

from json import JSONDecodeError

import fsspec

from artifacts.download_or_find_model import (
    ModelNotFound,
    asking_for,
    files_to_fetch,
    hub_error,
    local_model,
    remote_file,
    resolve_file,
    resolve_model,
)
from configs.secrets import one_line

#: Time limit in seconds of a request to the hub.
SECONDS = 20.0


def check_model_available(path: str, *, revision: str | None) -> str:
    """Where a model is, in words such as `local folder` or `on the hub, 12 files`.

    Args:
        path: as of `resolve_model`.
        revision: branch, tag or commit on the hub.

    Raises:
        ModelNotFound, ModelAway: it cannot be fetched; the message has the reason.
    """
    if local_model(path) is not None:
        return "local folder"
    if "://" in path:
        _check_folder(path)
        return "remote folder"
    return _ask_hub(path, revision)


def check_on_hub(repo: str, *, revision: str | None) -> None:
    """Raise ModelNotFound for a model that neither the hub's cache nor the hub has.

    Raises ModelAway if the hub does not answer.
    """
    from huggingface_hub import snapshot_download

    try:  # of a part of the files, `resolve_model` fetches the others
        snapshot_download(repo, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        _ask_hub(repo, revision)


def check_file_available(path: str) -> str:
    """`local file` or `remote file`; a remote one is not fetched.

    Raises:
        ModelNotFound, ModelAway: it cannot be fetched; the message has the reason.
    """
    if "://" not in path:
        resolve_file(path)
        return "local file"
    with asking_for(path):
        remote_file(path)
    return "remote file"


def _check_folder(url: str) -> None:
    """Raise ModelNotFound unless the folder has something; what is below it is not listed."""
    try:
        fs, root = fsspec.core.url_to_fs(url)
        found = bool(fs.ls(root, detail=False))
    except FileNotFoundError:
        found = False
    except Exception as error:  # each filesystem's client has errors of its own
        raise ModelNotFound(f"model {url}: {type(error).__name__}: {one_line(error)}") from None
    if not found:
        raise ModelNotFound(f"model {url}: no files there")


def _ask_hub(repo: str, revision: str | None) -> str:
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url, is_offline_mode
    from huggingface_hub.errors import HFValidationError

    if is_offline_mode():
        resolve_model(repo, revision=revision)
        return "in the hub's cache (HF_HUB_OFFLINE is set)"
    try:
        listed = HfApi().model_info(repo, revision=revision, timeout=SECONDS).siblings or []
        names = sorted(files_to_fetch(file.rfilename for file in listed))
        if not any(name.endswith(".safetensors") for name in names):
            raise ModelNotFound(
                f"model {repo}: on the hub it has no .safetensors weights by the names of "
                "diffusers or transformers (from_single_file and save_pretrained make them of a "
                "checkpoint file)"
            )
        # The hub lists the files of a gated model to everybody, and serves them to few.
        get_hf_file_metadata(hf_hub_url(repo, names[0], revision=revision), timeout=SECONDS)
    except ModelNotFound:
        raise
    except (OSError, HTTPError, HFValidationError, JSONDecodeError) as error:
        raise hub_error(error, repo, revision) from None
    return f"on the hub, {len(names)} files"
