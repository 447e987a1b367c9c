"""`kiln doctor`: check this machine, and on request a recipe; say how to mend each problem.

Each check yields findings: what was checked, and the command that mends a problem. The machine's
checks are Python, packages, NVIDIA, compiler, disk and hub token; none imports PyTorch or needs a
network.

A recipe's checks cover runtime, gate, prompts, signing key, memory, models, source, store and hub
token. No picture and no weights are fetched.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from artifacts.store import Store
from configs.checks import Check, Finding, collect, fine, note, problem
from configs.errors import Refused
from configs.secrets import without_secrets
from configs.settings.recipe import Recipe, RuntimeName
from flows.run import checks_of
from flows.run_in_terminal import check_home, check_server, configured_server
from runtimes import detect_hardware
from runtimes.contract import Probe
from runtimes.process.launcher import count_cores
from runtimes.registry import probe_runtime
from runtimes.torch_models.gpu_specs import GIB, known_gpu
from tasks.code_version import package_versions
from tasks.plan.disk import free_bytes
from tasks.plan.shipped_plans import RecipeMemory, shipped_plans
from tasks.preflight import Doors, devices_here, stages_without_pool
from tasks.progress import gib
from tasks.publish.hub import check_login

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
            pip = f"{sys.executable} -m pip"
            remedy = f"{pip} install --no-deps --requirement requirements/base.txt"
            if name == "dataclasses":
                remedy = f"{pip} uninstall --yes dataclasses"
            yield problem(f"{name} {installed[name]} {why}", remedy)


def _is_within(version: str, versions: str) -> bool:
    try:
        return SpecifierSet(versions, prereleases=True).contains(version)
    except InvalidVersion:
        return False


def nvidia_driver(
    cuda_devices: Sequence[str], torch: str | None, *, wanted: bool = False
) -> Iterator[Finding]:
    """Whether PyTorch uses NVIDIA's GPUs, and the shipped recipes that fit each of them.

    Args:
        cuda_devices: CUDA devices that PyTorch lists.
        torch: installed version of PyTorch; None without it.
        wanted: whether a recipe asks for CUDA; otherwise a CPU build is no problem.
    """
    gpus = detect_hardware.find_gpus()
    driver = detect_hardware.nvidia_driver_version()
    if not gpus and driver is None:
        return
    if not gpus:
        yield note(f"NVIDIA driver {driver} lists no GPU", "check `nvidia-smi`; it must be on PATH")
    cuda = detect_hardware.torch_cuda_version()
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


def _fitting(gpus: Sequence[detect_hardware.NvidiaGpu]) -> Iterator[Finding]:
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
        yield fine(f"{name} {gpu.name}, {gib(gpu.memory, 1)}: {words}")


def _timed(plan: RecipeMemory, gpu: detect_hardware.NvidiaGpu) -> str:
    spec = known_gpu(gpu.name)
    hours = None if spec is None else plan.hours(spec)
    return plan.recipe if hours is None or hours < 0.1 else f"{plan.recipe} ({hours:,.1f} h)"


def compiler() -> Iterator[Finding]:
    """Whether torch.compile can work; nothing else here needs a compiler."""
    if detect_hardware.find_c_compiler() is None:
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


def examine(recipe: Recipe | None, arguments: Sequence[str], *, as_json: bool) -> bool:
    """Print the findings; returns whether `kiln run` works here.

    Args:
        recipe: also check its model, source, store and runtime.
        arguments: those that gave the recipe, for the commands of remedies.
    """
    probes = {name: probe_runtime(name) for name in get_args(RuntimeName)}
    installed = package_versions(sys.executable, (*PINNED, *TRAPS))
    server, findings = _server()
    facts = _facts(probes, installed, server)
    checks = _machine_checks(probes, installed, recipe)
    if recipe is not None:
        checks += recipe_checks(recipe, arguments)
    findings = list(dict.fromkeys([*findings, *collect(checks)]))  # two may find the same
    problems = [finding.words for finding in findings if finding.level == "problem"]
    if as_json:
        print(json.dumps({**facts, "findings": [*map(asdict, findings)], "problems": problems}))
    else:
        _print(facts, findings)
    return not problems


def recipe_checks(recipe: Recipe, arguments: Sequence[str]) -> Iterator[Check]:
    """The checks that a run makes, and that of the hub's login.

    A run may have its token in a block of Prefect, and publishes the model without it.
    """
    yield from checks_of(Doors(recipe, fetch=False, words=arguments))
    login = partial(check_login, needed=recipe.publish.hub is not None)
    yield Check("hub login", login, remote=True)


def _facts(probes: dict[str, Probe], installed: dict[str, str], server: str) -> dict[str, Any]:
    """What is here, by name."""
    fields = ("available", "devices", "reason")
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": count_cores(),
        "disk_free_gb": _free_gb(),
        "prefect_api": server,
        "versions": {name: installed.get(name) for name in PINNED},
        "runtimes": {n: {f: getattr(probe, f) for f in fields} for n, probe in probes.items()},
        "ascend": {
            "npus": detect_hardware.count_npus(),
            "cann": detect_hardware.cann_version(),
            "torch_npu": detect_hardware.torch_npu_version(),
            "lacking": detect_hardware.missing_for_npu(),
        },
        "gaudi": {
            "hpus": detect_hardware.count_hpus(),
            "driver": detect_hardware.hpu_driver_version(),
            "habana_frameworks": detect_hardware.hpu_bridge_version(),
            "lacking": detect_hardware.missing_for_hpu(),
        },
    }


def _machine_checks(
    probes: dict[str, Probe], installed: dict[str, str], recipe: Recipe | None
) -> list[Check]:
    cuda = [device for device in probes["torch"].devices if device.startswith("cuda")]

    def nvidia() -> Iterator[Finding]:
        wanted = False
        if recipe is not None and recipe.runtime == "torch":
            devices = devices_here(
                recipe, stages_without_pool(recipe.place, recipe.stages)
            ).values()
            wanted = any(name.startswith("cuda") for name in devices)
        return nvidia_driver(cuda, installed.get("torch"), wanted=wanted)

    return [
        Check("python", python_version),
        Check("packages", partial(packages, installed)),
        Check("runtimes", partial(_runtimes, probes)),
        Check("NVIDIA", nvidia),
        Check("trains on the CPU", partial(_trains_on_cpu, probes["torch"], recipe)),
        Check("compiler", compiler),
        Check("disk", partial(disk, "." if recipe is None else recipe.store)),
        Check("caches", caches),
        Check("hub token", hub_token),
    ]


def _trains_on_cpu(probe: Probe, recipe: Recipe | None) -> Iterator[Finding]:
    """Whether a recipe that would train on a GPU finds none, or no PyTorch that works.

    A run does not ask for the devices `auto` and `cpu`.
    """
    if recipe is None or recipe.runtime != "torch" or "cuda" in probe.names:
        return
    here = devices_here(recipe, stages_without_pool(recipe.place, recipe.stages))
    if here and not probe.available:
        yield problem(f"runtime torch: {probe.reason}")
    elif here.get("train.device") == "auto":
        yield note(
            "runtime torch will train on the CPU, which suits only tiny models such as digits"
        )


def _runtimes(probes: dict[str, Probe]) -> Iterator[Finding]:
    if not any(probe.available for probe in probes.values()):
        yield problem("no runtime can train here", "run `make setup`")


def _server() -> tuple[str, list[Finding]]:
    """The Prefect server of a run as text, and the problems with it."""
    state = "unknown"

    def prefect_server() -> Iterator[Finding]:
        nonlocal state
        url = configured_server()
        if url is None:
            state = "embedded, during a run"
            try:
                check_home()
            except Refused as error:
                yield problem(str(error))
            return
        state = f"{without_secrets(url)} (does not answer)"
        try:
            check_server(url)
            state = f"{without_secrets(url)} (answers)"
        except Refused as error:
            yield problem(str(error))

    findings = list(collect([Check("prefect server", prefect_server)]))
    return state, findings


def _free_gb() -> float | None:
    """Free disk of the working directory in GB; None if it is gone."""
    try:
        return round(shutil.disk_usage(".").free / 1e9, 1)
    except OSError:
        return None


def _host(facts: dict[str, Any], kind: str, chips: str, *software: str) -> str:
    """A host's chips, their software and the missing parts, as text."""
    facts = facts[kind]
    if not facts[chips] and not any(facts[name] for name in software):
        return f"none; deploy/{kind} has the set-up of a machine with one"
    there = [f"{facts[chips]} {chips[:-1].upper()}s"]
    there += [f"{name} {facts[name]}" for name in software if facts[name]]
    return ", ".join(there) + "".join(f"; {words}" for words in facts["lacking"])


def _print(facts: dict[str, Any], findings: list[Finding]) -> None:
    print(
        f"python {facts['python']} ({facts['platform']}), {facts['cpus']} CPUs, "
        f"{facts['disk_free_gb']} GB free"
    )
    print(f"prefect server: {facts['prefect_api']}")
    for name, number in facts["versions"].items():
        print(f"  {name:14} {number or 'missing'}")
    for name, runtime in facts["runtimes"].items():
        state = ", ".join(runtime["devices"]) if runtime["available"] else runtime["reason"]
        print(f"runtime {name:10} {state}")
    print(f"ascend: {_host(facts, 'ascend', 'npus', 'cann', 'torch_npu')}")
    print(f"gaudi: {_host(facts, 'gaudi', 'hpus', 'driver', 'habana_frameworks')}")
    for finding in sorted(findings, key=lambda f: ("ok", "note", "problem").index(f.level)):
        print(f"{finding.level}: {finding.words}")
    ready = not any(finding.level == "problem" for finding in findings)
    print("ready" if ready else "not ready")
