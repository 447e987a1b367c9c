"""Under FSDP, each rank reads its rows of the weights, and holds no others.

The process group is PyTorch's fake one: this process is a rank of several.
"""

from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from jobs import MakeJob, lora, start
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.process.launcher import Ranks
from runtimes.torch.parallel import FullySharded, chunk_rows
from runtimes.torch_models import loading
from runtimes.torch_models.network import Network

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
WORLD = 4
FULL: dict[str, Any] = {}
HALF = {"mixed_precision": "bf16"}
EXTRAS = {"inpainting": True, "aesthetic_score": True}


@pytest.fixture(params=[0, WORLD - 1])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=WORLD)
    yield request.param
    dist.destroy_process_group()


def load(job: TrainJob, rank: int) -> Network:
    """The network as rank `rank` of several loads it."""
    settings = Train(**job.train)
    parallel = FullySharded(Ranks(rank=rank, world=WORLD), CPU, settings)
    network = parallel.load(job, Base.of(job), settings)
    parallel.wrap(network)
    return network


def shards(network: Network) -> dict[str, torch.Tensor]:
    """This rank's shard of each parameter, or a replicated one whole."""
    return {
        name: p.detach().to_local() if isinstance(p, DTensor) else p.detach()
        for name, p in network.named_parameters()
    }


@pytest.mark.parametrize(
    ("family", "settings", "fsdp"),
    [
        ("sdxl", FULL, "all"),
        ("sdxl", FULL, 2),
        ("sd", EXTRAS, "all"),
        ("sd3", FULL, "all"),
        ("sdxl", lora(dora=True), "all"),
        ("sdxl", HALF, "all"),
    ],
    ids=["full", "groups", "extra-inputs", "sd3", "dora", "half"],
)
def test_a_rank_has_its_rows_of_the_weights(
    make_job: MakeJob, tiny_model: Any, rank: int, family: str, settings: dict[str, Any], fsdp: Any
) -> None:
    job = make_job(model=str(tiny_model(f"tiny-{family}")), fsdp=fsdp, **settings)
    whole = Network.load(job, Base.of(job), Train(**job.train))
    expected, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    network = load(job, rank)
    found = shards(network)
    assert found.keys() == expected.keys()
    group = WORLD if fsdp == "all" else fsdp
    for name, shard in found.items():
        rows = chunk_rows(len(expected[name]), rank % group, group)
        if not isinstance(network.get_parameter(name), DTensor):
            assert settings == HALF and "norm" in name, name
            rows = slice(None)
        assert torch.equal(shard, expected[name][rows]), name
        assert network.get_parameter(name).requires_grad == expected[name].requires_grad, name
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_weights_are_gathered_in_half_precision_and_norms_are_whole(
    make_job: MakeJob, tiny_sdxl: Any, rank: int
) -> None:
    job = make_job(model=str(tiny_sdxl), fsdp="all", **HALF)
    network = load(job, rank)
    seen: dict[str, torch.dtype] = {}
    for name, module in network.denoiser.named_modules():
        if "transformer_blocks.0." in name and "weight" in module._parameters:
            module.register_forward_hook(
                lambda module, *_, name=name: seen.update({name: module.weight.dtype})
            )
    config = network.denoiser.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    added = {"text_embeds": torch.zeros(1, pooled), "time_ids": torch.zeros(1, 6)}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        network.denoiser(
            torch.zeros(1, config.in_channels, 8, 8),
            torch.zeros(1),
            torch.zeros(1, 7, config.cross_attention_dim),
            added_cond_kwargs=added,
        )
    assert {dtype for name, dtype in seen.items() if "norm" in name} == {torch.float32}
    assert {dtype for name, dtype in seen.items() if "norm" not in name} == {torch.bfloat16}


def test_a_rank_holds_no_more_than_its_share_of_the_model(
    make_job: MakeJob, tiny_sdxl: Any, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(model=str(tiny_sdxl), fsdp="all")
    sizes = [p.nbytes for p in Network.load(job, Base.of(job), Train(**job.train)).parameters()]
    share = sum(sizes) / WORLD
    read: list[int] = []
    fetch = loading._FileTensor.__getitem__

    def counted(tensor: Any, index: Any) -> torch.Tensor:
        with _disable_current_modes():  # a view of the mapped file takes no memory
            rows = fetch(tensor, index)
        read.append(rows.nbytes)
        return rows

    monkeypatch.setattr(loading._FileTensor, "__getitem__", counted)
    with Peak() as peak:
        held = shards(load(job, rank))
    assert sum(shard.nbytes for shard in held.values()) < 1.1 * share
    assert 0 < sum(read) < 1.2 * share, "its rows, and the layers that extra inputs change"
    assert peak.bytes < 1.3 * share


class Peak(TorchDispatchMode):
    """The most bytes of CPU tensors that existed within the context at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._now = 0
        self._alive: dict[int, Any] = {}  # storage address -> its weak reference

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            # A DTensor has no storage but its shard's.
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device == CPU:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return

        def freed(_: Any) -> None:
            self._alive.pop(address)
            self._now -= size

        self._alive[address] = ref(storage, freed)
        self._now += size
        self.bytes = max(self.bytes, self._now)


def test_an_untrained_process_group_loads_and_describes_the_state(
    make_job: MakeJob, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "runtimes.torch.runtime.open_parallel",
        lambda settings, *_: FullySharded(Ranks(rank=rank, world=WORLD), CPU, settings),
    )
    runtime, _ = start(make_job(fsdp="all", ema_decay=0.9))
    assert not any(t.is_meta for t in runtime._network.state_dict().values())
    shapes = runtime.state_shapes()
    assert shapes["weights"] == shapes["ema"] == shapes["exp_avg"]
