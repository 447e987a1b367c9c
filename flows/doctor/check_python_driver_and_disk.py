"""Checks of a machine for `kiln doctor`: Python, packages, NVIDIA, compiler, disk and hub token.

Each check yields findings; none imports PyTorch or needs a network.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from artifacts.store import Store
from configs.secrets import without_secrets
from flows.check_disk import free_bytes
from flows.doctor.findings import Finding, fine, note, problem
from runtimes.hosts.host import (
    NvidiaGpu,
    driver_version,
    find_c_compiler,
    find_gpus,
    torch_cuda_version,
)
from runtimes.torch_models.gpu_specs import GIB, known_gpu
from tasks.plan.gpu import RecipeMemory, shipped_plans

PYTHONS = ("3.11", "3.12")
PINNED = ("prefect", "apache-beam", "img2dataset", "torch", "diffusers", "transformers")
#: Package -> versions that break Kilnworks (requirements/README.md), and how.
TRAPS = {
    "dataclasses": ("", "shadows the standard library inside Prefect's server"),
    "fastapi": (">=0.151.0a0", "makes Prefect's server answer `prefect deploy` with 422"),
    "sqlalchemy": (">=2.1.0a0", "makes Prefect's scheduler fail silently: cron never fires"),
    "prefect": (">=3.9.0a0", "is untested here, and needs a newer certifi"),
}
#: Bytes of free disk that only small recipes are below.
LEAST_FREE = 5 * 10**9
CPU_BUILD = (
    "make setup-cuda (with TORCH_INDEX=ADDRESS if the index of pip has the CPU build only; "
    "docs/setup.md)"
)


def python_version() -> Iterator[Finding]:
    """Whether this Python is one of those that the lists are pinned for."""
    version = platform.python_version()
    if not version.startswith(tuple(f"{known}." for known in PYTHONS)):
        yield problem(
            f"Python {version}: {' or '.join(PYTHONS)} is needed",
            f"make setup PYTHON=python{PYTHONS[-1]} VENV=.venv312",
        )


def packages(installed: dict[str, str]) -> Iterator[Finding]:
    """Missing packages, and versions that break Prefect's server without a word."""
    for name in PINNED:
        if not installed.get(name):
            yield problem(f"{name} is not installed", "run `make setup`")
    for name, (versions, why) in TRAPS.items():
        if name in installed and _is_within(installed[name], versions):
            yield problem(f"{name} {installed[name]} {why}", _reinstall(name))


def _is_within(version: str, versions: str) -> bool:
    try:
        return SpecifierSet(versions, prereleases=True).contains(version)
    except InvalidVersion:
        return False


def _reinstall(name: str) -> str:
    pip = f"{sys.executable} -m pip"
    if name == "dataclasses":
        return f"{pip} uninstall --yes dataclasses"
    return f"{pip} install --no-deps --requirement requirements/base.txt"


def nvidia(
    cuda_devices: Sequence[str], torch: str | None, *, wanted: bool = False
) -> Iterator[Finding]:
    """Whether PyTorch uses NVIDIA's GPUs, and the shipped recipes that fit each of them.

    Args:
        cuda_devices: CUDA devices that PyTorch lists.
        torch: installed version of PyTorch; None without it.
        wanted: whether a recipe asks for CUDA; otherwise a CPU build is no problem.
    """
    gpus, driver = find_gpus(), driver_version()
    if not gpus and driver is None:
        return
    if not gpus:
        yield note(f"NVIDIA driver {driver} lists no GPU", "check `nvidia-smi`; it must be on PATH")
    cuda = torch_cuda_version()
    if torch is not None and cuda is None:
        tell = problem if wanted else note
        yield tell(f"PyTorch {torch} is a CPU build beside an NVIDIA driver", CPU_BUILD)
    elif torch is not None and not cuda_devices:
        yield problem(
            f"PyTorch {torch} (CUDA {cuda}) sees no GPU with NVIDIA driver {driver or 'unknown'}",
            "install a driver for this CUDA, or an older CUDA build: "
            "make setup-cuda TORCH_INDEX=ADDRESS (docs/setup.md); check CUDA_VISIBLE_DEVICES",
        )
    yield from _fitting(gpus)


def _fitting(gpus: Sequence[NvidiaGpu]) -> Iterator[Finding]:
    """One line for equal GPUs: the recipes that fit, with the hours of training."""
    for gpu, same in groupby(enumerate(gpus), lambda numbered: numbered[1]):
        numbers = [number for number, _ in same]
        name = f"gpu {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
        plans = shipped_plans()
        there = [_timed(plan, gpu) for plan in plans if plan.fits(gpu.memory)]
        large = [plan.recipe for plan in plans if not plan.fits(gpu.memory)]
        words = f"fits {', '.join(there) or 'no shipped recipe'}"
        if large:
            words += f"; too small for {', '.join(large)} (kiln plan {large[0]} --gpu "
            words += f"{gpu.memory / GIB:.0f}GB says what would fit)"
        yield fine(f"{name} {gpu.name}, {gpu.memory / GIB:.1f} GiB: {words}")


def _timed(plan: RecipeMemory, gpu: NvidiaGpu) -> str:
    spec = known_gpu(gpu.name)
    hours = None if spec is None else plan.hours(spec)
    return plan.recipe if hours is None or hours < 0.1 else f"{plan.recipe} ({hours:,.1f} h)"


def compiler() -> Iterator[Finding]:
    """Whether torch.compile can work; nothing else here needs a compiler."""
    if find_c_compiler() is None:
        yield note(
            "no C compiler: train.compile=auto trains uncompiled, and other values are refused",
            "apt install g++ (Debian, Ubuntu), or xcode-select --install (macOS)",
        )


def disk(place: str = ".") -> Iterator[Finding]:
    """Whether the disk of a store, or of the working directory, has room for common recipes.

    A run itself refuses a disk that is too small for it.
    """
    free = free_bytes(Store(place))
    if free is not None and free < LEAST_FREE:
        where = "here" if place == "." else f"for store {without_secrets(place)}"
        yield note(
            f"only {free / 1e9:.1f} GB of disk are free {where}",
            "free some (`kiln gc` lists what no run needs), or set `store`",
        )


def hub_token() -> Iterator[Finding]:
    """Whether a token for the hub is there; it is not shown, and the hub is not asked."""
    from huggingface_hub import get_token, is_offline_mode

    if is_offline_mode():
        yield note("HF_HUB_OFFLINE is set: models of the hub come from its cache only")
    elif get_token() is None:
        yield note("no hub token: gated models are refused", "hf auth login, or set HF_TOKEN")


def caches() -> Iterator[Finding]:
    """Whether the cache of models can be written."""
    from artifacts.models import cache_folder

    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK) or not Path(there).is_dir():
        yield problem(f"the cache {folder} cannot be written", "set KILN_CACHE to another folder")
