"""Build or reuse an artifact: every stage goes through `build_or_reuse`."""

from __future__ import annotations

import errno
import logging
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from artifacts.artifact_key import KeyParts
from artifacts.concurrent_requests import ask_at_once
from artifacts.list_folder import subfolders
from artifacts.remote_clients import is_of_client
from artifacts.store import MANIFEST, SHARDS, Artifact, Draft, Store
from configs.redact_errors_and_logs import one_line
from runtimes.registry import interpreter

log = logging.getLogger("kiln")

#: Packages whose versions a manifest records.
PACKAGES = (
    *("kilnworks", "prefect", "apache-beam", "img2dataset", "numpy", "pillow", "safetensors"),
    *("torch", "diffusers", "transformers", "torch_xla", "jax", "torchax", "mindspore"),
)
#: The packages of Kilnworks.
OURS = {"artifacts", "configs", "demo", "flows", "runtimes", "tasks"}


class TransientError(RuntimeError):
    """A failure that may pass, such as a lost network or a full disk: retry."""


class StorageError(RuntimeError):
    """The store is unusable; the message has the reason and the remedy."""


class StorageAway(StorageError, TransientError):
    """The store is full or does not answer: retry."""


class StageFailed(RuntimeError):
    """A stage has wrong input; the artifacts before it are kept."""


@dataclass(frozen=True)
class StageResult:
    """A stage's result: its artifact and the outcome.

    It has no manifest, since Prefect traverses all values that tasks exchange.
    """

    stage: str
    key: str
    uri: str
    digest: str
    outcome: str  # built | reused | rejected
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)  # added to the run's report

    def load(self, store: Store) -> Artifact:
        """The artifact. Raises StageFailed if it was deleted."""
        with storing(store):
            artifact = store.load(self.stage, self.key)
        if artifact is None:
            raise StageFailed(f"{self.stage} {self.key[:12]}: it was deleted: run again")
        return artifact


def build_or_reuse(
    store: Store,
    parts: KeyParts,
    build: Callable[[Draft], dict[str, Any]],
    *,
    parents: dict[str, Artifact],
    help_builder: Callable[[], object] | None = None,
) -> StageResult:
    """Reuse the artifact of `parts`, or build it under a lock.

    Args:
        build: adds files to the draft and returns the summary. Facts of the run, which do not
            affect the artifact's digest, are in the summary's `run`.
        parents: input name -> artifact, for the lineage.
        help_builder: does a share of the work while a process of another host builds the artifact.
            A process of this host already uses its devices.

    Raises:
        StageFailed: the input is wrong, which only `build` could detect.
        StorageError: the store is unusable.
    """
    started, outcome = time.monotonic(), "reused"
    with failing(parts.stage), storing(store):
        artifact = store.find(parts.stage, parts.key)
        if artifact is None:
            on_wait = partial(_on_wait, parts, help_builder)
            with store.lock(parts.stage, parts.key, on_wait) as lock:
                artifact = store.find(parts.stage, parts.key)  # another may have built it
                if artifact is None:
                    outcome, reason = "built", why_built(store, parts)
                    log.info("%s: building (%s)", parts.stage, reason)
                    draft, begun = store.draft(parts, lock), time.monotonic()
                    summary = build(draft)
                    facts = _facts(reason, begun, parents) | summary.pop("run", {})
                    artifact = draft.commit(summary, facts)
    seconds = round(time.monotonic() - started, 3)
    return StageResult(parts.stage, parts.key, artifact.uri, artifact.digest, outcome, seconds)


def _on_wait(
    parts: KeyParts, help_builder: Callable[[], object] | None, owner: dict[str, Any]
) -> None:
    where = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    helps = help_builder is not None and owner.get("host") != socket.gethostname()
    word = "helping" if helps else "waiting"
    log.info("%s %s: %s is building it; %s", parts.stage, parts.key[:12], where, word)
    if help_builder is not None and helps:
        try:
            help_builder()
        except Exception as error:  # the builder needs no help
            log.warning("%s: cannot help, waits: %s", parts.stage, one_line(error))


