"""Pictures and captions per second of the encoders of SD2 and SDXL on one GPU.

    python -m bench.encode_on_gpu [--batches N] [--json FILE]

Models have the published sizes and random weights, in bf16. The other side is diffusers'
`AutoencoderKL.encode` on the same VAE and pictures, as its training scripts call it: without
deterministic algorithms, and with a sample of each posterior copied to the host. Blocks of batches
alternate, and each round starts with the other side. `channels_last_images_per_second` is our side
with the VAE's weights in NHWC layout.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import benchmark_inputs, report
from bench.gpu import SD2, SDXL, Model
from bench.report import Row, spread
from bench.training_step_workloads import Context
from runtimes.pipeline_folder.folder import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.registry import open_encoder
from runtimes.torch.device import make_deterministic

ROUNDS = 5


@dataclass(frozen=True)
class Encoders:
    """The encoders of a model, and their batch size."""

    model: Model
    batch: int
    parts: tuple[str, ...]

    def write(self, folder: Path) -> Path:
        """Write them with random weights; the pipeline's folder."""
        return benchmark_inputs.write_published(folder, self.model.hub_id, self.parts)


ENCODERS = (
    Encoders(SD2, 32, ("vae", "text_encoder")),
    Encoders(SDXL, 8, ("vae", "text_encoder", "text_encoder_2")),
)


def row(encoders: Encoders, folder: Path, device: str, batches: int, dtype: str) -> Row:
    """Measure the encoders in a pipeline folder.

    Args:
        folder: of a pipeline with the weights of its encoders.
        device: PyTorch device.
        batches: batches of pictures in a round.
        dtype: compute dtype.
    """
    import torch

    size = encoders.model.size
    count = encoders.batch
    job = EncodeJob("torch", str(folder), batch_size=count, device=device, dtype=dtype)
    encoder: Any = open_encoder(job)
    random = np.random.default_rng(0)
    pixels = random.uniform(-1, 1, (count, 3, size, size)).astype(np.float32)
    captions = [f"a picture of the number {n}" for n in range(TEXT_BATCH)]

    def ours(_: Path) -> tuple[float, float]:
        make_deterministic()
        pictures = count / _seconds(lambda: encoder.images(pixels), batches)
        return pictures, TEXT_BATCH / _seconds(lambda: encoder.texts(captions), batches)

    def theirs(_: Path) -> float:
        make_deterministic(False)
        torch.backends.cudnn.benchmark = False  # PyTorch's default, as in a script
        return count / _seconds(lambda: _encode_as_diffusers_scripts(encoder, pixels), batches)

    context = Context(folder.parent, None, ROUNDS, batches)
    for side in (ours, theirs):
        side(folder)  # to warm up
    mine, their = context.alternate(ours, theirs)
    pictures = [rate for rate, _ in mine]
    ratio = spread([a / b for a, b in zip(pictures, their, strict=True)])
    name = f"encode_{encoders.model.name}"
    figures: dict[str, Any] = {
        "ratio": ratio,
        "images_per_second": spread(pictures),
        "peer_images_per_second": spread(their),
        "captions_per_second": spread([rate for _, rate in mine]),
        "batch": count,
        "pixels": size,
    }
    if device == "cuda":
        encoder.vae.to(memory_format=torch.channels_last)
        ours(folder)
        rates = [ours(folder)[0] for _ in range(ROUNDS)]
        figures["channels_last_images_per_second"] = spread(rates)
    return Row(name, {f"{name}_vs_diffusers": ratio["median"]}, figures)


def _encode_as_diffusers_scripts(encoder: Any, pixels: Any) -> Any:
    import torch

    with torch.no_grad():
        batch = torch.from_numpy(pixels).to(encoder.device, dtype=encoder.vae.dtype)
        return encoder.vae.encode(batch).latent_dist.sample().cpu()


def _seconds(call: Callable[[], None], count: int) -> float:
    """Seconds of a call that ends with its result on the host, the mean of `count`."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.encode_on_gpu", description=__doc__)
    parser.add_argument("--batches", type=int, default=8, help="per round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the JSON line")
    options = parser.parse_args(arguments)
    facts = {"machine": report.machine(os.cpu_count() or 1), "versions": report.versions()}
    rows = []
    with tempfile.TemporaryDirectory(prefix="kiln-encode-") as temporary:
        for encoders in ENCODERS:
            folder = encoders.write(Path(temporary))
            rows.append(row(encoders, folder, "cuda", options.batches, "bfloat16"))
            report.log("\n".join(report.table(rows[-1:])))
    report.publish("encode_on_gpu", rows, facts, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
