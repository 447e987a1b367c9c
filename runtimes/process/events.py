"""JSON lines from a runtime's process to the stage that started it.

| event      | fields                                                                           |
|------------|----------------------------------------------------------------------------------|
| start      | runtime, device, versions, step, total                                           |
| progress   | step, total, loss, learning_rate, grad_norm, images_per_second, data_wait (share  |
|            | of the time), eta_seconds, memory_bytes; tflops (of one device) and mfu, or null |
| validation | step, loss, error (standard error, or null)                                      |
| checkpoint | step, path, seconds (in all), blocked (of them the run stood still), bytes       |
| back       | step (gone back to), left_out (number of the batch)                              |
| sample     | step, path                                                                       |
| drawn      | done, total                                                                      |
| warning    | message                                                                          |
| error      | message, wrong_input (bool), errno (of an OSError, or null)                      |
| result     | whatever the job's caller needs                                                  |
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

EVENT_FD = "KILN_EVENT_FD"


class Events:
    """Writes events to the descriptor named in the environment, or nowhere without one."""

    def __init__(self) -> None:
        number = os.environ.get(EVENT_FD)
        self._stream = None if number is None else os.fdopen(int(number), "w", buffering=1)
        self._lock = threading.Lock()

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event. A reader that is gone is no error: the loop watches for that itself."""
        if self._stream is None:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        with self._lock:
            try:
                self._stream.write(line + "\n")
            except (BrokenPipeError, ValueError):
                self._stream = None


class SilentEvents(Events):
    """Says nothing: of the processes of a run the first one speaks for all."""

    def __init__(self) -> None:
        self._stream = None
