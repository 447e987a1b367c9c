"""Planned against real peak memory of a training step.

    python -m bench.planned_and_real_memory             # tiny and mid, on the CPU
    python -m bench.planned_and_real_memory --cuda      # SD2 and SDXL, on a CUDA device

The real peak on a CPU is that of PyTorch's allocator, by its profiler: other memory of the process
does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench import benchmark_inputs
from bench.train_rows import SD2_CONFIGS, SDXL_CONFIGS
from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.process.questions import GpuStepRequest
from runtimes.torch.device import free_memory
from runtimes.torch.gpu_step_memory import step_memory
from runtimes.torch.runtime import TheRuntime
from runtimes.torch_models.network import sample_batch

ALL = 1000  # blocks
CHECKPOINTED: dict[str, Any] = {
    **{"method": "lora", "mixed_precision": "bf16", "gradient_checkpointing": "blocks"}
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "gradient checkpointing": {"gradient_checkpointing": "blocks"},
    "EMA": {"ema_decay": 0.99},
    "LoRA": {"method": "lora"},
    "LoRA, bf16": {"method": "lora", "mixed_precision": "bf16"},
    "LoRA, int8": {"method": "lora", "mixed_precision": "bf16", "lora": {"base_precision": "int8"}},
    "fused backward": {
        "gradient_checkpointing": "blocks",
        "fused_backward": True,
        "max_grad_norm": None,
    },
    "Prodigy": {"optimizer": "prodigy"},
    "schedule-free": {"optimizer": "adamw_schedule_free"},
    "Muon": {"optimizer": "muon"},
    "CAME": {"optimizer": "came"},
    "Lion": {"optimizer": "lion"},
    "LoRA, nf4": {"method": "lora", "mixed_precision": "bf16", "lora": {"base_precision": "nf4"}},
    "LoRA, bf16, checkpointing": {**CHECKPOINTED},
    "LoRA, bf16, streamed": {**CHECKPOINTED, "stream_blocks": ALL},
    "LoRA, nf4, streamed": {
        **{**CHECKPOINTED, "stream_blocks": ALL},
        "lora": {"base_precision": "nf4"},
    },
    "prior": {"mixed_precision": "bf16", "has_prior": True},
    "ControlNet": {"method": "controlnet"},
    "LoRA, prior": {"method": "lora", "mixed_precision": "bf16", "has_prior": True},
    "bf16, two micro-batches": {"mixed_precision": "bf16", "micro_batches": 2},
}


def compare(
    model: Path,
    resolution: int,
    batch: int,
    *,
    micro_batches: int = 1,
    text_dtype: str | None = None,
    has_prior: bool = False,
    **train: Any,
) -> dict[str, float]:
    """Planned and real peak of a step, in bytes, and the duration of the plan in seconds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"global_batch_size": batch, "micro_batch_size": batch // micro_batches}
    settings = Train(**{**sizes, "device": device, **train})
    dumped = settings.model_dump(mode="json")
    request = GpuStepRequest(str(model), dumped, resolution, device=device, text_dtype=text_dtype)
    plan = step_memory(replace(request, has_prior=has_prior))
    plan = plan.with_streamed(settings.streamed_blocks)
    parts = plan.peak(batch // micro_batches, accumulating=micro_batches > 1)
    average = plan.ema if settings.keeps_average else 0
    state = plan.optimizer_state(settings.optimizer)
    planned = plan.weights + state + average + sum(parts.values())
    if device == "cpu":
        planned += plan.streamed  # the host's memory, which is the device's
    job = TrainJob("torch", str(model), "", dumped, "", "", text_dtype=text_dtype)
    if has_prior:
        job = replace(job, mixture={"old": {"regularisation": "prior"}})
    return {"planned": planned, "real": real_peak(job, resolution), "seconds": plan.seconds}


def real_peak(job: TrainJob, resolution: int) -> int:
    """Most bytes of live tensors during the second step of a job."""
    free_memory()  # the previous runtime is a reference cycle
    others = {id(storage) for storage in _storages()}
    runtime = TheRuntime()
    runtime.load(job, Base.of(job))
    batch = batch_of(runtime, job, resolution)
    runtime.step(batch, 1e-4)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        runtime.step(batch, 1e-4)
        return torch.cuda.max_memory_allocated()
    gc.collect()
    held = {s.data_ptr(): s.nbytes() for s in _storages() if id(s) not in others}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        runtime.step(batch, 1e-4)
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return int(sum(held.values()) + np.cumsum(changes).max())


def _storages() -> Iterator[Any]:
    tensors = [value for value in gc.get_objects() if type(value) in TENSORS]
    yield from (tensor.untyped_storage() for tensor in tensors)


TENSORS = (torch.Tensor, torch.nn.Parameter)


def batch_of(runtime: TheRuntime, job: TrainJob, resolution: int) -> StepBatch:
    """The batch of a job: a zero sample, as often as it has samples."""
    network = runtime._network
    count = job.train["global_batch_size"]
    sample = sample_batch(
        Base.of(job), network, (resolution, resolution), text=network.encodes_text
    )
    many = {name: np.repeat(array, count, axis=0) for name, array in sample.conditioning.items()}
    arrays = ("noisy_latents", "timesteps", "target", "weight")
    repeated: dict[str, Any] = {
        name: np.repeat(getattr(sample, name), count, axis=0) for name in arrays
    }
    repeated |= {"conditioning": many, "denominator": count}
    repeated["is_prior"] = np.ones(count, np.bool_) if job.has_prior else None
    return replace(sample, **repeated)


def main() -> None:
    """Print a row of JSON per model and variant."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.planned_and_real_memory", description=__doc__
    )
    parser.add_argument("--cuda", action="store_true", help="SD2 and SDXL at full size")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name, model, resolution, batch, train in _cases(Path(scratch), options.cuda):
            for variant, changes in VARIANTS.items():
                memory = compare(model, resolution, batch, **{**train, **changes})
                row = {"model": name, "variant": variant, **memory}
                row["difference"] = memory["planned"] / memory["real"] - 1
                print(json.dumps(row), flush=True)


def _cases(scratch: Path, cuda: bool) -> Iterator[tuple[str, Path, int, int, dict[str, Any]]]:
    if not cuda:
        yield "tiny", benchmark_inputs.write_pipeline(scratch / "tiny"), 32, 32, {}
        middle = benchmark_inputs.write_pipeline(scratch / "mid", benchmark_inputs.MIDDLE_UNET)
        yield "mid", middle, 64, 8, {}
        return
    bf16 = {"mixed_precision": "bf16"}
    yield "sd2", benchmark_inputs.write_full_size(scratch / "sd2", SD2_CONFIGS), 512, 32, bf16
    yield "sdxl", benchmark_inputs.write_full_size(scratch / "sdxl", SDXL_CONFIGS), 1024, 4, bf16


if __name__ == "__main__":
    main()
