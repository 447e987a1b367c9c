"""Estimate memory and FLOPs of a training step by compiling it for a TPU slice, without a TPU.

`python -P -m runtimes.jax.tpu_step_memory REQUEST` (JSON) prints one JSON object, a StepCost. The
compiler is that of libtpu if it can be imported, else XLA for the CPU with one virtual device per
chip.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.process.questions import StepCost, TpuStepRequest, answer
from runtimes.registry import check_supported
from runtimes.spmd.tpu_sharding import TpuSlice, parse_slice

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
#: libtpu's out-of-memory messages, with the program's bytes. Both figures include arguments, though
#: the second message says "temporaries".
REFUSALS = (
    re.compile(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm"),
    re.compile(r"temporaries \(([\d.]+)([KMG])\) exceeds available HBM"),
)
#: Keys of XLA's cost analysis.
COSTS = ("flops", "bytes accessed", "optimal_seconds")
#: Compiler options of a plan. SDXL's step compiles in a fifth of the time. Its program copies no
#: arrays to vector memory ahead of their use, and the cost analysis counts such copies as traffic.
LEAST_EFFORT: dict[str, Any] = {"exec_time_optimization_effort": -1.0}
#: An operation for which libtpu has no estimate. XLA adds -1 s for it: half of a complex argument.
WITHOUT_ESTIMATE = 'custom_call_target="X64Split'
#: Most virtual CPU devices for which a step compiles in reasonable time.
MOST_VIRTUAL = 16


def step_cost(request: TpuStepRequest) -> StepCost:
    """Compile the step of a request. Raises Refused."""
    since = time.monotonic()
    where = parse_slice(request.topology)
    settings = Train(**request.train)
    compiler, devices = _devices(where)
    # These modules initialize JAX, so _devices must have set the environment before.
    from runtimes.jax.abstract_step import AbstractStep

    check_supported("jax", settings)
    step = AbstractStep(request, settings, devices, where.hosts)
    compiled, options, refused = _compile(step.lower(), where.chip.hbm_bytes)
    costs: dict[str, float] = {}
    if compiled is None:
        memory = _refused(refused, step.argument_bytes())
    else:
        memory = _memory(compiled.memory_analysis())
        costs = _costs(compiled, step, options)
    for name in ("arguments", "total") if memory["total"] else ():
        memory[name] += step.prior_bytes()
    optimal = costs.get("optimal_seconds", -1.0)
    kernel_flops = step.kernel_flops()
    # XLA's cost analysis counts one iteration of the loop over micro-batches.
    times = step.micro_batches if step.has_loops else 1
    return StepCost(
        compiler=compiler,
        **memory,
        flops=costs.get("flops", 0.0) * times + kernel_flops if costs else 0.0,
        kernel_flops=kernel_flops,
        bytes_accessed=costs.get("bytes accessed", 0.0) * times,
        optimal_seconds=optimal * times if optimal > 0 else None,
        flops_per_image=step.flops_per_image(),
        parameters=step.parameters,
        seconds=time.monotonic() - since,
        fits=not refused,
    )


def _compile(lowered: Any, memory: int) -> tuple[Any, dict[str, Any], str]:
    """Compile with least effort; if `memory` bytes do not suffice, as training does.

    Returns:
        The program, its compiler options, and an empty message; or None, and the compiler's message
        that a chip's memory does not suffice.
    """
    for options in (LEAST_EFFORT, {}):
        try:
            compiled = lowered.compile(options)
            refused = ""
        except Exception as error:  # jaxlib has no exception type for out of memory
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            compiled = None
            refused = str(error)
        if compiled is not None and _memory(compiled.memory_analysis())["total"] <= memory:
            break
    return compiled, options, refused


def _costs(compiled: Any, step: Any, options: dict[str, Any]) -> dict[str, float]:
    """XLA's cost analysis of the step, with all iterations of loops over blocks."""
    total = _cost(compiled)
    for count, body in step.lower_loop_bodies():
        iteration = _cost(body.compile(options))
        for name in COSTS:
            total[name] += count * iteration[name]
    return total


def _cost(compiled: Any) -> dict[str, float]:
    """XLA's cost analysis of a program, without its -1 s for operations WITHOUT_ESTIMATE."""
    cost = dict(compiled.cost_analysis() or {})
    if "optimal_seconds" in cost:
        cost["optimal_seconds"] += compiled.as_text().count(WITHOUT_ESTIMATE)
    return cost


def _devices(where: TpuSlice) -> tuple[str, list[Any]]:
    """Name of the compiler, and the devices to compile for."""
    if find_spec("libtpu") is None:
        if where.chips > MOST_VIRTUAL:
            raise Refused(
                f"topology {where.name}: {where.chips} chips need libtpu: make setup-plan"
            )
        flag = f"--xla_force_host_platform_device_count={where.chips}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    # No TPU is used: skip libtpu's lock file and its metadata queries.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    import jax
    from jax.experimental import topologies

    if find_spec("libtpu") is None:
        return f"XLA for the CPU (jaxlib {version('jaxlib')})", jax.devices()
    options: dict[str, Any] = {}
    if where.hosts == 1:  # libtpu's default is 2x2 chips per host
        options["chips_per_host_bounds"] = (*where.shape, 1)[:3]
    if where.kind == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip as one device
    topology = topologies.get_topology_desc(platform="tpu", topology_name=where.topology, **options)
    return f"libtpu {version('libtpu')}", list(topology.devices)


def _memory(analysis: Any) -> dict[str, int]:
    arguments = analysis.argument_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    # Donated state is aliased: its outputs reuse the memory of the arguments.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    total = arguments + temporaries + outputs + analysis.generated_code_size_in_bytes
    return {"arguments": arguments, "temporaries": temporaries, "total": total}


def _refused(words: str, arguments: int) -> dict[str, int]:
    """Memory of a program that the compiler refused, from its error message."""
    match = next(filter(None, (pattern.search(words) for pattern in REFUSALS)), None)
    if match is None:
        return {"arguments": arguments, "temporaries": 0, "total": 0}
    total = int(float(match[1]) * _UNITS[match[2]])
    return {"arguments": arguments, "temporaries": max(total - arguments, 0), "total": total}


if __name__ == "__main__":
    answer(lambda: step_cost(TpuStepRequest(**json.loads(sys.argv[1]))))
