"""Check this machine, and on request a recipe: what is missing, and the command that mends it."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, get_args

from configs.secrets import without_secrets
from configs.settings.recipe import Recipe, RuntimeName
from flows.doctor import check_python_driver_and_disk as machine
from flows.doctor.check_python_driver_and_disk import PINNED, TRAPS
from flows.doctor.check_recipe import recipe_checks
from flows.doctor.findings import Check, Finding, collect, named, problem
from flows.own_prefect_server import HomeNotWritable, check_home
from flows.preflight import devices_here, stages_without_pool
from flows.runner import ServerAway, check_server, configured_server
from runtimes.contract import Probe
from runtimes.hosts import detect_gaudi
from runtimes.hosts.detect_ascend import (
    cann_version,
    count_npus,
    missing_components,
    torch_npu_version,
)
from runtimes.process.launcher import count_cores
from runtimes.registry import probe_runtime
from tasks.stage import package_versions


def examine(recipe: Recipe | None, arguments: Sequence[str], *, as_json: bool) -> bool:
    """Print the findings; returns whether `kiln run` works here.

    Args:
        recipe: also check its model, source, store and runtime.
        arguments: those that gave the recipe, for the commands of remedies.
    """
    probes = {name: probe_runtime(name) for name in get_args(RuntimeName)}
    installed = package_versions(sys.executable, (*PINNED, *TRAPS))
    server, findings = _server()
    found = _facts(probes, installed, server)
    checks = _machine_checks(probes, installed, recipe)
    checks += [] if recipe is None else recipe_checks(recipe, probes, arguments)
    findings += collect(checks)
    problems = [finding.words for finding in findings if finding.level == "problem"]
    if as_json:
        print(json.dumps({**found, "findings": [*map(asdict, findings)], "problems": problems}))
    else:
        _print(found, findings)
    return not problems


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
            "npus": count_npus(),
            "cann": cann_version(),
            "torch_npu": torch_npu_version(),
            "lacking": missing_components(),
        },
        "gaudi": {
            "hpus": detect_gaudi.count_hpus(),
            "driver": detect_gaudi.driver_version(),
            "habana_frameworks": detect_gaudi.bridge_version(),
            "lacking": detect_gaudi.missing_components(),
        },
    }


def _machine_checks(
    probes: dict[str, Probe], installed: dict[str, str], recipe: Recipe | None
) -> list[Check]:
    cuda = [device for device in probes["torch"].devices if device.startswith("cuda")]

    def nvidia() -> Iterator[Finding]:
        wanted = recipe is not None and _asks_cuda(recipe)
        return machine.nvidia(cuda, installed.get("torch"), wanted=wanted)

    return [
        machine.python_version,
        named("packages", machine.packages, installed),
        named("runtimes", _runtimes, probes),
        nvidia,
        machine.compiler,
        named("disk", machine.disk, "." if recipe is None else recipe.store),
        machine.caches,
        machine.hub_token,
    ]


def _runtimes(probes: dict[str, Probe]) -> Iterator[Finding]:
    if not any(probe.available for probe in probes.values()):
        yield problem("no runtime can train here", "run `make setup`")


def _asks_cuda(recipe: Recipe) -> bool:
    devices = devices_here(recipe, stages_without_pool(recipe)).values()
    return recipe.runtime == "torch" and any(name.startswith("cuda") for name in devices)


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
            except HomeNotWritable as error:
                yield problem(str(error))
            return
        state = f"{without_secrets(url)} (does not answer)"
        try:
            check_server(url)
            state = f"{without_secrets(url)} (answers)"
        except ServerAway as error:
            yield problem(str(error))

    findings = list(collect([prefect_server]))
    return state, findings


def _free_gb() -> float | None:
    """Free disk of the working directory in GB; None if it is gone."""
    try:
        return round(shutil.disk_usage(".").free / 1e9, 1)
    except OSError:
        return None


def _host(found: dict[str, Any], kind: str, chips: str, *software: str) -> str:
    """A host's chips, their software and the missing parts, as text."""
    found = found[kind]
    if not found[chips] and not any(found[name] for name in software):
        return f"none; deploy/{kind} has the set-up of a machine with one"
    there = [f"{found[chips]} {chips[:-1].upper()}s"]
    there += [f"{name} {found[name]}" for name in software if found[name]]
    return ", ".join(there) + "".join(f"; {words}" for words in found["lacking"])


def _print(found: dict[str, Any], findings: list[Finding]) -> None:
    print(
        f"python {found['python']} ({found['platform']}), {found['cpus']} CPUs, "
        f"{found['disk_free_gb']} GB free"
    )
    print(f"prefect server: {found['prefect_api']}")
    for name, number in found["versions"].items():
        print(f"  {name:14} {number or 'missing'}")
    for name, runtime in found["runtimes"].items():
        state = ", ".join(runtime["devices"]) if runtime["available"] else runtime["reason"]
        print(f"runtime {name:10} {state}")
    print(f"ascend: {_host(found, 'ascend', 'npus', 'cann', 'torch_npu')}")
    print(f"gaudi: {_host(found, 'gaudi', 'hpus', 'driver', 'habana_frameworks')}")
    for finding in sorted(findings, key=lambda one: ("ok", "note", "problem").index(one.level)):
        print(f"{finding.level}: {finding.words}")
    ready = not any(finding.level == "problem" for finding in findings)
    print("ready" if ready else "not ready")
