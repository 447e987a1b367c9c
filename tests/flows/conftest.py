"""A small, fast recipe over the real base and real digits, in a store of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Server


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that runs may share: an own one costs each some ten seconds."""
    server = Server(tmp_path_factory.mktemp("prefect-server"))
    try:
        server.serve()
        yield server.api
    finally:
        server.stop()


@pytest.fixture
def small(tmp_path: Path) -> dict[str, object]:
    """Overrides of `digits` for a whole run in seconds; the gate lets everything pass."""
    return {
        "store": str(tmp_path / "store"),
        "source.count": 60,
        "source.rehearsal": 0,
        "download.shard_size": 20,
        "train.steps": 6,
        "train.global_batch_size": 4,
        "train.checkpoint_every": 2,
        "train.sample_every": 3,
        "evaluate.num_inference_steps": 2,
        "evaluate.prompts.new.images_per_prompt": 2,
        "evaluate.prompts.old.images_per_prompt": 1,
        "evaluate.bootstrap": 10,
        "evaluate.holdout_samples": 4,
        "evaluate.holdout_draws": 1,
        "publish.gate": [],
    }
