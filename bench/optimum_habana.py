"""What we publish, drawn by optimum-habana: `python -m bench.optimum_habana MODEL PROMPT...`.

Loads a published SDXL with its `GaudiStableDiffusionXLPipeline` on device hpu and with diffusers'
own pipeline on the CPU, draws the same prompts from the same noise with both, and tells how far
they are apart. Wants an environment of its own, as optimum-habana needs older libraries
(docs/gaudi.md); without a Gaudi the emulated one of tests/hpu_host does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

SEED, STEPS, GUIDANCE = 42, 10, 3.0
PACKAGES = ("optimum-habana", "optimum", "diffusers", "transformers", "torch")


def main(arguments: Sequence[str]) -> int:
    """Draw by both and compare; 1 if they are more than two of 255 levels apart."""
    parser = argparse.ArgumentParser(prog="python -m bench.optimum_habana", description=__doc__)
    parser.add_argument("model", help="folder of a published StableDiffusionXLPipeline")
    parser.add_argument("prompts", nargs="+")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PT_HPU_LAZY_MODE", "1")
    import habana_frameworks.torch.core  # noqa: F401  before any tensor
    import torch
    from diffusers import StableDiffusionXLPipeline
    from optimum.habana import GaudiConfig
    from optimum.habana.diffusers import GaudiStableDiffusionXLPipeline

    config = GaudiConfig(use_torch_autocast=False)
    theirs = GaudiStableDiffusionXLPipeline.from_pretrained(
        options.model, use_habana=True, use_hpu_graphs=False, gaudi_config=config
    )
    ours = StableDiffusionXLPipeline.from_pretrained(options.model)
    size = ours.unet.config.sample_size
    shape = (len(options.prompts), ours.unet.config.in_channels, size, size)
    noise = np.random.default_rng(SEED).standard_normal(shape, dtype=np.float32)
    drawn = [_draw(pipe, options.prompts, torch.from_numpy(noise)) for pipe in (theirs, ours)]
    apart = np.abs(drawn[0] - drawn[1])
    told: dict[str, Any] = {
        "device": str(theirs.device),
        "pictures": len(drawn[0]),
        "most_levels_apart": float(apart.max() * 255),
        "versions": {name: version(name) for name in PACKAGES},
    }
    print(json.dumps(told))
    return int(told["most_levels_apart"] > 2)


def _draw(pipe: Any, prompts: Sequence[str], noise: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    drawn = pipe(
        list(prompts),
        latents=noise,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        output_type="np",
    )
    return np.stack(list(drawn.images))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
