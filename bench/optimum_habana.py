"""Compare optimum-habana with diffusers: `python -m bench.optimum_habana MODEL PROMPT...`.

A published SDXL samples the same prompts from the same noise, by optimum-habana's
`GaudiStableDiffusionXLPipeline` on device hpu and by diffusers' pipeline on the CPU. optimum-habana
requires an environment of its own with older libraries (docs/gaudi.md). tests/hpu_host emulates a
Gaudi.
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

SEED = 42
STEPS = 10
GUIDANCE = 3.0
REPORTED = ("optimum-habana", "optimum", "diffusers", "transformers", "torch")


def main(arguments: Sequence[str]) -> int:
    """Sample with both and compare; 1 if a value differs by more than 2 of 255 levels."""
    parser = argparse.ArgumentParser(prog="python -m bench.optimum_habana", description=__doc__)
    parser.add_argument("model", help="folder of a published StableDiffusionXLPipeline")
    parser.add_argument("prompts", nargs="+")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PT_HPU_LAZY_MODE", "1")
    import habana_frameworks.torch.core  # noqa: F401  must precede every tensor
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
    pictures = [_sample(pipe, options.prompts, torch.from_numpy(noise)) for pipe in (theirs, ours)]
    result: dict[str, Any] = {
        "device": str(theirs.device),
        "pictures": len(pictures[0]),
        "max_difference_levels": float(np.abs(pictures[0] - pictures[1]).max() * 255),
        "versions": {name: version(name) for name in REPORTED},
    }
    print(json.dumps(result))
    return int(result["max_difference_levels"] > 2)


def _sample(pipe: Any, prompts: Sequence[str], noise: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    output = pipe(
        list(prompts),
        latents=noise,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        output_type="np",
    )
    return np.stack(list(output.images))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
