"""Run in the environment of runtime xla: the same noise drawn by XLA and by diffusers on the CPU.

python draw_driver.py PIPELINE     prints one JSON object: scheduler -> what was found
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch_xla.debug import metrics

from runtimes.job import Drawing
from runtimes.objective.draws import Stream, generator
from runtimes.objective.scheduler import read_config
from runtimes.torch.generate import load_network
from runtimes.torch.schedulers import make_scheduler
from runtimes.xla.device import start
from runtimes.xla.graph import keep_whole
from runtimes.xla.mesh import Mesh
from runtimes.xla.sampler import Sampler

SCHEDULERS = ("EulerDiscreteScheduler", "DDIMScheduler", "DPMSolverMultistepScheduler")
PROMPTS = ("a red cat", "a blue dog", "a green bird")
SAMPLER = {"seed": 5, "num_inference_steps": 6, "guidance_scale": 3.0, "batch_size": 2}


def drawn_plainly(folder: Path, scheduler: Any) -> np.ndarray:
    pipe = DiffusionPipeline.from_pretrained(folder, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    noise = [
        generator(5, Stream.PICTURE, number).standard_normal((4, 8, 8), dtype=np.float32)
        for number in range(len(PROMPTS))
    ]
    return pipe(
        list(PROMPTS),
        height=32,
        width=32,
        num_inference_steps=6,
        guidance_scale=3.0,
        latents=torch.from_numpy(np.stack(noise)),
        output_type="np",
    ).images


def compiles() -> int:
    found = metrics.metric_data("CompileTime")  # (times, ...)
    return 0 if found is None else int(found[0])


def main(folder: Path) -> dict[str, Any]:
    base = read_config(folder / "scheduler")
    config = {**base, "clip_sample": False}
    schedulers = {name: make_scheduler({**config, "_class_name": name}) for name in SCHEDULERS}
    start("cpu", compiled=None)  # first of all: diffusers' pipelines open the device too
    expected = {name: drawn_plainly(folder, scheduler) for name, scheduler in schedulers.items()}
    mesh = Mesh(fsdp=1, hosts=1)
    network = load_network(Drawing(""), folder, torch.float32, torch.device("cpu"))
    keep_whole(network)
    mesh.place(network)
    sampler = Sampler(folder, mesh)
    found = {}
    for name, scheduler in schedulers.items():
        sampler.use(network, make_scheduler(dict(scheduler.config)))
        before = compiles()
        pixels = sampler.pixels(PROMPTS, SAMPLER, first=0)
        middle = compiles()
        again = sampler.pixels(PROMPTS[::-1], SAMPLER, first=0)
        found[name] = {
            "furthest": float(np.abs(pixels - expected[name]).max()),
            "spread": float(expected[name].std()),
            "other prompts differ": float(np.abs(pixels - again).max()),
            "first": middle - before,
            "second": compiles() - middle,
        }
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {"drawn": found, "fallbacks": fallbacks}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