def _facts(reason: str, begun: float, parents: dict[str, Artifact]) -> dict[str, Any]:
    """Facts of this run that do not affect an artifact's content."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": package_versions(sys.executable),
        "git": _git_commit(),
        "reason": reason,
        "seconds": round(time.monotonic() - begun, 3),
        "parents": {n: {"stage": a.stage, "key": a.key} for n, a in parents.items()},
    }


@contextmanager
def failing(stage: str) -> Iterator[None]:
    """Convert wrong input, a ValueError of ours, to StageFailed; other errors are bugs."""
    try:
        yield
    except ValueError as error:
        if not is_ours(error):
            raise
        raise StageFailed(f"{stage}: {error}") from error


def is_ours(error: Exception) -> bool:
    """Whether an error is of a class of Kilnworks: its message then says what to do."""
    return type(error).__module__.partition(".")[0] in OURS


@contextmanager
def storing(store: Store) -> Iterator[None]:
    """Convert errors of the store to StorageError; other errors pass through."""
    try:
        yield
    except Exception as error:
        converted = storage_error(store, error)
        if converted is error:
            raise
        raise converted from error


def storage_error(store: Store, error: Exception) -> Exception:
    """The StorageError of a store's error, or the error itself if it has another cause."""
    number = getattr(error, "errno", None)
    place = getattr(error, "filename", None) or store.url
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StorageAway(f"no space left for {place}: free some (try `kiln gc`), then run again")
    # S3's client has no errno; Google's has neither an errno nor an own type.
    forbidden = isinstance(error, PermissionError) or str(error).startswith("Forbidden: ")
    if forbidden or number in (errno.EPERM, errno.EROFS):
        return StorageError(f"no permission for {place}: grant it, or choose another `store`")
    if is_of_client(error) and not store.is_local:
        return StorageAway(f"{store.url} cannot be used now ({one_line(error)}): run again later")
    return error


def why_built(store: Store, parts: KeyParts) -> str:
    """The reason of a build: how the key differs from that of the newest artifact of the stage."""
    folder = f"{store.root}/{parts.stage}"
    try:
        if store.fs.exists(f"{folder}/{parts.key}/manifest.json"):
            return "it was damaged"
        newest = _newest_key(store, parts.stage)
        if newest is None:
            return "none was built before"
        found = store.load(parts.stage, newest, with_files=False)
    except (OSError, ValueError):
        found = None
    if found is None:
        return "the newest artifact could not be read"
    new = _flat(parts.as_dict())
    old = {name: found.manifest[name] for name in parts.as_dict()}
    return "changed: " + ", ".join(_changes(_flat(old), new)[:6])


def _newest_key(store: Store, stage: str) -> str | None:
    """Key of the artifact of a stage that was committed last."""
    folder = f"{store.root}/{stage}"

    def committed(key: str) -> tuple[datetime, str] | None:
        try:
            return store.fs.modified(f"{folder}/{key}/{MANIFEST}"), key
        except FileNotFoundError:
            return None

    keys = (key for key in subfolders(store.fs, folder) if key != SHARDS)
    found = filter(None, ask_at_once(store.fs, committed, keys))
    return max(found, default=(None, None))[1]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Dotted name -> value."""
    if not isinstance(value, dict):
        return {name: value}
    parts = (_flat(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items())
    return {key: inner for part in parts for key, inner in part.items()}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    changes = ((name, old.get(name), new.get(name)) for name in names)
    return [
        name
        if isinstance(before, str | list) or isinstance(after, str | list)
        else f"{name} {before} → {after}"
        for name, before, after in changes
    ]


def runtime_facts(name: str) -> dict[str, Any]:
    """The runtime of a stage and the package versions of its environment, for a manifest."""
    return {"runtime": name, "versions": package_versions(interpreter(name))}


def package_versions(python: str, packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Package -> version of installed packages in the environment of a Python interpreter."""
    folders = map(str, Path(python).parents[1].glob("lib/python*/site-packages"))
    path = sys.path if python == sys.executable else list(folders)
    found = {name: list(distributions(name=name, path=path)) for name in packages}
    return {name: one[0].version for name, one in found.items() if one}


def _git_commit() -> str | None:
    """Git commit of this code, with -dirty if the checkout has changes; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
