"""Import single modules of img2dataset.

The package itself imports its writers and with them PyTorch: 1.4 seconds and 220 MiB per process.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

#: Name of a package with img2dataset's modules and an empty `__init__`.
PACKAGE = "img2dataset_modules"


def img2dataset_module(name: str) -> Any:
    """A module of img2dataset, such as `resizer`; whoever imports the package has another copy.

    Raises:
        ModuleNotFoundError: img2dataset is not installed, or has no such module.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no version check over the network
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")  # lines in C++ for each broken picture
    if PACKAGE not in sys.modules:
        spec = find_spec("img2dataset")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("No module named 'img2dataset'", name="img2dataset")
        package = ModuleType(PACKAGE)
        package.__path__ = spec.submodule_search_locations
        sys.modules.setdefault(PACKAGE, package)
    return import_module(f"{PACKAGE}.{name}")
