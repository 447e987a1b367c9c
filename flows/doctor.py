"""Check this machine: versions, devices, the Prefect server and missing parts."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from typing import Any, get_args

from configs.recipe import RuntimeName
from configs.redact_urls import without_secrets
from flows.runner import ServerAway, check_server, configured_server
from runtimes.check_support import probe_runtime
from runtimes.hosts import detect_gaudi
from runtimes.hosts.detect_ascend import (
    cann_version,
    count_npus,
    missing_components,
    torch_npu_version,
)
from runtimes.process.launcher import count_cores
from tasks.build_or_reuse import package_versions

#: Packages that must not be installed, with the reason.
TRAPS = {
    "dataclasses": "shadows the standard library inside Prefect's server: uninstall it",
}
PINNED = ("prefect", "apache-beam", "img2dataset", "torch", "diffusers", "transformers")


def examine(*, as_json: bool) -> bool:
    """Print the findings; returns whether `kiln run` works here."""
    found = _findings()
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)
    return not found["problems"]


def _findings() -> dict[str, Any]:
    probes = {name: probe_runtime(name) for name in get_args(RuntimeName)}
    fields = ("available", "devices", "reason")
    runtimes = {name: {f: getattr(probe, f) for f in fields} for name, probe in probes.items()}
    installed = package_versions(sys.executable, (*PINNED, *TRAPS))
    versions = {name: installed.get(name) for name in PINNED}
    problems = [
        f"{name} is not installed: run `make setup`" for name, v in versions.items() if not v
    ]
    problems += [f"{name} {why}" for name, why in TRAPS.items() if name in installed]
    if not any(found["available"] for found in runtimes.values()):
        problems.append("no runtime can train here")
    server, wrong = _server()
    problems += wrong
    free = shutil.disk_usage(".").free
    if free < 5 * 10**9:
        problems.append(f"only {free / 1e9:.1f} GB of disk are free here")
    return {
        "python": platform.python_version(),
        "cpus": count_cores(),
        "disk_free_gb": round(free / 1e9, 1),
        "prefect_api": server,
        "versions": versions,
        "runtimes": runtimes,
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
        "problems": problems,
    }


def _server() -> tuple[str, list[str]]:
    """The Prefect server of a run as text, and the problems with it."""
    url = configured_server()
    if url is None:
        return "embedded, during a run", []
    try:
        check_server(url)
    except ServerAway as error:
        return f"{without_secrets(url)} (does not answer)", [str(error)]
    return f"{without_secrets(url)} (answers)", []


def _host(found: dict[str, Any], chips: str, *software: str) -> str:
    """A host's chips, their software and the missing parts, as text."""
    there = [f"{found[chips]} {chips[:-1].upper()}s"]
    there += [f"{name} {found[name]}" for name in software if found[name]]
    return ", ".join(there) + "".join(f"; {words}" for words in found["lacking"])


def _print(found: dict[str, Any]) -> None:
    print(f"python {found['python']}, {found['cpus']} CPUs, {found['disk_free_gb']} GB free")
    print(f"prefect server: {found['prefect_api']}")
    for name, number in found["versions"].items():
        print(f"  {name:14} {number or 'missing'}")
    for name, runtime in found["runtimes"].items():
        state = ", ".join(runtime["devices"]) if runtime["available"] else runtime["reason"]
        print(f"runtime {name:10} {state}")
    print(f"ascend: {_host(found['ascend'], 'npus', 'cann', 'torch_npu')}")
    print(f"gaudi: {_host(found['gaudi'], 'hpus', 'driver', 'habana_frameworks')}")
    for problem in found["problems"]:
        print(f"problem: {problem}")
    print("ready" if not found["problems"] else "not ready")
