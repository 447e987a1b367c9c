"""A slot of a concurrency limit survives a restart of the server: its run keeps and frees it."""

from pathlib import Path
from typing import Any

import pytest
from prefect_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.extended]
LIMIT = "tag:accelerator"


def test_a_slot_is_renewed_and_freed_after_a_restart(tmp_path: Path) -> None:
    """Else Prefect ends runs of deployments with a limit, and stages wait for a slot for ever."""
    server = Server(tmp_path)

    def active() -> Any:
        return server.ask(f"/v2/concurrency_limits/{LIMIT}")["active_slots"]

    try:
        server.serve()
        server.ask("/v2/concurrency_limits/", {"name": LIMIT, "limit": 1})
        asked = {"names": [LIMIT], "slots": 1, "mode": "concurrency", "lease_duration": 300}
        lease = server.ask("/v2/concurrency_limits/increment-with-lease", asked)["lease_id"]
        assert active() == 1
        server.stop()
        server.serve()
        renew = f"/v2/concurrency_limits/leases/{lease}/renew"
        server.ask(renew, {"lease_duration": 300})
        server.ask("/v2/concurrency_limits/decrement-with-lease", {"lease_id": lease})
        assert active() == 0
    finally:
        server.stop()
