"""Stages: build an artifact or reuse it, say why, and read what it holds.

Every stage goes through `build_or_reuse`. The reason of a build is what differs from the most
similar recent artifact. The bytes of shards depend on the versions of this process's code and
packages.

METRICS to GRID name files of an evaluation, RECIPE to REPORT those that a published model has in
addition. Trained weights are read as local folders: pipeline parts or LoRA adapters.

The version of this code is that of pyproject.toml, its git commit, and a digest of its files.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, ClassVar

from artifacts.errors import classify
from artifacts.filesystems import ask_at_once, subfolders
from artifacts.lock import owner_in_words
from artifacts.records import Damaged, digest_bytes, digest_json, first_fault, open_checked
from artifacts.store import MANIFEST, SHARDS, Artifact, Draft, KeyParts, Store
from configs.errors import Failed, Refused
from configs.load_recipe import CHECKOUT
from configs.secrets import one_line
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.objective.noise_schedule import SCHEDULER_FILE
from runtimes.process.job import Drawing
from runtimes.registry import interpreter, spec_of
from tasks.panels import Panel
from tasks.progress import Progress

#: Artifacts of a stage that are compared, the newest first: a store may have several recipes.
RECENT = 20
#: Changes that a reason names.
SHOWN = 6


def why_built(store: Store, parts: KeyParts) -> str:
    """The reason of a build: how its key differs from the most similar one of the stage.

    The artifact with the fewest changes counts, among the RECENT newest; if several, the newest.
    It may belong to another recipe (`kiln ls` has the recipes of each key).
    """
    folder = f"{store.root}/{parts.stage}"
    try:
        if store.fs.exists(f"{folder}/{parts.key}/manifest.json"):
            return "it was damaged"
        recent = _recent_keys(store, parts.stage)
        if not recent:
            return "none was built before"
        artifacts = list(ask_at_once(store.fs, partial(_readable, store, parts.stage), recent))
    except OSError:
        artifacts = []
    own = parts.as_dict()
    changed = [
        (a.key, _changes(_flat({name: a.manifest[name] for name in own}), _flat(own)))
        for a in artifacts
        if a is not None
    ]
    if not changed:
        return "the artifacts before could not be read"
    key, fewest = min(changed, key=lambda pair: len(pair[1]))
    changes = ", ".join([*fewest[:SHOWN], *["…"][: len(fewest) > SHOWN]])
    return f"changed since {key[:12]}: {changes}"


def _readable(store: Store, stage: str, key: str) -> Artifact | None:
    try:
        return store.load(stage, key, with_files=False)
    except ValueError:  # damaged
        return None


def _recent_keys(store: Store, stage: str) -> list[str]:
    """Keys of the RECENT artifacts of a stage that were committed last, the newest first."""
    folder = f"{store.root}/{stage}"

    def committed(key: str) -> tuple[datetime, str] | None:
        try:
            return store.fs.modified(f"{folder}/{key}/{MANIFEST}"), key
        except FileNotFoundError:
            return None

    keys = (key for key in subfolders(store.fs, folder) if key != SHARDS)
    dated = sorted(filter(None, ask_at_once(store.fs, committed, keys)), reverse=True)
    return [key for _, key in dated[:RECENT]]


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
        else f"{name} {json.dumps(before)} → {json.dumps(after)}"
        for name, before, after in changes
    ]


log = logging.getLogger("kiln")

#: Packages whose versions a manifest records.
RECORDED_PACKAGES = (
    *("kilnworks", "prefect", "apache-beam", "img2dataset", "numpy", "pillow", "safetensors"),
    *("torch", "diffusers", "transformers", "torch_xla", "jax", "torchax", "mindspore"),
)


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

    @classmethod
    def of_reused(cls, store: Store, stage: str, key: str) -> StageResult:
        """The result of reusing an artifact. Raises Failed if it was deleted."""
        artifact = _load(store, stage, key)
        return cls(stage, key, artifact.uri, artifact.digest, "reused", 0.0)

    def load(self, store: Store) -> Artifact:
        """The artifact. Raises Failed if it was deleted."""
        return _load(store, self.stage, self.key)


class Stage(ABC):
    """A stage and what it is built from; each stage is a frozen dataclass of its inputs.

    `Builder.build` (flows/prefect_run.py) records, builds or reuses, and checks all of them.
    """

    name: ClassVar[str]
    version: ClassVar[int]  # raised when the meaning of the output changes

    @cached_property
    def parts(self) -> KeyParts:
        """What the artifact's key is computed from, once."""
        return KeyParts(self.name, self.version, self.settings, self.inputs)

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings that affect the artifact."""

    @property
    @abstractmethod
    def inputs(self) -> dict[str, str]:
        """Input name -> sha256 (hex) of its content."""

    @property
    def parents(self) -> dict[str, Artifact]:
        """Input name -> artifact, for the lineage and for `kiln gc`."""
        return {}

    @abstractmethod
    def build(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        """Add the artifact's files to the draft; returns its summary (see `build_or_reuse`)."""

    def check(self, summary: dict[str, Any]) -> None:
        """Warn of an artifact, built or reused, and raise Failed beyond limits outside its key."""
        return

    def facts(self, summary: dict[str, Any]) -> dict[str, Any]:
        """What the run's report has of the artifact."""
        return {}

    def helper(self, store: Store, progress: Progress) -> Callable[[], object] | None:
        """A call that does a share of the work of another host's build; None: it has no shares."""
        return None

    def versions(self) -> Mapping[str, str]:
        """What helper and builder must have in common, such as the code's digest."""
        return {}

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """The artifact for people: in Prefect's UI and in the report."""
        return []


