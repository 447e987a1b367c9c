"""The part of a generate job's pipeline that does not depend on the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.process.job import Drawing, GenerateJob
from runtimes.sample.generate_job import LOSS_BATCH
from runtimes.sample.trained_components import load_trained_scheduler


class BasePipeline(ABC):
    """Methods of contract.Pipeline that all runtimes share.

    One sampler serves all models, since its encoders and VAE are those of the base pipeline.

    Args:
        job: of the images.
        make_scheduler: constructs a scheduler from its diffusers config.
        save_compiled: saves newly compiled programs to the cache.
    """

    def __init__(
        self,
        job: GenerateJob,
        make_scheduler: Callable[[dict[str, Any]], Any],
        save_compiled: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._make_scheduler = make_scheduler
        self._save_compiled = save_compiled
        self._sampler: Any = None  # constructed for the first image
        self._network: Any = None
        self._loss_rows = min(LOSS_BATCH, job.sampler.get("batch_size", LOSS_BATCH))

    def load(self, drawing: Drawing) -> None:
        self._release()
        self._network = self._load_network(drawing)
        self._scheduler = load_trained_scheduler(drawing, self._make_scheduler)
        self.encodes_text = self._network.encodes_text

    def draw(self, prompts: Sequence[str], first: int) -> NDArray[np.uint8]:
        if self._sampler is None:
            self._sampler = self._open_sampler()
        self._use_network()
        drawn: NDArray[np.uint8] = self._sampler.draw(prompts, self._job.sampler, first=first)
        self._save_compiled()
        return drawn

    def compile_seconds(self) -> float:
        return 0.0

    def _release(self) -> None:
        """Drop references to the previous model: the device need not hold two of them."""
        self._network = None
        if self._sampler is not None:
            self._sampler.release_network()

    def _use_network(self) -> None:
        """Set the sampler's network and scheduler."""
        self._sampler.use(self._network, self._scheduler)

    @abstractmethod
    def _load_network(self, drawing: Drawing) -> Any:
        """The frozen network of a drawing, on the device."""

    @abstractmethod
    def _open_sampler(self) -> Any:
        """A sampler with the encoders and the VAE of the base pipeline."""
