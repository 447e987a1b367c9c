"""Checks of a recipe for `kiln doctor RECIPE`.

They cover runtime, gate, prompts, signing key, memory, models, source, store and hub token. No
picture and no weights are fetched.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence

from artifacts.models import ModelAway, ModelNotFound, check_file_available, check_model_available
from artifacts.store import Store, StoreError
from configs.secrets import without_secrets
from configs.settings.recipe import Recipe, warnings_without_effect, with_defaults_without_effect
from flows.doctor.findings import Check, Finding, fine, limited, named, note, problem
from flows.preflight import (
    check_gate_and_prompts,
    devices_here,
    must_fit_one_gpu,
    stages_without_pool,
)
from runtimes.contract import Probe, WrongInput
from runtimes.hosts.host import usable_gpus
from runtimes.torch_models.gpu_specs import GIB
from tasks import download
from tasks.evaluate.inception import fidelity_folder
from tasks.plan.gpu import memory_of
from tasks.publish.promotion_gate import warnings_of_few_prompts
from tasks.stage import TransientError, storage_error


def recipe_checks(
    recipe: Recipe, probes: Mapping[str, Probe], arguments: Sequence[str]
) -> list[Check]:
    """The checks of a recipe, in order. Those that need a network have a time limit.

    Args:
        probes: runtime -> its probe.
        arguments: those that gave the recipe, for the commands of remedies.
    """
    unused = named("settings", _without_effect, recipe)
    recipe = with_defaults_without_effect(recipe)
    late = problem if recipe.publish.hub is not None else note
    source = named("source", _source, recipe)
    return [
        unused,
        named("runtime", _runtime, recipe, probes[recipe.runtime]),
        limited(named("gate and prompts", _gate_and_prompts, recipe)),
        limited(named("memory", _memory, recipe, arguments)),  # also reads the prompts
        *(limited(check) for check in (*_models(recipe), source, *_stores(recipe))),
        limited(named("hub login", _hub_login, recipe), late),
    ]


def _without_effect(recipe: Recipe) -> Iterator[Finding]:
    yield from map(note, warnings_without_effect(recipe))


def _runtime(recipe: Recipe, probe: Probe) -> Iterator[Finding]:
    name, devices = recipe.runtime, devices_here(recipe, stages_without_pool(recipe))
    if not devices:
        return
    if not probe.available:
        yield problem(f"runtime {name}: {probe.reason}")  # the reason has the remedy
        return
    yield fine(f"runtime {name}: {', '.join(probe.devices)}")
    for setting, device in devices.items():
        if device not in {"auto", *probe.names}:
            there = ", ".join(sorted(probe.names))
            yield problem(f"{setting} {device} is not here", f"set one of auto, {there}")
    if name == "torch" and "cuda" not in probe.names and devices.get("train.device") == "auto":
        yield note(
            "runtime torch will train on the CPU, which suits only tiny models such as digits"
        )


def _gate_and_prompts(recipe: Recipe) -> Iterator[Finding]:
    try:
        check_gate_and_prompts(recipe)
    except (ValueError, TransientError) as error:
        yield problem(str(error))
    else:
        yield fine("gate and prompts")
        yield from map(note, warnings_of_few_prompts(recipe))


def _memory(recipe: Recipe, arguments: Sequence[str]) -> Iterator[Finding]:
    try:
        plan, gpus = memory_of(recipe), usable_gpus()
    except (WrongInput, TransientError):  # a prompt file, which _gate_and_prompts reports
        return
    here = "train" in stages_without_pool(recipe) and must_fit_one_gpu(recipe)
    if not here or not gpus:
        return
    largest = max(gpus, key=lambda gpu: gpu.memory)
    given = without_secrets(shlex.join(arguments))
    command = f"kiln plan {given} --gpu {largest.memory / GIB:.0f}GB"
    if plan is None:
        yield note("the recipe's memory is not planned yet", command)
    elif plan.fits(largest.memory):
        yield fine(f"memory: {plan.largest / GIB:.1f} GiB fit {largest.name}")
    else:
        there = f"{largest.name} has {largest.memory / GIB:.1f} GiB"
        yield problem(f"memory: {plan.largest / GIB:.1f} GiB are needed, {there}", command)


def _models(recipe: Recipe) -> Iterator[Check]:
    settings = recipe.evaluate
    revision = recipe.model.revision
    places = {"model.path": recipe.model.path, "model.vae": recipe.model.vae}
    places |= {"evaluate.clip": settings.clip, "evaluate.image_encoder": settings.image_encoder}
    places |= {f"evaluate.judges {name}": path for name, path in settings.preference_models.items()}
    for setting, path in places.items():
        if path is not None:
            given = revision if setting == "model.path" else None
            yield named(setting, _model, setting, path, given)
    if settings.inception is not None:
        yield named("evaluate.inception", _inception, recipe, settings.inception)


def _model(setting: str, path: str, revision: str | None) -> Iterator[Finding]:
    try:
        where = check_model_available(path, revision=revision)
        yield fine(f"{setting}: {without_secrets(path)} ({where})")
    except (ModelNotFound, ModelAway) as error:
        yield problem(f"{setting}: {error}", f"set {setting} to a folder, URL or hub id")


def _inception(recipe: Recipe, path: str) -> Iterator[Finding]:
    try:
        yield fine(f"evaluate.inception: {without_secrets(path)} ({check_file_available(path)})")
        if "evaluate" in stages_without_pool(recipe):
            fidelity_folder()
    except (ModelNotFound, ModelAway, WrongInput) as error:
        yield problem(str(error), "see docs/evaluation.md#features-of-inception")


def _source(recipe: Recipe) -> Iterator[Finding]:
    where = getattr(recipe.source, "path", None) or recipe.source.kind
    try:
        download.check(recipe)
        yield fine(f"source: {without_secrets(str(where))} opens")
    except (download.SourceError, TransientError) as error:
        yield problem(str(error))


def _stores(recipe: Recipe) -> Iterator[Check]:
    yield named("store", _store, "store", recipe.store)
    if recipe.publish.registry is not None:
        yield named("registry", _store, "publish.registry", recipe.publish.registry)


def _store(setting: str, url: str) -> Iterator[Finding]:
    """Create, replace and delete an object, as a run does."""
    mend = f"grant the permission, or set `{setting}` to another folder or URL"
    try:
        store = Store(url)
    except StoreError as error:
        yield problem(f"{setting}: {error}", mend)
        return
    is_new = store.is_local and not os.path.isdir(store.root)
    try:
        store.check_writable()
        yield fine(f"{setting}: {store.url} can be written")
    except Exception as error:  # each filesystem's client has errors of its own
        yield problem(f"{setting}: {storage_error(store, error)}", mend)
    finally:
        if is_new and os.path.isdir(store.root) and not os.listdir(store.root):
            os.rmdir(store.root)


def _hub_login(recipe: Recipe) -> Iterator[Finding]:
    """Whether the hub knows the token, if there is one or publishing needs one."""
    from huggingface_hub import HfApi, get_token, is_offline_mode

    token, mend = get_token(), "hf auth login, or set HF_TOKEN"
    needed = recipe.publish.hub is not None
    if token is None:
        if needed:
            yield problem("publish.hub needs a hub token", mend)
        return
    if is_offline_mode():
        return
    try:
        name = HfApi().whoami(token=token)["name"]
        yield fine(f"hub token: of {name}")
    except Exception as error:  # of several HTTP libraries
        words = f"hub token: the hub does not accept it ({type(error).__name__})"
        yield problem(words, mend) if needed else note(words, mend)