def _load(store: Store, stage: str, key: str) -> Artifact:
    with storing(store):
        artifact = store.load(stage, key)
    if artifact is None:
        raise Failed(f"{stage} {key[:12]}: it was deleted: run again")
    return artifact


def build_or_reuse(
    store: Store,
    parts: KeyParts,
    build: Callable[[Draft], dict[str, Any]],
    *,
    parents: dict[str, Artifact],
    help_builder: Callable[[], object] | None = None,
    send: Callable[[], str] | None = None,
    versions: Callable[[], Mapping[str, str]] = dict,
) -> StageResult:
    """Reuse the artifact of `parts`, or build it under a lock.

    Args:
        build: adds files to the draft and returns the summary. Facts of the run, which do not
            affect the artifact's digest, are in the summary's `run`, and parents that only the
            build knows in its `parents`.
        parents: input name -> artifact, for the lineage and for `kiln gc`.
        help_builder: does a share of the work while a process of another host builds the artifact.
            A process of this host already uses its devices.
        send: lets a run elsewhere build the artifact, under its own lock, instead of `build`;
            returns its outcome.
        versions: returns what helper and builder must have in common, such as the code's digest.

    Raises:
        Failed: the input is wrong, which only `build` could detect, or the run elsewhere built
            another artifact, or the store is unusable.
        Away: the store or the machine may be usable later.
    """
    started = time.monotonic()
    outcome = "reused"
    with failing(parts.stage), storing(store):
        artifact = store.find(parts.stage, parts.key)
        if artifact is None and send is not None:
            artifact, outcome = _built_elsewhere(store, parts, send)
        elif artifact is None:
            ours = versions()
            on_wait = partial(_on_wait, parts, help_builder, ours)
            facts = {"versions": ours} if ours else {}
            with store.lock(parts.stage, parts.key, on_wait, facts) as lock:
                artifact = store.find(parts.stage, parts.key)  # another may have built it
                if artifact is None:
                    outcome = "built"
                    reason = why_built(store, parts)
                    log.info("%s: building (%s)", parts.stage, reason)
                    draft = store.draft(parts, lock)
                    begun = time.monotonic()
                    draft.discard_damaged()
                    summary = build(draft)
                    all_parents = parents | summary.pop("parents", {})
                    facts = _facts(reason, begun, all_parents) | summary.pop("run", {})
                    artifact = draft.commit(summary, facts)
                    log.info("%s: committed %s", parts.stage, parts.key[:12])
    seconds = round(time.monotonic() - started, 3)
    return StageResult(parts.stage, parts.key, artifact.uri, artifact.digest, outcome, seconds)


