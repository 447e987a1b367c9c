"""What a Gaudi host has: driver, devices, Intel's PyTorch bridge. Files and metadata are looked at;
nothing is imported or opened."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Of the kernel: accelerators, and the habanalabs driver's module.
DEVICES = Path("/sys/class/accel")
MODULE = Path("/sys/module/habanalabs")
VENDOR = "0x1da3"  # Habana Labs, in PCI's list
BRIDGE = "habana-torch-plugin"


def count_hpus() -> int:
    """Gaudis that the driver shows."""
    vendors = (path / "device/vendor" for path in DEVICES.glob("accel[0-9]*"))
    return sum(path.is_file() and path.read_text().strip() == VENDOR for path in vendors)


def driver_version() -> str | None:
    """The version of the habanalabs driver; `unknown` where it does not say, None without one."""
    if not MODULE.is_dir():
        return None
    path = MODULE / "version"
    return path.read_text().strip() if path.is_file() else "unknown"


def bridge_version() -> str | None:
    """The version of Intel's PyTorch bridge in this environment, which is the Gaudi software's."""
    try:
        return version(BRIDGE)
    except PackageNotFoundError:
        return None


def lacking() -> list[str]:
    """What a Gaudi takes and this machine lacks, and what to do about it."""
    found = []
    if not count_hpus():
        found.append("no driver (there is no Gaudi in /sys/class/accel): deploy/gaudi says which")
    if bridge_version() is None:
        found.append("no habana_frameworks: take Intel's container (deploy/gaudi)")
    return found
