"""The loader against WebDataset and grain: `python -m bench.loader [--quick]`.

All three read the same tensors from local shards in one process, shuffled, and return the same
arrays in float32; grain reads with a thread per core. A sample of SDXL at 1024 pixels has 0.58 MB.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts import latent_shards
from artifacts.latent_shards import LatentScale
from bench.benchmark_inputs import MODELS, write_random_latents
from bench.report import Rounds, Row, finish, log, option_parser, spread
from runtimes.data.loader import BatchReader, Loader, latent_moments
from runtimes.data.sample_order import Mixture, Order
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective

SDXL = MODELS / "stable-diffusion-xl-base-1.0"
NAMES = ("mean", "logvar", "prompt_embeds", "pooled_prompt_embeds")
Batch = dict[str, NDArray[Any]]
Epoch = Callable[[], Iterator[Batch]]  # returns the batches of an epoch
Rows = dict[str, NDArray[np.uint16]]  # of one sample, bf16 bits
SHUFFLED = 256  # samples of WebDataset's shuffle buffer


def main(arguments: Sequence[str]) -> int:
    """Measure the three loaders in turns and print the table."""
    parser = option_parser("loader", __doc__, rounds=5)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--folder", help="work folder; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="64 pixels, 64 samples, one round")
    options = parser.parse_args(arguments)
    samples, rounds = (64, 1) if options.quick else (options.samples, options.rounds)
    with tempfile.TemporaryDirectory(prefix="kiln-", dir=options.folder) as scratch:
        log("writing the shards")
        size = 64 if options.quick else 1024
        url = write_random_latents(Path(scratch), SDXL, samples, size, shards=4, captions=samples)
        loaders = {
            "ours": our_batches(url, options.batch_size, samples // options.batch_size),
            "webdataset": webdataset_batches(url, Path(scratch), options.batch_size),
            "grain": grain_batches(url, Path(scratch), options.batch_size),
        }
        steps = samples // options.batch_size
        turns = Rounds(Path(scratch), rounds)
        rows = [compare(loaders, steps, options.batch_size, turns), mixture_row(turns)]
    return finish("loader", rows, options, ("numpy", "webdataset", "grain", "array_record"))


def compare(loaders: dict[str, Epoch], steps: int, size: int, turns: Rounds) -> Row:
    """Samples per second of each loader, over an epoch per round, after an epoch to warm up.

    Each round begins an epoch, so that no loader reads ahead while another is measured.
    """
    shapes = {name: _shapes(next(epoch())) for name, epoch in loaders.items()}
    assert len(set(map(str, shapes.values()))) == 1, shapes

    def rate(name: str, _: Path | None = None) -> float:
        log(name)
        since = time.perf_counter()
        assert sum(len(batch["mean"]) for batch in loaders[name]()) == steps * size
        return steps * size / (time.perf_counter() - since)

    for name in loaders:
        rate(name)
    results = turns.alternate(*(partial(rate, name) for name in loaders))
    rates = dict(zip(loaders, results, strict=True))
    figures = {f"{name}_samples_per_second": spread(rates[name]) for name in loaders}
    ratios = {}
    for name in [name for name in loaders if name != "ours"]:
        pairs = zip(rates["ours"], rates[name], strict=True)
        figures[f"rate_vs_{name}"] = spread([ours / theirs for ours, theirs in pairs])
        ratios[f"rate_vs_{name}"] = figures[f"rate_vs_{name}"]["median"]
    return Row("loader", ratios=ratios, figures=figures)


def mixture_row(turns: Rounds) -> Row:
    """Milliseconds that the order of a batch of 64 takes, of ten sources and of one."""
    buckets = {f"train/{number}x8": 100 for number in range(10)}
    sources = [f"s{number % 10}" for number in range(60)]
    facts = {"weight": None, "repeats": 1.5, "regularisation": None}

    def milliseconds(mixture: Mixture | None, _: Path | None = None) -> float:
        order = Order(
            [buckets] * 60, batch_size=64, seed=0, window=4, sources=sources, mixture=mixture
        )
        since = time.perf_counter()
        for step in range(1000):
            order.batch(step)
        return time.perf_counter() - since

    mixture = dict.fromkeys(sources, facts)
    ten, one = turns.alternate(partial(milliseconds, mixture), partial(milliseconds, None))
    figures = {"ten_sources_ms": spread(ten), "one_source_ms": spread(one)}
    ratio = spread([b / a for a, b in zip(ten, one, strict=True)])["median"]
    return Row("mixture", ratios={"speed_vs_one_source": ratio}, figures=figures)


def _shapes(batch: Batch) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(batch[name].dtype), batch[name].shape) for name in NAMES}


def our_batches(url: str, size: int, steps: int) -> Epoch:
    """Epochs of our loader, without noise."""
    objective = Objective(NoiseSchedule.from_config({}), LatentScale(0.13025), seed=0)
    family = FAMILIES["sdxl"]
    reader = BatchReader(latent_shards.open_latents(url), family, objective)
    loader = Loader(reader, batch_size=size, seed=0, window=4)

    def epoch() -> Iterator[Batch]:
        for step in range(steps):
            chosen = objective.choices(range(step * size, (step + 1) * size))
            samples = reader.read(loader.order.batch(step), chosen)
            mean, logvar = latent_moments(samples)
            yield {"mean": mean, "logvar": logvar, **family.condition(samples)}

    return epoch


def webdataset_batches(url: str, folder: Path, size: int) -> Epoch:
    """Epochs of WebDataset, from tars with one .npy file per tensor."""
    import webdataset

    tars = []
    for number, shard in enumerate(_shards(url)):
        tars.append(str(folder / f"{number}.tar"))
        with tarfile.open(tars[-1], "w", format=tarfile.USTAR_FORMAT) as tar:
            for row, tensors in enumerate(shard):
                for name, tensor in tensors.items():
                    data = io.BytesIO()
                    np.save(data, tensor)
                    member = tarfile.TarInfo(f"{number:03d}{row:06d}.{name}.npy")
                    member.size = data.tell()
                    data.seek(0)
                    tar.addfile(member, data)

    def collate(rows: list[tuple[NDArray[np.uint16], ...]]) -> Batch:
        return _stack([dict(zip(NAMES, row, strict=True)) for row in rows])

    dataset = webdataset.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
    dataset = dataset.shuffle(SHUFFLED).decode().to_tuple(*(f"{name}.npy" for name in NAMES))
    dataset = dataset.batched(size, collation_fn=collate, partial=False)
    return lambda: iter(dataset)


def grain_batches(url: str, folder: Path, size: int) -> Epoch:
    """Epochs of grain, from ArrayRecord files with the bytes of one sample per record."""
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    files = []
    shapes = {}
    for number, shard in enumerate(_shards(url)):
        files.append(str(folder / f"{number}.arrayrecord"))
        writer = ArrayRecordWriter(files[-1], "group_size:1,uncompressed")
        for tensors in shard:
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            writer.write(b"".join(tensor.tobytes() for tensor in tensors.values()))
        writer.close()

    def parsed(record: bytes) -> Rows:
        rows = {}
        start = 0
        for name, shape in shapes.items():
            rows[name] = np.frombuffer(record, np.uint16, int(np.prod(shape)), start).reshape(shape)
            start += rows[name].nbytes
        return rows

    source = grain.sources.ArrayRecordDataSource(files)
    dataset = grain.MapDataset.source(source).shuffle(seed=0).map(parsed)
    dataset = dataset.batch(size, drop_remainder=True, batch_fn=_stack)
    # Its default of 16 threads is slower on few cores.
    threads = os.cpu_count() or 1
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    return lambda: iter(dataset.to_iter_dataset(options))


def _shards(url: str) -> Iterator[list[Rows]]:
    """The samples of each shard of an artifact."""
    for ref in latent_shards.open_latents(url).shards:
        shard = latent_shards.LatentShard(ref.url)
        ((group, count),) = shard.groups.items()
        samples = [shard.sample(group, row) for row in range(count)]
        rows = [sample.caption_rows[0] for sample in samples]
        yield [
            {
                "mean": sample.mean,
                "logvar": sample.logvar,
                "prompt_embeds": shard.prompt_embeds(row),
                "pooled_prompt_embeds": np.asarray(shard.pooled_prompt_embeds(row)),
            }
            for sample, row in zip(samples, rows, strict=True)
        ]


def _stack(rows: Sequence[Rows]) -> Batch:
    """The arrays of a batch, as the objective and the denoiser need them."""
    return {name: latent_shards.stack_rows([row[name] for row in rows]) for name in NAMES}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
