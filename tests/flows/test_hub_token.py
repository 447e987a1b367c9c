"""A flow pushes to the hub with the token of Prefect's secret block, which appears nowhere else."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from huggingface_hub import constants

from tasks.publish.hub import token_block

pytestmark = pytest.mark.slow
TOKEN, REPO = "hf_of_the_block", "someone/digits"


@pytest.fixture
def block(at_home: Callable[[str], None], api: str) -> Iterator[None]:
    """The secret block on the shared server."""
    from prefect.blocks.system import Secret

    at_home(api)
    Secret(value=TOKEN).save(token_block("digits"), overwrite=True)
    yield
    Secret.delete(token_block("digits"))


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The hub, where only the token of the block may write."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has no chunk storage
    hub.writers.add(TOKEN)
    return hub


def test_a_flow_pushes_with_the_token_of_the_secret_block(
    hub: HubServer,
    block: None,
    first: dict[str, Any],
    small: dict[str, Any],
    run_here: Callable[..., dict[str, Any]],
) -> None:
    report = run_here("digits", {**small, "publish.hub": {"repo": REPO}})
    pushed = hub.repositories[REPO]
    assert report["hub"] == f"{hub.url}/{REPO}/commit/{pushed.commit}" and pushed.private
    stored = [path for path in Path(str(small["store"])).rglob("*") if path.is_file()]
    assert not [path for path in stored if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in str(report)
