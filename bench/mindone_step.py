"""mindone's own training step against ours, in the environment of runtime mindspore.

    python -m bench.mindone_step JOB.json ROUNDS STEPS MODE [SIDE]

Theirs is mindone's TrainStep with what its SDXL script puts into it: noise, timesteps and loss in
the step, a static loss scale, clipping, nn.AdamWeightDecay. Both compute in MODE (pynative, graph)
on one batch of the job. Without SIDE, blocks of STEPS steps take turns and are timed; with SIDE
(theirs, ours) that one alone is run, and the process's peak memory told: theirs then with all of
the job's samples in memory, as its script has them. The last line printed is a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.overhead import Bare
from bench.report import spread
from configs.training import Train
from runtimes.process.job import TrainJob, read_job
from runtimes.process.memory import peak_rss

WARM_UP = 3
#: Conditioning of their step, in its order.
SEEN = ("prompt_embeds", "pooled_prompt_embeds", "add_time_ids")
Steps = Callable[[int], None]


def ours(job: TrainJob) -> Steps:
    """So many steps of our runtime."""
    bare = Bare(job)

    def take(count: int) -> None:
        bare.seconds(count)

    return take


def theirs(job: TrainJob, mode: str, *, whole: bool = False) -> Steps:
    """So many steps of mindone's, on one batch or on the whole dataset, held as arrays."""
    from runtimes.mindspore.device import start

    start("cpu")
    import mindspore as ms
    from mindone.diffusers import DDPMScheduler, UNet2DConditionModel
    from mindone.diffusers.training_utils import TrainStep
    from mindspore import Tensor, nn, ops
    from mindspore.amp import StaticLossScaler

    from runtimes.data.loader import open_job_latents
    from runtimes.train.trainer import make_loader

    settings = Train(**job.train)
    unet = UNet2DConditionModel.from_pretrained(f"{job.model}/unet")
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
            found = self.model(
                noisy, timesteps, embeds, added_cond_kwargs=added, return_dict=False
            )[0]
            loss = ops.mse_loss(found.float(), noise.float(), reduction="mean")
            return self.scale_loss(loss), found

    # Without a count of accumulated batches its graph would divide the loss by None.
    step = Step(unet, optimizer, StaticLossScaler(65536), settings.max_grad_norm, 1).set_train()
    latents = open_job_latents(job.latents)
    loader = make_loader(job, settings, latents)
    count = sum(latents.groups().values()) // settings.global_batch_size if whole else 1
    batches = [loader.batch(number) for number in range(count)]
    dataset = [(b.noisy_latents, *(b.conditioning[name] for name in SEEN)) for b in batches]
    turns = cycle(dataset)

    def take(count: int) -> None:
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        for _ in range(count):
            loss = step(*map(Tensor, next(turns)))[0]
        float(loss.asnumpy())
        ms.set_context(mode=ms.PYNATIVE_MODE)  # in which ours compiles its graphs

    return take


def compare(job: TrainJob, rounds: int, steps: int, mode: str) -> dict[str, Any]:
    """Seconds a step of both, and how many times longer theirs takes."""
    sides = {"ours": ours(job), "theirs": theirs(job, mode)}
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for take in sides.values():
        take(WARM_UP)
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
    """Compare, or take one side's memory, and print."""
    path, rounds, steps, mode, *side = arguments
    job = read_job(Path(path))
    assert isinstance(job, TrainJob)
    job = replace(job, train={**job.train, "mindspore": {"mode": mode}})
    if side:
        take = ours(job) if side == ["ours"] else theirs(job, mode, whole=True)
        take(WARM_UP + int(steps))
        print(json.dumps({"memory_bytes": peak_rss()}))
    else:
        print(json.dumps(compare(job, int(rounds), int(steps), mode)))


if __name__ == "__main__":
    main(sys.argv[1:])
