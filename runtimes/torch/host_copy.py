"""Copy a device's tensors to NumPy arrays on the host."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

#: Bytes of one of the two staging buffers.
STAGE = 64 * 2**20


class HostCopies:
    """Float32 NumPy copies of tensors.

    From CUDA, pieces pass through two pinned buffers in turn: the device fills one of them while
    the host empties the other. An array is complete after `finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stages: list[_Stage] = []
        if device.type == "cuda":
            self._stages = [_Stage(), _Stage()]

    def copy(self, tensor: torch.Tensor) -> NDArray[np.float32]:
        """A new array for a tensor's values, which must not change before `finish`."""
        array = np.empty(tensor.shape, np.float32)
        target = torch.from_numpy(array)
        if not self._stages:
            target.copy_(tensor.detach())
            return array
        source = tensor.detach().float().contiguous().flatten()
        size = STAGE // 4
        for piece, place in zip(source.split(size), target.flatten().split(size), strict=True):
            self._stages.reverse()
            self._stages[0].begin(piece, place)
        return array

    def finish(self) -> None:
        """Wait for the copies that have begun."""
        for stage in reversed(self._stages):
            stage.end()


class _Stage:
    """One pinned buffer, and the copy through it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(STAGE // 4, pin_memory=True)
        self._filled = torch.cuda.Event()
        self._place: torch.Tensor | None = None

    def begin(self, piece: torch.Tensor, place: torch.Tensor) -> None:
        self.end()
        self._buffer[: piece.numel()].copy_(piece, non_blocking=True)
        self._filled.record(_stream(piece.device))
        self._place = place

    def end(self) -> None:
        if self._place is not None:
            self._filled.synchronize()
            self._place.copy_(self._buffer[: self._place.numel()])
            self._place = None


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the copies from a device, which need not be the current one of the thread."""
    return torch.cuda.current_stream(device)
