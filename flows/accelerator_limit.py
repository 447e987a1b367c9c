"""How many stages use an accelerator at once: Prefect's limit for the tag of their tasks."""

from __future__ import annotations

from prefect.client.orchestration import SyncPrefectClient

#: Tag of the tasks that use an accelerator.
ACCELERATOR = "accelerator"


def limit_accelerators(client: SyncPrefectClient, stages: int) -> None:
    """Let at most `stages` tasks of all runs of the server use an accelerator at once."""
    client.create_concurrency_limit(ACCELERATOR, stages)
