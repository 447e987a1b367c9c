"""What pictures of prompts are drawn from: start noise and conditioning, as arrays on the host.

For runtimes that sample by a table of numbers (tabulated_scheduler.py), not by a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput
from runtimes.data.padding import round_up
from runtimes.families import Family, family_named
from runtimes.families.unet_inputs import ExtraInputs, aesthetic_scores, fully_masked
from runtimes.models.schedulers import make_scheduler
from runtimes.objective.noise_scheduler import sampling_scheduler
from runtimes.sample.start import starts
from runtimes.sample.tabulated_scheduler import Table, tabulate

Float32 = NDArray[np.float32]
#: Pictures [B, 3, H, W] in -1..1 -> mean and log-variance of their latents [B, C, h, w].
Images = Callable[[Float32], tuple[Any, Any]]
#: Captions -> prompt embeddings [B, T, D] and pooled ones [B, P] or None.
Texts = Callable[[list[str]], tuple[Float32, Float32 | None]]


@dataclass(frozen=True)
class Start:
    """Of one batch, filled up with copies of its last prompt."""

    count: int  # pictures that are wanted
    noise: Float32  # [B, C, h, w], standard normal
    #: keyword -> [B, ...] or, with guidance, [2 B, ...]: of every picture, without its caption and
    #: with it, one below the other, so that they lie on one device.
    conditioning: dict[str, Float32]


@dataclass(frozen=True)
class Starts:
    """Of a pipeline.

    Args:
        info: of its encoders, as describe_encoders gives it.
        texts: encodes captions.
        images: encodes pictures.
    """

    info: dict[str, Any]
    texts: Texts
    images: Images

    @property
    def family(self) -> Family:
        return family_named(self.info["family"])

    def of(
        self,
        prompts: Sequence[str],
        sampler: dict[str, Any],
        *,
        first: int,
        denoiser: Mapping[str, Any],
        multiple: int = 1,
    ) -> Iterator[Start]:
        """Batches of `batch_size` pictures, filled up to a multiple.

        Args:
            sampler: as GenerateJob.sampler.
            first: number of the first picture's noise.
            denoiser: its config.
        """
        rows = round_up(sampler["batch_size"], multiple)
        guided = is_guided(self.family, sampler)
        without = self._without(sampler.get("negative_prompt")) if guided else None
        more: dict[str, Float32] | None = None
        factor = self.info["vae_scale_factor"]
        family = self.family
        for batch in starts(prompts, sampler, family, denoiser, factor, first=first, rows=rows):
            size = (batch.height, batch.width)
            if more is None:
                more = self._more(ExtraInputs.from_config(denoiser), size, sampler, rows)
            conditioning = self._condition(batch.prompts, without)
            drawn = self.family.drawing_condition(size, sampler["guidance_scale"])
            count = len(conditioning["prompt_embeds"])
            conditioning |= {n: np.repeat(array[None], count, axis=0) for n, array in drawn.items()}
            yield Start(batch.count, batch.noise, conditioning | more)

    def _condition(
        self, captions: list[str], without: dict[str, Float32] | None
    ) -> dict[str, Float32]:
        """Args: without: what stands for no caption [1, ...]; None where nothing is guided."""
        found = self._embeds(captions)
        if without is not None:
            found = {
                name: _in_turns(np.broadcast_to(without[name], array.shape), array)
                for name, array in found.items()
            }
        return found

    def _more(
        self, extras: ExtraInputs, size: tuple[int, int], sampler: Mapping[str, Any], rows: int
    ) -> dict[str, Float32]:
        """A mask over everything, and the score that is asked for: as far as they are taken."""
        found = {}
        if extras.inpainting:
            mean, _ = self.images(np.zeros((1, 3, *size), np.float32))
            times = 2 * rows if is_guided(self.family, sampler) else rows
            found["inpainting"] = np.repeat(fully_masked(mean, self.info), times, axis=0)
        if extras.aesthetic_score:
            found["aesthetic_score"] = np.tile(
                np.array(aesthetic_scores(sampler), np.float32), rows
            )
        return found

    def _without(self, negative: str | None) -> dict[str, Float32]:
        """What guidance leads away from, once for all pictures [1, ...]: a prompt, or none."""
        found = self._embeds([negative or ""])
        if negative is None and self.info["empty_prompt"] == "zeros":
            return {name: np.zeros_like(array) for name, array in found.items()}
        return found

    def _embeds(self, captions: list[str]) -> dict[str, Float32]:
        states, pooled = self.texts(captions)
        # Of SD3 without a T5, what is missing is zeros.
        missing = (self.info["tokens"] - states.shape[1], self.info["prompt_dim"] - states.shape[2])
        found = {"prompt_embeds": np.pad(states, ((0, 0), *((0, more) for more in missing)))}
        return found if pooled is None else {**found, "pooled_prompt_embeds": pooled}


def is_guided(family: Family, sampler: Mapping[str, Any]) -> bool:
    """Whether each step also predicts without caption (classifier-free guidance, 2207.12598)."""
    return bool(sampler["guidance_scale"] > 1) and not family.guidance_input


def table_of(scheduler: Any, sampler: Mapping[str, Any], family: Family) -> Table:
    """The table of a model's scheduler, or of the one that pictures are asked to be drawn with.

    Raises:
        WrongInput: it has none.
    """
    if sampler.get("eta"):
        raise WrongInput("eta draws noise at every step, which a table of numbers does not: set 0")
    steps = sampler["num_inference_steps"]
    return tabulate(
        sampling_scheduler(scheduler, sampler, make_scheduler), steps, family.sigmas(steps)
    )


def _in_turns(one: Float32, other: Float32) -> Float32:
    """Rows of two arrays [B, ...] in turns [2 B, ...]."""
    return np.stack([one, other], axis=1).reshape(-1, *one.shape[1:])
