"""What must hold of a store after a round, whatever happened in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from chaos import toy_flow

from artifacts.records import FileEntry, file_fault
from artifacts.store import MANIFEST, Store
from tasks.publish.champion_alias import History
from tasks.publish.registry import Registry

Digests = dict[str, tuple[str, str]]  # stage -> (key, digest)
#: Folders of the store that runs build again.
STAGES = ("download/", "encode/", "train/", "evaluate/", "publish/", "generate/")


@dataclass
class Findings:
    """What does not hold, in words."""

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.lost, *self.wrong, *self.hangs])


def faulty_files(store: Store) -> Iterator[tuple[str, str]]:
    """(path, fault) of each committed file that is not whole, of artifacts and of models."""
    for stage, key, fault in store.unreadable():
        yield f"{store.root}/{stage}/{key}/{MANIFEST}", fault
    for artifact in store.artifacts():
        yield from _faulty(store, artifact.path, artifact.files)
    registry = _registry(store)
    for version, fault in registry.unreadable():
        yield f"{registry.root}/{version}/{MANIFEST}", fault
    for found in registry.versions():
        yield from _faulty(store, f"{registry.root}/{found.name}", found.manifest["files"])


def _faulty(store: Store, root: str, files: list[FileEntry]) -> Iterator[tuple[str, str]]:
    for entry in files:
        shared = entry.path.startswith("../")
        path = f"{root.rpartition('/')[0]}/{entry.path[3:]}" if shared else f"{root}/{entry.path}"
        fault = file_fault(store.fs, root, entry, deep=True)
        if fault is None and sha256(store.fs.cat_file(path)).hexdigest() != entry.sha256:
            fault = "it is damaged, and taken for whole"
        if fault is not None:
            yield path, fault


def check_files(store: Store, damaged: Collection[str], found: Findings) -> None:
    """Every manifest's files are whole but for those that were damaged."""
    for path, fault in faulty_files(store):
        if path not in damaged:
            found.wrong.append(f"{path}: {fault}")


def check_wanted(
    store: Store,
    runs: dict[str, Digests],
    damaged: Collection[str],
    undisturbed: Store,
    found: Findings,
) -> None:
    """Each run that ended and is still needed has its artifacts.

    One that was damaged may be away: the builder of another was killed.

    Args:
        undisturbed: has the same artifacts, but for those of `publish`.
    """
    for run, stages in runs.items():
        for stage, (key, _) in stages.items():
            path = f"{store.root}/{stage}/{key}/{MANIFEST}"
            try:
                present = store.load(stage, key) is not None
            except ValueError:
                present = path in damaged
            if not present and not _was_damaged(store, stage, key, damaged, undisturbed):
                found.lost.append(f"{stage}/{key} of run {run}")


def _was_damaged(
    store: Store, stage: str, key: str, damaged: Collection[str], undisturbed: Store
) -> bool:
    known = undisturbed.load(stage, key)
    entries = [] if known is None else known.files
    shards = {f"{store.root}/{stage}/{e.path[3:]}" for e in entries if e.path.startswith("../")}
    own = f"{store.root}/{stage}/{key}/"
    return any(path.startswith(own) or path in shards for path in damaged)


def check_equal(got: Digests, reference: Digests, found: Findings) -> None:
    """A run's artifacts have the bytes of an undisturbed run."""
    for stage in toy_flow.EXACT:
        if stage in got and got[stage] != reference[stage]:
            found.wrong.append(f"{stage}: {got[stage]}, undisturbed {reference[stage]}")


def check_registry(
    store: Store, before: list[Any], harmed: Collection[str], found: Findings
) -> list[Any]:
    """Each model loads; each champion passed its gate against the one before it.

    Args:
        before: the history after the previous round, which must be a part of the present one.
        harmed: versions of which a file was damaged: such a model is published anew.

    Returns the history.
    """
    registry = _registry(store)
    versions = {one.name: one for one in registry.versions()}
    scores = {}
    for name, version in versions.items():
        try:
            scores[name] = toy_flow.score(toy_flow.read_published(version.uri, toy_flow.WEIGHTS))
            toy_flow.load_weights(version.uri)
        except (OSError, ValueError) as error:
            found.wrong.append(f"registry {name} does not load: {error}")
            scores[name] = -1
    moves = registry.history().moves
    if moves[: len(before)] != before:
        found.lost.append(f"a change of the champion: {before} became {moves}")
    whole = [version for name, version in versions.items() if name not in harmed]
    digests = [version.manifest["digest"] for version in whole]
    if len({move["token"] for move in moves}) != len(moves) or len(set(digests)) != len(digests):
        found.wrong.append(f"a move or a version is there twice: {moves}, {digests}")
    published: set[str] = set()
    for number, move in enumerate(moves):
        name, champion = move["version"], History(moves[:number]).champion
        if name not in versions:
            found.lost.append(f"version {name}, champion in move {number}")
        elif move["why"] == "published":
            compared = versions[name].manifest["inputs"].get("champion")
            was = versions[champion].manifest["digest"] if champion in versions else None
            passed = champion is None or scores[name] >= 0.5 * scores[champion]
            is_copy = champion in harmed and versions[champion].model == versions[name].model
            if (compared != was and not is_copy) or not passed or name in published:
                found.wrong.append(f"move {number}: {name} was not gated against {champion}")
            published.add(name)
        elif move["why"] == "rolled back" and name not in {m["version"] for m in moves[:number]}:
            found.wrong.append(f"move {number}: {name} was no champion before")
    if registry.alias.target() != registry.history().champion:
        found.wrong.append(f"the alias is {registry.alias.target()}, not {moves[-1:]}")
    return moves


def _registry(store: Store) -> Registry:
    return Registry(f"{store.url}/registry", toy_flow.NAME)
