"""The loader: a step's batch as a pure function of (seed, step, rank, world size), prefetched.

Batches are padded to a fixed number of rows, so that one compiled program serves every batch. A
thread prepares them while the device computes. Batches of the held-out split have fixed noise, and
each of their samples has its own loss.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from artifacts import latent_shards
from artifacts.errors import is_outage
from artifacts.filesystems import REAL, Clock
from artifacts.references import stored_group
from configs.errors import Refused
from configs.settings.train_parts import MaskedLoss
from runtimes.contract import OPTIONAL, StepBatch
from runtimes.data.sample_order import Mixture, Order, SampleIndex, Window, evenly_spaced
from runtimes.data.shard_cache import KeptRows, KeptShard, ShardFiles
from runtimes.families import Captioned, Conditioning, Family, families_with_references
from runtimes.families.family import REFERENCE
from runtimes.families.inpainting_aesthetics import NO_EXTRA_INPUTS, ExtraInputs
from runtimes.objective.random_draws import Choices, Stream, generator
from runtimes.objective.training_objective import Objective

#: Captions of varying length are padded to a multiple of this number of tokens.
TOKEN_STEP = 32
#: Open shards of references: targets of any shard may share them.
REFERENCE_SHARDS = 64


def padded_rows(count: int, devices: int) -> int:
    """The smallest multiple of `devices` that is at least `count`."""
    return -(-count // devices) * devices


def pad_rows(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """Repeat the last row of an array [B, ...] until it has `rows` rows.

    An array that already has `rows` rows or more is copied unchanged.
    """
    return np.concatenate([array, np.repeat(array[-1:], max(0, rows - len(array)), axis=0)])


def pad_batch(batch: StepBatch, rows: int, devices: int) -> StepBatch:
    """Repeat the last sample of a batch until every device has the same number of rows.

    Args:
        rows: least number of rows of the padded batch.
        devices: devices that share the rows; the padded number is a multiple of it.
    """
    rows = padded_rows(max(rows, len(batch.timesteps)), devices)
    names = ["noisy_latents", "timesteps", "target", "weight"]
    names += [name for name in OPTIONAL if getattr(batch, name) is not None]
    conditioning = {name: pad_rows(array, rows) for name, array in batch.conditioning.items()}
    arrays: dict[str, Any] = {name: pad_rows(getattr(batch, name), rows) for name in names}
    return replace(batch, conditioning=conditioning, **arrays)


Batch = TypeVar("Batch")
POLL_SECONDS = 0.1
JOIN_SECONDS = 5.0


class Prefetch(Generic[Batch]):
    """An iterator over batches that a thread prepares. Enter it as a context manager first.

    Args:
        batches: iterated by the thread.
        depth: maximum number of prepared batches.
        stopping: ends the iteration once it returns True, even during a slow read.
        clock: source of time for `waited`.

    Attributes:
        waited: total seconds that the consumer has waited for a batch.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        depth: int,
        stopping: Callable[[], bool] = lambda: False,
        clock: Clock = REAL,
    ) -> None:
        self.waited = 0.0
        self._batches = batches
        self._stopping = stopping
        self._clock = clock
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)

    def __enter__(self) -> Prefetch[Batch]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_SECONDS)  # a stalled read must not block the process's exit

    def __iter__(self) -> Iterator[Batch]:
        while True:
            begin = self._clock.now()
            item = self._next()
            self.waited += self._clock.now() - begin
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _next(self) -> Batch | BaseException | None:
        """The next batch or the thread's error; None at the end or after a stop request."""
        while not self._stopping():
            try:
                return self._ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        return None

    def _fill(self) -> None:
        try:
            for batch in self._batches:
                self._put(batch)
                if self._stop.is_set():
                    return
        except BaseException as error:  # the consumer's thread raises it again
            self._put(error)
        else:
            self._put(None)

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue


