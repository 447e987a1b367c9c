"""Find a model's files, wherever they are, and fingerprint them by their bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from json import JSONDecodeError
from pathlib import Path

import fsspec

from artifacts.keys import canonical_json, digest_bytes, digest_json

#: What changes nothing when it changes: documentation and version control.
IGNORED = {".git", ".cache", "README.md", ".gitattributes"}

#: The weights diffusers and transformers would read: safetensors only, those of a pipeline's parts
#: and, at the top, those of a model that stands alone; not a pipeline's single-file checkpoints.
#: The hub's patterns are fnmatch's, whose * matches / too.
HUB_FILES = ["*.json", "*.txt", "*.model", "*.md", "*/*.safetensors"]
HUB_FILES += ["model*.safetensors", "diffusion_pytorch_model*.safetensors"]
HUB_CONFIGS = ["*.json", "*.txt"]
HUB_SKIPPED = ["*/openvino*", "*/flax*", "*.onnx*", "text_encoders/*"]
#: Copies of the same weights, left out unless one is asked for.
HUB_VARIANTS = ["*.fp16.safetensors", "*.fp16-*.safetensors", "*.non_ema.safetensors"]


class ModelNotFound(ValueError):
    """The model's files are not there; the message says where they were looked for."""


def cache_folder() -> Path:
    """Where copies of remote models and shards are kept on this machine."""
    base = os.environ.get("KILN_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kilnworks"


def resolve_model(
    path: str,
    *,
    revision: str | None = None,
    variant: str | None = None,
    files: Sequence[str] = HUB_FILES,
) -> Path:
    """A local folder holding the model at `path`: a local folder, a hub id, or an fsspec URL.

    Raises:
        ModelNotFound: nothing is there, or it cannot be fetched.
    """
    if Path(path).is_dir():
        return Path(path).resolve()
    if "://" in path:
        return _fetch_url(path)
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelNotFound(f"model {path}: no such folder (give a folder, a hub id or a URL)")
    return _fetch_hub(path, revision, variant, files)


def resolve_configs(path: str, *, revision: str | None = None) -> Path:
    """The same, but of a hub id the configs only: no weights. Raises ModelNotFound."""
    return resolve_model(path, revision=revision, files=HUB_CONFIGS)


def digest_model(folder: Path, parts: tuple[str, ...] = ()) -> str:
    """sha256 over relative path and bytes of every file, or of those below the named parts."""
    roots = [folder / part for part in parts if (folder / part).exists()] or [folder]
    found = sorted(p for root in roots for p in (root.rglob("*") if root.is_dir() else [root]))
    files = [p for p in found if p.is_file() and not IGNORED & set(p.relative_to(folder).parts)]
    stats = {p: p.stat() for p in files}
    return digest_json(
        {
            str(p.relative_to(folder)): _digest_file(p, at.st_size, at.st_mtime_ns)
            for p, at in stats.items()
        }
    )


@lru_cache(maxsize=4096)
def _digest_file(path: Path, size: int, mtime_ns: int) -> str:
    """sha256 of a file, once a process for as long as its size and time stamp stay."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch_url(url: str) -> Path:
    try:
        fs, root = fsspec.core.url_to_fs(url)
        files = {p: fs.checksum(p) for p in sorted(fs.find(root))}
    except FileNotFoundError:
        files = {}
    except (ImportError, ValueError) as error:
        raise ModelNotFound(f"model {url}: {error}") from None
    if not files:
        raise ModelNotFound(f"model {url}: nothing is there")
    target = cache_folder() / "models" / digest_bytes(canonical_json([url, sorted(files.items())]))
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as beside:
            whole = Path(beside, "model")
            fs.get(root, str(whole), recursive=True)
            try:
                whole.rename(target)
            except OSError:
                if not target.is_dir():  # else another process has fetched the same meanwhile
                    raise
    return target


def _fetch_hub(repo: str, revision: str | None, variant: str | None, files: Sequence[str]) -> Path:
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, XetDownloadError

    skip = HUB_SKIPPED if variant else [*HUB_SKIPPED, *HUB_VARIANTS]
    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=list(files), ignore_patterns=skip
        )
    # A network that wants people to log in answers with a page of its own, which is no JSON.
    except (OSError, HTTPError, HFValidationError, XetDownloadError, JSONDecodeError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise  # a full disk here is no fault of the model's
        why = _hub_refusal(error, repo, revision)
        raise ModelNotFound(f"model {repo}: no such folder, and {why}") from None
    return Path(folder)


def _hub_refusal(error: Exception, repo: str, revision: str | None) -> str:
    """Why the hub did not give a model, and what to do, in one line."""
    from httpx2 import ConnectError, TimeoutException
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    log_in = "log in by `hf auth login`, or set HF_TOKEN"
    cause = error.__cause__ or error
    if isinstance(error, GatedRepoError):
        terms = f"{constants.ENDPOINT}/{repo}"
        return f"on the hub it is for those who accepted its terms: see {terms}, then {log_in}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has none of that name for you: if it is private, {log_in}"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub's has no revision {revision}"
    if isinstance(cause, ConnectError | TimeoutException):
        return f"the hub cannot be reached at {constants.ENDPOINT}"
    reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
    return f"the hub could not give it ({reason.strip()})"
