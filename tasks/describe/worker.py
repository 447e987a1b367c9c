"""Describe the pictures of image shards on one device, deterministically in their content.

A picture is decoded once for all describers that lack it, ahead of the device. A batch is filled up
to its full size, so that a picture has the same values whatever is beside it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from artifacts.image_shards import Sample, read_tar
from runtimes.data.loader import Prefetch
from runtimes.process.launcher import count_cores
from tasks.describe.describers import Describer, Picture, Spec, kind_of
from tasks.describe.tables import INPUT_BYTES, STAGE, SUFFIX, read_table, write_table
from tasks.devices.processes import Facts, Worker
from tasks.encode.crop_to_bucket import BadSample, decode
from tasks.encode.shard import in_order

#: Quantiles of a value in a table's facts; those of all tables give its histogram.
QUANTILES = 17


@dataclass(frozen=True)
class DescribingPlan:
    """The describers of a device process, as devices.processes.Plan."""

    specs: dict[str, Spec]  # by digest
    max_pixels: int
    batch_size: int
    device: str
    decoders: int = 1  # threads that decode pictures, per device

    stage = STAGE
    runtime = "torch"

    def fetched(self) -> DescribingPlan:
        """The plan with the models of this machine. Raises Refused."""
        return replace(self, specs={digest: s.fetched() for digest, s in self.specs.items()})

    def on(self, device: str, processes: int) -> DescribingPlan:
        """The plan of one of several processes of this machine."""
        return replace(self, device=device, decoders=max(1, count_cores() // processes))

    def open(self) -> Worker:
        """Load the models in this process. Raises Refused."""
        return ShardDescriber(self)


def describe_request(
    tar: str, sha256: str, image: str, tables: Mapping[str, Mapping[str, Any]], *, of: bool = False
) -> dict[str, Any]:
    """What a ShardDescriber needs.

    Args:
        tar, sha256: URL and digest of the image shard, or of a table of embeddings.
        image: sha256 of the image shard.
        tables: digest of a describer -> key: of the table; earlier: (URL, sha256) of its tables
            that may have some of the pictures.
        of: whether it is a table of embeddings.
    """
    return {"tar": tar, "sha256": sha256, "image": image, "tables": tables, "of": of}


@dataclass
class _Source:
    """What describers read of a sample."""

    row: int
    id: bytes
    inputs: dict[str, bytes]  # digest of a describer -> that of its input
    prepared: dict[str, Any]  # digest of a describer -> what its `describe` takes
    reason: str | None  # why it has no values


@dataclass
class _Table:
    """A table under construction."""

    describer: Describer
    earlier: dict[bytes, dict[str, Any]]  # input -> row
    rows: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[tuple[int, Any]] = field(default_factory=list)  # row, prepared
    described: int = 0

    def fill(self, batch: list[tuple[int, Any]], size: int) -> None:
        """Describe a batch of up to `size` pictures."""
        prepared = [one for _, one in batch]
        if type(self.describer).fixed_batch:
            prepared += prepared[-1:] * (size - len(prepared))
        names = [f"value_{name}" for name in type(self.describer).values(self.describer.spec)]
        for (row, _), values in zip(batch, self.describer.describe(prepared), strict=False):
            self.described += 1
            if any(_is_nan(value) for value in values):
                self.rows[row]["reason"] = "NaN"
            else:
                self.rows[row].update(zip(names, values, strict=True))

    def write(self, path: str) -> dict[str, Any]:
        """Write the table; return its facts."""
        values = type(self.describer).values(self.describer.spec)
        write_table(path, values, self.rows)
        reasons = Counter(row["reason"] for row in self.rows if row["reason"] is not None)
        return {
            "samples": len(self.rows),
            "described": self.described,
            "bad_reasons": dict(sorted(reasons.items())),
            "quantiles": {
                name: _quantiles([row.get(f"value_{name}") for row in self.rows])
                for name, kind in values.items()
                if pa.types.is_floating(kind)
            },
        }


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.ndarray | np.floating) and not np.isfinite(value).all()


def _quantiles(values: list[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    if not known:
        return []
    return [round(float(q), 6) for q in np.quantile(known, np.linspace(0, 1, QUANTILES))]


class ShardDescriber:
    """Describes shards on one device, one at a time, while others are decoded or written."""

    def __init__(self, plan: DescribingPlan) -> None:
        self._describers = {
            digest: kind_of(spec)(spec, plan.device) for digest, spec in plan.specs.items()
        }
        self._max_pixels = plan.max_pixels
        self._batch_size = plan.batch_size
        self._threads = ThreadPoolExecutor(plan.decoders, thread_name_prefix="decode")
        self._ahead = 2 * max(plan.batch_size, plan.decoders)
        self._device = threading.Lock()  # held for a whole shard, as ShardEncoder's

    def __call__(self, request: dict[str, Any], folder: str) -> Facts:
        """Write the tables of `describe_request` to a folder; return their facts.

        Raises:
            Damaged: the shard or an earlier table has another sha256.
        """
        tables = {
            digest: _Table(self._describers[digest], _earlier(asked["earlier"]))
            for digest, asked in request["tables"].items()
        }
        with Prefetch(self._batches(request, tables), depth=1) as ready, self._device:
            for table, batch in ready:
                table.fill(batch, self._batch_size)
        facts: Facts = {}
        for digest, table in tables.items():
            key = request["tables"][digest]["key"]
            written = table.write(f"{folder}/{key}{SUFFIX}")
            facts[key] = {"tar": request["image"], "describer": digest, **written}
        return facts

    def _batches(
        self, request: dict[str, Any], tables: Mapping[str, _Table]
    ) -> Iterator[tuple[_Table, list[tuple[int, Any]]]]:
        """The batches of each table's pictures; its other rows are filled at once."""
        jobs = (self._threads.submit(prepare) for prepare in self._sources(request, tables))
        for source in in_order(jobs, self._ahead):
            for digest, table in tables.items():
                given = source.inputs[digest]
                row = {"reason": source.reason, **table.earlier.get(given, {})}
                table.rows.append(row | {"row": source.row, "id": source.id, "input": given})
                if digest in source.prepared:
                    table.waiting.append((source.row, source.prepared[digest]))
                if len(table.waiting) == self._batch_size:
                    yield table, table.waiting
                    table.waiting = []
        for table in tables.values():
            if table.waiting:
                yield table, table.waiting

    def _sources(
        self, request: dict[str, Any], tables: Mapping[str, _Table]
    ) -> Iterator[Callable[[], _Source]]:
        """A call for each sample, which reads and prepares it."""
        if request["of"]:
            rows = read_table(request["tar"], request["sha256"]).to_pylist()
            yield from (partial(self._of_embedding, tables, row) for row in rows)
        else:
            samples = read_tar(request["tar"], request["sha256"])
            for number, sample in enumerate(samples):
                yield partial(self._of_sample, tables, number, sample)

    def _of_sample(self, tables: Mapping[str, _Table], number: int, sample: Sample) -> _Source:
        caption = sample.captions[0]
        inputs = {
            digest: _digest(sample.image, caption if table.describer.reads_captions else "")
            for digest, table in tables.items()
        }
        source = _Source(number, sample.source_sha256, inputs, {}, None)
        missing = [d for d, table in tables.items() if inputs[d] not in table.earlier]
        if missing:
            try:
                picture = Picture(decode(sample.image, self._max_pixels), caption)
            except BadSample as error:
                source.reason = str(error)
                return source
            source.prepared = {d: tables[d].describer.prepare(picture) for d in missing}
        return source

    def _of_embedding(self, tables: Mapping[str, _Table], row: dict[str, Any]) -> _Source:
        inputs = dict.fromkeys(tables, row["input"])
        source = _Source(row["row"], row["id"], inputs, {}, row["reason"])
        if row["reason"] is None:
            embedding: NDArray[np.float16] = np.array(row["value_"], np.float16)
            missing = (d for d, table in tables.items() if row["input"] not in table.earlier)
            source.prepared = {d: tables[d].describer.prepare(embedding) for d in missing}
        return source


def _digest(image: bytes, caption: str) -> bytes:
    """What a describer reads of a sample, as 16 bytes."""
    content = hashlib.sha256(image)
    content.update(b"\0" + caption.encode())
    return content.digest()[:INPUT_BYTES]


def _earlier(places: list[tuple[str, str]]) -> dict[bytes, dict[str, Any]]:
    """The rows of earlier tables by their inputs."""
    rows: dict[bytes, dict[str, Any]] = {}
    for url, sha256 in places:
        for row in read_table(url, sha256).to_pylist():
            rows.setdefault(row["input"], row)
    return rows
