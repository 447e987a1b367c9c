"""What an Ascend host has: driver, CANN, torch_npu. Files and metadata are looked at; nothing is
imported or opened."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Where CANN is, unless ASCEND_HOME_PATH says so (its set_env.sh does).
TOOLKIT = Path("/usr/local/Ascend/ascend-toolkit/latest")
DEVICES = Path("/dev")
#: `toolkit_running_version=[7.6.0.1.220:8.0.0]`, an inner version before the one of the release, or
#: `version=8.0.0`.
_VERSION = re.compile(r"^\w*version=\[?(?:[^:\]\n]*:)?(\d[\w.-]*)", re.MULTILINE)


def count_npus() -> int:
    """NPUs that the driver shows."""
    return sum(path.name[len("davinci") :].isdigit() for path in DEVICES.glob("davinci[0-9]*"))


def cann_version() -> str | None:
    """The version of CANN's toolkit; `unknown` where it does not say, None where there is none."""
    home = Path(os.environ.get("ASCEND_HOME_PATH") or TOOLKIT)
    if not home.is_dir():
        return None
    for path in (home / "version.cfg", *sorted(home.glob("*/ascend_toolkit_install.info"))):
        if path.is_file() and (match := _VERSION.search(path.read_text(errors="replace"))):
            return match[1]
    return "unknown"


def torch_npu_version() -> str | None:
    """The version of torch_npu in this environment, if it is installed."""
    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return None


def lacking() -> list[str]:
    """What an NPU takes and this machine lacks, and what to do about it."""
    found = []
    if not count_npus():
        found.append("no driver (there is no /dev/davinci0): deploy/ascend says which")
    if cann_version() is None:
        found.append("no CANN: install it, and source its set_env.sh")
    return found
