"""Run an unmodified diffusers example script; time its steps and record their arrays.

    python diffusers_script_hooks.py NOTES.json RECORD_FOLDER|- SCRIPT ARGUMENTS...

Runs in the script's environment, so it imports none of our modules. It wraps library functions that
the script calls:

* accelerate's data loader: seconds per fetch, and seconds until the next fetch;
* the VAE's `encode` and the text encoders' `forward`: their seconds;
* datasets' `Dataset.map`, by which a script precomputes: seconds, and CPU seconds of the process;
* with the environment variable KILN_BENCH_VAE_SECONDS, the VAE's `encode` is replaced: a batch
  takes this time and no processor, as on an accelerator;
* with a record folder, `add_noise`, the UNet's `forward`, `Accelerator.backward` and
  `clip_grad_norm_`: the arrays of each step, as `00000.npz`, ... in that folder.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def _allow_foreign_torchvision() -> None:
    """Skip a module of torchvision's CUDA build that fails with a CPU build of torch."""
    import torch

    if torch.version.cuda is None:
        name = "torchvision._meta_registrations"
        sys.modules[name] = types.ModuleType(name)


class Stopwatch:
    """Seconds of each step: fetching, encoding, and all except fetching; and of `Dataset.map`.

    On CUDA, every reading of the clock synchronizes the device.
    """

    def __init__(self) -> None:
        import torch

        self._wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self.steps: list[dict[str, float]] = []
        self.encoding = 0.0
        self.precomputing = [0.0, 0.0]
        self._encodes = False  # encoders may be nested; only the outer one is timed

    def now(self) -> float:
        """The time, once the device is idle."""
        self._wait()
        return time.perf_counter()

    def batches(self, original: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        """The data loader's `__iter__`, timed."""

        def timed(loader: Any) -> Iterator[Any]:
            batches = original(loader)
            while True:
                start = self.now()
                batch = next(batches, None)
                if batch is None:
                    return
                fetched = self.now()
                self.encoding = 0.0
                yield batch
                done = self.now()
                step = {"fetch": fetched - start, "encode": self.encoding, "body": done - fetched}
                self.steps.append(step)

        return timed

    def encoder(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An encoder's method, timed."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._encodes:
                return original(*arguments, **keywords)
            begin = self.now()
            self._encodes = True
            try:
                return original(*arguments, **keywords)
            finally:
                self._encodes = False
                self.encoding += self.now() - begin

        return timed

    def mapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A dataset's `map`, timed."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = self.now()
            cpu = time.process_time()
            mapped = original(*arguments, **keywords)
            self.precomputing[0] += self.now() - begin
            self.precomputing[1] += time.process_time() - cpu
            return mapped

        return timed


def stand_in(seconds: float) -> Callable[..., Any]:
    """A VAE's `encode` whose posterior is zero."""
    import torch
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.models.modeling_outputs import AutoencoderKLOutput

    def encode(vae: Any, pixels: Any, **_: Any) -> Any:
        time.sleep(seconds)
        factor = 2 ** (len(vae.config.block_out_channels) - 1)
        sides = (side // factor for side in pixels.shape[2:])
        moments = torch.zeros(len(pixels), 2 * vae.config.latent_channels, *sides)
        return AutoencoderKLOutput(DiagonalGaussianDistribution(moments))

    return encode


class Recorder:
    """Writes the inputs of each step, its loss and its gradient norm."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._arrays: dict[str, Any] = {}

    def add_noise(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The scheduler's `add_noise(latents, noise, timesteps)`."""

        def recorded(scheduler: Any, latents: Any, noise: Any, timesteps: Any) -> Any:
            self._store(latents=latents, noise=noise, timesteps=timesteps)
            return original(scheduler, latents, noise, timesteps)

        return recorded

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The UNet's `forward`."""

        def recorded(unet: Any, sample: Any, timestep: Any, embeds: Any, **more: Any) -> Any:
            added = more["added_cond_kwargs"]
            self._store(
                prompt_embeds=embeds,
                pooled_prompt_embeds=added["text_embeds"],
                add_time_ids=added["time_ids"],
            )
            return original(unet, sample, timestep, embeds, **more)

        return recorded

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The accelerator's `backward(loss)`."""

        def recorded(accelerator: Any, loss: Any, **more: Any) -> Any:
            self._store(loss=loss)
            return original(accelerator, loss, **more)

        return recorded

    def clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The accelerator's `clip_grad_norm_`, the last recorded call of a step."""
        import numpy as np

        def recorded(*arguments: Any, **keywords: Any) -> Any:
            norm = original(*arguments, **keywords)
            self._store(grad_norm=norm)
            np.savez(self._folder / f"{self._count:05d}.npz", **self._arrays)
            self._arrays = {}
            self._count = self._count + 1
            return norm

        return recorded

    def _store(self, **tensors: Any) -> None:
        for name, tensor in tensors.items():
            self._arrays[name] = tensor.detach().float().cpu().numpy().copy()


def _peak_bytes() -> int:
    """Peak memory of the CUDA device, or of this process on a CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


def main(arguments: list[str]) -> None:
    """Install the wrappers, run the script, write the notes."""
    notes, record, script, *rest = arguments
    _allow_foreign_torchvision()
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    watch = Stopwatch()
    if seconds := os.environ.get("KILN_BENCH_VAE_SECONDS"):
        AutoencoderKL.encode = stand_in(float(seconds))
    _wrap(DataLoaderShard, "__iter__", watch.batches)
    _wrap(AutoencoderKL, "encode", watch.encoder)
    if find_spec("datasets"):
        from datasets import Dataset

        _wrap(Dataset, "map", watch.mapping)
    for kind in (CLIPTextModel, CLIPTextModelWithProjection):
        _wrap(kind, "forward", watch.encoder)
    if record != "-":
        recorder = Recorder(Path(record))
        _wrap(DDPMScheduler, "add_noise", recorder.add_noise)
        _wrap(UNet2DConditionModel, "forward", recorder.forward)
        _wrap(Accelerator, "backward", recorder.backward)
        _wrap(Accelerator, "clip_grad_norm_", recorder.clip)
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    figures = {
        "steps": watch.steps,
        "memory_bytes": _peak_bytes(),
        "precomputing": watch.precomputing,
    }
    Path(notes).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
