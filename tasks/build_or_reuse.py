"""Stages: build an artifact or reuse it, say why, and read what it holds.

A `Builder` builds all stages in the same way: the begin is recorded for `kiln gc`, the end is shown
in Prefect's UI. Every stage goes through `build_or_reuse`. The reason of a build is what differs
from the most similar recent artifact.

METRICS to GRID name files of an evaluation, RECIPE to REPORT those that a published model has in
addition.
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, ClassVar

from artifacts.errors import classify
from artifacts.filesystems import ask_at_once, subfolders
from artifacts.gc import record_run
from artifacts.lock import owner_in_words
from artifacts.records import Damaged
from artifacts.store import MANIFEST, SHARDS, Artifact, Draft, KeyParts, Store
from configs.errors import Failed, Refused
from configs.secrets import one_line
from tasks import code_version
from tasks.panels import Panel
from tasks.progress import Progress, artifact_key, show_in_prefect, stage_links

log = logging.getLogger("kiln")
METRICS = "metrics.json"
BOOTSTRAP = "bootstrap.npz"  # resampled values of every metric, for paired differences
GRID = "before_after.png"

RECIPE = "recipe.yaml"
GATE = "gate.json"
REPORT = "report.html"  # outside the manifest, since it shows the publication itself

#: Name of the completed state in Prefect of a stage whose artifact was in the store.
REUSED = "Reused"
#: Artifacts of a stage that are compared, the newest first: a store may have several recipes.
RECENT = 20
#: Changes that a reason names.
SHOWN = 6


def why_built(store: Store, parts: KeyParts) -> str:
    """The reason of a build: how its key differs from the most similar one of the stage.

    The artifact with the fewest changes counts, among the RECENT newest; if several, the newest.
    It may belong to another recipe (`kiln ls` has the recipes of each key).
    """
    try:
        if store.fs.exists(f"{store.root}/{parts.stage}/{parts.key}/{MANIFEST}"):
            return "it was damaged"
        artifacts = recent_artifacts(store, parts.stage)
        if not artifacts:
            return "none was built before"
    except OSError:
        artifacts = []
    own = parts.as_dict()
    changed = [
        (a.key, _changes(_flat({name: a.manifest[name] for name in own}), _flat(own)))
        for a in filter(None, artifacts)
    ]
    if not changed:
        return "the artifacts before could not be read"
    key, fewest = min(changed, key=lambda pair: len(pair[1]))
    changes = [*fewest[:SHOWN], "…"] if len(fewest) > SHOWN else fewest
    return f"changed since {key[:12]}: {', '.join(changes)}"


def recent_artifacts(store: Store, stage: str) -> list[Artifact | None]:
    """The RECENT artifacts of a stage that were committed last, the newest first, without files.

    A damaged one is None.
    """
    return [*ask_at_once(store.fs, partial(_readable, store, stage), _recent_keys(store, stage))]


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


@dataclass(frozen=True)
class StageResult:
    """A stage's result: its artifact and the outcome.

    It has no manifest, since Prefect traverses all values that tasks exchange.
    """

    stage: str
    key: str
    uri: str
    digest: str
    outcome: str  # built | reused | rejected | undecided
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

    `Builder.build` records, builds or reuses, and checks all of them.
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
            outcome = send()
            artifact = store.find(parts.stage, parts.key)
            if artifact is None:
                raise Failed(
                    f"{parts.stage} {parts.key[:12]}: the run on the work pool built another "
                    "artifact: its workers need this version of Kilnworks, and the same models"
                )
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
        "versions": code_version.package_versions(sys.executable, code_version.RECORDED_PACKAGES),
        "git": code_version.git_commit(),
        "reason": reason,
        "seconds": round(time.monotonic() - begun, 3),
        "parents": {n: {"stage": a.stage, "key": a.key} for n, a in parents.items()},
    }


#: Results of the stages before a stage, or the plan; None of a stage that the recipe lacks.
Before = Sequence[StageResult | Artifact | None]


class Builder(ABC):
    """What builds the stages of a flow run, each in the same way."""

    store: Store
    id: str  # of the flow run
    flow_stages: Sequence[str] = ()  # those of the flow, in order

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Name of the model, which separates recipes in Prefect."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the record of the run has beside its stages."""

    def begin(self, parts: KeyParts) -> Progress:
        """Record, before a stage is built, that the run needs it: `kiln gc` keeps what runs need.

        Returns the progress of building the stage.
        """
        with storing(self.store):
            record_run(self.store, self.id, {**self.facts, "stages": {parts.stage: [parts.key]}})
        return Progress(parts.stage, self.model_name)

    def send(self, parts: KeyParts, progress: Progress, before: Before) -> Callable[[], str] | None:
        """A call that lets a run elsewhere build a stage; None: it is built here.

        Args:
            before: what the stage is built from.
        """
        return None

    def build(self, stage: Stage, before: Before | None = None) -> StageResult:
        """Build a stage's artifact, here or elsewhere, or reuse it, and check it.

        Args:
            before: as of `send`; None: it is built here.

        Raises:
            Failed: as `build_or_reuse` and the stage's `check`.
        """
        parts = stage.parts
        progress = self.begin(parts)
        result = build_or_reuse(
            *(self.store, parts, partial(stage.build, progress=progress)),
            parents=stage.parents,
            help_builder=stage.helper(self.store, progress),
            versions=stage.versions,
            send=None if before is None else self.send(parts, progress, before),
        )
        summary = result.load(self.store).summary
        stage.check(summary)
        return replace(result, facts=stage.facts(summary))

    def ended(self, result: StageResult, show: Callable[[Artifact], list[Panel]]) -> Any:
        """Show a stage's artifact in the UI, and return the final state of its task.

        Prefect passes the result to a task that receives the state, and draws an edge.

        Args:
            show: returns the panels of the stage's artifact.
        """
        from prefect.states import Completed

        heading = f"{result.stage}: {result.outcome}"
        # The artifact is loaded where an error is only logged.
        self.show(result.stage, heading, lambda: show(result.load(self.store)))
        text = "%s: %s in %.1f s (%s)"
        log.info(text, result.stage, result.outcome, result.seconds, result.key[:12])
        return Completed(name=REUSED if result.outcome == "reused" else None, data=result)

    def show(self, stage: str, heading: str, panels: Callable[[], list[Panel]]) -> None:
        """Show panels of a stage in the UI, with links to the artifacts of the stages before."""
        stages = self.flow_stages
        earlier = stages[: stages.index(stage)] if stage in stages else ()
        links = [stage_links(self.model_name, earlier)] if earlier else []
        key = artifact_key(self.model_name, stage)
        show_in_prefect(key, heading, lambda: [*panels(), *links])


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
