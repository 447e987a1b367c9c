"""The smoke test: a published folder loads and draws by plain diffusers in a clean process.

`check` runs this file as a script, isolated from the project's path and from the network.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.settings.recipe import Recipe

#: Formats that can execute code when they are loaded.
UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
SECONDS = 1800  # an SDXL pipeline on the CPU of a small machine
SAMPLE_SIZE = 128  # latents' side where the denoiser's config has none, as of packed latents
LARGEST_SIDE = 256  # of the picture, pixels
STEPS = 2
INDEX = "model_index.json"
ADAPTERS = "pytorch_lora_weights.safetensors"
#: Free memory that a picture in float32 needs, as a multiple of the weights.
HEADROOM = 1.5
#: Files with the free memory of the machine and the limit of its container, and their units.
HOST_MEMORY = (
    ("/proc/meminfo", r"MemAvailable:\s+(\d+)", 1024),
    ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
)
#: A traceback's line of any error that memory, or a device that is not ready, causes; loaders wrap
#: it in errors of their own.
OF_THE_MACHINE = re.compile(
    r"^(?=\w).*(?:out of memory|MemoryError|allocate (?:memory|\d)|bad_alloc|map segment"
    r"|start new thread|busy or unavailable|uncorrectable ECC|no CUDA-capable device"
    r"|unspecified launch failure|driver version|NVML|hardware error).*",
    re.MULTILINE | re.IGNORECASE,
)


class SmokeTestFailed(ValueError):
    """The folder is not fit for publication; the message has the reason."""


def check(folder: Path, base: Path, vae: Path | None, recipe: Recipe) -> None:
    """Raise SmokeTestFailed unless a folder loads and draws a finite picture.

    Args:
        folder: the published files: a pipeline, or adapters of `base`.
        base: local pipeline folder.
        vae: folder of the VAE that replaces the base's own.

    Raises:
        TransientError: the process was killed, or ran out of memory or time, on a busy machine.
    """
    from tasks.build_or_reuse import TransientError  # the script has no project to import from

    job = json.dumps(describe(folder, base, vae, recipe))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DIFFUSERS_VERBOSITY": "error"}
    try:
        result = subprocess.run(
            [sys.executable, "-P", __file__, job],  # not -I: packages may be in PYTHONPATH
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TransientError(f"smoke test: no picture after {SECONDS} s: run again") from None
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        raise TransientError(f"smoke test: killed by {name}: run again")
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        if (lack := OF_THE_MACHINE.search(result.stderr)) is not None:
            raise TransientError(f"smoke test: {lack[0]}: run again")
        raise SmokeTestFailed(lines[-1])


def check_files(folder: Path, max_bytes: int | None) -> None:
    """Raise SmokeTestFailed unless a folder has safe files only, of at most `max_bytes`."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    unsafe = [path.name for path in files if path.suffix.lower() in UNSAFE]
    if unsafe:
        raise SmokeTestFailed(f"{unsafe[0]} is no safetensors file")
    size = sum(path.stat().st_size for path in files)
    if max_bytes is not None and size > max_bytes:
        raise SmokeTestFailed(f"{size:,} bytes exceed publish.max_bytes ({max_bytes:,})")


def describe(folder: Path, base: Path, vae: Path | None, recipe: Recipe) -> dict[str, Any]:
    """The job of `draw`; arguments as for `check`."""
    from runtimes.pipeline_folder.describe_encoders import absent_text_parts
    from runtimes.pipeline_folder.weight_files import (
        pipeline_variant,
        weight_shapes,
        weight_variant,
    )

    pipeline = folder if (folder / INDEX).is_file() else base
    parts = [part for part in sorted(pipeline.iterdir()) if part.is_dir()]
    shapes = (shape for part in parts for shape in weight_shapes(part).values())
    given = recipe.evaluate
    return {
        "folder": str(folder),
        "base": str(base),
        "variant": pipeline_variant(pipeline),
        "absent": absent_text_parts(pipeline),
        "vae": None if vae is None else str(vae),
        "vae_variant": None if vae is None else weight_variant(vae),
        "float32_bytes": 4 * sum(map(math.prod, shapes)),
        "dtype": given.dtype,
        "device": given.device,
        "aesthetic_scores": [given.negative_aesthetic_score, given.aesthetic_score],
    }


