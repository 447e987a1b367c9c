"""Wait for other threads and processes, and make calls at once."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def wait_until(
    ready: Callable[[], object],
    seconds: float = 60.0,
    *,
    alive: Callable[[], bool] = lambda: True,
    says: Callable[[], object] = lambda: "it does not come",
) -> None:
    """Return once `ready()`; fail with what `says()` after `seconds`, or if `alive()` ends."""
    until = time.monotonic() + seconds
    while not ready():
        assert alive() and time.monotonic() < until, says()
        time.sleep(0.02)


def at_once(*calls: Callable[[], object]) -> None:
    """Make each call in a thread of its own, to its end; raise the first of their errors."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result()
