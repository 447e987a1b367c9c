"""A run whose training is on a slice, through to a published model; no cloud is here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcloud_program import make_world, told
from gcs_server import GcsServer

pytestmark = pytest.mark.extended
Overrides = dict[str, Any]


@pytest.mark.parametrize(
    ("runtime", "accelerator_type", "hosts"),
    [("jax", "v5p-16", 2), ("xla", "v5p-8", 1)],  # XLA's CPU backend aborts with two processes
)
def test_a_slice_trains_a_published_model(
    small: Overrides,
    tiny_model: Callable[[str], Path],
    tiny_clip: Path,
    gcs: GcsServer,
    run_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runtime: str,
    accelerator_type: str,
    hosts: int,
) -> None:
    world = make_world(tmp_path, monkeypatch, hosts)
    overrides = {
        **small,
        "runtime": runtime,
        "store": f"gs://bucket/{runtime}",  # the runtime is in no key
        "publish.registry": str(tmp_path / "registry"),
        "model.path": str(tiny_model("least-sd")),
        "evaluate.clip": str(tiny_clip),
        "evaluate.judges": [],
        "evaluate.scheduler": "ddim",
        "train.steps": 2,
        "train.global_batch_size": 4,
        "train.micro_batch_size": None,
        "train.lr_warmup_steps": 1,
        "train.sample_every_n_steps": 0,
        "tpu": {"name": "kiln", "zone": "us-east5-a", "accelerator_type": accelerator_type},
    }
    report = run_here("digits", overrides)
    assert report["status"] == "published"
    assert told(world)[-1] == "delete" and told(world).count("create") == 1
