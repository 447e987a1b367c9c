"""Detect the driver, CANN and torch_npu of an Ascend host.

Detection reads files and package metadata only: it imports no package and opens no device.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Default folder of CANN; ASCEND_HOME_PATH, which CANN's set_env.sh exports, overrides it.
TOOLKIT = Path("/usr/local/Ascend/ascend-toolkit/latest")
DEVICES = Path("/dev")
#: Matches `version=8.0.0`, and the release 8.0.0 in `toolkit_running_version=[7.6.0.1.220:8.0.0]`.
_VERSION = re.compile(r"^\w*version=\[?(?:[^:\]\n]*:)?(\d[\w.-]*)", re.MULTILINE)


def count_npus() -> int:
    """Number of NPUs that the driver lists in /dev."""
    return sum(path.name[len("davinci") :].isdigit() for path in DEVICES.glob("davinci[0-9]*"))


def cann_version() -> str | None:
    """Version of the CANN toolkit; `unknown` if no version file exists, None without CANN."""
    home = Path(os.environ.get("ASCEND_HOME_PATH") or TOOLKIT)
    if not home.is_dir():
        return None
    for path in (home / "version.cfg", *sorted(home.glob("*/ascend_toolkit_install.info"))):
        if path.is_file() and (match := _VERSION.search(path.read_text(errors="replace"))):
            return match[1]
    return "unknown"


def torch_npu_version() -> str | None:
    """Version of the installed torch_npu, or None."""
    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return None


def missing_components() -> list[str]:
    """Requirements of an NPU that this machine does not meet, each with its remedy."""
    missing = []
    if not count_npus():
        missing.append("no driver (/dev/davinci0 is absent): install the one in deploy/ascend")
    if cann_version() is None:
        missing.append("no CANN: install it, and source its set_env.sh")
    return missing