class BatchReader:
    """Reads samples of a latents artifact and assembles batches.

    Args:
        text_encoders: whether the step runs text encoders, trained or frozen; batches then contain
            token ids.
        extras: the denoiser's inputs in addition to the family's conditioning.
        cache_bytes: size limit of the local cache of remote shards.
        guidance_scale: input of a guidance-distilled denoiser.
        keep_bytes: maximum size of samples that stay in memory once they are read.
        masked_loss: how the pictures' masks weight the loss; None: not at all.
        mixture: facts of each source, by TrainJob.mixture; None: all sources count alike.
        reference_dropout_rate: probability that a batch has no references.

    Attributes:
        groups: for each shard, number of samples per group.
        sources: for each shard, the name of its source; "" without a mixture.
        left_out: for each shard, group -> rows that are left out.
        held_out: the held-out samples, if they have an order of their own.
        shards: the memory-mapped shards.

    Raises:
        Refused: the latents do not fit the model, its extra inputs or `text_encoders`.
    """

    def __init__(
        self,
        latents: latent_shards.Latents,
        family: Family,
        objective: Objective,
        *,
        text_encoders: bool = False,
        extras: ExtraInputs = NO_EXTRA_INPUTS,
        cache_bytes: int = 20 * 2**30,
        guidance_scale: float = 1.0,
        keep_bytes: int = 0,
        masked_loss: MaskedLoss | None = None,
        mixture: Mixture | None = None,
        reference_dropout_rate: float = 0.0,
    ) -> None:
        if latents.info["family"] != family.name:
            raise Refused(
                f"the latents were encoded for a model of family {latents.info['family']}, "
                f"this one is {family.name}: encode with this model"
            )
        if latents.text_dtype is not None and not text_encoders:
            raise Refused(
                "the latents have token ids of captions, this run reads embeddings: encode again "
                "with encode.text: embeddings"
            )
        if extras.inpainting and not latents.info.get("masks"):
            raise Refused("the latents have no masks: set encode.masks, and encode again")
        if extras.control and not latents.info.get("control"):
            raise Refused("the latents have no control pictures: set source.control, and run again")
        if extras.aesthetic_score and not latents.info.get("scored"):
            raise Refused(
                "the latents have no aesthetic scores: name their column in "
                "source.aesthetic_column, and download again"
            )
        if latents.references.table:
            _check_references(latents, family)
        self._family = family
        self._objective = objective
        self._extras = extras
        self._text_encoders = text_encoders
        self._guidance_scale = guidance_scale
        self._masked_loss = masked_loss
        self._zeros = latents.info["empty_prompt"] == "zeros"
        self._prompt_shape = (latents.info["tokens"], latents.info["prompt_dim"])
        self.groups = [ref.groups for ref in latents.shards]
        self.left_out = [ref.left_out for ref in latents.shards]
        self.sources = [ref.source for ref in latents.shards]
        self.mixture = mixture
        self._refs = latents.shards
        self._references = latents.references.table
        self._prompts = latents.prompts.table
        self._reference_dropout_rate = reference_dropout_rate
        order = latents.held_out_order
        self.held_out = None if order is None else [SampleIndex(*place) for place in order]
        self.shards = ShardFiles(latents.shards, open_limit=8, cache_bytes=cache_bytes)
        self._rows = KeptRows(self.shards, keep_bytes) if keep_bytes else self.shards
        self.reference_shards = ShardFiles(
            latents.references.shards, open_limit=REFERENCE_SHARDS, cache_bytes=cache_bytes
        )
        self.prompt_shards = ShardFiles(
            latents.prompts.shards, open_limit=REFERENCE_SHARDS, cache_bytes=cache_bytes
        )

    def batch(
        self, step: int, samples: Sequence[SampleIndex], counters: Sequence[int], denominator: int
    ) -> StepBatch:
        """Read samples and draw their noise and choices.

        Args:
            counters: random-number counter of each sample.
            denominator: global batch size, see StepBatch.

        Raises:
            Refused: a shard is missing or damaged.
        """
        facts = self._facts(samples)
        rates = [source["caption_dropout_rate"] for source in facts]
        chosen = self._objective.choices(counters, rates)
        captioned = self.read(samples, chosen)
        levels = np.array([c.level for c in chosen], np.int32)
        mean, logvar = latent_moments(captioned)
        noised = self._objective.noised(mean, logvar, levels, counters)
        conditioning = self._family.condition(captioned, self._guidance_scale)
        batch = StepBatch(
            step=step,
            **vars(noised),
            conditioning=conditioning
            | self._extra_inputs(captioned, chosen)
            | self._reference_inputs(captioned, step),
            denominator=denominator,
            loss_mask=self._loss_mask(captioned),
        )
        if not facts:
            return batch
        factors = np.array([source["loss_weight"] for source in facts], np.float32)
        return replace(batch, weight=batch.weight * factors, is_prior=self._is_prior(facts))

    def _reference_inputs(self, captioned: Sequence[Captioned], step: int) -> Conditioning:
        """`reference_0`, `reference_1`... [B, C, h, w] f32, in the denoiser's latents; no noise.

        A batch has all of its references or none: its samples have one shape.
        """
        rate = self._reference_dropout_rate
        if rate and generator(self._objective.seed, Stream.REFERENCES, step).random() < rate:
            return {}
        by_number = zip(*(item.references for item in captioned), strict=True)
        means = map(latent_shards.stack_rows, by_number)
        scale = self._objective.scale
        return {f"{REFERENCE}{number}": scale.scaled(mean) for number, mean in enumerate(means)}

    def _facts(self, samples: Sequence[SampleIndex]) -> list[Mapping[str, Any]]:
        """The facts of each sample's source; none without a mixture."""
        mixture = self.mixture
        return [mixture[self.sources[index.shard]] for index in samples] if mixture else []

    def _is_prior(self, facts: Sequence[Mapping[str, Any]]) -> NDArray[np.bool_] | None:
        """Rows [B] whose source has `regularisation: prior`; None if no source has."""
        if not any(source["regularisation"] == "prior" for source in (self.mixture or {}).values()):
            return None  # the step's program needs no frozen base
        return np.array([source["regularisation"] == "prior" for source in facts])

    def _loss_mask(self, captioned: Sequence[Captioned]) -> NDArray[np.float32] | None:
        """Factor [B, h, w] f32 of the loss at each latent position; None without masked loss."""
        if self._masked_loss is None:
            return None
        whole = np.full(captioned[0].sample.mean.shape[1:], 255, np.uint8)
        stored = [item.sample.loss_mask for item in captioned]
        shown = np.stack([whole if mask is None else mask for mask in stored]) / np.float32(255)
        mask = np.maximum(shown, np.float32(self._masked_loss.unmasked_weight))
        if self._masked_loss.area_normalised:  # a mask that shows nothing stays 0
            mask /= np.maximum(mask.mean((1, 2), keepdims=True), np.finfo(np.float32).tiny)
        return mask

    def read(self, samples: Sequence[SampleIndex], chosen: Sequence[Choices]) -> list[Captioned]:
        """Samples with the conditioning of their chosen captions. Raises Refused."""
        return [self._read(index, c) for index, c in zip(samples, chosen, strict=True)]

    def _extra_inputs(
        self, captioned: Sequence[Captioned], chosen: Sequence[Choices]
    ) -> Conditioning:
        """`inpainting` [B, 1 + C, h, w], `aesthetic_score` [B] and `control`, f32, those it has.

        `inpainting` concatenates the mask and the latents of the masked image. `control` is what
        the ControlNet reads: pixels [B, 3, H, W] in 0..1, or scaled latents [B, C, h, w].
        """
        inputs: Conditioning = {}
        samples = [item.sample for item in captioned]
        if self._extras.inpainting:
            masked = [sample.masked for sample in samples if sample.masked is not None]
            pairs = [(m, int(c.mask * len(m.masks))) for m, c in zip(masked, chosen, strict=True)]
            masks = latent_shards.stack_rows([m.masks[k] for m, k in pairs])
            means = latent_shards.stack_rows([m.means[k] for m, k in pairs])
            latents = self._objective.scale.scaled(means)
            inputs["inpainting"] = np.concatenate([masks[:, None], latents], 1, dtype=np.float32)
        if self._extras.control:
            controls = [sample.control for sample in samples if sample.control is not None]
            stored = latent_shards.stack_rows(controls)
            is_pixels = stored.dtype == np.uint8
            scaled = stored / np.float32(255) if is_pixels else self._objective.scale.scaled(stored)
            inputs["control"] = scaled
        if self._extras.aesthetic_score:
            scores = [sample.aesthetic_score for sample in samples]
            inputs["aesthetic_score"] = np.array(scores, np.float32)
        return inputs

    def _read(self, index: SampleIndex, choices: Choices) -> Captioned:
        shard = self._rows[index.shard]
        group = stored_group(index.group)
        stored = self._refs[index.shard].stored_row(index.group, index.row)
        references = self._references_of(index.shard, group, stored)
        stored_at = group, stored
        mirrored = latent_shards.flipped_group(group)
        if choices.flip < 0.5 and mirrored in shard.groups:
            group = mirrored
        try:
            sample = shard.sample(group, stored)
            if self._extras.inpainting and sample.masked is None:
                raise ValueError(f"picture {stored} of {group} has no masks")
            if self._extras.control and sample.control is None:
                raise ValueError(f"picture {stored} of {group} has no control picture")
            if self._extras.aesthetic_score and sample.aesthetic_score is None:
                raise ValueError(f"picture {stored} of {group} has no aesthetic score")
            rows = sample.caption_rows or (0,)  # row 0 of a shard is the empty caption
            row = 0 if choices.dropped else rows[int(choices.caption * len(rows))]
            if self._family.sees_references:
                embeds = self._prompt_beside(index.shard, stored_at, choices)
                tokens = len(embeds)
                embeds = self._padded(embeds)
                return Captioned(sample, embeds, None, tokens=tokens, references=references)
            captioned = self._captioned(sample, shard, row, choices.dropped and self._zeros)
            return replace(captioned, references=references) if references else captioned
        except (ValueError, IndexError, KeyError) as error:
            raise Refused(f"latent shard {shard.path} is damaged: {error}") from None

    def _references_of(self, shard: int, group: str, row: int) -> tuple[NDArray[np.uint16], ...]:
        """The references of a stored sample, each [C, h, w] as bf16 bits. Raises Refused."""
        targets = self._refs[shard].references.get(group)
        if targets is None:
            return ()
        places = [self._references[number] for number in targets.of(row)]
        try:
            return tuple(
                self.reference_shards[place.shard].mean(place.group, place.row) for place in places
            )
        except (IndexError, KeyError) as error:
            raise Refused(f"references of {self._refs[shard].url}: damaged: {error}") from None

    def _prompt_beside(
        self, shard: int, stored_at: tuple[str, int], choices: Choices
    ) -> NDArray[np.uint16]:
        """Embeddings [T, D] of the chosen caption, or of none, beside the sample's references.

        Raises IndexError or KeyError if there are none.
        """
        group, row = stored_at
        *captions, empty = self._refs[shard].prompts[group].of(row)
        of_chosen = captions or [empty]
        number = empty if choices.dropped else of_chosen[int(choices.caption * len(of_chosen))]
        place = self._prompts[number]
        return self.prompt_shards[place.shard].mean(place.group, place.row)[0]

    def _captioned(
        self,
        sample: latent_shards.LatentSample,
        shard: latent_shards.LatentShard | KeptShard,
        row: int,
        zeros: bool,
    ) -> Captioned:
        """The sample with a caption; zeros replace its embeddings, as some pipelines sample."""
        if self._text_encoders:
            has_t5 = self._family.frozen_text is not None
            t5 = self._padded(shard.prompt_embeds(row)) if has_t5 else None
            return Captioned(sample, t5, None, shard.input_ids(row), zeros)
        stored = shard.prompt_embeds(row)
        pooled = shard.pooled_prompt_embeds(row)
        prompt = self._padded(stored)
        tokens = len(stored)
        if zeros:
            prompt = np.zeros_like(prompt)
            pooled = None if pooled is None else np.zeros_like(pooled)
        return Captioned(sample, prompt, pooled, tokens=tokens)

    def _padded(self, stored: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Prompt embeddings [T, D] as bf16 bits. Shards omit trailing zeros; restore them."""
        if stored.shape == self._prompt_shape:
            return stored
        padded = np.zeros_like(stored, shape=self._prompt_shape)
        padded[: stored.shape[0], : stored.shape[1]] = stored
        return padded


def _check_references(latents: latent_shards.Latents, family: Family) -> None:
    """Raise Refused if targets have more references than the family reads."""
    groups = (group for group in latents.groups() if "+" in group)
    most = max((group.count("+") for group in groups), default=0)
    if most > family.max_references:
        raise Refused(
            f"the latents have up to {most} references of a picture, family {family.name} reads "
            f"{family.max_references or 'none'}: {families_with_references()}"
        )


def latent_moments(samples: Sequence[Captioned]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The VAE's mean and logvar [B, C, h, w] of samples."""
    mean = latent_shards.stack_rows([item.sample.mean for item in samples])
    return mean, latent_shards.stack_rows([item.sample.logvar for item in samples])


class Loader:
    """The batches of a training run; `batch(step)` is a pure function of these arguments.

    Args:
        batch_size: global batch size, a multiple of `world`.
        window: number of shards that are shuffled together.

    Raises:
        Refused: `world` does not divide `batch_size`, or the latents have no samples.
    """

    def __init__(
        self,
        reader: BatchReader,
        *,
        batch_size: int,
        seed: int,
        window: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size % world:
            raise Refused(
                f"train.global_batch_size {batch_size} cannot be shared by {world} processes: "
                "make it a multiple"
            )
        self.order = Order(
            reader.groups,
            batch_size=batch_size,
            seed=seed,
            window=window,
            left_out=reader.left_out,
            sources=reader.sources,
            mixture=reader.mixture,
        )
        # Each stream uses one window; a batch across two windows also needs the following window.
        streams = sum(map(len, self.order.buckets))
        reader.shards.open_limit = window * (streams + len(self.order.per_epoch))
        self._reader = reader
        self._batch_size = batch_size
        self._rank = rank
        self._world = world
        self._windows: dict[int, Window] = {}  # stream -> the window that was read ahead last
        self._lock = threading.Lock()

    def batch(self, step: int) -> StepBatch:
        """This rank's share of batch number `step` (from 0). Thread-safe. Raises Refused."""
        samples = self.order.batch(step, self._rank, self._world)
        first = step * self._batch_size + self._rank * self._batch_size // self._world
        counters = range(first, first + len(samples))
        windows = {window.stream: window for window in self.order.windows(step)}
        with self._lock:
            if not windows.items() <= self._windows.items():
                self._windows |= windows
                in_use = set().union(*map(self.order.shards, self._windows.values()))
                self._reader.shards.close_others(in_use)
                ahead = chain.from_iterable(map(self.order.shards, windows.values()))
                self._reader.shards.read_ahead([*ahead])
            return self._reader.batch(step, samples, counters, self._batch_size)

    def prefetch(
        self,
        start: int,
        stop: int,
        depth: int,
        stopping: Callable[[], bool] = lambda: False,
        skipped: Sequence[int] = (),
        put: Callable[[StepBatch], StepBatch] = lambda batch: batch,
    ) -> Prefetch:
        """Iterate over the batches of steps [start, stop), prepared by a background thread.

        Args:
            depth: maximum number of prepared batches.
            stopping: ends the iteration once it returns True, even during a slow read.
            skipped: numbers of excluded batches; later batches move to earlier steps.
            put: starts a batch's transfer to the device, in the background thread.
        """
        numbers = (batch_number(step, skipped) for step in range(start, stop))
        return Prefetch(map(put, map(self.batch, numbers)), depth, stopping)


def batch_number(step: int, skipped: Sequence[int]) -> int:
    """The number (from 0) of a step's batch, given the numbers of the skipped batches."""
    for left_out in sorted(skipped):
        step += left_out <= step
    return step


def open_job_latents(url: str) -> latent_shards.Latents:
    """Open the latents artifact at a URL.

    Raises:
        Refused: there is none, or it is damaged. A store that does not respond raises as its
            client does.
    """
    try:
        return latent_shards.open_latents(url)
    except (OSError, ValueError) as error:
        if is_outage(error):
            raise
        raise Refused(f"latents {url}: {error}") from None


class Holdout:
    """Batches of held-out samples, each sample with `draws` fixed draws of noise and timestep.

    The seed of the reader's objective determines the noise, so every run measures the same batches.

    Args:
        reader: closed with this object.
        samples: maximum number of held-out samples of each source: the first of the latents' order,
            which is random, or evenly spaced over the shards.
        draws: noise draws per sample.
        batch_size: maximum samples per batch.
        regularised: sources of a mixture that are not learnt.

    Attributes:
        sources: the source of each sample; "" without a mixture.
        regularised: as given.

    Raises:
        Refused: the latents have no held-out samples.
    """

    def __init__(
        self,
        reader: BatchReader,
        *,
        samples: int,
        draws: int,
        batch_size: int,
        regularised: Collection[str] = (),
    ) -> None:
        self.regularised = regularised
        self._samples: list[SampleIndex] = []
        for source in sorted(set(reader.sources)):
            self._samples += _held_out(reader, source, samples)
        self.sources = [reader.sources[index.shard] for index in self._samples]
        if not self._samples:
            raise Refused("the latents have no held-out samples: raise encode.holdout")
        self._draws = draws
        self._batch_size = batch_size
        self._reader = reader

    def batches(self) -> Iterator[tuple[list[int], StepBatch]]:
        """Yield (numbers, batch); `numbers` has the held-out sample (from 0) of each row."""
        numbered = sorted(enumerate(self._samples), key=lambda item: item[1].group)
        for _, bucket in groupby(numbered, key=lambda item: item[1].group):
            rows = [(number, sample, d) for number, sample in bucket for d in range(self._draws)]
            for start in range(0, len(rows), self._batch_size):
                chunk = rows[start : start + self._batch_size]
                numbers, samples, draws = zip(*chunk, strict=True)
                counters = [n * self._draws + draw for n, draw in zip(numbers, draws, strict=True)]
                yield list(numbers), self._reader.batch(0, samples, counters, len(chunk))

    def __enter__(self) -> Holdout:
        return self

    def __exit__(self, *_: object) -> None:
        """Unmap the shards."""
        self._reader.shards.close()
        self._reader.reference_shards.close()
        self._reader.prompt_shards.close()


def _held_out(reader: BatchReader, source: str, count: int) -> list[SampleIndex]:
    """At most `count` held-out samples of a source."""
    if reader.held_out is not None:
        own = (index for index in reader.held_out if reader.sources[index.shard] == source)
        return [*islice(own, count)]
    shards = zip(reader.groups, reader.sources, strict=True)
    return evenly_spaced([g if of == source else {} for g, of in shards], "holdout", count)


def draw_losses(
    holdout: Holdout,
    errors: Callable[[StepBatch], NDArray[np.float32]],
    stopping: Callable[[], bool] = lambda: False,
) -> list[list[float]] | None:
    """The losses of each held-out sample, one per draw; None if `stopping` returned True.

    Args:
        errors: returns the mean squared error per sample [B] f32 of a batch.
        stopping: polled before each batch.
    """
    losses: dict[int, list[float]] = {}
    for numbers, batch in holdout.batches():
        if stopping():
            return None
        for number, error in zip(numbers, errors(batch).tolist(), strict=True):
            losses.setdefault(number, []).append(error)
    return [losses[n] for n in sorted(losses)]
