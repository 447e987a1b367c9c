"""A compiled denoiser trains as an uncompiled one; the `aot_eager` backend needs no compiler."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from jobs import MakeJob, start
from torch._dynamo.utils import counters
from torch.profiler import profile

from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base
from runtimes.process.launcher import Ranks
from runtimes.torch import parallel
from runtimes.torch.device import is_deterministic
from runtimes.torch.kernels import DeviceHooks, attention_kernel, compile_denoiser
from runtimes.torch.step import keep_channels_last
from runtimes.torch_models.network import Network

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _aot_eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DeviceHooks, "compile_backend", "aot_eager")
    # After a test of runtime jax in this process, torchax's device counts as an accelerator.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def two_steps(make_job: MakeJob, name: str, **settings: Any) -> tuple[list[float], set[str]]:
    """Loss and gradient norm of two steps, and the keys of State."""
    job = make_job(name, steps=2, micro_batch_size=2, **settings)
    runtime, batch = start(job)
    outputs = [runtime.step(batch(step), 1e-3) for step in range(2)]
    figures = [float(value) for o in outputs for value in (o.loss, o.grad_norm)]
    return figures, set(runtime.state()["weights"])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"compile": "blocks"}, marks=pytest.mark.soak),
        {"compile": "blocks", "gradient_checkpointing": "blocks"},
        pytest.param({"compile": "blocks", "method": "lora"}, marks=pytest.mark.extended),
        {"compile": "blocks", "method": "lora", "lora": {"base_precision": "int8"}},
        pytest.param({"compile": "denoiser"}, marks=pytest.mark.extended),
    ],
)
def test_a_compiled_denoiser_has_the_losses_of_an_uncompiled_one(
    make_job: MakeJob, settings: dict[str, Any]
) -> None:
    compiled, names = two_steps(make_job, "compiled", **settings)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    eager, same = two_steps(make_job, "eager", **{**settings, "compile": "none"})
    assert compiled == pytest.approx(eager, rel=1e-5)
    assert names == same


def test_blocks_share_programs_and_every_size_has_one(make_job: MakeJob) -> None:
    """PyTorch's default runs the ninth size uncompiled, without a word."""
    job = make_job()
    network = Network.load(job, Base.of(job), Train(**job.train))
    compile_denoiser(network.denoiser, "blocks", DeviceHooks(torch.device("cpu")))
    equal = network.denoiser.mid_block.resnets
    first, embedding = equal[0], equal[0].time_emb_proj.in_features
    with torch.no_grad():
        for side in range(2, 20, 2):
            for block in equal:
                block(torch.randn(1, first.in_channels, side, side), torch.randn(1, embedding))
    assert counters["stats"]["unique_graphs"] == 9


def test_equal_attention_layers_share_three_programs(make_job: MakeJob) -> None:
    """Norm and projection before the blocks, a block, and the projection after them."""
    job = make_job()
    denoiser = Network.load(job, Base.of(job), Train(**job.train)).denoiser
    keep_channels_last(denoiser)
    compile_denoiser(denoiser, "blocks", DeviceHooks(torch.device("cpu")))
    layers = [m for m in denoiser.modules() if isinstance(m, Transformer2DModel)]
    equal = [m for m in layers if m.in_channels == layers[0].in_channels]
    assert len(equal) > 1
    width = denoiser.config.cross_attention_dim
    with torch.no_grad():
        for layer in equal:
            layer(torch.randn(1, layer.in_channels, 4, 4), torch.randn(1, 7, width))
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize(
    ("what", "recomputed", "kept"),
    [("blocks", "selective", False), ("blocks", "blocks", True), ("none", "selective", True)],
)
def test_selective_recomputation_of_a_compiled_denoiser_is_the_compiler_s(
    make_job: MakeJob, what: str, recomputed: str, kept: bool
) -> None:
    job = make_job(gradient_checkpointing=recomputed)
    denoiser = Network.load(job, Base.of(job), Train(**job.train)).denoiser
    compile_denoiser(denoiser, what, DeviceHooks(torch.device("cpu")), recomputed)
    assert denoiser.is_gradient_checkpointing == kept


@pytest.mark.parametrize(("device", "compiled"), [("cuda", True), ("cpu", False)])
def test_auto_compiles_blocks_on_cuda(make_job: MakeJob, device: str, compiled: bool) -> None:
    job = make_job()
    network = Network.load(job, Base.of(job), Train(**job.train))
    compile_denoiser(network.denoiser, "auto", DeviceHooks(torch.device(device)))
    found = {type(m).__name__ for m in network.modules() if m._compiled_call_impl is not None}
    assert found == ({"BasicTransformerBlock", "ResnetBlock2D"} if compiled else set())


@pytest.mark.extended
def test_a_compiled_and_checkpointed_denoiser_trains_in_ddp(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's DDPOptimizer splits the graph at DDP's buckets, which are small here."""
    settings = {"compile": "denoiser", "gradient_checkpointing": "blocks"}
    expected, _ = two_steps(make_job, "alone")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
        several = partial(parallel.DistributedDataParallel, bucket_cap_mb=0.01)  # buckets
        monkeypatch.setattr(parallel, "DistributedDataParallel", several)
        monkeypatch.setattr(
            "runtimes.torch.runtime.open_parallel", lambda *_: parallel.DataParallel(Ranks(world=1))
        )
        found, _ = two_steps(make_job, "ddp", **settings)
    finally:
        dist.destroy_process_group()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("device", "default"), [("cpu", True), ("cuda", False)])
def test_deterministic_kernels_are_the_default_except_on_cuda(device: str, default: bool) -> None:
    assert is_deterministic(Train(), torch.device(device)) == default
    for setting in (True, False):
        assert is_deterministic(Train(deterministic=setting), torch.device(device)) == setting


@pytest.mark.parametrize(("setting", "enabled"), [(None, True), (True, True), (False, False)])
def test_the_runtime_selects_the_kernels_of_the_settings(
    make_job: MakeJob, setting: bool | None, enabled: bool
) -> None:
    try:
        start(make_job(deterministic=setting))
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.backends.cudnn.deterministic == enabled
        assert torch.backends.cudnn.benchmark != enabled
    finally:
        start(make_job("after"))  # resets the flags for other tests


def test_adapters_receive_activations_in_the_compute_dtype(make_job: MakeJob) -> None:
    """PEFT would cast them to float32, and autocast back."""
    runtime, batch = start(make_job(method="lora", mixed_precision="bf16"))
    found = set()
    for name, module in runtime._network.named_modules():
        if "attn1.to_q.lora_A." in name:
            module.register_forward_pre_hook(lambda _, given: found.add(given[0].dtype))
    runtime.step(batch(0), 1e-3)
    # Layer norm is float32 in CUDA's autocast only.
    assert found == {torch.bfloat16}


def test_programs_of_a_kernel_are_not_those_of_another() -> None:
    """Processes share PyTorch's cache on disk, of backend `inductor` alone."""
    query, flash = torch.ones(1, 1, 8, 8), "aten::_scaled_dot_product_flash_attention_for_cpu"
    for name, is_flash in (("flash", True), ("math", False)):
        torch._dynamo.reset()  # a program in memory is not asked for its kernel either
        attend = torch.compile(torch.nn.functional.scaled_dot_product_attention)
        with attention_kernel(name), profile() as found:
            attend(query, query, query)
        assert (flash in {event.key for event in found.key_averages()}) == is_flash
