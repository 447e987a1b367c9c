"""Find the C compiler that torch.compile calls."""

from __future__ import annotations

import os
import shutil

#: Compilers in the order in which Inductor and Triton look for them.
NAMES = ("g++", "gcc", "clang++", "clang", "cc")


def find_c_compiler() -> str | None:
    """Path of the compiler of CXX or CC, or of the first on PATH; None without one."""
    named = (os.environ.get(variable) for variable in ("CXX", "CC"))
    found = (shutil.which(name) for name in (*filter(None, named), *NAMES))
    return next(filter(None, found), None)
