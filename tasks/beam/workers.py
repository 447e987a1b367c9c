"""Where the workers of a pipeline are, what they reach, and what they have done.

Workers of a stage read its source and its store. They never read the flow's model folder: remote
workers fetch the encoders from the store. The work pools of a recipe's `place` must reach what
their stages need, too; they get the recipe resolved.

Each process of a pipeline writes one small file on what it has done, which the flow reads to show
progress. A listing of the shards themselves would grow with the store.

This module does not import Beam.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import SplitResult, urlsplit
from uuid import uuid4

from pydantic import SecretStr, ValidationError

from artifacts.filesystems import REAL, Clock, ask_at_once, entries, name_of, read_small_file
from artifacts.records import parse_json, write_atomic
from artifacts.store import Store
from configs.errors import Refused
from configs.explain_errors import explain
from configs.load_recipe import RECIPES, anchored
from configs.secrets import hide_secrets, one_line, without_secrets
from configs.settings.data import Source
from configs.settings.recipe import Recipe, StageName
from tasks.progress import seconds_in_words

BeamStage = Literal["download", "describe", "caption", "encode"]
BEAM_STAGES: tuple[BeamStage, ...] = get_args(BeamStage)
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
    """Raise Refused if workers cannot reach what their stage needs, or if none can be asked.

    Args:
        stages: stages of the run; others than BEAM_STAGES have no Beam workers.
    """
    for stage in BEAM_STAGES:
        if stage not in stages or stage not in recipe.stages:
            continue
        options = beam_options(recipe, stage)
        kind = workers_of(options)
        if kind is Workers.THREADS:
            continue
        name = f"the workers of {options.get('runner', 'multi_processing')} ({stage})"
        places = [("store", recipe.store), *_source_places(recipe.source, stage, in_pool=False)]
        for setting, place in places:
            _refuse(name, setting, place, out_of_reach(place, kind, recipe.shared_folders))
        for option in ("dask_client_address", "job_endpoint"):  # of the scheduler or job service
            address = options.get(option)
            if not isinstance(address, str) or ":" not in address:
                continue
            url = _split(address)
            try:
                socket.create_connection((url.hostname, url.port), CONNECT_SECONDS).close()
            except (OSError, ValueError) as error:
                raise Refused(
                    f"beam.{option}: nothing answers at {address} ({error}): start it, or correct "
                    "the address"
                ) from None


def _refuse(workers: str, setting: str, place: str, why: str | None) -> None:
    """Raise Refused for a place, unless nothing is known against it."""
    if why is not None:
        raise Refused(f"{workers} cannot reach {without_secrets(place)}, {why}", setting=setting)


def _source_places(source: Source, stage: StageName, *, in_pool: bool) -> Iterator[tuple[str, str]]:
    """(setting, place) of what workers of a stage read of a source.

    Beam's workers do not read the URLs of a list; each machine of a work pool draws the digits.
    What the base draws is in the store.
    """
    if stage != "download" or source.kind == "drawn":
        return
    if source.kind == "digits":
        if not in_pool:
            yield "source.kind", "http://127.0.0.1"  # tasks.download.folders
    elif source.kind == "urls":
        if in_pool:
            yield "source.path", source.path
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


def _runner(options: Mapping[str, Any]) -> str:
    name = str(options.get("runner") or "").rpartition(".")[2]
    return name.lower().removesuffix("runner")


def is_hub_id(path: str) -> bool:
    """Whether a path is `owner/name` on the Hugging Face hub, not an existing local path."""
    named = "://" not in path and path.count("/") == 1 and path[:1] not in "./~"
    return named and not Path(path).exists()


def _is_loopback(address: str) -> bool:
    host = _split(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(address: str) -> SplitResult:
    return urlsplit(address if "://" in address else f"tcp://{address}")


#: Models that come with the code: each machine has its own copy.
SHIPPED = RECIPES.parent / "demo"


def check_places(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise Refused if a work pool cannot reach what its stage needs; nothing is asked.

    Args:
        stages: stages of the run.
    """
    for stage, pool in recipe.place.pools().items():
        if stage not in stages:
            continue
        name = f"workers of pool {pool} (place.{stage})"
        for setting, place in _work_pool_places(recipe, stage):
            _refuse(name, setting, place, _why_not(setting, place, recipe.shared_folders))
        if (secret := _secret(hide_secrets(settings_to_send(recipe)))) is not None:
            raise Refused(
                f"{secret}: a secret cannot be sent to pool {pool} (place.{stage}), since Prefect "
                "would store it: set credentials in the environment of its workers"
            )


