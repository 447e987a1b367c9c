"""Find a model's files, wherever they are, and fingerprint them by their bytes."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

import fsspec

from artifacts.keys import canonical_json, digest_bytes, digest_json

#: What changes nothing when it changes: documentation and version control.
IGNORED = {".git", ".cache", "README.md", ".gitattributes"}


class ModelNotFound(ValueError):
    """The model's files are not there; the message says where they were looked for."""


def cache_folder() -> Path:
    """Where copies of remote models and shards are kept on this machine."""
    base = os.environ.get("KILN_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kilnworks"


def resolve_model(path: str, *, revision: str | None = None, variant: str | None = None) -> Path:
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
    return _fetch_hub(path, revision, variant)


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
    fs, root = fsspec.core.url_to_fs(url)
    files = {p: fs.checksum(p) for p in sorted(fs.find(root))}
    if not files:
        raise ModelNotFound(f"model {url}: nothing is there")
    target = cache_folder() / "models" / digest_bytes(canonical_json([url, sorted(files.items())]))
    if not target.is_dir():
        beside = target.with_suffix(f".{os.getpid()}.tmp")
        fs.get(root, str(beside), recursive=True)
        beside.rename(target)
    return target


def _fetch_hub(repo: str, revision: str | None, variant: str | None) -> Path:
    from huggingface_hub import snapshot_download

    # The weights diffusers would read: safetensors only, and of two variants just the wanted one.
    patterns = ["*.json", "*.txt", "*.model", "*.md", "*.safetensors"]
    skip = [] if variant else ["*.fp16.safetensors", "*.non_ema.safetensors"]
    skip += ["*/openvino*", "*/flax*", "*.onnx*"]
    if "/" in repo:
        # single-file checkpoints at the top of a pipeline repository are not read by diffusers
        skip.append("*_base_*.safetensors")
    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=skip
        )
    except Exception as error:  # the hub's client raises a dozen unrelated types
        reason = str(error).split("\n")[0]
        raise ModelNotFound(
            f"model {repo}: no such folder, and the hub could not give it ({reason})"
        ) from None
    return Path(folder)
