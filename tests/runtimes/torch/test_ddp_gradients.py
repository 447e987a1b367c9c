"""DDP's gradients are views of its buckets, in the first step and with micro-batches too."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import MakeJob, lora, start

from runtimes.process.launcher import Ranks
from runtimes.torch import parallel
from runtimes.torch.parallel import DataParallel

pytestmark = pytest.mark.slow
BUCKET = 2**20


@pytest.fixture
def ddp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of this process use DDP, with buckets of 1 MiB."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kind = parallel.DistributedDataParallel
    monkeypatch.setattr(
        parallel, "DistributedDataParallel", lambda *a, **k: kind(*a, **k, bucket_cap_mb=1)
    )
    monkeypatch.setattr(
        "runtimes.torch.runtime.open_parallel", lambda *_: DataParallel(Ranks(world=1))
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train_text_encoder": True, "gradient_checkpointing": "blocks"},
        {"method": "lora", "mixed_precision": "bf16"},
    ],
    ids=["full", "text-encoders", "lora"],
)
def test_micro_batches_add_no_gradients_beside_the_buckets(
    make_job: MakeJob, ddp: None, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    found: list[tuple[int, int]] = []  # bytes of the gradients, bytes of their storages
    backward = torch.Tensor.backward

    def watched(tensor: torch.Tensor, *given: Any, **more: Any) -> None:
        backward(tensor, *given, **more)
        gradients = [p.grad for p in runtime._update._masters if p.grad is not None]
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage() for g in gradients}
        assert len(storages) <= 3 + sum(g.nbytes for g in gradients) // BUCKET < len(gradients)
        found.append((sum(g.nbytes for g in gradients), sum(s.nbytes() for s in storages.values())))

    runtime, batch = start(make_job(micro_batch_size=2, **settings))
    monkeypatch.setattr(torch.Tensor, "backward", watched)
    for step in range(2):
        runtime.step(batch(step), 1e-3)
    assert len(found) == 1 + 2 * 2, "one pass allocates, then each micro-batch"
    assert max(gradients for gradients, _ in found) > 0
    unused = sum(p.nbytes for p in runtime._update._masters if p.grad is None)
    assert {storages - gradients for gradients, storages in found} <= {0, unused}


@pytest.mark.parametrize(
    "settings", [{"train_text_encoder": True}, lora(dropout=0.3)], ids=["text-encoders", "dropout"]
)
def test_ddp_has_the_losses_and_weights_of_one_process(
    make_job: MakeJob, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Layers without gradient stay unchanged, and dropout draws the same masks."""

    def train(name: str) -> tuple[list[float], dict[str, Any]]:
        job = make_job(name, micro_batch_size=2, **settings, weight_decay=0.1)
        runtime, batch = start(job)
        outputs = [runtime.step(batch(step), 1e-3) for step in range(3)]
        return [float(o.loss) for o in outputs], runtime.state()["weights"]

    losses, weights = train("one")
    request.getfixturevalue("ddp")
    found, those = train("ddp")
    assert found == pytest.approx(losses, rel=1e-6)
    for name, array in weights.items():
        assert those[name] == pytest.approx(array, abs=1e-5), name