def draw(job: dict[str, Any]) -> None:
    """Load the job's folder, draw a picture and check it."""
    import numpy as np
    import torch

    pipe = _load(job)
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    if getattr(denoiser.config, "class_embed_type", None):  # aesthetic scores: see the card
        labels = torch.tensor(job["aesthetic_scores"], device=pipe.device)
        denoiser.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"class_labels": labels}), with_kwargs=True
        )
    generator = torch.Generator().manual_seed(0)  # a retry has the same verdict
    pictures = pipe(
        **_inputs(pipe, denoiser.config),
        num_inference_steps=STEPS,
        output_type="np",
        generator=generator,
    ).images
    if not np.isfinite(pictures).all():
        raise ValueError("the picture is not finite")
    if np.ptp(pictures) == 0:
        raise ValueError("the picture has one colour only")


def _load(job: dict[str, Any]) -> Any:
    """The pipeline on its device.

    One that fits as float32 is loaded without further arguments. A larger one is loaded in the
    dtype of the evaluation, which has drawn with it.
    """
    import diffusers
    import torch

    folder = Path(job["folder"])
    device = "cuda" if job["device"] != "cpu" and torch.cuda.is_available() else "cpu"
    fits = HEADROOM * job["float32_bytes"] <= _free_bytes(device)
    dtype = torch.float32 if fits else getattr(torch, job["dtype"])
    given: dict[str, Any] = dict.fromkeys(job["absent"])  # diffusers requires a None for each
    if (folder / INDEX).is_file():
        given |= {} if fits else {"dtype": dtype}
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **given)
    else:  # a base may store its text encoders in half precision, and not load bare
        given |= {"dtype": dtype, "variant": job["variant"]}
        given |= {} if job["vae"] is None else {"vae": _load_vae(job, dtype)}
        pipe = diffusers.DiffusionPipeline.from_pretrained(job["base"], **given)
        pipe.load_lora_weights(folder, weight_name=ADAPTERS)
        if (folder / "scheduler").is_dir():
            config = json.loads((folder / "scheduler/scheduler_config.json").read_text())
            pipe.scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
    pipe.set_progress_bar_config(disable=True)
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None  # it blackens what it takes for unsafe, such as noise
    return pipe.to(device)


def _inputs(pipe: Any, denoiser: Any) -> dict[str, Any]:
    """A prompt and a size, for a denoiser's config; an inpainting UNet needs a picture too."""
    from PIL import Image

    size = getattr(denoiser, "sample_size", None)
    size = size or getattr(pipe, "default_sample_size", SAMPLE_SIZE)
    side = min(size * pipe.vae_scale_factor, LARGEST_SIDE)
    inputs: dict[str, Any] = {"prompt": "a", "height": side, "width": side}
    if denoiser.in_channels == 9:
        blank = Image.new("RGB", (side, side))
        inputs |= {"image": blank, "mask_image": blank.convert("L")}
    return inputs


def _free_bytes(device: str) -> float:
    """Free memory of the host and, if it draws, of the GPU: weights are loaded by way of both."""
    import torch

    found = [math.inf]
    for path, form, unit in HOST_MEMORY:
        with suppress(OSError):
            found += [unit * int(size) for size in re.findall(form, Path(path).read_text())]
    if device == "cuda":
        found.append(torch.cuda.mem_get_info()[0])
    return min(found)


def _load_vae(job: dict[str, Any], dtype: Any) -> Any:
    """The recipe's VAE, of the class that the base's index names."""
    import diffusers

    index = json.loads(Path(job["base"], INDEX).read_text(encoding="utf-8"))
    vae_class = getattr(diffusers, index["vae"][1])
    return vae_class.from_pretrained(job["vae"], dtype=dtype, variant=job["vae_variant"])


if __name__ == "__main__":
    draw(json.loads(sys.argv[1]))
