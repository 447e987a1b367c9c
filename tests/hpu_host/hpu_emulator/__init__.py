"""Of an emulated Gaudi host: graphs, on the emulator that all kinds of devices share."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "emulator"))

from device_emulator import build  # lies there

__all__ = ["build"]
