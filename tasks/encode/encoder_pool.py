"""The encoders of one machine: an encoder process for each accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from runtimes.registry import encoder_devices, encodes_in_subprocess
from tasks.encode.encoder_client import EncoderLost, EncoderProcess
from tasks.encode.encoder_process import SHARDS_PER_DEVICE, EncodingPlan, encode_tar


class EncoderPool:
    """Encodes shards on all devices of this machine; thread-safe.

    One device needs no process of its own, unless its runtime has another environment or locks it.

    Args:
        plan: encoders and settings; its device may be a kind of devices, such as `cuda`.
        processes: see encoder_devices.
        start: starts an encoder process.

    Attributes:
        devices: their number.

    Raises:
        WrongInput: the model or a device is unusable.
    """

    def __init__(
        self,
        plan: EncodingPlan,
        processes: int | None = None,
        start: Callable[..., EncoderProcess] = EncoderProcess,
    ) -> None:
        self._processes: list[EncoderProcess] = []
        devices = encoder_devices(plan.job, processes)
        self.devices = count = len(devices)
        if count == 1 and not encodes_in_subprocess(plan.job):
            encoder = plan.on(devices[0], count).open()
            slots = [partial(encode_tar, encoder)] * SHARDS_PER_DEVICE
        else:
            for device in devices:
                self._processes.append(start(plan.on(device, count)))
            for process in self._processes:
                process.wait()
            of_devices = (process.slots for process in self._processes)
            # First one slot of each device: few shards use all devices.
            slots = [slot for row in zip(*of_devices, strict=True) for slot in row]
        self._free: SimpleQueue[Callable[..., dict[str, Any]]] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._slots, self._lock = len(slots), threading.Lock()

    def encode(self, tar: str, sha256: str, path: str) -> dict[str, Any]:
        """Encode a shard on a free device, as encoder_process.encode_tar.

        Raises:
            EncoderFailed: the shard could not be encoded.
            EncoderLost: the device's process has ended.
        """
        slot, stays = self._free.get(), True
        try:
            return slot(tar, sha256, path)
        except EncoderLost:
            with self._lock:
                self._slots -= 1
                stays = self._slots <= 0  # the last one: who waits for a slot gets its error
            raise
        finally:
            if stays:
                self._free.put(slot)

    def __del__(self) -> None:
        """End the processes and wait for them: the next stage needs their devices."""
        for process in self._processes:
            process.close()
        for process in self._processes:
            process.join()
