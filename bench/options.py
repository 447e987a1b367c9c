"""What each choice of the torch runtime is worth: a bare step with one of them changed at a time.

    python -m bench.options JOB.json ROUNDS STEPS

Each change is made to a runtime of its own, which is loaded, warmed up and timed in turn; then the
next. The last line printed is a JSON object: seconds a step, by change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.overhead import Bare
from bench.report import say, spread
from runtimes.process.job import TrainJob, read_job
from runtimes.torch.device import free_memory

WARM_UP = 5
Change = Callable[[Any], None]  # of a loaded runtime


def _nothing(runtime: Any) -> None:
    pass


# These reach into the runtime: what it has settled is no setting, and here its worth is asked for.


def _contiguous(runtime: Any) -> None:
    runtime._network.to(memory_format=torch.contiguous_format)
    for moments in runtime._update._optimizer._torch.state.values():  # the fused update wants alike
        moments |= {name: moment.contiguous() for name, moment in moments.items()}


def _unfused(runtime: Any) -> None:
    for group in runtime._update._optimizer._torch.param_groups:
        on_cuda = group["params"][0].is_cuda  # and its counters too, which are not to be fetched
        group.update(fused=False, foreach=True, capturable=on_cuda)


def _cuda_graphs(runtime: Any) -> None:
    runtime._network.denoiser.compile(mode="reduce-overhead")


def _any_algorithm(runtime: Any) -> None:
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = True


#: Train settings, then what is done to the loaded runtime.
CHANGES: dict[str, tuple[dict[str, Any], Change]] = {
    "as_it_is": ({}, _nothing),
    "not_channels_last": ({}, _contiguous),
    "not_fused_adamw": ({}, _unfused),
    "not_deterministic": ({}, _any_algorithm),
    "gradient_checkpointing": ({"gradient_checkpointing": True}, _nothing),
    "compile": ({"compile": True}, _nothing),
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
    """Seconds a step by change; one that does not run here says why instead."""
    cases = {name: (*change, nullcontext()) for name, change in CHANGES.items()}
    cases |= {name: ({}, _nothing, sdpa_kernel(kind)) for name, kind in ATTENTION.items()}
    if not torch.cuda.is_available():
        del cases["compile_cuda_graphs"]  # there it is "compile" again, minutes of it
    found: dict[str, Any] = {}
    for name, (settings, change, within) in cases.items():
        if only is None or name in only:
            say(f"  {name}")
            found[name] = _seconds(job, settings, change, within, rounds, steps)
    return found


def _seconds(
    job: TrainJob,
    settings: dict[str, Any],
    change: Change,
    within: AbstractContextManager[Any],
    rounds: int,
    steps: int,
) -> Any:
    changed = replace(job, train={**job.train, **settings})
    try:
        bare = Bare(changed)
        change(bare.runtime)
        with within:
            bare.seconds(WARM_UP)
            times = [bare.seconds(steps) / steps for _ in range(rounds)]
    except RuntimeError as error:
        return f"does not run: {' '.join(str(error).split())[:200]}"
    finally:
        bare = None  # type: ignore[assignment]  # its memory goes before the next is loaded
        free_memory()
    return spread(times)


def main(arguments: list[str]) -> None:
    """Measure, and print."""
    path, rounds, steps = arguments
    job = read_job(Path(path))
    assert isinstance(job, TrainJob)
    print(json.dumps(measure(job, int(rounds), int(steps))))


if __name__ == "__main__":
    main(sys.argv[1:])
