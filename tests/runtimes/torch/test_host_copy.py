"""Copies of device tensors on the host, through staging buffers as on CUDA."""

import numpy as np
import pytest
import torch

from runtimes.torch import step
from runtimes.torch.step import HostCopies


class Stage(step._Stage):
    """A stage without CUDA; its event is a fake."""

    def __init__(self) -> None:
        self._buffer = torch.full((step.STAGE // 4,), torch.nan)
        self._filled = self
        self._place = None
        self.waits = 0

    def record(self, stream: str) -> None:
        assert stream == "stream of cpu"

    def synchronize(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("staged", [False, True])
def test_copies_have_the_values_of_every_layout_and_dtype(
    monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    monkeypatch.setattr(step, "STAGE", 64)  # 16 numbers
    monkeypatch.setattr(step, "_stream", lambda device: f"stream of {device}")
    copies = HostCopies(torch.device("cpu"))
    copies._stages = [Stage(), Stage()] if staged else []
    drawn = torch.Generator().manual_seed(1)
    whole = torch.randn(3, 5, 4, 2, generator=drawn)
    tensors = [
        whole,
        whole.to(memory_format=torch.channels_last),
        whole[:, 1:3],
        whole.bfloat16(),
        torch.arange(40, dtype=torch.uint8),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.nn.Parameter(whole[0]),
    ]
    arrays = [copies.copy(tensor) for tensor in tensors]
    copies.finish()
    assert all(stage._place is None for stage in copies._stages), "a piece is left in a buffer"
    for tensor, array in zip(tensors, arrays, strict=True):
        assert array.dtype == np.float32 and array.flags.c_contiguous
        np.testing.assert_equal(array, tensor.detach().float().numpy())
    assert not any(np.shares_memory(arrays[0], array) for array in arrays[1:])
    assert not np.shares_memory(arrays[0], whole.numpy())


def test_copies_from_cuda_are_complete() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    copies = HostCopies(torch.device("cuda"))
    tensors = [torch.randn(n * 10**6, device="cuda") for n in (1, 40, 7)]
    arrays = [copies.copy(tensor) for tensor in tensors]
    copies.finish()
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_equal(array, tensor.cpu().numpy())
