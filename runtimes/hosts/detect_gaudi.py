"""Detect the driver, devices and Intel's PyTorch bridge of a Gaudi host.

Detection reads files and package metadata only: it imports no package and opens no device.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Folders of the Linux kernel: accelerator devices, and the module of the habanalabs driver.
DEVICES = Path("/sys/class/accel")
MODULE = Path("/sys/module/habanalabs")
VENDOR = "0x1da3"  # PCI vendor ID of Habana Labs
BRIDGE = "habana-torch-plugin"


def count_hpus() -> int:
    """Number of Gaudi accelerators that the driver lists."""
    vendors = (path / "device/vendor" for path in DEVICES.glob("accel[0-9]*"))
    return sum(path.is_file() and path.read_text().strip() == VENDOR for path in vendors)


def driver_version() -> str | None:
    """Version of the habanalabs driver; `unknown` without a version file, None without a driver."""
    if not MODULE.is_dir():
        return None
    path = MODULE / "version"
    return path.read_text().strip() if path.is_file() else "unknown"


def bridge_version() -> str | None:
    """Version of Intel's PyTorch bridge, equal to the Gaudi software version; None if absent."""
    try:
        return version(BRIDGE)
    except PackageNotFoundError:
        return None


def missing_components() -> list[str]:
    """Requirements of a Gaudi that this machine does not meet, each with its remedy."""
    missing = []
    if not count_hpus():
        missing.append("no driver (no Gaudi in /sys/class/accel): install the one in deploy/gaudi")
    if bridge_version() is None:
        missing.append("no habana_frameworks: use Intel's container (deploy/gaudi)")
    return missing
