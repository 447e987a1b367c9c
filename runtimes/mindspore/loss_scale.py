"""Dynamic loss scaling for float16 (arXiv 1710.03740, section 3.2).

The loss is multiplied by a scale, so that small gradients do not underflow in float16. The
gradients are divided by the scale in float32.
"""

from __future__ import annotations

import numpy as np

from artifacts.safetensors import Arrays
from configs.settings.train_parts import LossScale

#: Smallest scale. An overflow at this scale is not caused by loss scaling.
LEAST = 1.0


class DynamicLossScale:
    """A loss scale that halves at an overflow and doubles after a run of finite gradients.

    Args:
        settings: initial scale and steps between doublings; None disables scaling.

    Attributes:
        value: the scale, the initial scale times a power of two; 1 without scaling.
        updates: number of optimizer steps that were not skipped, for bias corrections.
    """

    def __init__(self, settings: LossScale | None) -> None:
        self._settings = settings
        self.value = 1.0 if settings is None else settings.initial
        self.updates = 0
        self._since = 0  # steps since the scale last changed

    def update(self, grad_norm: float) -> bool:
        """Adapt the scale to the gradients of a step.

        An overflow at the smallest scale is not skipped: the loop then detects the divergence.

        Args:
            grad_norm: L2 norm of the step's gradients, NaN or infinite at an overflow.

        Returns:
            Whether the optimizer must skip the step.
        """
        if self._settings is None:
            self.updates += 1
            return False
        finite = bool(np.isfinite(grad_norm))
        if not finite and self.value > LEAST:
            self.value = max(self.value / 2, LEAST)
            self._since = 0
            return True
        self.updates = self.updates + 1
        self._since = self._since + 1 if finite else 0
        if self._since == self._settings.growth_every:
            self.value = self.value * 2
            self._since = 0
        return False

    def state(self) -> Arrays:
        """The group `loss_scale` of State: arrays [1] f32; empty without scaling."""
        if self._settings is None:
            return {}
        numbers = {"value": self.value, "updates": self.updates, "since": self._since}
        return {name: np.array([number], np.float32) for name, number in numbers.items()}

    def restore(self, arrays: Arrays, step: int) -> None:
        """Restore the group that was saved after `step` steps.

        An empty group, of a run without scaling, keeps the initial scale.
        """
        self.updates = step
        self._since = 0
        if arrays and self._settings is not None:
            self.value = float(arrays["value"][0])
            self.updates = int(arrays["updates"][0])
            self._since = int(arrays["since"][0])