def settings_to_send(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as JSON, for a run that sends no stage itself.

    It has no secrets of publishing, which stays with the sender. Paths of shipped models are
    relative to the folder of recipes, as in a recipe there.
    """
    settings: dict[str, Any] = recipe.model_dump(mode="json")
    settings["place"] = {}
    settings["publish"] |= {"signing_key": None, "hub": None}
    return dict(_relative(settings))


def received_recipe(settings: dict[str, Any]) -> Recipe:
    """The recipe of `settings_to_send`. Raises Refused if this version refuses it."""
    settings = anchored(settings, RECIPES)
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        raise Refused(explain("the sent recipe", error, settings)) from None


def _work_pool_places(recipe: Recipe, stage: StageName) -> Iterator[tuple[str, str]]:
    """(setting, place) of what a sent stage reads, writes or checks."""
    measuring = recipe.evaluate
    judges = measuring.preference_models.items()
    caption = recipe.caption
    if caption is not None and caption.endpoint is not None and stage != "caption":
        caption = None  # only its own stage asks the servers
    places = {
        "model.path": recipe.model.path,
        "model.vae": recipe.model.vae,
        "model.components": recipe.model.components,
        "train.denoiser_config": recipe.train.denoiser_config,
        "train.lora.start": recipe.train.lora.start,
        "train.lora.assistant": recipe.train.lora.assistant,
        "evaluate.model": measuring.model.path if measuring.model else None,
        "evaluate.model.components": measuring.model.components if measuring.model else None,
        "evaluate.clip": measuring.clip,
        "evaluate.image_encoder": measuring.image_encoder,
        "evaluate.inception": measuring.inception,
        **{f"evaluate.judges.{name}": path for name, path in judges},
        **{f"evaluate.prompts.{n}.file": prompts.file for n, prompts in measuring.prompts.items()},
        **(recipe.describe.models if recipe.describe else {}),
        **(caption.places if caption else {}),
        "publish.registry": recipe.publish.registry,
    }
    yield "store", recipe.store
    yield from _source_places(recipe.source, stage, in_pool=True)
    yield from ((setting, place) for setting, place in places.items() if place is not None)


def _why_not(setting: str, place: str, shared: Sequence[str]) -> str | None:
    """The reason and the remedy, or None if nothing is known against the place."""
    if "://" not in place:
        section, _, name = setting.partition(".")
        is_file = name == "inception" or name.endswith((".file", ".head"))
        is_file = is_file or place.endswith(".onnx")
        is_model = section in ("model", "describe", "caption", "evaluate") and not is_file
        is_shipped = Path(os.path.abspath(place)).is_relative_to(SHIPPED)
        if is_shipped or (is_model and is_hub_id(place)):
            return None
        if not Path(place).expanduser().is_absolute():
            return "a path relative to this folder: write a URL (s3://, gs://) or an absolute path"
    return out_of_reach(place, Workers.REMOTE, shared)


def _relative(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _relative(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item) for item in value]
    if isinstance(value, str) and value.startswith(f"{SHIPPED}/"):
        return os.path.relpath(value, RECIPES)
    return value


def _secret(value: Any, name: str = "") -> str | None:
    """The dotted name of the first hidden setting; None if no setting is hidden."""
    if isinstance(value, dict | list):
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        inner = (_secret(item, f"{name}.{key}".lstrip(".")) for key, item in rows)
        return next(filter(None, inner), None)
    return name if isinstance(value, SecretStr) else None


#: Seconds between two writings of a report, at least.
EVERY_SECONDS = {True: 0.5, False: 10.0}  # by whether the store is local
#: A report takes at most this share of a worker's time.
SHARE = 0.05
#: Characters of a shard's key that a report has.
PREFIX = 16
FAILED = "failed "
#: Folder of the reports in a draft.
REPORTS = "progress"
log = logging.getLogger("kiln")


class WorkerReport:
    """Counts what one process has done, in a file of its own; threads may share it."""

    def __init__(self, store: str, folder: str, clock: Clock = REAL) -> None:
        self._store = Store(store)
        self._clock = clock
        self._path = f"{folder}/{uuid4().hex}.json"
        self._shards: list[str] = []
        self._counts: Counter[str] = Counter()
        self._next = 0.0
        self._lock = threading.Lock()

    def add(self, key: str, counts: Mapping[str, int]) -> None:
        """Count a shard that the store has; the file follows a few seconds later."""
        with self._lock:
            self._shards.append(key[:PREFIX])
            self._counts.update(counts)
            begun = self._clock.now()
            if begun >= self._next:
                self._write()
                took = self._clock.now() - begun
                self._next = begun + max(EVERY_SECONDS[self._store.is_local], took / SHARE)

    def flush(self) -> None:
        """Write the file now."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        data = json.dumps({"shards": self._shards, "counts": self._counts}).encode()
        try:
            write_atomic(self._store.fs, self._path, data)
        except Exception as error:  # the pipeline itself fails if the store does
            log.debug("no progress was reported: %s", one_line(error))


#: Run and report of this process, by folder.
_reports: dict[str, tuple[str, WorkerReport]] = {}
_reports_lock = threading.Lock()


def worker_report(store: str, folder: str, run: str) -> WorkerReport:
    """The report of this process for the reports in a folder.

    Args:
        run: unique id of the pipeline's run; a worker that outlives a run begins another report.
    """
    with _reports_lock:
        if folder not in _reports or _reports[folder][0] != run:
            _reports[folder] = run, WorkerReport(store, folder)
        return _reports[folder][1]


@dataclass
class Done:
    """What all workers have done. A shard of a worker that was killed may count twice."""

    shards: set[str] = field(default_factory=set)  # the first PREFIX characters of keys
    counts: Counter[str] = field(default_factory=Counter)

    def rows(self, sizes: Mapping[str, int]) -> int:
        """Rows of the shards that are done, of {key: rows}."""
        return sum(rows for key, rows in sizes.items() if key[:PREFIX] in self.shards)


def shard_counts(rows: int, failed: Mapping[str, int], size: int, *, is_new: bool) -> Counter[str]:
    """What `WorkerReport.add` counts of a shard.

    Args:
        failed: rows without a result, by reason.
        size: bytes that were read or fetched for it.
        is_new: whether this run has built it.
    """
    counts = Counter({f"{FAILED}{reason}": count for reason, count in failed.items()})
    return counts + Counter({"rows": rows, "bytes": size} if is_new else {})


def progress_text(
    done: int, total: int, shards: str, unit: str, counts: Mapping[str, int], seconds: float
) -> str:
    """A line on what is done, what failed and how fast: `seconds` since the beginning."""
    failed = Counter(
        {name.removeprefix(FAILED): n for name, n in counts.items() if name.startswith(FAILED)}
    )
    parts = [f"{done:,} of {total:,} {unit}, {shards}"]
    if failed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in failed.most_common(3))
        parts.append(f"{failed.total():,} failed ({reasons})")
    rate = counts.get("rows", 0) / max(seconds, 1e-9)
    if rate and done < total:
        parts.append(f"{rate:,.1f} {unit}/s")
        parts.append(f"{counts.get('bytes', 0) / 1e6 / seconds:,.1f} MB/s")
        parts.append(f"{seconds_in_words((total - done) / rate)} left")
    return ", ".join(parts)