def _built_elsewhere(
    store: Store, parts: KeyParts, send: Callable[[], str]
) -> tuple[Artifact, str]:
    """The artifact and the outcome of the run elsewhere."""
    outcome = send()
    artifact = store.find(parts.stage, parts.key)
    if artifact is None:
        raise Failed(
            f"{parts.stage} {parts.key[:12]}: the run on the work pool built another artifact: its "
            "workers need this version of Kilnworks, and the same models"
        )
    return artifact, outcome


def _on_wait(
    parts: KeyParts,
    help_builder: Callable[[], object] | None,
    ours: Mapping[str, str],
    owner: dict[str, Any],
) -> None:
    helps = help_builder is not None and owner.get("host") != socket.gethostname()
    word = "helping" if helps else "waiting"
    differs = _difference(owner.get("versions"), ours)
    if helps and differs:  # its shards could have other bytes under the same keys
        helps = False
        word = f"waiting, since it has {differs}: install the same to help"
    who = owner_in_words(owner)
    log.info("%s %s: %s is building it; %s", parts.stage, parts.key[:12], who, word)
    if help_builder is not None and helps:
        try:
            help_builder()
        except Exception as error:  # the builder needs no help
            log.warning("%s: cannot help, waits: %s", parts.stage, one_line(error))


def _difference(theirs: Any, ours: Mapping[str, str]) -> str:
    """The first difference between the versions of a builder and ours, or ''."""
    if ours and (not isinstance(theirs, dict) or not theirs):
        return "an older Kilnworks, which names no versions"
    theirs = theirs if isinstance(theirs, dict) else {}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            here, there = (parts.get(name, "(none)") for parts in (ours, theirs))
            return f"{name} {there} and this host {here}"
    return ""


def _facts(reason: str, begun: float, parents: dict[str, Artifact]) -> dict[str, Any]:
    """Facts of this run that do not affect an artifact's content."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": package_versions(sys.executable, RECORDED_PACKAGES),
        "git": git_commit(),
        "reason": reason,
        "seconds": round(time.monotonic() - begun, 3),
        "parents": {n: {"stage": a.stage, "key": a.key} for n, a in parents.items()},
    }


@contextmanager
def failing(stage: str) -> Iterator[None]:
    """Convert wrong input or damage to a Failed of the stage: artifacts before it are kept."""
    try:
        yield
    except (Refused, Damaged) as error:
        raise Failed(f"{stage}: {error}") from error


@contextmanager
def storing(store: Store) -> Iterator[None]:
    """Raise what the errors of the store and of the machine mean, see `classify`; not others."""
    try:
        yield
    except Exception as error:
        meaning = classify(error, store.url)
        if meaning is error:
            raise
        raise meaning from error


def runtime_facts(name: str) -> dict[str, Any]:
    """The runtime of a stage and the package versions of its environment, for a manifest."""
    return {"runtime": name, "versions": package_versions(interpreter(name), RECORDED_PACKAGES)}


def package_versions(python: str, packages: Iterable[str]) -> dict[str, str]:
    """Package -> version of installed packages in the environment of a Python interpreter."""
    folders = map(str, Path(python).parents[1].glob("lib/python*/site-packages"))
    path = sys.path if python == sys.executable else list(folders)
    installed = {name: list(distributions(name=name, path=path)) for name in packages}
    return {name: matches[0].version for name, matches in installed.items() if matches}


def git_commit() -> str | None:
    """Git commit of this code, with -dirty if the checkout has changes; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


#: Packages that decode, resize, encode and write.
SHARD_PACKAGES = (
    *("img2dataset", "numpy", "opencv-python-headless", "pillow", "pyarrow", "safetensors"),
    *("torch", "diffusers", "transformers"),
)
FOLDERS = ("artifacts", "configs", "runtimes", "tasks")


