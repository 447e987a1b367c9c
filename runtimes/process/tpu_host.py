"""A host of a TPU slice on its own: libtpu waits for all hosts of the slice, unless it is told.

The variables are those by which JAX, PyTorch/XLA and Ray give a process a part of the chips:
https://gist.github.com/skye/f82ba45d2445bb19d53545538754f9a3 (of a maintainer of JAX), Ray's
`ray.util.tpu` for the bounds, and https://github.com/pytorch/xla/issues/7714 for the wait. No TPU
has run this.
"""

from __future__ import annotations

from pathlib import Path

#: Chips of a host -> their bounds: x, y, z.
BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def alone(devices: Path = Path("/dev")) -> dict[str, str]:
    """The variables of a process that uses this host's chips alone; none without chips.

    Args:
        devices: folder of the device files: `accel0`, or `vfio/0` of v6e and later.
    """
    chips = len(list(devices.glob("accel[0-9]*"))) or len(list(devices.glob("vfio/[0-9]*")))
    if chips not in BOUNDS:
        return {}
    return {
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[chips],
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(chips))),
        # This host is the only one, whatever the slice's metadata or GKE say.
        "CLOUD_TPU_TASK_ID": "0",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
