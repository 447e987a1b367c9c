"""Functions that test_xla.py calls in the environment of runtime xla."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import torch
import torch_xla
import training
from diffusers import DiffusionPipeline
from numpy.typing import NDArray
from torch.nn import functional
from torch_xla.debug import metrics

from runtimes.contract import StepBatch, StepOutput
from runtimes.objective.noise_schedule import read_scheduler_config
from runtimes.objective.random_draws import Stream, generator
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, TrainJob
from runtimes.torch_models.loading import make_scheduler
from runtimes.torch_models.network import load_network
from runtimes.train import training_loop
from runtimes.xla.device import start
from runtimes.xla.mesh import Mesh, in_order, rows_of
from runtimes.xla.runtime import TheRuntime
from runtimes.xla.sampler import Sampler

SCHEDULERS = ("EulerDiscreteScheduler", "DDIMScheduler", "DPMSolverMultistepScheduler")
PROMPTS = ("a red cat", "a blue dog", "a green bird")
SAMPLER = {"seed": 5, "num_inference_steps": 6, "guidance_scale": 3.0, "batch_size": 2}


class Counting(TheRuntime):
    """Counts the compilations of each step; `made` are those that were opened."""

    made: ClassVar[list["Counting"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.by_step: list[int] = []
        self.made.append(self)

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        before = compiles()
        output = super().step(batch, learning_rate)
        self.by_step.append(compiles() - before)
        return output

    def shared(self) -> list[str]:
        """Which arrays of the state lie in parts on several devices: `<group> <name>`."""
        spec = torch_xla._XLAC._get_xla_sharding_spec
        return [
            f"{group} {name}"
            for group, arrays in self._update.tensors().items()
            for name, array in arrays.items()
            if "devices=[" in spec(array)
        ]


def train(given: dict[str, Any], *again: int) -> dict[str, Any]:
    """Do a job, then from the checkpoints of some steps again; what XLA counted.

    Args:
        again: steps.
    """
    job = TrainJob(**given)
    training_loop.open_runtime = lambda name: Counting()  # type: ignore[assignment]
    began, counted = [training.train(job)], [compiles()]
    left = [training.results(job)]
    for step in again:
        training.roll_back(job, step)
        began.append(training.train(job))
        counted.append(compiles())
        left.append(training.results(job))
    names = metrics.counter_names()
    return {
        "began": began,
        "left": left,
        "by_step": [runtime.by_step for runtime in Counting.made],
        "compiles": counted,
        "fallbacks": _fallbacks(),
        "cache": {n: metrics.counter_value(n) for n in names if n.startswith("PersistentCache")},
        "shared": Counting.made[0].shared(),
    }


def train_and_dump(given: dict[str, Any], folder: str, *again: int) -> dict[str, Any]:
    """The same; XLA writes its programs into a folder."""
    os.environ["XLA_FLAGS"] += f" --xla_dump_to={folder} --xla_dump_hlo_as_text"
    return train(given, *again)


def draw(folder: str) -> dict[str, Any]:
    """What XLA draws beside what diffusers draws on the CPU: what was found, by scheduler."""
    model = Path(folder)
    config = {**read_scheduler_config(model / "scheduler"), "clip_sample": False}
    schedulers = {name: make_scheduler({**config, "_class_name": name}) for name in SCHEDULERS}
    start("cpu", compiled=None)  # first of all: diffusers' pipelines open the device too
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    mesh = Mesh(fsdp=1, hosts=1)
    network = load_network(Drawing(""), Base.open(model), torch.float32, torch.device("cpu"))
    mesh.shard_module(network)
    sampler, found = Sampler(Base.open(model), mesh), {}
    for name, scheduler in schedulers.items():
        pipe.scheduler = scheduler
        expected, others = (_plainly(pipe, prompts) for prompts in (PROMPTS, PROMPTS[::-1]))
        sampler.use(network, make_scheduler(dict(scheduler.config)))
        before = compiles()
        pixels = sampler.pixels(PROMPTS, SAMPLER, first=0)
        middle = compiles()
        again = sampler.pixels(PROMPTS[::-1], SAMPLER, first=0)
        found[name] = {
            "furthest": _apart(pixels, expected),
            "furthest of others": _apart(again, others),
            "by prompts": _apart(expected, others),
            "first": middle - before,
            "second": compiles() - middle,
        }
    return {"drawn": found, "fallbacks": _fallbacks()}


def _plainly(pipe: Any, prompts: tuple[str, ...]) -> NDArray[np.float32]:
    """What a pipeline draws from the noise that every runtime draws."""
    noise = [
        generator(SAMPLER["seed"], Stream.PICTURE, number).standard_normal(
            (4, 8, 8), dtype=np.float32
        )
        for number in range(len(prompts))
    ]
    return pipe(
        list(prompts),
        height=32,
        width=32,
        num_inference_steps=SAMPLER["num_inference_steps"],
        guidance_scale=SAMPLER["guidance_scale"],
        latents=torch.from_numpy(np.stack(noise)),
        output_type="np",
    ).images


def _apart(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.abs(one - other).max())


def ordered() -> list[float]:
    """Rows of a host whose devices come as PyTorch/XLA gives them, in their order."""
    rows = torch.arange(8.0)
    return in_order([(6, rows[6:]), (4, rows[4:6]), (8, rows[8:])]).tolist()


def sent_and_fetched(devices: int) -> tuple[int, list[list[float]]]:
    """Devices that rows are spread over, and the rows, to each of which one is added there."""
    os.environ["CPU_NUM_DEVICES"] = str(devices)
    start("cpu", None)
    mesh = Mesh(fsdp=1, hosts=1)
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    return mesh.count, mesh.fetch_rows(mesh.shard_rows(rows) + 1).tolist()


def left_after_sampling(given: dict[str, Any]) -> list[bool]:
    """Whether the VAE exists, while pictures are sampled and afterwards."""
    models, found, runtime = list[Any](), list[bool](), TheRuntime()

    def draw(sampler: Sampler, *_: Any, **__: Any) -> NDArray[np.uint8]:
        encoder = sampler._encoder
        models.append(ref(encoder.vae))
        found.append(all(model() is not None for model in models))
        return np.zeros((1, 8, 8, 3), np.uint8)

    job = TrainJob(**given)
    runtime.load(job, Base.of(job))
    Sampler.draw = draw  # type: ignore[method-assign]
    runtime.sample(["a"], SAMPLER)
    return [*found, any(model() is not None for model in models)]


def loaded(shape: tuple[int, ...]) -> tuple[list[Any], list[float], int]:
    """Load an array by its rows on two pairs of devices: the rows, its values, compilations."""
    start("cpu", None)
    mesh = Mesh(fsdp=2, hosts=1)
    array = torch.nn.Parameter(mesh.shard(torch.zeros(shape)))
    torch_xla.sync()
    before, rows = compiles(), mesh.local_rows(array)
    values = torch.arange(float(np.prod(shape))).view(shape)
    mesh.load_rows(array, values[rows])
    index = [rows.start, rows.stop] if isinstance(rows, slice) else []
    return index, mesh.copy_to_host(array).flatten().tolist(), compiles() - before


def replaced_operators(is_half: bool) -> dict[str, Any]:
    """Largest difference of outputs and gradients from the CPU's, by operator."""
    start("cpu", None)
    Mesh(fsdp=1, hosts=1)  # opens the device, before autograd counts devices
    dtype = torch.bfloat16 if is_half else torch.float32
    make = np.random.default_rng(0).standard_normal
    arrays = [make(shape, dtype=np.float32) for shape in ((4, 8, 6, 4), (8,), (8,), (6, 4), (6, 4))]

    def outputs(operator: str, put: Callable[[NDArray[Any]], torch.Tensor]) -> list[torch.Tensor]:
        leaves = [put(array).detach().requires_grad_() for array in arrays]
        inputs, scale, shift, *row = leaves
        output = {
            "group_norm": lambda: functional.group_norm(3 + inputs, 2, scale, shift),
            "group_norm without weights": lambda: functional.group_norm(inputs, 4, eps=0.1),
            "layer_norm": lambda: functional.layer_norm(3 + inputs, (6, 4), *row),
            "layer_norm of rows": lambda: functional.layer_norm(inputs, (4,)),
            "by factor": lambda: functional.interpolate(inputs, scale_factor=2.0),
            "to size": lambda: functional.interpolate(inputs, size=(13, 7)),
        }[operator]()
        output.backward(torch.arange(1.0, output.numel() + 1).log().view_as(output).to(output))
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [output.detach(), *grads]

    names = ["group_norm", "group_norm without weights", "layer_norm", "layer_norm of rows"]
    apart = {}
    for name in [*names, "by factor", "to size"]:
        expected = outputs(name, lambda array: torch.from_numpy(array).to(dtype).float())
        found = [
            tensor.cpu()
            for tensor in outputs(name, lambda array: torch.from_numpy(array).to("xla", dtype))
        ]
        assert all(tensor.dtype == dtype for tensor in found)
        pairs = zip(found, expected, strict=True)
        apart[name] = max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs)
    return {"apart": apart, "fallbacks": _fallbacks()}


