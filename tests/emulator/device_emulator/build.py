"""Compile the emulator's extension once for its source, compiler and PyTorch, outside the tree."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

NAME = "device_emulator_C"
SOURCE = Path(__file__).with_name("emulator.cpp")
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={NAME}")
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def compiler() -> str:
    """The C++ compiler."""
    return os.environ.get("CXX", "g++")


def cached() -> Path:
    """Where the library is, or will be: named for all that it is made of."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    for part in (torch.__version__, sys.version, compiler(), *FLAGS):
        digest.update(part.encode())
    folder = os.environ.get("KILN_TEST_CACHE") or Path.home() / ".cache/kilnworks-tests"
    return Path(folder) / f"{NAME}-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile it, unless that was done; processes that want it at once wait for one of them."""
    library = cached()
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            subprocess.run(_command(part), check=True)
            part.replace(library)
    return library


def load() -> Any:
    """The extension, which emulates nothing before `install` is called."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, build())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]


def _command(library: Path) -> list[str]:
    root = Path(torch.__file__).parent
    include = root / "include"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    return [
        compiler(),
        *FLAGS,
        *(f"-I{folder}" for folder in folders),
        str(SOURCE),
        "-o",
        str(library),
        f"-L{root / 'lib'}",
        *(f"-l{name}" for name in LIBRARIES),
        f"-Wl,-rpath,{root / 'lib'}",
    ]


if __name__ == "__main__":
    print(build())
