"""Compare mindone's training step with ours, in the environment of runtime mindspore.

    python -m bench.mindone_step JOB.json ROUNDS STEPS MODE [SIDE]

Theirs is the TrainStep of mindone's SDXL script: noise, timesteps and loss in the step, a static
loss scale, clipping, nn.AdamWeightDecay. Both run in MODE (pynative, graph) on one batch. Without
SIDE, blocks of STEPS steps alternate and are timed. With SIDE (theirs, ours), only that side runs,
and the result is the peak memory of its process; theirs then holds the whole dataset in memory, as
its script does. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

from bench.job_command_line import read_train_job
from bench.overhead import BareSteps
from bench.report import spread
from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.process.memory import peak_rss

WARM_UP = 3
#: Conditioning inputs of their step, in order.
CONDITIONING = ("prompt_embeds", "pooled_prompt_embeds", "add_time_ids")
RunSteps = Callable[[int], None]  # with the number of steps


def ours(job: TrainJob) -> RunSteps:
    """Our runtime on one batch."""
    bare = BareSteps(job)

    def run_steps(count: int) -> None:
        bare.seconds(count)

    return run_steps


def theirs(job: TrainJob, mode: str, *, whole: bool = False) -> RunSteps:
    """mindone's step on one batch, or on the whole dataset in memory."""
    from runtimes.mindspore.device import start

    start("cpu")
    import mindspore as ms

    from runtimes.data.loader import open_job_latents
    from runtimes.train.training_loop import make_loader

    settings = Train(**job.train)
    step = _script_step(f"{job.model}/unet", settings)
    latents = open_job_latents(job.latents)
    loader = make_loader(job, Base.of(job), settings, latents)
    count = sum(latents.groups().values()) // settings.global_batch_size if whole else 1
    batches = [loader.batch(number) for number in range(count)]
    dataset = cycle(
        [(b.noisy_latents, *(b.conditioning[name] for name in CONDITIONING)) for b in batches]
    )

    def run_steps(count: int) -> None:
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        for _ in range(count):
            loss = step(*map(ms.Tensor, next(dataset)))[0]
        float(loss.asnumpy())
        ms.set_context(mode=ms.PYNATIVE_MODE)  # ours compiles its graphs in this mode

    return run_steps


def _script_step(unet_folder: str, settings: Train) -> Any:
    """The TrainStep of mindone's SDXL script, of latents and CONDITIONING."""
    from mindone.diffusers import DDPMScheduler, UNet2DConditionModel
    from mindone.diffusers.training_utils import TrainStep
    from mindspore import nn, ops
    from mindspore.amp import StaticLossScaler

    unet = UNet2DConditionModel.from_pretrained(unet_folder)
    scheduler = DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000
    )
    optimizer = nn.AdamWeightDecay(
        unet.trainable_params(),
        learning_rate=settings.learning_rate,
        beta1=settings.adam_betas[0],
        beta2=settings.adam_betas[1],
        weight_decay=settings.weight_decay,
        eps=settings.adam_epsilon,
    )

    class Step(TrainStep):
        def forward(self, latents: Any, embeds: Any, pooled: Any, ids: Any) -> Any:
            noise = ops.randn_like(latents, dtype=latents.dtype)
            timesteps = ops.randint(0, 1000, (latents.shape[0],))
            noisy = scheduler.add_noise(latents, noise, timesteps)
            added = {"time_ids": ids, "text_embeds": pooled}
            prediction = self.model(
                noisy, timesteps, embeds, added_cond_kwargs=added, return_dict=False
            )[0]
            loss = ops.mse_loss(prediction.float(), noise.float(), reduction="mean")
            return self.scale_loss(loss), prediction

    # The accumulation count must be set: its graph divides the loss by it.
    scaler = StaticLossScaler(65536)
    return Step(unet, optimizer, scaler, settings.max_grad_norm, 1).set_train()


def compare(job: TrainJob, rounds: int, steps: int, mode: str) -> dict[str, Any]:
    """Seconds per step of both, and the ratio theirs / ours."""
    sides = {"ours": ours(job), "theirs": theirs(job, mode)}
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for run_steps in sides.values():
        run_steps(WARM_UP)
    for number in range(rounds):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            since = time.perf_counter()
            sides[side](steps)
            times[side].append((time.perf_counter() - since) / steps)
    ratio = [a / b for a, b in zip(times["theirs"], times["ours"], strict=True)]
    return {
        "ratio": spread(ratio),
        "seconds": spread(times["ours"]),
        "peer_seconds": spread(times["theirs"]),
    }


def main(arguments: list[str]) -> None:
    """Compare, or measure the memory of one side, and print the result."""
    path, rounds, steps, mode, *side = arguments
    job = read_train_job(path)
    job = replace(job, train={**job.train, "mindspore": {"mode": mode}})
    if side:
        run_steps = ours(job) if side == ["ours"] else theirs(job, mode, whole=True)
        run_steps(WARM_UP + int(steps))
        print(json.dumps({"memory_bytes": peak_rss()}))
    else:
        print(json.dumps(compare(job, int(rounds), int(steps), mode)))


if __name__ == "__main__":
    main(sys.argv[1:])
