"""What a training step takes on a TPU slice, found by compiling it for that slice, without a TPU.

`python -P -m runtimes.jax.plan REQUEST.json` prints one JSON object, a Plan. libtpu's compiler does
it where libtpu can be imported; else XLA's for the CPU, over as many virtual devices.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from configs.training import Train
from runtimes.contract import WrongInput
from runtimes.spmd.tpu_specs import Slice, parse_slice

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
#: What libtpu says of a program that is too large: the bytes that it takes, arguments included,
#: whatever the second form calls them.
REFUSALS = (
    re.compile(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm"),
    re.compile(r"temporaries \(([\d.]+)([KMG])\) exceeds available HBM"),
)
#: Of virtual devices: what a compiler can still be asked for in reasonable time.
MOST_VIRTUAL = 16


@dataclass(frozen=True)
class Request:
    """Which step, on which slice."""

    model: str  # local folder of the base pipeline; its configs are enough
    train: dict[str, Any]  # configs.training.Train, dumped
    resolution: int  # of the pictures, pixels
    topology: str  # such as v5p-8
    vae: str | None = None
    denoiser_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Plan:
    """What a step takes. Bytes and FLOPs are of one chip and one step, if not said otherwise.

    Of several micro-batches, each counts as one step would: the update is a small part of it.
    """

    compiler: str  # such as libtpu 0.0.42
    arguments: int  # bytes of weights, optimizer, average and batch
    temporaries: int  # bytes of activations, gradients, gathered weights (refused: all else)
    total: int  # bytes of all that there is at once; 0 where it is not known
    flops: float  # done, what is recomputed included
    bytes_accessed: float
    optimal_seconds: float | None  # a step, as the compiler estimates it
    flops_per_image: float | None  # forward and backward, none counted twice
    parameters: int  # that are trained
    seconds: float  # that planning took
    fits: bool  # as far as the compiler says: it refuses what does not


def plan(request: Request) -> Plan:
    """Compile the step of a request. Raises WrongInput."""
    since = time.monotonic()
    where, settings = parse_slice(request.topology), Train(**request.train)
    compiler, devices = _devices(where)
    # These open JAX, which is set up by now.
    from runtimes.jax.abstract import AbstractStep
    from runtimes.jax.device import check_rules

    check_rules(settings)
    step = AbstractStep(request, settings, devices, where.hosts)
    refused = ""
    try:
        compiled: Any = step.lower().compile()
    except Exception as error:  # of jaxlib, which has no type of its own for it
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        compiled, refused = None, str(error)
    costs: dict[str, float] = {}
    if compiled is None:
        memory = _refused(refused, step.argument_bytes())
    else:
        memory, costs = _memory(compiled.memory_analysis()), dict(compiled.cost_analysis() or {})
    optimal = costs.get("optimal_seconds", -1.0)
    # XLA counts a loop's body once; on the CPU there is none (step.py).
    times = 1 if devices[0].platform == "cpu" else step.micro_batches
    return Plan(
        compiler=compiler,
        **memory,
        flops=costs.get("flops", 0.0) * times,
        bytes_accessed=costs.get("bytes accessed", 0.0) * times,
        optimal_seconds=optimal * times if optimal > 0 else None,
        flops_per_image=step.flops_per_image(),
        parameters=step.parameters,
        seconds=time.monotonic() - since,
        fits=not refused,
    )


def _devices(where: Slice) -> tuple[str, list[Any]]:
    """A compiler's name, and the devices that it compiles for."""
    if find_spec("libtpu") is None:
        if where.chips > MOST_VIRTUAL:
            raise WrongInput(
                f"topology {where.name}: for so many chips libtpu is needed: make setup-plan"
            )
        flag = f"--xla_force_host_platform_device_count={where.chips}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    # There is no TPU to look for, to ask for, or to keep from others who plan.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    import jax
    from jax.experimental import topologies

    if find_spec("libtpu") is None:
        return f"XLA for the CPU (jaxlib {version('jaxlib')})", jax.devices()
    options: dict[str, Any] = {}
    if where.hosts == 1:  # else of 2x2 chips each
        options["chips_per_host_bounds"] = (*where.shape, 1)[:3]
    if where.kind == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip as one device
    topology = topologies.get_topology_desc(platform="tpu", topology_name=where.topology, **options)
    return f"libtpu {version('libtpu')}", list(topology.devices)


def _memory(found: Any) -> dict[str, int]:
    arguments, temporaries = found.argument_size_in_bytes, found.temp_size_in_bytes
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes  # the state's is used again
    code = found.generated_code_size_in_bytes
    total = arguments + temporaries + fresh + code
    return {"arguments": arguments, "temporaries": temporaries, "total": total}


def _refused(words: str, arguments: int) -> dict[str, int]:
    """The memory of a program that a compiler refuses, as far as its words tell."""
    found = next(filter(None, (pattern.search(words) for pattern in REFUSALS)), None)
    if found is None:
        return {"arguments": arguments, "temporaries": 0, "total": 0}
    total = int(float(found[1]) * _UNITS[found[2]])
    return {"arguments": arguments, "temporaries": max(total - arguments, 0), "total": total}


def main(path: str) -> int:
    """Print the plan of a request, or why there is none."""
    request = Request(**json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        print(json.dumps(asdict(plan(request))))
    except WrongInput as error:
        print(json.dumps({"wrong_input": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