def attended(queries: int, keys: int, size: int, is_padded: bool) -> tuple[float, int]:
    """Attend on four devices by the kernel, and on the CPU by PyTorch's.

    Returns:
        Largest difference of the outputs and gradients, and how many programs were lowered.
    """
    from runtimes.xla.attention import XlaAttention

    start("cpu", None)
    mesh = Mesh(fsdp=2, hosts=1)
    attention = XlaAttention((2, 2), interpret=True)
    attention.register()
    make = np.random.default_rng(0).standard_normal
    lengths = (queries, keys, keys, queries)
    arrays = [make((4, 2, length, size), dtype=np.float32) for length in lengths]
    mask = (np.arange(keys) < np.array([keys, 1, keys // 2, 7])[:, None])[:, None, None]

    def outputs(put: Callable[[NDArray[Any]], torch.Tensor]) -> list[torch.Tensor]:
        query, key, value, gradient = map(put, arrays)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        kept = put(mask) if is_padded else None
        output = functional.scaled_dot_product_attention(*leaves, attn_mask=kept, scale=0.2)
        output.backward(gradient)
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = outputs(torch.from_numpy)
    found = [mesh.copy_to_host(tensor) for tensor in outputs(mesh.shard_rows)]
    apart = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    return max(apart), attention._lowered.cache_info().currsize


def attended_in_autocast() -> list[str]:
    """Dtypes of the output and of the query's gradient, for a float32 query and a bfloat16 value.

    Norms of queries and keys, as of SD3.5 and Qwen-Image, return float32.
    """
    start("cpu", None)
    Mesh(fsdp=1, hosts=1)
    query = torch.ones((1, 1, 4, 8), device="xla", requires_grad=True)
    value = torch.ones((1, 1, 4, 8), device="xla", dtype=torch.bfloat16)
    mask = torch.zeros((1, 1, 4, 4), device="xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        output = functional.scaled_dot_product_attention(query, query, value, attn_mask=mask)
    output.float().sum().backward()
    assert query.grad is not None
    return [str(tensor.dtype) for tensor in (output, query.grad)]


def kernels_of_a_tpu() -> list[int]:
    """Numbers of kernels in the forward and in the backward pass, lowered for a TPU."""
    import jax

    from runtimes.xla.attention import XlaAttention

    start("cpu", None)
    shape = jax.ShapeDtypeStruct((4, 2, 1024, 64), "bfloat16")
    program = XlaAttention((2, 2)).program([shape] * 3, 0.125)
    programs = (program.forward, program.backward)
    return [hlo.as_hlo_text().count("tpu_custom_call") for hlo in programs]


def rows_of_hosts() -> list[list[int]]:
    """Rows of the hosts of an array with eight rows, of which each host has two shards."""
    quarters = [[slice(2 * n, 2 * n + 2), slice(0, 3)] for n in range(4)]
    found = [rows_of(quarters[at : at + 2]) for at in (0, 2)]
    return [[rows.start, rows.stop] for rows in found]


def compiles() -> int:
    """Of every kind: steps, and programs that bring arrays together."""
    found = metrics.metric_data("CompileTime")  # (times, ...)
    return 0 if found is None else int(found[0])


def _fallbacks() -> list[str]:
    """Operators that the host did."""
    return [name for name in metrics.counter_names() if name.startswith("aten::")]
