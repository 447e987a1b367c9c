"""Stands in for torch_npu on a host without NPUs: PyTorch's spare backend, named npu, of two
devices that have names and memory, and no operator."""

from types import ModuleType

import torch

opened: list[int] = []


class _Devices(ModuleType):
    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def current_device() -> int:
        return opened[-1] if opened else 0

    @staticmethod
    def set_device(device: torch.device) -> None:
        opened.append(torch.device(device).index or 0)

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        return "Ascend910B2"

    @staticmethod
    def max_memory_allocated(device: torch.device) -> int:
        return 5 * 2**30

    @staticmethod
    def empty_cache() -> None:
        """Nothing is kept."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def npu_fusion_attention(*arguments: object, **more: object) -> None:
    """diffusers takes it by name when it is imported."""
    raise NotImplementedError


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", _Devices("torch.npu"))
