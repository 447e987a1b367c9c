"""From (seed, step, rank, world size) to the step's batch, made ready ahead of the device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from types import TracebackType
from typing import Any

import numpy as np

from artifacts.latents import Latents, LatentShard
from runtimes.base import StepBatch, WrongInput
from runtimes.families import Captioned, Family
from runtimes.objective import Choices, Objective
from runtimes.order import Order, Place, spread
from runtimes.shards import ShardFiles

POLL_SECONDS = 0.1
JOIN_SECONDS = 5.0


class Reader:
    """Reads samples of a latents artifact and makes batches of them."""

    def __init__(
        self,
        latents: Latents,
        family: Family,
        objective: Objective,
        *,
        open_limit: int = 8,
        cache_bytes: int = 20 * 2**30,
    ) -> None:
        if latents.info["family"] != family.name:
            raise WrongInput(
                f"the latents were encoded for a model of family {latents.info['family']}, "
                f"this one is {family.name}: encode with this model"
            )
        self._family, self._objective = family, objective
        self._zeros = latents.info["empty_prompt"] == "zeros"
        self._shards = ShardFiles(latents.shards, open_limit=open_limit, cache_bytes=cache_bytes)

    def batch(
        self, step: int, places: Sequence[Place], counters: Sequence[int], denominator: int
    ) -> StepBatch:
        """Read samples and draw everything random about each by its counter."""
        chosen = [self._objective.choices(counter) for counter in counters]
        captioned = [self._read(place, c) for place, c in zip(places, chosen, strict=True)]
        timesteps = np.array([c.timestep for c in chosen], np.int32)
        mean, logvar = (
            np.stack([getattr(item.sample, name) for item in captioned])
            for name in ("mean", "logvar")
        )
        noised = self._objective.noised(mean, logvar, timesteps, counters)
        return StepBatch(
            step=step,
            noisy_latents=noised.noisy_latents,
            timesteps=timesteps,
            target=noised.target,
            weight=noised.weight,
            conditioning=self._family.condition(captioned),
            denominator=denominator,
        )

    def close(self) -> None:
        """Unmap the shards."""
        self._shards.close()

    def _read(self, place: Place, choices: Choices) -> Captioned:
        shard = self._shards[place.shard]
        try:
            sample = shard.sample(place.group, place.row)
            rows = sample.caption_rows or (0,)
            row = 0 if choices.dropped else rows[int(choices.caption * len(rows))]
            prompt, pooled = _embeds(shard, row, choices.dropped and self._zeros)
        except (ValueError, IndexError, KeyError) as error:
            raise WrongInput(f"latent shard {shard.path} is damaged: {error}") from None
        return Captioned(sample, prompt, pooled)


def _embeds(shard: LatentShard, row: int, zeros: bool) -> tuple[Any, Any]:
    prompt, pooled = shard.prompt_embeds(row), shard.pooled_prompt_embeds(row)
    if not zeros:
        return prompt, pooled
    return np.zeros_like(prompt), None if pooled is None else np.zeros_like(pooled)


class Loader:
    """The batches of a training run; `batch(step)` is a pure function of the arguments here.

    Args:
        batch_size: the global batch size, which `world` must divide.
        window: shards whose samples are mixed at a time.
    """

    def __init__(
        self,
        latents: Latents,
        family: Family,
        objective: Objective,
        *,
        batch_size: int,
        seed: int,
        window: int,
        cache_bytes: int = 20 * 2**30,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size % world:
            raise WrongInput(
                f"train.global_batch_size {batch_size} cannot be shared by {world} processes: "
                "make it a multiple"
            )
        groups = [ref.groups for ref in latents.shards]
        self.order = Order(groups, batch_size=batch_size, seed=seed, window=window)
        # A window of each bucket is in use, and the next one while a batch straddles two.
        open_limit = window * (len(self.order.buckets) + 1)
        self._reader = Reader(
            latents, family, objective, open_limit=open_limit, cache_bytes=cache_bytes
        )
        self._batch_size, self._rank, self._world = batch_size, rank, world

    def batch(self, step: int) -> StepBatch:
        """This rank's share of a step's batch."""
        places = self.order.batch(step, self._rank, self._world)
        first = step * self._batch_size + self._rank * self._batch_size // self._world
        counters = range(first, first + len(places))
        return self._reader.batch(step, places, counters, self._batch_size)

    def ahead(
        self, start: int, stop: int, depth: int, stopping: Callable[[], bool] = lambda: False
    ) -> Prefetch:
        """The batches of steps [start, stop), `depth` of them made ready in background.

        They end early once `stopping` says so, even while the next one is long in coming.
        """
        return Prefetch(self, start, stop, depth, stopping)


class Prefetch:
    """An iterator of batches made by a thread; `waited` is how long its reader stood idle."""

    def __init__(
        self, loader: Loader, start: int, stop: int, depth: int, stopping: Callable[[], bool]
    ) -> None:
        self.waited = 0.0  # seconds
        self._stopping = stopping
        self._steps = range(start, stop)
        self._loader = loader
        self._ready: queue.Queue[StepBatch | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)

    def __enter__(self) -> Prefetch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_SECONDS)  # a read that stalls must not keep the process

    def __iter__(self) -> Iterator[StepBatch]:
        for _ in self._steps:
            begin = time.perf_counter()
            item = self._next()
            self.waited += time.perf_counter() - begin
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _next(self) -> StepBatch | BaseException | None:
        """What comes next, or None when it is time to stop."""
        while not self._stopping():
            try:
                return self._ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        return None

    def _fill(self) -> None:
        for step in self._steps:
            try:
                self._put(self._loader.batch(step))
            except BaseException as error:  # raised again in the thread that reads
                self._put(error)
                return
            if self._stop.is_set():
                return

    def _put(self, item: StepBatch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue


def holdout_batches(
    latents: Latents,
    family: Family,
    objective: Objective,
    *,
    samples: int,
    draws: int,
    batch_size: int,
) -> Iterator[tuple[list[int], StepBatch]]:
    """Held-out samples, `draws` times each with noise fixed by the objective's seed.

    Yields, for each batch, the number (from 0) of every sample in it, and the batch.

    Raises:
        WrongInput: nothing was held out.
    """
    places = spread([ref.groups for ref in latents.shards], "holdout", samples)
    if not places:
        raise WrongInput("the latents have no held-out samples: raise encode.holdout")
    reader = Reader(latents, family, objective)
    try:
        numbered = sorted(enumerate(places), key=lambda item: item[1].group)
        for _, bucket in groupby(numbered, key=lambda item: item[1].group):
            drawn = [(number, place, d) for number, place in bucket for d in range(draws)]
            for start in range(0, len(drawn), batch_size):
                part = drawn[start : start + batch_size]
                counters = [number * draws + draw for number, _, draw in part]
                numbers = [number for number, _, _ in part]
                yield numbers, reader.batch(0, [p for _, p, _ in part], counters, len(part))
    finally:
        reader.close()
