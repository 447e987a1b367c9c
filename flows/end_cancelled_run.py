"""End a flow's process once its run is cancelled in Prefect and no worker ends it.

A Prefect worker ends the runs of deployments. `kiln run` has no worker, and a worker may be killed
or miss the cancellation.
"""

from __future__ import annotations

import contextvars
import logging
import os
import signal
import threading
import time

from prefect.client.base import ServerType
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from tasks.run_job import stopping

log = logging.getLogger("kiln")

#: Seconds between two looks at the run's state.
POLL_SECONDS = 10.0
#: Seconds that a worker has: it sends SIGTERM, and SIGKILL after 30 s.
WORKER_SECONDS = 120.0


def end_run_if_cancelled() -> None:
    """Watch the state of this thread's flow run in the background, until the run ends.

    Once it is cancelled, the process receives SIGTERM, as from a worker. A server that ends
    with the run is not asked: nobody sees its UI.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    if threading.current_thread() is not threading.main_thread():  # signals reach that thread alone
        return
    if context.client.server_type is ServerType.EPHEMERAL:
        return
    inherited = contextvars.copy_context()  # has the server's address, and the run for log lines
    threading.Thread(
        target=inherited.run, args=(_watch, context.flow_run), name="cancellation", daemon=True
    ).start()


def _watch(run: FlowRun) -> None:
    # Not the client of the run's own thread, whose connections that thread closes.
    with get_client(httpx_settings={}, sync_client=True) as client:
        seen: float | None = None  # seconds of this clock: the server's may differ by minutes
        while not _has_ended(run):
            time.sleep(POLL_SECONDS)
            try:
                state = client.read_flow_run(run.id).state
                if state is None or not (state.is_cancelling() or state.is_cancelled()):
                    seen = None
                    continue
                seen = time.monotonic() if seen is None else seen
                if _is_due(run, seen) and _ended(client, run, state):
                    return
            except ObjectNotFound:  # the run was deleted
                return
            except Exception as error:
                log.debug("the state of the run is unknown: %s", error)


def _is_due(run: FlowRun, seen: float) -> bool:
    """Whether no worker has ended a run since its cancellation was seen."""
    return run.deployment_id is None or time.monotonic() - seen > WORKER_SECONDS


def _ended(client: SyncPrefectClient, run: FlowRun, state: State) -> bool:
    """End the process of a cancelled run, unless a worker or a user does so."""
    if _is_ending(run):
        return False
    if not state.is_final():
        state = Cancelled(message="cancelled; the process ends by itself")
        client.set_flow_run_state(run.id, state, force=True)
        if _is_ending(run):  # since the request, which may have taken minutes
            return False
    log.warning("the run is cancelled in Prefect: it ends")
    run.state = state  # Prefect's engine replaces a state that is not final by Crashed
    os.kill(os.getpid(), signal.SIGTERM)
    return True


def _is_ending(run: FlowRun) -> bool:
    return stopping.is_set() or _has_ended(run)


def _has_ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()
