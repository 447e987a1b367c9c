"""Events: JSON lines from a runtime's process to its parent, the stage.

| event      | fields                                                                           |
|------------|----------------------------------------------------------------------------------|
| start      | runtime, device, versions, step, total                                           |
| progress   | step, total, loss, learning_rate, grad_norm, images_per_second, data_wait (fraction |
|            | of the time), eta_seconds, memory_bytes; tflops (of one device) and mfu, or null |
| validation | step, loss, error (standard error, or null): the held-out loss                   |
| checkpoint | step, path, seconds (total), blocked (seconds of paused training), bytes         |
| back       | step (restored after divergence), left_out (number of the skipped batch)         |
| sample     | step, path                                                                       |
| drawn      | done, total                                                                      |
| losses     | model, models: the held-out losses of model number `model` are computed          |
| warning    | message                                                                          |
| error      | message, wrong_input (bool), errno and file (of an OSError, or null), away (bool: |
|            | a store did not respond), traceback (or "")                                      |
| result     | the job's results, different for each kind of job                                |
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

EVENT_FD = "KILN_EVENT_FD"


class Events:
    """Writes events to the file descriptor in KILN_EVENT_FD; without one, discards them."""

    def __init__(self) -> None:
        number = os.environ.get(EVENT_FD)
        self._stream = None if number is None else os.fdopen(int(number), "w", buffering=1)
        self._lock = threading.Lock()

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event. A closed pipe is no error here: signals.py detects a dead parent."""
        stream = self._stream  # another thread may find the pipe closed meanwhile
        if stream is None:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        with self._lock:
            try:
                stream.write(line + "\n")
            except (BrokenPipeError, ValueError):
                self._stream = None


class SilentEvents(Events):
    """Discards all events, on every rank but 0."""

    def __init__(self) -> None:
        self._stream = None
