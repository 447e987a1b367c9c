"""Where the workers of a stage's Beam runner are, and whether they reach what they need there.

Workers of a stage read its source and its store. They never read the flow's model folder: remote
workers fetch the encoders from the store. This module does not import Beam.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from configs.load_recipe import RecipeError
from configs.secrets import without_secrets
from configs.settings.recipe import Recipe, StageName

BeamStage = Literal["download", "encode"]
BEAM_STAGES: tuple[BeamStage, ...] = ("download", "encode")
#: Runners of this machine. The names are as Beam compares them: lower case, without "Runner".
THREADS = ("", "fnapi")
PROCESSES = ("direct", "switchingdirect", "bundlebaseddirect", "prism")
DASK_ADDRESSES = {"dask_client_address", "dask_scheduler_file"}
CONNECT_SECONDS = 5.0


class Workers(Enum):
    """Where workers are."""

    THREADS = "in this process"
    PROCESSES = "in other processes of this machine"
    REMOTE = "on other machines or in containers, as far as is known"


def beam_options(recipe: Recipe, stage: BeamStage) -> dict[str, Any]:
    """Beam options of a stage: its own over those of section `beam`; null is the default."""
    options = {**recipe.beam, **getattr(recipe, stage).beam}
    return {name: value for name, value in options.items() if value is not None}


def is_dask(options: Mapping[str, Any]) -> bool:
    """Whether the options name Beam's Dask runner."""
    return _runner(options) == "dask"


def uses_job_service(options: Mapping[str, Any]) -> bool:
    """Whether the runner submits its pipeline to a job service, which has options of its own."""
    return _runner(options) in ("portable", "flink", "spark")


def workers_of(options: Mapping[str, Any]) -> Workers:
    """Where the workers of Beam options are.

    An engine with an address counts as remote, also at a loopback address: a forwarded port or a
    container has one too.
    """
    runner = _runner(options)
    if runner in THREADS:
        separate = options.get("direct_running_mode") == "multi_processing"
        return Workers.PROCESSES if separate else Workers.THREADS
    if runner in PROCESSES or options.get("environment_type") == "LOOPBACK":
        return Workers.PROCESSES
    if runner == "dask" and not DASK_ADDRESSES & options.keys():
        return Workers.PROCESSES  # a cluster of this run
    return Workers.REMOTE


def check_workers(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise RecipeError if workers cannot reach what their stage needs, or if none can be asked.

    Args:
        stages: stages of the run; others than download and encode have no Beam workers.
    """
    for stage in BEAM_STAGES:
        options = beam_options(recipe, stage)
        workers, runner = workers_of(options), options.get("runner", "multi_processing")
        if stage not in stages or workers is Workers.THREADS:
            continue
        for setting, place in _places(recipe, stage):
            why = out_of_reach(place, workers, recipe.shared_folders)
            if why is not None:
                raise RecipeError(
                    f"{setting}: the workers of {runner} ({stage}) cannot reach "
                    f"{without_secrets(place)}, {why}"
                )
        _check_listening(options)


def _places(recipe: Recipe, stage: BeamStage) -> Iterator[tuple[str, str]]:
    """(setting, place) of what workers of a stage read or write, the URLs of a list excluded."""
    yield "store", recipe.store
    source = recipe.source
    if stage != "download":
        return
    if source.kind == "digits":
        yield "source.kind", "http://127.0.0.1"  # tasks.download.folders
    elif source.kind == "urls":
        if source.base_url is not None:
            yield "source.base_url", source.base_url
    elif source.kind != "dataset" or not is_hub_id(source.path):
        yield "source.path", source.path


def out_of_reach(place: str, workers: Workers, shared: Sequence[str]) -> str | None:
    """The reason and the remedy, or None if nothing is known against the place."""
    scheme, _, rest = place.rpartition("://")
    if scheme == "memory":
        return "the memory of this process: use a folder or a bucket (s3://, gs://)"
    if workers is not Workers.REMOTE:
        return None
    if scheme in ("http", "https"):
        if _is_loopback(place):
            return "an address of this machine alone: serve it at one that workers can reach"
    elif scheme in ("", "file", "local"):
        path = Path(os.path.abspath(Path(rest).expanduser()))
        if not any(path.is_relative_to(folder) for folder in shared):
            return (
                "a folder of this machine: use a bucket (s3://, gs://), or name the file system "
                "that they share in shared_folders"
            )
    return None


def _check_listening(options: Mapping[str, Any]) -> None:
    """Raise RecipeError if nothing listens at the address of the scheduler or job service."""
    for name in ("dask_client_address", "job_endpoint"):
        address = options.get(name)
        if not isinstance(address, str) or ":" not in address:
            continue
        found = _split(address)
        try:
            socket.create_connection((found.hostname, found.port), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"beam.{name}: nothing answers at {address} ({error}): start it, or correct the "
                "address"
            ) from None


def _runner(options: Mapping[str, Any]) -> str:
    name = str(options.get("runner") or "").rpartition(".")[2]
    return name.lower().removesuffix("runner")


def is_hub_id(path: str) -> bool:
    """Whether a path is `owner/name` of the Hugging Face hub, not an existing local one."""
    named = "://" not in path and path.count("/") == 1 and path[:1] not in "./~"
    return named and not Path(path).exists()


def _is_loopback(address: object) -> bool:
    host = _split(str(address)).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(address: str) -> SplitResult:
    return urlsplit(address if "://" in address else f"tcp://{address}")
