"""Models: from a folder, a store or the hub to a local folder with a digest.

A check finds whether a model can be fetched, without fetching its weights. For other machines,
models are copied to the store, from which each machine fetches them once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import lru_cache
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from filelock import FileLock
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from artifacts.errors import caching, is_outage, reading
from artifacts.filesystems import fetch_files, find_files
from artifacts.records import canonical_json, digest_bytes, digest_json, put_atomic
from artifacts.store import Store
from configs.errors import Away, Refused
from configs.secrets import one_line

log = logging.getLogger("kiln")

#: What a web server says about a file's version, without which it is fetched again.
HTTP_MARKS = ("ETag", "Last-Modified")
#: Names without effect on a model's digest: documentation and version control.
IGNORED = {".git", ".cache", "README.md", ".gitattributes"}

#: Weights of a model that is no pipeline.
HUB_STANDALONE = ["model*.safetensors", "diffusion_pytorch_model*.safetensors"]
#: Files that diffusers and transformers read: configs, the safetensors of a pipeline's parts, and
#: those of a standalone model or of adapters at the top level; and the recipe that a published
#: model comes with. Single-file checkpoints of pipelines are excluded.
#: The hub matches with fnmatch, where * also matches /.
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.md", "*/*.safetensors", *HUB_STANDALONE]
HUB_FILES += ["pytorch_lora_weights.safetensors", "recipe.yaml"]
#: Texts at the top level that a derived model must come with. Most have no suffix.
LICENSE_FILES = ["LICENSE*", "LICENCE*", "NOTICE*"]
HUB_FILES += LICENSE_FILES
HUB_CONFIGS = ["*.json", "*.jinja", "*.txt"]
HUB_SKIPPED = ["*/openvino*", "*/flax*", "*.onnx*", "text_encoders/*"]
#: Variants of the same weights, which are read only where a part has no plain weights.
HUB_VARIANTS = ["*.bf16.safetensors", "*.bf16-*.safetensors", "*.fp16.safetensors"]
HUB_VARIANTS += ["*.fp16-*.safetensors", "*.non_ema.safetensors"]


def cache_folder() -> Path:
    """Local cache of remote models and shards: $KILN_CACHE, $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("KILN_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kilnworks"


def resolve_model(
    path: str, *, revision: str | None = None, files: Sequence[str] = HUB_FILES
) -> Path:
    """A local folder with the model at `path`, downloaded to the cache if it is remote.

    Args:
        path: a local folder, a Hugging Face hub id, or an fsspec URL.
        revision: branch, tag or commit on the hub.
        files: patterns of the files to fetch from the hub.

    Raises:
        Refused: the location does not exist or cannot be fetched.
        Away: it does not answer now.
        Failed: the cache of remote models cannot be written.
    """
    if (folder := local_model(path)) is not None:
        return folder
    if "://" in path:
        return _fetch_url(path)
    return _fetch_hub(path, revision, files)


def local_model(path: str) -> Path | None:
    """The folder of a local model; None for a hub id or a URL.

    Raises:
        Refused: there is no such folder.
    """
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        return Path(path).resolve()
    if os.path.isfile(path):
        raise Refused(f"model {path}: it is a file: give a folder")
    if "://" not in path and (path.count("/") != 1 or path.startswith((".", "/", "~"))):
        raise Refused(f"model {path}: no such folder (give a folder, a hub id or a URL)")
    return None


def resolve_file(path: str) -> Path:
    """A local copy of the file at a local path or fsspec URL, in the cache if it is remote.

    Raises:
        Refused: there is no such file, or it cannot be fetched.
        Away: its store or server does not answer now.
        Failed: the cache of remote models cannot be written.
    """
    if "://" not in path:
        local = Path(os.path.expanduser(path))  # Path's own fails for an unknown user
        if not local.is_file():
            raise Refused(f"file {path}: no such file (give a local path or a URL)")
        return local.resolve()
    with reading(f"file {path}", path):
        fs, root, info = remote_file(path)
        is_web = path.startswith(("http://", "https://"))
        # A web server may redirect to a URL that is signed anew, which is no new version.
        marks = [info.get(name) for name in HTTP_MARKS] if is_web else [fs.checksum(root)]

    def fetch(copy: Path) -> None:
        with reading(f"file {path}", path):
            fs.get_file(root, str(copy))

    version = [path, *marks, info.get("size")]
    return cached(version, path, fetch, digest_model, is_versioned=any(marks))


def remote_file(path: str) -> tuple[AbstractFileSystem, str, dict[str, Any]]:
    """Filesystem, path there and info of a file at an fsspec URL. Raises as its client does."""
    fs, root = url_to_fs(path)
    info = fs.info(root)  # `isfile` takes every error for a missing file
    if info["type"] != "file":
        raise FileNotFoundError
    return fs, root, info


def resolve_configs(path: str, *, revision: str | None = None) -> Path:
    """As `resolve_model`, but a hub id is fetched without weights."""
    return resolve_model(path, revision=revision, files=HUB_CONFIGS)


def digest_model(folder: Path, parts: tuple[str, ...] = ()) -> str:
    """sha256 (hex) over the relative path and bytes of every file, or of those in `parts`."""
    files = model_files(folder, parts)
    return digest_json({name: digest_model_file(file) for name, file in files.items()})


def model_files(folder: Path, parts: tuple[str, ...] = ()) -> dict[str, Path]:
    """Relative path -> file of a model, or of those in `parts`.

    In the hub's cache only the files count that this program fetches: others share that folder.
    """
    roots = [folder / part for part in parts if (folder / part).exists()] or [folder]
    paths = (p for root in roots for p in (files_below(root) if root.is_dir() else [root]))
    files = {str(p.relative_to(folder)): p for p in paths if p.is_file()}
    names = [name for name in files if not IGNORED.intersection(name.split("/"))]
    above = (place for place in folder.parents if place.name == "snapshots")
    if any((place.parent / "blobs").is_dir() for place in above):
        names = files_to_fetch(names)
    return {name: files[name] for name in names}


def files_to_fetch(names: Iterable[str]) -> list[str]:
    """Those of a hub model's files that this program fetches and reads.

    A part without plain weights is read from its variant, such as fp16.
    """
    chosen = [name for name in names if _matches(name, HUB_FILES)]
    chosen = [name for name in chosen if not _matches(name, HUB_SKIPPED)]
    variants = {name for name in chosen if _matches(name, HUB_VARIANTS)}
    plain = {os.path.dirname(n) for n in chosen if n.endswith(".safetensors") and n not in variants}
    return [n for n in chosen if n not in variants or os.path.dirname(n) not in plain]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Every file below a folder, in a fixed order; `Path.rglob` follows no link to a folder.

    Args:
        above: folders around this folder; a link back to any of them is not followed.
    """
    here = folder.resolve()
    if here in above:
        return
    children: list[Path] = []
    with suppress(FileNotFoundError, PermissionError):  # as Path.rglob does
        children = sorted(folder.iterdir())
    for path in children:
        if path.is_dir():
            yield from files_below(path, (*above, here))
        elif path.is_file():
            yield path


def digest_model_file(path: Path) -> str:
    """sha256 (hex) of a file, cached per process until its size or time stamp changes."""
    at = path.stat()
    return _digest_file(path, at.st_size, at.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest_file(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch_url(url: str) -> Path:
    with reading(f"model {url}", url):
        fs, root = url_to_fs(url)
        fs.invalidate_cache()  # `find` asks the store, but `checksum` an earlier listing
        files = {p: fs.checksum(p) for p in sorted(find_files(fs, root))}
    if not files:
        raise Refused(f"model {url}: no files there")

    def fetch(copy: Path) -> None:
        with reading(f"model {url}", url):
            fetch_files(fs, root, files, str(copy))

    return cached([url, sorted(files.items())], url, fetch, digest_model)


def cached(
    version: Any,
    url: str,
    fetch: Callable[[Path], None],
    digest_of: Callable[[Path], str],
    *,
    is_versioned: bool = True,
) -> Path:
    """The local copy of a remote folder or file, fetched to the cache once per machine.

    A copy is fetched beside its place and then renamed, with the digest of its content in its name.
    A damaged copy would be another model, with which all is built again: it is fetched again.

    Args:
        version: JSON that identifies the content.
        url: the remote place, for messages.
        fetch: writes a copy to a path.
        digest_of: the digest of a copy; it may raise ValueError.
        is_versioned: False: the content may change without `version`, so it is fetched each time.

    Raises:
        Failed: the cache cannot be written.
    """
    name = digest_bytes(canonical_json(version))
    folder = cache_folder() / "models"
    locks = cache_folder() / "model-locks"

    def copies() -> Iterator[tuple[Path, bool]]:
        """The copies of this version, and whether they are whole."""
        for copy in folder.glob(f"{name}-*") if is_versioned else ():
            is_whole = False
            with suppress(ValueError, FileNotFoundError):  # damaged, or being replaced
                is_whole = copy.name == f"{name}-{digest_of(copy)}"
            yield copy, is_whole

    with caching(cache_folder()):
        for copy, is_whole in copies():
            if is_whole:
                return copy
        folder.mkdir(parents=True, exist_ok=True)
        locks.mkdir(exist_ok=True)
        with FileLock(locks / name), tempfile.TemporaryDirectory(dir=folder) as temporary:
            for copy, is_whole in copies():
                if is_whole:  # fetched by another process while this one waited
                    return copy
                log.warning("%s is fetched again: its local copy is damaged", url)
                copy.rename(Path(temporary, copy.name))  # nobody sees a part of it
            complete = Path(temporary, "copy")
            fetch(complete)
            return complete.replace(folder / f"{name}-{digest_of(complete)}")


def _fetch_hub(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    from httpx2 import HTTPError
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, XetDownloadError

    def fetch(commit: str | None, wanted: Sequence[str], skipped: Sequence[str]) -> Path:
        path = snapshot_download(
            repo, revision=commit, allow_patterns=[*wanted], ignore_patterns=[*skipped]
        )
        return Path(path)

    try:
        with caching(Path(constants.HF_HUB_CACHE), "HF_HOME"):
            folder = fetch(revision, files, HUB_SKIPPED + HUB_VARIANTS)
            if files == HUB_FILES and (lacking := _without_plain_weights(folder)):
                # Without a match, as of the configs, the client would warn.
                fetch(folder.name, HUB_CONFIGS + lacking, HUB_SKIPPED)
    # JSONDecodeError: the login page of a captive network is not JSON.
    except (OSError, HTTPError, HFValidationError, XetDownloadError, JSONDecodeError) as error:
        raise hub_error(error, repo, revision) from None
    fetched = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    for name in files_to_fetch(fetched):
        # The hub's cache names weights by sha256. To hash them costs little: the keys of stages
        # have the digests, which a process computes once by path.
        blob = fetched[name].resolve()
        is_hashed = _matches(name, files) and re.fullmatch("[0-9a-f]{64}", blob.name)
        if is_hashed and blob.name != digest_model_file(fetched[name]):
            raise Refused(f"model {repo}: {blob} is damaged: delete it to have it fetched again")
    return folder


def _without_plain_weights(folder: Path) -> list[str]:
    """Patterns for a model's weights, or its parts', with a config and no plain weights.

    A variant may be there in part, after an interruption.
    """
    patterns: list[str] = []
    for config in [*folder.glob("config.json"), *sorted(folder.glob("*/config.json"))]:
        part = config.parent
        if all(_matches(path.name, HUB_VARIANTS) for path in part.glob("*.safetensors")):
            patterns += HUB_STANDALONE if part == folder else [f"{part.name}/*.safetensors"]
    return patterns


def hub_error(error: Exception, repo: str, revision: str | None) -> Refused | Away:
    """The error of a model that the hub's client did not get."""
    kind = Away if is_outage(error) else Refused
    return kind(f"model {repo}: no such folder, and {hub_refusal(error, repo, revision)}")


def was_not_reached(error: Exception) -> bool:
    """Whether an error of huggingface_hub is about the connection: the hub has not answered."""
    from httpx2 import ConnectError, TimeoutException

    causes = (error, error.__cause__)
    return any(isinstance(cause, ConnectError | TimeoutException) for cause in causes)


def hub_refusal(error: Exception, repo: str, revision: str | None) -> str:
    """One line: the reason why the hub refused a model, and a remedy."""
    from huggingface_hub import constants, errors

    log_in = "log in by `hf auth login`, or set HF_TOKEN"
    cause = error.__cause__ or error
    if isinstance(error, errors.GatedRepoError):
        terms = f"{constants.ENDPOINT}/{repo}"
        return f"on the hub it is gated: accept its terms at {terms}, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no such model visible to you: if it is private, {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub's model has no revision {revision}"
    if constants.HF_HUB_OFFLINE:
        return "the hub's cache lacks it: unset HF_HUB_OFFLINE to fetch it"
    if was_not_reached(error):
        return f"the hub cannot be reached at {constants.ENDPOINT}"
    reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
    return f"the hub could not serve it ({reason.strip()})"


#: Time limit in seconds of a request to the hub.
SECONDS = 20.0


def check_model_available(path: str, *, revision: str | None = None) -> str:
    """Where a model is, in words such as `local folder` or `on the hub, 12 files`.

    Args:
        path: as of `resolve_model`.
        revision: branch, tag or commit on the hub.

    Raises:
        Refused, Away: it cannot be fetched; the message has the reason.
    """
    from huggingface_hub import snapshot_download

    if local_model(path) is not None:
        return "local folder"
    if "://" in path:
        try:
            fs, root = url_to_fs(path)
            has_files = bool(fs.ls(root, detail=False))  # what is below them is not listed
        except FileNotFoundError:
            has_files = False
        except Exception as error:  # each filesystem's client has errors of its own
            raise Refused(f"model {path}: {type(error).__name__}: {one_line(error)}") from None
        if not has_files:
            raise Refused(f"model {path}: no files there")
        return "remote folder"
    try:  # a part of the files is enough: `resolve_model` fetches the others
        snapshot_download(path, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return _ask_hub(path, revision)
    return "in the hub's cache"


def check_file_available(path: str) -> str:
    """`local file` or `remote file`; a remote file is not fetched.

    Raises:
        Refused, Away: it cannot be fetched; the message has the reason.
    """
    if "://" not in path:
        resolve_file(path)
        return "local file"
    with reading(f"file {path}", path):
        remote_file(path)
    return "remote file"


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
            raise Refused(
                f"model {repo}: on the hub it has no .safetensors weights by the names of "
                "diffusers or transformers (from_single_file and save_pretrained make them of a "
                "checkpoint file)"
            )
        # The hub lists the files of a gated model to everybody, and serves them to few.
        get_hf_file_metadata(hf_hub_url(repo, names[0], revision=revision), timeout=SECONDS)
    except Refused:
        raise
    except (OSError, HTTPError, HFValidationError, JSONDecodeError) as error:
        raise hub_error(error, repo, revision) from None
    return f"on the hub, {len(names)} files"


def put_model(store: Store, digest: str, files: Mapping[str, Path]) -> str:
    """URL of a model's folder in the store, copied if it is not there.

    Args:
        digest: sha256 (hex) of the model's content, the name of the folder.
        files: relative path in the folder -> local file.
    """
    path = f"models/{digest}"
    done = f"{store.root}/{path}.json"
    if not store.fs.exists(done):
        log.info("copying %d files of a model to %s", len(files), store.url_of(path))
        for name, file in files.items():
            put_atomic(store.fs, str(file), f"{store.root}/{path}/{name}")
    # Last: it marks a complete copy. Its age is the time since the last use, for `kiln gc`.
    store.fs.pipe_file(done, b"{}")
    return store.url_of(path)


def fetch_model(url: str, digest: str, digest_of: Callable[[Path], str]) -> Path:
    """The local folder of a model of `put_model`, fetched to the cache once per machine.

    Args:
        digest_of: the digest of a local folder; it may raise ValueError.

    Raises:
        Refused: the store has no such model, or other bytes.
        Failed: the cache cannot be written.
    """

    def fetch(copy: Path) -> None:
        fs, root = url_to_fs(url)
        names = fs.find(root)
        if not names:
            raise Refused(f"model {url}: no files there")
        fetch_files(fs, root, names, str(copy))
        if digest_of(copy) != digest:
            raise Refused(
                f"model {url}: it has other bytes than its name says: delete {url}.json, and the "
                "next run copies it again"
            )

    return cached(digest, url, fetch, digest_of)
