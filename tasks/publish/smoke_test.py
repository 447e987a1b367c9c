"""The smoke test: a published folder loads and draws by plain diffusers in a clean process.

`check` runs this file as a script, isolated from the project's path and from the network.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
ADAPTERS = "pytorch_lora_weights.safetensors"


class SmokeTestFailed(ValueError):
    """The folder is not fit for publication; the message has the reason."""


def check(folder: Path, base: Path, recipe: Recipe) -> None:
    """Raise SmokeTestFailed unless a folder loads and draws a finite picture.

    Args:
        folder: the published files: a pipeline, or adapters of `base`.
        base: local pipeline folder.

    Raises:
        TransientError: the process was killed, or ran out of memory or time, on a busy machine.
    """
    from tasks.build_or_reuse import TransientError  # the script has no project to import from

    device = recipe.evaluate.device
    job = {"folder": str(folder), "base": str(base), "device": device}
    scores = [recipe.evaluate.negative_aesthetic_score, recipe.evaluate.aesthetic_score]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DIFFUSERS_VERBOSITY": "error"}
    try:
        result = subprocess.run(
            [sys.executable, "-I", __file__, json.dumps({**job, "aesthetic_scores": scores})],
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
        if "out of memory" in lines[-1]:
            raise TransientError(f"smoke test: {lines[-1]}: run again")
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


def draw(job: dict[str, Any]) -> None:
    """Load the job's folder without further arguments, draw a picture and check it."""
    import numpy as np
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image

    folder = Path(job["folder"])
    adapters = not (folder / "model_index.json").is_file()
    if adapters:  # a base may store its text encoders in half precision, and not load bare
        pipe = DiffusionPipeline.from_pretrained(job["base"], dtype=torch.float32)
        pipe.load_lora_weights(folder, weight_name=ADAPTERS)
    else:
        pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe = pipe.to("cuda" if job["device"] != "cpu" and torch.cuda.is_available() else "cpu")
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    size = getattr(denoiser.config, "sample_size", None)
    size = size or getattr(pipe, "default_sample_size", SAMPLE_SIZE)
    side = min(size * pipe.vae_scale_factor, LARGEST_SIDE)
    inputs: dict[str, Any] = {"prompt": "a", "height": side, "width": side}
    if denoiser.config.in_channels == 9:  # an inpainting UNet
        blank = Image.new("RGB", (side, side))
        inputs |= {"image": blank, "mask_image": blank.convert("L")}
    if getattr(denoiser.config, "class_embed_type", None):  # aesthetic scores: see the card
        labels = torch.tensor(job["aesthetic_scores"], device=pipe.device)
        denoiser.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"class_labels": labels}), with_kwargs=True
        )
    pictures = pipe(**inputs, num_inference_steps=STEPS, output_type="np").images
    if not np.isfinite(pictures).all():
        raise ValueError("the picture is not finite")
    if np.ptp(pictures) == 0:
        raise ValueError("the picture has one colour only")


if __name__ == "__main__":
    draw(json.loads(sys.argv[1]))
