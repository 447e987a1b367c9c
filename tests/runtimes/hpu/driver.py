"""Functions that test_hpu.py calls in a process of an emulated Gaudi host, in its mode."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import training

from configs.settings.train import Train
from configs.settings.train_parts import Hpu
from runtimes.pipeline_folder.folder import Base
from runtimes.torch.device import open_device

CHIP = open_device("hpu", settings=Hpu(mode=None))  # before what looks for accelerators
from hpu_emulator import build, graphs, watch  # noqa: E402

from runtimes.contract import StepBatch, StepOutput  # noqa: E402
from runtimes.process.job import TrainJob  # noqa: E402
from runtimes.torch.kernels import DeviceHooks  # noqa: E402
from runtimes.torch.runtime import TheRuntime  # noqa: E402
from runtimes.torch.sampler import Sampler  # noqa: E402
from runtimes.torch.step import Update  # noqa: E402
from runtimes.torch_models.loading import load_denoiser  # noqa: E402

SYNCS = ("to_host", "numbers_read")


def train(given: dict[str, Any], warm_up: int = 2**31) -> dict[str, Any]:
    """Do a job, watched: what had been compiled before and after each step, how often the host
    waited between them, and what types products were computed in.

    Args:
        warm_up: the step from which on nothing new may be compiled.
    """
    step, syncs, compiled = TheRuntime.step, list[int](), list[int]()
    products = Counter[str]()

    def watched(self: TheRuntime, batch: StepBatch, learning_rate: float) -> StepOutput:
        counts = build.load().counts()
        syncs.append(sum(counts[name] for name in SYNCS))
        if not compiled:
            compiled.append(graphs.compiled())
        before = _products()
        with ExitStack() as stack:
            stack.enter_context(watch.no_host_syncs())
            if batch.step >= warm_up:
                stack.enter_context(watch.no_new_graphs())
            output = step(self, batch, learning_rate)
        compiled.append(graphs.compiled())
        for (name, kind), count in _products().items():
            products[kind] += count - before.get((name, kind), 0)
        return output

    TheRuntime.step = watched  # type: ignore[method-assign]
    events = training.RecordedEvents()
    training.train(TrainJob(**given), events)
    return {
        "compiled": compiled,
        "recorded": len(graphs.recorded),
        "syncs": [after - before for before, after in pairwise(syncs)],
        "products": +products,
        "figures": events.of("progress"),
    }


def _products() -> dict[tuple[str, str], int]:
    """How many were computed so far, by operator and type."""
    counted: dict[Any, int] = build.load().by_type()
    return {key: count for key, count in counted.items() if key[0] in watch.PRODUCTS}


def unforgiven() -> dict[str, list[str]]:
    """What is said to that which a Gaudi would not forgive."""
    x, on_host = torch.ones(4, 4, device="hpu"), torch.ones(4, 4)

    def product() -> None:
        with watch.casts("BFloat16"):
            x @ x

    found = {
        "where": [str((x @ x).device)],
        "devices": _said(lambda: x + on_host, lambda: torch.mm(x, on_host)),
    }
    with watch.no_host_syncs():
        found["waits"] = _said(lambda: x.sum().item(), x.cpu, x.nonzero)
    with watch.no_new_graphs():
        found["met before"] = _said(lambda: x @ x)
        found["new"] = _said(lambda: x[:2] @ x, lambda: x * 0.3)
    found["not cast"] = _said(product)
    with torch.autocast("hpu", torch.bfloat16):
        found["cast"] = _said(product)
    return found


def numbers_in_graphs() -> list[str]:
    """What is said to a graph met before, to another number in it, and to another shape."""
    x = torch.ones(4, 4, device="hpu")

    def step(factor: float, rows: int = 4) -> None:
        (x[:rows] * factor).sum()
        CHIP.mark_step()

    CHIP.mark_step()
    step(0.5)
    with watch.no_new_graphs():
        return _said(lambda: step(0.5), lambda: step(0.3), lambda: step(0.5, 2))


def draw(folder: str, guidance: float) -> tuple[int, list[int], int]:
    """Graphs recorded for pictures; how far each is from the CPU's; how far two prompts are."""
    sampler = {
        **{"seed": 3, "scheduler": "pndm", "num_inference_steps": 6, "height": None},
        **{"width": None, "guidance_scale": guidance, "batch_size": 2},
    }

    def drawn(chip: DeviceHooks, *prompts: str) -> Any:
        unet = load_denoiser(Path(folder) / "unet").to(chip.device).eval().requires_grad_(False)
        chip.prepare_sampling(unet)
        pipe = Sampler(Base.open(Path(folder)), {"unet": unet}, chip)
        return pipe.draw(prompts, sampler, first=0).astype(int)

    found, cpu = drawn(CHIP, "a red cat", "b", "c"), open_device("cpu")
    expected, others = (drawn(cpu, first, "b", "c") for first in ("a red cat", "a blue dog"))
    apart = [int(abs(one - other).max()) for one, other in zip(found, expected, strict=True)]
    return len(graphs.recorded), apart, int(abs(others[0] - expected[0]).max())


NAMES = ("unet.a", "unet.b", "text_encoder.c")
UPDATE: dict[str, Any] = {
    **{"weight_decay": 0.1, "ema_decay": 0.9, "train_text_encoder": True, "learning_rate": 1e-2},
    **{"text_encoder_lr": 1e-3, "max_grad_norm": 2.0, "hpu": Hpu(mode=None)},
}


def furthest(scale: float) -> tuple[float, dict[str, float]]:
    """How far twelve updates are from those on the CPU: norms, relatively, and the state.

    Args:
        scale: of gradients.
    """
    ours, plain = _weights("hpu"), _weights("cpu")
    on_hpu, on_cpu = Update(ours, Train(**UPDATE), None, CHIP), Update(plain, Train(**UPDATE))
    draw, norms = torch.Generator().manual_seed(1), []
    for step in range(12):
        for name in NAMES:
            plain[name].grad = scale * torch.randn(5, 7, generator=draw)
            ours[name].grad = plain[name].grad.to("hpu")
        rate = 1e-2 * (step + 1) / 12
        norms.append((float(on_hpu.apply(rate)), float(on_cpu.apply(rate))))
    one, other = on_hpu.state(), on_cpu.state()
    far = {g: max(float(abs(one[g][n] - other[g][n]).max()) for n in NAMES) for g in one}
    return max(abs(a / b - 1) for a, b in norms), far


def _weights(where: str) -> dict[str, torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    drawn = (torch.randn(5, 7, generator=draw).to(where) for _ in NAMES)
    return dict(zip(NAMES, map(torch.nn.Parameter, drawn), strict=True))


def _said(*asked: Callable[[], Any]) -> list[str]:
    """The complaint of each; nothing where it has none."""
    said = []
    for ask in asked:
        try:
            ask()
        except (RuntimeError, AssertionError) as error:
            said.append(str(error).splitlines()[0])
        else:
            said.append("")
    return said