@lru_cache
def versions(runtime: str = "torch") -> dict[str, str]:
    """Package -> version in this process, and in the interpreter of a runtime's encoders.

    `Kilnworks` is a digest of our code. Raises Refused if the runtime is not installed.
    """
    ours = {"Kilnworks": CODE, **package_versions(sys.executable, SHARD_PACKAGES)}
    python = interpreter(runtime)
    packages = (*SHARD_PACKAGES, *spec_of(runtime).needs)
    theirs = package_versions(python, packages)
    if python == sys.executable:
        return ours | theirs
    return ours | {f"{name} ({runtime})": version for name, version in theirs.items()}


def _code_digest(root: Path = CHECKOUT) -> str:
    """Digest of our modules; an editor's files, such as the dangling link `.#a.py`, are none."""
    paths = (path for name in FOLDERS for path in (root / name).rglob("*.py"))
    digests = {}
    for path in sorted(path for path in paths if not path.name.startswith(".")):
        with suppress(FileNotFoundError):
            digests[path.relative_to(root).as_posix()] = digest_bytes(path.read_bytes())
    return digest_json(digests)[:12]


#: The digest at the time of the import: a long-lived worker runs the code that it began with.
CODE = _code_digest()


METRICS = "metrics.json"
BOOTSTRAP = "bootstrap.npz"  # resampled values of every metric, for paired differences
GRID = "before_after.png"

RECIPE = "recipe.yaml"
GATE = "gate.json"
REPORT = "report.html"  # outside the manifest, since it shows the publication itself


@dataclass(frozen=True)
class TrainedWeights:
    """Parts that replace the base's parts, and LoRA adapters. Both empty: the base itself."""

    parts: dict[str, Path] = field(default_factory=dict)  # unet, text_encoder, ... -> folder
    lora: Path | None = None  # adapter file in diffusers' format

    def drawing(self, out: Path) -> Drawing:
        """A generate job's part that samples with these weights to a folder."""
        parts = {name: str(folder) for name, folder in self.parts.items()}
        return Drawing(str(out), parts, None if self.lora is None else str(self.lora))


BASE = TrainedWeights()


@contextmanager
def local_weights(trained: Artifact) -> Iterator[TrainedWeights]:
    """The weights of a train artifact: in place for a local store, else in a temporary copy.

    Raises Damaged: their bytes are not those that were committed.
    """
    fs = trained.store.fs
    kept = set(_weights(trained))
    entries = [entry for entry in trained.files if entry.path in kept]
    if trained.store.is_local:
        fault = first_fault(fs, trained.path, entries, deep=True)
        if fault is not None:
            raise Damaged(f"{trained.uri}: {fault}; run again")
        yield _tuned(Path(trained.path), trained)
        return
    with tempfile.TemporaryDirectory(prefix="kiln-tuned-") as folder:
        for entry in entries:
            target = Path(folder) / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            url = trained.url(entry.path)
            with open_checked(url, entry.sha256) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 2**22)
        yield _tuned(Path(folder), trained)


def weights_content(trained: Artifact) -> list[Any]:
    """Path, size and sha256 of each artifact file that affects the pictures."""
    kept = set(_weights(trained))
    return [entry.content() for entry in trained.files if entry.path in kept]


def _weights(trained: Artifact) -> list[str]:
    """Paths of all files that sampling reads: adapters, and parts with their configs."""
    paths = [entry.path for entry in trained.files]
    configs = (path for path in paths if path.endswith(("/config.json", f"/{SCHEDULER_FILE}")))
    parts = {path.rpartition("/")[0] for path in configs}
    return [path for path in paths if path == LORA_WEIGHTS or path.rpartition("/")[0] in parts]


def _tuned(folder: Path, trained: Artifact) -> TrainedWeights:
    paths = _weights(trained)
    names = sorted({path.partition("/")[0] for path in paths if "/" in path})
    lora = folder / LORA_WEIGHTS if LORA_WEIGHTS in paths else None
    return TrainedWeights({name: folder / name for name in names}, lora)


def version() -> str:
    """The version, commit and digest: `0.1.0 (1a2b3c..., code 4d5e6f...)`.

    An image has no commit; the digest tells its code from other code of the same version.
    """
    file = CHECKOUT / "pyproject.toml"
    number = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]
    known = [commit] if (commit := git_commit()) else []
    return f"{number} ({', '.join([*known, f'code {CODE}'])})"
