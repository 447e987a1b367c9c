"""The part of a runtime that does not depend on its framework."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.settings.train import Train
from runtimes.contract import Owners, SavedState, State, StateShapes, StepBatch, StepOutput, Writers
from runtimes.optimizer_state import owned_copies, shapes_of
from runtimes.pipeline_folder.folder import Base
from runtimes.process.launcher import Ranks


class BaseRuntime(ABC):
    """Methods of contract.Runtime that all runtimes share."""

    samples_collectively = False
    _counter: Any = None  # a FlopCounter, where the network is of PyTorch
    # `load` of a runtime sets these.
    versions: dict[str, str]
    device: str
    _base: Base
    _settings: Train
    _ranks: Ranks
    _network: Any
    _update: Any
    _step: Any
    _collectives: Any  # of all ranks, on the host where the framework permits it

    @cached_property
    def writers(self) -> Writers:
        return self._collectives.writers()

    def any_rank(self, flag: bool) -> bool:
        return bool(self._collectives.any(flag))

    def broadcast(self, number: int) -> int:
        return int(self._collectives.broadcast(number))

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        return self._step(batch, learning_rate)

    def flops(self, batch: StepBatch) -> float | None:
        return None if self._counter is None else self._counter.of(batch)

    def peak_flops(self) -> float | None:
        return None

    def figures(self) -> dict[str, float]:
        return {}

    def profile(self, folder: str) -> AbstractContextManager[None]:
        return self._trace(folder) if self._ranks.first else nullcontext()

    def sample(
        self, prompts: Sequence[str], sampler: dict[str, Any], controls: Sequence[str] = ()
    ) -> NDArray[np.uint8]:
        opened = self._open_sampler()
        followed = {"controls": controls} if controls else {}  # runtime torch alone has them
        try:
            with self.evaluating():
                return opened.draw(prompts, sampler, first=0, **followed)
        finally:
            del opened
            gc.collect()  # pipelines refer to themselves, and training needs their memory

    def shutdown(self) -> None:
        return None  # no process has to wait for the others

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._network.train(False)
        try:
            with self._update.averaged(), self._autocast():
                yield
        finally:
            self._network.train()

    def _autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_shapes(self) -> StateShapes:
        return self._update.shapes() | shapes_of(self._constants())

    def state(self, owners: Owners | None = None) -> State:
        state = self._update.state(owners, self._ranks.rank)
        return state | owned_copies(self._constants(), owners, self._ranks.rank, np.array)

    def restore(self, state: SavedState, step: int) -> None:
        self._update.restore(state, step)

    def scalars(self) -> dict[str, float]:
        return {}

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        return None

    def _constants(self) -> State:
        """The group of the network's constants, which full fine-tuning stores too."""
        constants = self._network.constants() if self._settings.method != "lora" else {}
        return {"constants": constants} if constants else {}

    @abstractmethod
    def _trace(self, folder: str) -> AbstractContextManager[None]:
        """Trace the steps within the context to files in a local folder."""

    @abstractmethod
    def _open_sampler(self) -> Any:
        """A sampler of the trained network, with the scheduler that the settings demand."""
