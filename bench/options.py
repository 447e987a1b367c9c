"""Ablation of runtime torch: seconds per bare step with one option changed at a time.

    python -m bench.options JOB.json ROUNDS STEPS

Each variant has a runtime of its own, which is loaded, warmed up, timed and freed. The last line
printed is JSON: seconds per step by variant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.jobs import run
from bench.overhead import BareSteps
from bench.report import log, spread
from runtimes.process.job import TrainJob
from runtimes.torch.device import free_memory

WARM_UP = 5
Change = Callable[[Any], None]  # of a loaded runtime


def _unchanged(runtime: Any) -> None:
    pass


# These options are not settings, so the functions change private attributes of the runtime.


def _contiguous(runtime: Any) -> None:
    runtime._network.to(memory_format=torch.contiguous_format)
    for moments in (
        runtime._update._optimizer._torch.state.values()
    ):  # the fused update requires equal formats
        moments |= {name: moment.contiguous() for name, moment in moments.items()}


def _unfused(runtime: Any) -> None:
    for group in runtime._update._optimizer._torch.param_groups:
        on_cuda = group["params"][0].is_cuda  # step counters too: reading them would synchronize
        group.update(fused=False, foreach=True, capturable=on_cuda)


def _cuda_graphs(runtime: Any) -> None:
    runtime._network.denoiser.compile(mode="reduce-overhead")


def _nondeterministic(runtime: Any) -> None:
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = True


#: Variant -> changed train settings, change of the loaded runtime.
VARIANTS: dict[str, tuple[dict[str, Any], Change]] = {
    "baseline": ({}, _unchanged),
    "contiguous": ({}, _contiguous),
    "unfused_adamw": ({}, _unfused),
    "nondeterministic": ({}, _nondeterministic),
    "gradient_checkpointing": ({"gradient_checkpointing": True}, _unchanged),
    "compile": ({"compile": True}, _unchanged),
    "compile_cuda_graphs": ({}, _cuda_graphs),
}
ATTENTION = {
    "attention_flash": SDPBackend.FLASH_ATTENTION,
    "attention_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "attention_cudnn": SDPBackend.CUDNN_ATTENTION,
    "attention_math": SDPBackend.MATH,
}


def measure(
    job: TrainJob, rounds: int, steps: int, only: frozenset[str] | None = None
) -> dict[str, Any]:
    """Seconds per step by variant; an error message for variants that this device cannot run."""
    cases = {name: (*change, nullcontext()) for name, change in VARIANTS.items()}
    cases |= {name: ({}, _unchanged, sdpa_kernel(kind)) for name, kind in ATTENTION.items()}
    if not torch.cuda.is_available():
        del cases["compile_cuda_graphs"]  # on a CPU the same as "compile"
    seconds: dict[str, Any] = {}
    for name, (settings, change, attention) in cases.items():
        if only is None or name in only:
            log(f"  {name}")
            seconds[name] = _seconds(job, settings, change, attention, rounds, steps)
    return seconds


def _seconds(
    job: TrainJob,
    settings: dict[str, Any],
    change: Change,
    attention: AbstractContextManager[Any],
    rounds: int,
    steps: int,
) -> Any:
    changed = replace(job, train={**job.train, **settings})
    try:
        bare = BareSteps(changed)
        change(bare.runtime)
        with attention:
            bare.seconds(WARM_UP)
            times = [bare.seconds(steps) / steps for _ in range(rounds)]
    except RuntimeError as error:
        return f"does not run: {' '.join(str(error).split())[:200]}"
    finally:
        bare = None  # type: ignore[assignment]  # free its memory before the next variant
        free_memory()
    return spread(times)


if __name__ == "__main__":
    run(measure, sys.argv[1:])