class WorkerReports:
    """The reports of all workers, each of which is read again only once it has changed."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._read: dict[str, tuple[Any, dict[str, Any]]] = {}  # name -> size and content

    def clear(self) -> None:
        """Delete the reports, also those of an earlier run."""
        _reports.pop(self._folder, None)
        try:
            for entry in entries(self._store.fs, self._folder):
                self._store.fs.rm_file(entry["name"])
        except Exception as error:  # the pipeline itself fails if the store does
            log.debug("reports of progress stay: %s", one_line(error))

    def flush(self) -> None:
        """Write the report of this process now, if it has a report."""
        if self._folder in _reports:
            _reports[self._folder][1].flush()

    def done(self) -> Done:
        """The sum of all reports. Raises as the filesystem does."""
        fs = self._store.fs
        files = entries(fs, self._folder)
        # A report that is written again has grown, as its list of shards has.
        changed = [e for e in files if self._read.get(name_of(e), (-1,))[0] != e["size"]]
        contents = ask_at_once(fs, lambda entry: read_small_file(fs, entry["name"]), changed)
        for entry, data in zip(changed, contents, strict=True):
            self._read[name_of(entry)] = (entry["size"], parse_json(data))
        total = Done()
        for _, report in self._read.values():
            total.shards.update(report["shards"])
            total.counts.update(report["counts"])
        return total


@contextmanager
def quiet_import() -> Iterator[None]:
    """Discard records of the root logger during the block."""
    root = logging.getLogger()
    silence = logging.NullHandler()
    nothing = logging.Filter("no logger of this name")
    root.addHandler(silence)  # otherwise logging would install a default handler
    root.addFilter(nothing)
    try:
        yield
    finally:
        root.removeFilter(nothing)
        root.removeHandler(silence)
