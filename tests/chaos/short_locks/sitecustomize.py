"""Lets the locks of a process expire soon, so that a pause past their expiry takes seconds.

Python imports this module at its start from a folder on PYTHONPATH.
"""

from artifacts import lock

EXPIRY, HEARTBEAT = 3.0, 0.5
lock.EXPIRY_SECONDS, lock.HEARTBEAT_SECONDS = EXPIRY, HEARTBEAT
lock.hold.__wrapped__.__kwdefaults__.update(expiry=EXPIRY, heartbeat=HEARTBEAT)
