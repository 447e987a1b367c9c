"""Replace operators that MindSpore lacks on a CPU, in every process with this folder on its path.

Python imports this module at its start. MindSpore and mindone are patched at their own import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _patch_mindspore() -> None:
    import cpu_ops

    cpu_ops.route()


def _patch_activations() -> None:
    import cpu_ops

    cpu_ops.route_models()


#: What is called after the import of a module.
PATCHES: dict[str, Callable[[], None]] = {
    "mindspore": _patch_mindspore,
    "mindone.diffusers.models.activations": _patch_activations,
}


class _Patching(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _patch_after_import(spec.loader, PATCHES[name])
        return spec


def _patch_after_import(loader: Loader, patch: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        patch()

    loader.exec_module = exec_module  # type: ignore[method-assign]


sys.meta_path.insert(0, _Patching())
