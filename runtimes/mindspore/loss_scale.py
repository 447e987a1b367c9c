"""The loss scale of float16: gradients too small for its range are multiplied up before they are
computed, and divided again in float32 (arXiv 1710.03740, section 3.2)."""

from __future__ import annotations

import numpy as np

from artifacts.safetensors import Arrays
from configs.training import LossScale

#: Below it an overflow is no matter of scale any more.
LEAST = 1.0


class DynamicLossScale:
    """A scale that follows what the gradients bear.

    Attributes:
        value: a power of two times where it started; 1 without scaling.
        updates: optimizer steps that were not skipped, which bias corrections count.
    """

    def __init__(self, settings: LossScale | None) -> None:
        self._settings = settings
        self.value = 1.0 if settings is None else settings.initial
        self.updates = 0
        self._since = 0  # steps since it changed

    def update(self, grad_norm: float) -> bool:
        """Whether a step is to be skipped, whose gradients have this norm; the scale follows.

        A norm that is no number even at the least scale is nothing that scaling cures: the step is
        not skipped, so that the run notices that it has diverged.
        """
        if self._settings is None:
            self.updates += 1
            return False
        finite = bool(np.isfinite(grad_norm))
        if not finite and self.value > LEAST:
            self.value, self._since = max(self.value / 2, LEAST), 0
            return True
        self.updates, self._since = self.updates + 1, self._since + 1 if finite else 0
        if self._since == self._settings.growth_every:
            self.value, self._since = self.value * 2, 0
        return False

    def state(self) -> Arrays:
        """As a group of State; nothing without scaling."""
        if self._settings is None:
            return {}
        numbers = {"value": self.value, "updates": self.updates, "since": self._since}
        return {name: np.array([number], np.float32) for name, number in numbers.items()}

    def restore(self, arrays: Arrays, step: int) -> None:
        """Continue as after `step` steps; from a run without scaling, with a scale of its own."""
        self.updates, self._since = step, 0
        if arrays and self._settings is not None:
            self.value = float(arrays["value"][0])
            self.updates, self._since = int(arrays["updates"][0]), int(arrays["since"][0])
