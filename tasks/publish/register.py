"""Registration of a published model: the next version, its champion, its report, the hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from artifacts.records import write_atomic
from artifacts.store import Artifact, Store
from configs.errors import Away, Refused
from configs.settings.publish import Hub
from configs.settings.recipe import STAGES, Recipe
from runtimes.pipeline_folder.folder import Base
from tasks.panels import Facts, Panel
from tasks.progress import stage_links
from tasks.publish import hub as publish_hub
from tasks.publish import report
from tasks.publish.hub import sign_version
from tasks.publish.registry import AliasNotWritten, Registry, Version
from tasks.publish.stage import STAGE, PublishStage, registry_of
from tasks.stage import REPORT, StageResult, failing, storing

log = logging.getLogger("kiln")


def register(
    recipe: Recipe,
    base: Base,
    store: Store,
    results: Sequence[StageResult],
    shows: Mapping[str, Callable[..., list[Panel]]],
    start: str | None = None,
) -> dict[str, Any]:
    """Copy the model and its report to the registry; a new version becomes the champion.

    Args:
        results: one per stage, in the order of the flow.
        shows: stage name -> function that returns the panels of its artifact.
        start: the version that must still be the champion; None: do not check.

    Returns {"model": URL of the version, "champion": the registry's last move, "promoted": whether
    this call made it the champion}. After a rollback the champion may be another version. An error
    in the report, or after the promotion, is logged.

    Raises:
        Away: the gate compared with another champion, or another run's
            `keep_versions` has deleted the version: a retry publishes it again.
    """
    registry = registry_of(recipe)
    artifacts = [result.load(store) for result in results]
    trained, evaluated, published = artifacts[-3:]
    with storing(store):
        path = f"{published.path}/{REPORT}"
        if results[-1].outcome == "built" or not store.fs.exists(path):
            with _warning(f"{REPORT} is missing"):
                page = _page(recipe, registry, artifacts, results, shows)
                write_atomic(store.fs, path, page.encode())
    with storing(registry.store):
        version = registry.publish(published)
        if recipe.publish.signing_key is not None:  # before anyone may use it
            with failing(STAGE):
                sign_version(registry, version, recipe.publish.signing_key)
        promoted = not registry.was_champion(version.name)
        if promoted:
            model = PublishStage(recipe, base, trained, evaluated)
            check = partial(model.check_champion, published.manifest)
            _promote(registry, version, published.summary["forced"], start, check)
        else:
            with _warning("the alias is not mended"):
                registry.mend_alias()
    registered: dict[str, Any] = {"model": version.uri, "champion": None, "promoted": promoted}
    with _warning("the champion is not shown"):
        registered["champion"] = registry.last_move()
    if recipe.publish.keep_versions is not None:
        with _warning("old versions are kept"):
            for name in registry.keep(recipe.publish.keep_versions):
                log.info("publish: %s %s is deleted: publish.keep_versions", registry.name, name)
    if recipe.publish.hub is not None:
        registered["hub"] = _pushed(recipe.publish.hub, registry, version)
    return registered


def _page(
    recipe: Recipe,
    registry: Registry,
    artifacts: Sequence[Artifact],
    results: Sequence[StageResult],
    shows: Mapping[str, Callable[..., list[Panel]]],
) -> str:
    """The report, whose evaluation has the champion too if it is comparable."""
    *_, evaluated, published = artifacts
    champion = report.champion_evaluation(registry.champion(), evaluated, published)
    if champion is not None:
        evaluate = partial(shows[evaluated.stage], champion=champion)
        shows = {**shows, evaluated.stage: evaluate}
    return report.page(recipe, list(zip(artifacts, results, strict=True)), shows)


def _promote(
    registry: Registry,
    version: Version,
    forced: str | None,
    start: str | None,
    check: Callable[[], None],
) -> None:
    """Make a version the champion.

    Raises Away if another became the champion, or another run deleted the version.

    Args:
        forced: the reason to publish despite the gate.
        start: as of `register`.
        check: raises Away unless the gate compared with the present champion.
    """
    champion = registry.champion()
    expected = champion.name if champion else None
    if start not in (None, expected):
        raise Away(f"{expected} became the champion meanwhile: run again")
    check()
    try:
        why = "published" if forced is None else f"forced: {forced}"
        registry.promote(version.name, why, expected=expected)
    except AliasNotWritten as error:  # it holds: a retry would not announce it
        log.warning("publish: %s", error)
    except Refused as error:
        raise Away(f"{error}: run again") from None


def _pushed(hub: Hub, registry: Registry, version: Version) -> str | None:
    """The URL of the commit; None after a failure, whose warning has the command to repeat it.

    None also if another version is the champion, for example after a rollback.
    """
    again = publish_hub.command(registry, version, hub.repo, private=hub.private)
    with _warning(f"{version.uri} is not on the hub; to push it: {again}"):
        champion = registry.champion()
        if champion is not None and champion.name == version.name:
            url = publish_hub.push(registry, version, hub.repo, private=hub.private)
            log.info("publish: pushed to %s", url)
            return url
    return None


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """Log an error, instead of a failed run whose model is published."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %r", what, error)


def show_version(model: str, registered: dict[str, Any]) -> list[Panel]:
    """The model's URL in the registry, the champion, and links to the model's stages."""
    url = registered["model"]
    champion = registered["champion"]
    facts = {
        "model": url,
        "version": url.rpartition("/")[2],
        "champion": champion["version"] if champion else "none",
        "report": f"{url}/{REPORT}",
    }
    if registered.get("hub"):
        facts["hub"] = registered["hub"]
    return [Facts("Published", facts), stage_links(model, STAGES)]
