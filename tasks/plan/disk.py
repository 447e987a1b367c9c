"""Disk and time of a run, estimated before it starts; a disk that cannot hold it is refused."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from artifacts.store import MANIFEST, Store
from configs.errors import Refused
from configs.settings.recipe import OPTIONAL_STAGES, Recipe, StageName
from runtimes.detect_hardware import find_gpus
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.gpu_specs import known_gpu
from tasks.download.shard import STAGE as DOWNLOAD
from tasks.encode.crop_to_bucket import STAGE as ENCODE
from tasks.plan.gpu_time import TYPICAL_MFU
from tasks.plan.plan import estimate_disk
from tasks.plan.shipped_plans import memory_of
from tasks.progress import bytes_in_words

log = logging.getLogger("kiln")


def check_disk(
    recipe: Recipe,
    store: Store,
    base: Base,
    rows: int,
    stages: Sequence[StageName],
    shards: Collection[str],
    trials: Sequence[Recipe] = (),
    references: int = 0,
) -> None:
    """Log what a run needs, and raise Refused if a local store's disk cannot hold it.

    Stored artifacts need no more space. They are subtracted only if the whole run does not fit.

    Args:
        rows: the number of rows in the source.
        stages: those that the run builds.
        shards: keys of the planned shards.
        trials: recipes of a sweep.
        references: the number of distinct references of the rows.

    Raises:
        Refused: the base's configs are invalid.
    """
    whole = left = estimate_disk(recipe, base, rows, stages, trials, references=references)
    needed, words = _needed(recipe.plan.disk_gb, whole, left)
    free = free_bytes(store)
    if free is not None and needed > free:
        missing = _missing(store, stages, shards)
        left = {stage: int(missing[stage] * size) for stage, size in whole.items()}
        needed, words = _needed(recipe.plan.disk_gb, whole, left)
    there = "" if free is None else f", {bytes_in_words(free)} are free"
    time = training_time(trials or (recipe,)) if left.get("train") else None
    log.info(
        "estimate: %s rows, at most %s of disk%s (%s)%s",
        f"{rows:,}",
        bytes_in_words(needed),
        there,
        words,
        "" if time is None else f"; {time}",
    )
    if free is not None and needed > free:
        raise Refused(_refusal(store, needed, words, free))


def training_time(recipes: Sequence[Recipe]) -> str | None:
    """Duration of the trainings on this machine's GPU, in words; None if a rate is not known."""
    plans = [plan for plan in map(memory_of, recipes) if plan is not None]
    on_gpu = recipes[0].train.device.partition(":")[0] in ("auto", "cuda")
    gpus = find_gpus() if len(plans) == len(recipes) and on_gpu else []
    spec = known_gpu(gpus[0].name) if gpus else None
    if spec is None:
        return None
    hours = [time for plan in plans if (time := plan.hours(spec)) is not None]
    if len(hours) < len(plans):
        return None
    return f"training about {sum(hours):,.1f} h on {spec.name} (at {TYPICAL_MFU:.0%} of its peak)"


def _needed(
    by_hand: float | None, whole: dict[StageName, int], left: dict[StageName, int]
) -> tuple[int, str]:
    """Bytes still needed, and their parts in words; `plan.disk_gb` replaces the whole estimate."""
    total = sum(left.values())
    if by_hand is None:
        return total, ", ".join(f"{name} {bytes_in_words(size)}" for name, size in left.items())
    share = total / sum(whole.values()) if any(whole.values()) else 0.0
    return int(by_hand * 1e9 * share), f"plan.disk_gb {by_hand:g}, {1 - share:.0%} of it stored"


def _missing(
    store: Store, stages: Sequence[StageName], shards: Collection[str]
) -> dict[StageName, float]:
    """The share of each stage that a local store lacks.

    Latent shards are counted, since their keys are not known yet. Once all pictures are there, a
    later stage that the store has, begun or finished, counts as this run's.
    """
    missing: dict[StageName, float] = dict.fromkeys(stages, 1.0)
    if not store.is_local or not shards:
        return missing
    there = set(_shard_names(store, DOWNLOAD))
    pictures = sum(key not in there for key in shards) / len(shards)
    latents = max(0.0, 1 - sum(1 for _ in _shard_names(store, ENCODE)) / len(shards))
    shares: dict[StageName, float] = {"download": pictures, "encode": latents}
    if not pictures:
        # A shard without good pictures has no latents.
        whole: tuple[StageName, ...] = (*OPTIONAL_STAGES, "encode")
        shares |= {stage: 0.0 for stage in whole if _has_artifact(store, stage, MANIFEST)}
        later: tuple[StageName, ...] = ("train", "evaluate", "publish")
        shares |= {stage: 0.0 for stage in later if _has_artifact(store, stage)}
    return {stage: shares.get(stage, 1.0) for stage in stages}


def _shard_names(store: Store, stage: str) -> Iterator[str]:
    """Keys of a stage's shards in a local store."""
    folder = store.shards_path(stage)
    if os.path.isdir(folder):
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries)
            yield from (name[: -len(".json")] for name in names if name.endswith(".json"))


def _has_artifact(store: Store, stage: StageName, file: str = "") -> bool:
    """Whether a local store has an artifact of the stage, with `file` in it."""
    folder = Path(store.root) / stage
    keys = os.listdir(folder) if folder.is_dir() else []
    return any(len(key) == 64 and (folder / key / file).exists() for key in keys)


def free_bytes(store: Store) -> int | None:
    """Free bytes of a local store's disk; None for a bucket, whose limits are not known."""
    if not store.is_local:
        return None
    folder = next(path for path in (Path(store.root), *Path(store.root).parents) if path.is_dir())
    return shutil.disk_usage(folder).free


def _refusal(store: Store, needed: int, words: str, free: int) -> str:
    return (
        f"store {store.url}: the run needs about {bytes_in_words(needed)} ({words}), and its "
        f"disk has {bytes_in_words(free)} free: free some (`kiln gc`), set `store` to another "
        "place, lower encode.resolution or the rows, or correct the estimate by plan.disk_gb"
    )
