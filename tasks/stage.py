"""Build an artifact or reuse it: the one way every stage comes about."""

from __future__ import annotations

import errno
import logging
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from artifacts.commit import is_of_client
from artifacts.store import Artifact, Draft, KeyParts, Store
from runtimes.registry import interpreter

log = logging.getLogger("kiln")

PACKAGES = (
    "apache-beam",
    "diffusers",
    "img2dataset",
    "jax",
    "kilnworks",
    "mindspore",
    "numpy",
    "pillow",
    "prefect",
    "safetensors",
    "torch",
    "torch_xla",
    "torchax",
    "transformers",
)

#: The packages of Kilnworks.
OURS = {"artifacts", "configs", "demo", "flows", "runtimes", "tasks"}


class TransientError(RuntimeError):
    """What failed may work when tried again: a network away, a full disk that clears."""


class StorageError(RuntimeError):
    """The store cannot be used; the message says why and what to do."""


class StorageAway(StorageError, TransientError):
    """The store is full or does not answer, which may pass."""


class StageFailed(RuntimeError):
    """A stage could not use what it was given; what was built before it is kept."""


@dataclass(frozen=True)
class StageResult:
    """What a stage hands on: where its artifact is, and how it came about.

    It holds no manifest: Prefect walks through all that is handed from task to task.
    """

    stage: str
    key: str
    uri: str
    digest: str
    outcome: str  # built | reused | rejected
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)  # what the run's report says of it

    def load(self, store: Store) -> Artifact:
        """The artifact. Raises StageFailed if it has been deleted since."""
        with storing(store):
            artifact = store.load(self.stage, self.key)
        if artifact is None:
            raise StageFailed(f"{self.stage} {self.key[:12]}: it has been deleted: run again")
        return artifact


def build_or_reuse(
    store: Store,
    parts: KeyParts,
    build: Callable[[Draft], dict[str, Any]],
    *,
    parents: dict[str, Artifact],
) -> StageResult:
    """Reuse the artifact of `parts`, or be its only builder.

    `build` adds files to the draft and returns the summary.

    Raises:
        StageFailed: `build` raised a ValueError, wrong input that shows only now.
        StorageError: the store cannot be used.
    """
    started, outcome = time.monotonic(), "reused"
    with failing(parts.stage), storing(store):
        artifact = store.find(parts.stage, parts.key)
        if artifact is None:
            with store.lock(parts.stage, parts.key, partial(_say_who_builds, parts)):
                artifact = store.find(parts.stage, parts.key)  # another may have built it
                if artifact is None:
                    outcome, reason = "built", why_not_cached(store, parts)
                    log.info("%s: building (%s)", parts.stage, reason)
                    draft, begun = store.draft(parts), time.monotonic()
                    summary = build(draft)
                    facts = _facts(reason, begun, parents) | summary.pop("run", {})
                    artifact = draft.commit(summary, facts)
    seconds = round(time.monotonic() - started, 3)
    return StageResult(parts.stage, parts.key, artifact.uri, artifact.digest, outcome, seconds)


def _say_who_builds(parts: KeyParts, owner: dict[str, Any]) -> None:
    where = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    log.info("%s %s: %s is building it; waiting", parts.stage, parts.key[:12], where)


def _facts(reason: str, begun: float, parents: dict[str, Artifact]) -> dict[str, Any]:
    return {
        **run_facts(),
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
    """Turn what goes wrong with a store into a StorageError; other errors stay themselves."""
    try:
        yield
    except Exception as error:
        told = storage_error(store, error)
        if told is error:
            raise
        raise told from error


def storage_error(store: Store, error: Exception) -> Exception:
    """An error of the store in words, or the error itself when it is about something else."""
    number = getattr(error, "errno", None)
    place = getattr(error, "filename", None) or store.url
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StorageAway(f"no space left for {place}: free some (try `kiln gc`), then run again")
    # S3's client gives no number, Google's neither a number nor a type of its own.
    forbidden = isinstance(error, PermissionError) or str(error).startswith("Forbidden: ")
    if forbidden or number in (errno.EPERM, errno.EROFS):
        return StorageError(f"no permission for {place}: mend that, or choose another `store`")
    if is_of_client(error) and not store.is_local:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return StorageAway(f"{store.url} cannot be used now ({reason}): run again when it can")
    return error


def run_facts() -> dict[str, Any]:
    """Facts of this run that change nothing in an artifact's content."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": package_versions(sys.executable),
        "git": _git_commit(),
    }


def why_not_cached(store: Store, parts: KeyParts) -> str:
    """What differs from the artifact of this stage that is most like the one wanted."""
    try:
        if store.fs.exists(f"{store.root}/{parts.stage}/{parts.key}/manifest.json"):
            return "it was damaged"
        others = [a.manifest for a in store.artifacts() if a.stage == parts.stage]
    except OSError:
        return "the store could not be read"
    if not others:
        return "none was built before"
    changes = [_changes(other, parts.as_dict()) for other in others]
    return "changed: " + ", ".join(min(changes, key=len)[:6])


def _changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name in sorted(set(new) | (set(old) if prefix else set())):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            names += _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            short = not isinstance(after, str | dict | list) and not isinstance(before, dict | list)
            names.append(f"{prefix}{name} {before} → {after}" if short else f"{prefix}{name}")
    return names


def runtime_facts(name: str) -> dict[str, Any]:
    """The runtime of a stage and the package versions of its environment, for a manifest."""
    return {"runtime": name, "versions": package_versions(interpreter(name))}


def package_versions(python: str) -> dict[str, str]:
    """Package -> version of the PACKAGES in the environment of a Python interpreter."""
    folders = [str(path) for path in Path(python).parents[1].glob("lib/python*/site-packages")]
    found = {name: list(distributions(name=name, path=folders)) for name in PACKAGES}
    return {name: one[0].version for name, one in found.items() if one}


def _git_commit() -> str | None:
    """Commit of the checkout this code runs from, marked when it has changes; None outside one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
