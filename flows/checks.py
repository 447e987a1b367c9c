"""The doors that every flow passes with its recipe, and the work pools that Prefect knows.

`kiln run`, `retrain` and `sweep` pass all doors; before a Prefect server is started, what asks
other machines is left out; `kiln doctor RECIPE` lists what all of them find.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial

from artifacts.latent_shards import Latents
from artifacts.store import Store
from configs.errors import Refused
from configs.preflight import Check, enter
from configs.settings.recipe import STAGES, PlacedStage, Recipe, StageName
from flows.run import Run
from flows.run_command import configured_server, lasting_server
from flows.send_stage import check_deployments
from tasks.doors import Doors
from tasks.evaluate.metrics import metric_names
from tasks.publish.promotion_gate import check_rules


def prepare(
    recipe: Recipe,
    *,
    until: StageName = "publish",
    only: PlacedStage | None = None,
    run_id: str | None = None,
    retry_failed: bool = False,
    force: str | None = None,
) -> Run:
    """Pass the doors with a recipe; a stage with a work pool is checked on its worker.

    Args:
        only: the single stage that this run builds; default: all up to `until`.

    Raises:
        Refused: the recipe cannot run here.
        Away: a place or a model does not answer now.
    """
    if force is not None and not force.strip():
        raise Refused("force: give a reason: the model card and the history name it")
    built = STAGES[: 1 + STAGES.index(until)] if only is None else (only,)
    doors = Doors(recipe, built)
    enter(checks_of(doors))
    run_id = run_id or str(uuid.uuid4())
    return Run(
        *(doors.recipe, Store(recipe.store), doors.opened.base, doors.opened.measuring),
        id=run_id,
        retry_run=run_id if retry_failed else None,
        force=force,
        stages=built,
    )


def checks_of(doors: Doors) -> Iterator[Check]:
    """The checks of all doors, in order."""
    yield from doors.settings()
    is_sent = len(doors.here) < len(doors.built)
    if is_sent:
        yield Check("server", _lasting_server)
    yield from doors.places()
    if is_sent:
        yield Check("deployments", partial(_deployments, doors), remote=True)
    yield from doors.machine()
    yield from doors.models()


def _lasting_server() -> None:
    lasting_server("place: work pools need", ", or leave `place` out: all stages then run here")


def _deployments(doors: Doors) -> None:
    if configured_server() is not None:  # otherwise Prefect would start one for the question
        check_deployments(doors.recipe.place, doors.built)


def enter_before_server(recipe: Recipe, until: StageName = "publish") -> None:
    """Pass the doors as far as no other machine is asked, and no model fetched."""
    doors = Doors(recipe, STAGES[: 1 + STAGES.index(until)], fetch=False)
    enter(checks_of(doors), remote=False)


def check_gate_rules(recipe: Recipe, latents: Latents) -> None:
    """Raise Refused for rules on metrics that these latents do not support."""
    count = latents.held_out
    share = f"encode.holdout {recipe.encode.holdout:g}"
    hint = f"{share} selected {count or 'none'} of these few pictures: raise it or remove the rule"
    known = metric_names(recipe, held_out=count)
    check_rules(recipe.publish.gate, known, recipe.evaluate.bootstrap, hint)
