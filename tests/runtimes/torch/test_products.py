"""Products by oneDNN: the numbers of PyTorch's own, and only where they are the faster ones."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from driver_process import DriverProcess
from jobs import MakeJob, lora, start

from runtimes.torch import products

pytestmark = pytest.mark.slow


def choose(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """Have products of all sizes made by oneDNN, or none."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: faster)
    monkeypatch.setattr(products, "LEAST", 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("lies", ["rows", "columns", "every other"])
def test_a_layer_computes_what_pytorch_does(
    monkeypatch: pytest.MonkeyPatch, bias: bool, frozen: bool, lies: str
) -> None:
    choose(monkeypatch, True)
    torch.manual_seed(0)
    inputs = {
        "rows": torch.randn(3, 5, 24),
        "columns": torch.randn(3, 24, 5).transpose(1, 2),
        "every other": torch.randn(3, 5, 48)[..., ::2],
    }[lies]
    ours, theirs = torch.nn.Linear(24, 40, bias=bias), torch.nn.Linear(24, 40, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    products.with_faster_products(ours, torch.device("cpu"))
    wanted = torch.randn(3, 40, 5).transpose(1, 2)
    found = []
    for layer in (ours, theirs):
        layer.requires_grad_(not frozen)
        given = inputs.clone().requires_grad_()
        output = layer(given)
        if layer is ours:
            kept = [size for t in output.grad_fn.saved_tensors if t is not None for size in t.shape]
        output.backward(wanted)
        found.append([output, given.grad, *(weight.grad for weight in layer.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    assert kept == [*([] if frozen else inputs.shape), 40, 24]  # inputs for the weight alone


def test_small_products_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes oneDNN longer to begin with one than to do it."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST", 2 * 5 * 7 * 3)
    left, right = torch.randn(2, 5, 7), torch.randn(3, 7)
    assert products._goes_to_onednn(left, right)
    assert not products._goes_to_onednn(left[:, 1:], right)
    assert not products._goes_to_onednn(left, right[1:])
    # What PyTorch would refuse, it shall refuse: its words can be understood.
    assert not products._goes_to_onednn(left, torch.randn(3, 8))
    assert not products._goes_to_onednn(left, right.half())


@pytest.mark.parametrize("settings", [{}, lora(), lora(dropout=0.1), lora(dora=True)])
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True, "text_encoders": True}])
def test_training_is_the_same(
    make_job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    more: dict[str, object],
) -> None:
    losses = []
    for faster in (True, False):
        choose(monkeypatch, faster)
        runtime, batch = start(make_job(**settings, **more))
        assert any(map(is_ours, runtime._network.modules())) == faster
        losses.append([float(runtime.step(batch(step), 1e-3).loss) for step in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def is_ours(module: torch.nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is products._forward


@pytest.fixture
def chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Gives this machine another chip."""

    def give(maker: str | None, family: int, capability: str) -> None:
        told = tmp_path / "cpuinfo"
        if maker is not None:
            told.write_text(f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\n")
        monkeypatch.setattr(products, "CPUINFO", told)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        products.onednn_is_faster.cache_clear()

    yield give
    products.onednn_is_faster.cache_clear()


@pytest.mark.parametrize(
    ("maker", "family", "capability", "faster"),
    [
        ("AuthenticAMD", 26, "AVX512", True),  # Zen 5
        ("AuthenticAMD", 25, "AVX512", False),  # Zen 4
        ("AuthenticAMD", 26, "AVX2", False),
        ("GenuineIntel", 6, "AVX512", False),
        ("HygonGenuine", 26, "AVX512", False),
        (None, 0, "AVX512", False),
    ],
)
def test_who_is_faster_is_told_by_the_chip(
    chip: Callable[..., None], maker: str | None, family: int, capability: str, faster: bool
) -> None:
    chip(maker, family, capability)
    assert products.onednn_is_faster() is faster


@pytest.mark.soak
def test_inductor_compiles_layers_with_and_without_adapters(tmp_path: Path) -> None:
    """As one graph; in a process of its own: Inductor fails where torchax has named its device."""
    driver = Path(__file__).with_name("inductor_driver.py")
    with closing(DriverProcess(driver, sys.executable, tmp_path)) as process:
        assert process.call("compile_and_compare") == [True, False]
