"""Time of a training step with prior targets, as a ratio of a plain step.

    python -m bench.prior_step ROUNDS

Plain steps and steps with one prior sample alternate, on a UNet of random weights. The last line
printed is JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import benchmark_inputs
from bench.planned_and_real_memory import batch_of
from bench.report import spread
from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch.runtime import TheRuntime

SIZE = 64  # pixels
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora"},
    "lora, checkpointing": {"method": "lora", "gradient_checkpointing": "blocks"},
}


def ratios(model: Path, rounds: int, **train: Any) -> list[float]:
    """Seconds of a step with a prior sample / of a plain one, by round."""
    settings = Train(global_batch_size=4, mixed_precision="bf16", **train)
    job = TrainJob("torch", str(model), "", settings.model_dump(mode="json"), "", "")
    job = replace(job, mixture={"old": {"regularisation": "prior"}})
    runtime = TheRuntime()
    runtime.load(job, Base.of(job))
    prior = replace(batch_of(runtime, job, SIZE), is_prior=np.arange(4) == 0)
    plain = replace(prior, is_prior=None)

    def seconds(batch: StepBatch) -> float:
        begin = time.perf_counter()
        float(runtime.step(batch, 1e-4).loss)
        return time.perf_counter() - begin

    for batch in (plain, prior):  # compilation
        seconds(batch)
    return [seconds(prior) / seconds(plain) for _ in range(rounds)]


def main(arguments: list[str]) -> None:
    """Measure each method, and print the ratios."""
    (rounds,) = map(int, arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = benchmark_inputs.write_pipeline(Path(folder), benchmark_inputs.MIDDLE_UNET)
        found = {name: spread(ratios(model, rounds, **train)) for name, train in METHODS.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
