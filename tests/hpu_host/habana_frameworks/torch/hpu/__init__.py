"""Device figures, and HPU graphs: recorded by the shapes of what a module is given."""

import sys
from typing import Any

import torch
from hpu_emulator import graphs
from torch.utils._pytree import tree_flatten, tree_unflatten

memory_stats = sys.modules["torch.hpu"].memory_stats
device_count = sys.modules["torch.hpu"].device_count
synchronize = sys.modules["torch.hpu"].synchronize


def wrap_in_hpu_graph(module: torch.nn.Module, **more: Any) -> torch.nn.Module:
    """Record the module's forward, in lazy mode alone; in place."""
    return _recorded(module, training=False)


class ModuleCacher:
    """Records forward and backward of a module in training."""

    def __init__(self, max_graphs: int = 10) -> None:
        self._most = max_graphs

    def __call__(
        self,
        model: torch.nn.Module,
        inplace: bool = True,
        allow_unused_input: bool = False,
        have_grad_accumulation: bool = False,
    ) -> torch.nn.Module:
        assert inplace, "emulated in place only"
        return _recorded(model, training=True, most=self._most)


def _recorded(module: Any, training: bool, most: int = 2**31) -> Any:
    if not graphs.lazy():
        raise RuntimeError("HPU graphs are for lazy mode")
    original, met = module.forward, dict[Any, list[torch.Tensor]]()

    def forward(*given: Any, **more: Any) -> Any:
        output = original(*given, **more)
        key = (id(module), _shape((given, more)))
        if module.training != training or (key not in met and len(met) == most):
            return output  # lazily, without a graph
        if training and torch.is_autocast_enabled("hpu"):
            assert not torch.is_autocast_cache_enabled(), "a recorded graph keeps old casts"
        graphs.record(key)
        if training:
            met[key] = []
            return output
        leaves, form = tree_flatten(output)
        if key not in met:
            met[key] = leaves
        for kept, new in zip(met[key], leaves, strict=True):
            if kept is not new:
                kept.copy_(new)
        return tree_unflatten(met[key], form)  # each replay writes to the same memory

    module.forward = forward
    return module


def _shape(given: Any) -> Any:
    """What graphs are told apart by."""
    if isinstance(given, torch.Tensor):
        if given.device.type != "hpu":
            raise RuntimeError("an HPU graph was given a tensor of the host")
        return (tuple(given.shape), given.dtype, given.stride(), given.storage_offset())
    if isinstance(given, dict):
        return tuple((name, _shape(value)) for name, value in sorted(given.items()))
    if isinstance(given, (list, tuple)):
        return tuple(_shape(value) for value in given)
    return given
