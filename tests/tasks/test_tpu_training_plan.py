"""Planning: few compilations find the largest batch, and plans are cached."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
from kiln_command import ROOT
from shortest_recipe import shortest_recipe

from configs.errors import Refused
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from flows.show_plan import show_plan
from runtimes.jax.tpu_step_memory import LEAST_EFFORT, _compile, _refused
from runtimes.process.questions import StepCost
from runtimes.spmd.tpu_sharding import parse_slice
from tasks.plan import tpu
from tasks.plan.tpu import Size, _largest, _size

SLICE = parse_slice("v5e-8")
GIB = 2**30
#: Of the encoders.
INFO = {
    **{"vae_scale_factor": 8, "latent_channels": 4},
    **{"tokens": 77, "prompt_dim": 32, "pooled_dim": None},
}
PLAN = StepCost("a compiler", 2 * GIB, 0, 0, 1e12, 0.0, 1e9, 0.1, 1e12, 10, 1.0, True)


class Measured:
    """A step with a fixed number of bytes per picture; it records the batches asked for."""

    def __init__(self, bytes_a_picture: float, extra: float = 0.0) -> None:
        self.bytes_a_picture, self.extra, self.asked = bytes_a_picture, extra, list[Size]()

    def __call__(self, size: Size) -> StepCost:
        self.asked.append(size)
        temporaries = int(self.extra + self.bytes_a_picture * size.per_chip)
        total = PLAN.arguments + temporaries
        return replace(
            PLAN, temporaries=temporaries, total=total, fits=total <= SLICE.chip.hbm_bytes
        )


@pytest.mark.parametrize("start", [8, 32, 512])
@pytest.mark.parametrize("extra", [0.0, 1.5 * GIB])
def test_the_largest_batch_that_fits_is_found_in_a_few_compilations(
    start: int, extra: float
) -> None:
    measured = Measured(0.4 * GIB, extra)
    found = _largest(measured, Size(start, 512, SLICE))
    assert found is not None
    assert found.per_chip == int((SLICE.chip.hbm_bytes - 2 * GIB - extra) / (0.4 * GIB))
    assert found.micro_batch_size == found.per_chip * 8
    assert len(measured.asked) <= 6, measured.asked
    # What was compiled is the recipe's batch, in as many micro-batches as it takes.
    assert {size.global_batch_size for size in measured.asked} == {512}
    assert found.micro_batches == -(-512 // found.micro_batch_size)


@pytest.mark.parametrize(
    "words",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 28.25G of 15.75G hbm.",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (28.25G) exceeds available HBM (15.75G).",
    ],
)
def test_the_size_of_a_step_is_read_from_a_refusal(words: str) -> None:
    whole = int(28.25 * GIB)
    assert _refused(words, 4 * GIB) == {
        "arguments": 4 * GIB,
        "temporaries": whole - 4 * GIB,
        "total": whole,
    }


def test_the_search_bisects_if_a_refusal_has_no_size() -> None:
    asked = []

    def measure(size: Size) -> StepCost:
        asked.append(size.per_chip)
        return replace(PLAN, total=2 * GIB + size.per_chip * GIB // 8, fits=size.per_chip < 7)

    found = _largest(measure, Size(5 * 8, 512, SLICE))
    assert found is not None and found.per_chip == 6
    assert len(asked) <= 8, asked


def test_no_batch_is_found_if_one_picture_does_not_fit() -> None:
    assert _largest(Measured(20.0 * GIB), Size(32, 32, SLICE)) is None


def make_recipe(folder: Path, model: Path | str = ".", **train: Any) -> Recipe:
    return shortest_recipe(
        runtime="jax",
        store=str(folder / "store"),
        model={"path": str(model)},
        encode={"resolution": 32},
        train={"steps": 3600, **train},
        plan={"pictures": 1000, "chip_hour_price": 2.0},
    )


def test_padding_rows_are_not_counted_as_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four pictures on eight chips leave four chips idle."""
    recipe = make_recipe(tmp_path, global_batch_size=16, micro_batch_size=4)
    size = _size(recipe.train, SLICE)
    assert (size.per_chip, size.micro_batches, size.global_batch_size) == (1, 4, 16)
    found = tpu.SlicePlan(recipe, SLICE, size, PLAN, INFO)
    monkeypatch.setattr("flows.show_plan.plan_slice_training", lambda *_, **__: found)
    show_plan(recipe, "v5e-8", None, search=False, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["global_batch_size"] == 16
    assert facts["images_per_second"] == pytest.approx(16 / 0.1)
    assert facts["cost"] == pytest.approx(8 * 2.0 * 0.1)


def test_attention_kernels_add_their_time_at_half_of_the_peak(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, global_batch_size=16)
    size, step = _size(recipe.train, SLICE), replace(PLAN, kernel_flops=SLICE.chip.peak)
    found = tpu.SlicePlan(recipe, SLICE, size, step, INFO)
    assert found.step_seconds == pytest.approx(0.1 + 2)
    assert "attention kernels at 50% of the chip's peak" in found.assumption


@pytest.mark.parametrize("total", [SLICE.chip.hbm_bytes + 4 * GIB, 0])
def test_the_error_of_a_large_batch_has_the_largest_that_fits(
    total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the compiler does not report the size."""
    recipe = make_recipe(tmp_path, global_batch_size=64)
    size, refused = _size(recipe.train, SLICE), replace(PLAN, total=total, flops=0, fits=False)
    found = tpu.SlicePlan(recipe, SLICE, size, refused, INFO, size.with_per_chip(3))
    monkeypatch.setattr("flows.show_plan.plan_slice_training", lambda *_, **__: found)
    with pytest.raises(Refused, match="micro_batch_size=24"):
        show_plan(recipe, "v5e-8", None, search=False, as_json=False)
    said = capsys.readouterr().out
    assert ("4.0 GiB too much" in said) == (total > 0)
    assert " 0.00 of" not in said and " 0 TFLOP" not in said and ": -" not in said


def test_measurements_that_gather_the_whole_model_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 B parameters in bfloat16 are 22.4 GiB; a step gathers one block at a time."""
    step = replace(PLAN, total=3 * GIB, parameters=12 * 10**9)

    def plan(**train: Any) -> tpu.SlicePlan:
        recipe = make_recipe(tmp_path, global_batch_size=16, mixed_precision="bf16", **train)
        return tpu.SlicePlan(recipe, SLICE, _size(recipe.train, SLICE), step, INFO)

    assert plan().fits and not plan(sample_every_n_steps=10).fits
    found = plan(holdout_loss={"every_n_steps": 10})
    monkeypatch.setattr("flows.show_plan.plan_slice_training", lambda *_, **__: found)
    with pytest.raises(Refused, match=r"gather the model .* 24\.4 GiB of the 15\.75 GiB"):
        show_plan(found.recipe, "v5e-8", None, search=False, as_json=False)
    assert "fits, 12.8 GiB spare\n          held-out loss and samples: 24.35 GiB" in (
        capsys.readouterr().out
    )


def test_inputs_other_than_text_are_planned(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    train = recipe.train.model_copy(update={"inpainting": True, "aesthetic_score": True})
    encode = recipe.encode.model_copy(update={"masks": 3})
    recipe = recipe.model_copy(update={"train": train, "encode": encode})
    size = _size(recipe.train, SLICE)
    asked = Train(**tpu._of_the_step(recipe.train, size))
    assert asked.inpainting and asked.aesthetic_score
    planned = tpu.SlicePlan(recipe, SLICE, size, PLAN, INFO)
    latents, masks = np.zeros((4, 4, 4), np.uint16), np.zeros((3, 4, 4), np.uint8)
    masked_means, prompt = np.zeros((3, 4, 4, 4), np.uint16), np.zeros((77, 32), np.uint16)
    kept = [latents, latents, masks, masked_means, prompt]  # two: mean and log-variance
    assert planned.bytes_per_picture == sum(array.nbytes for array in kept)


@pytest.fixture
def least_model(tiny_sd: Path, tmp_path: Path) -> Path:
    """Configs of the smallest UNet with every kind of layer; it compiles in seconds."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_sd, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "unet/config.json"
    least = {
        "block_out_channels": [16],
        "down_block_types": ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"],
        "attention_head_dim": 2,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | least))
    return folder


@pytest.mark.extended
@pytest.mark.slow
def test_without_libtpu_the_step_is_compiled_for_the_cpu_and_the_plan_is_cached(
    least_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tpu, "compiler_folder", lambda: None)
    monkeypatch.setenv("XLA_FLAGS", chips.FAST_COMPILATION)
    settings: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 4}
    recipe = make_recipe(tmp_path, least_model, ema_decay=0.9, **settings)
    show_plan(recipe, "v5e-1", None, search=False, as_json=True)
    facts, said = _read(capsys)
    assert facts["compiler"].startswith("XLA for the CPU") and facts["fits"]
    assert "compiling" in said
    of_pictures = 8 * facts["flops_per_image"]
    assert 0.9 * of_pictures < facts["flops"] < 1.5 * of_pictures  # the update is a small part
    state = 4 * 4 * facts["parameters"]  # weights, moments and average
    assert state < facts["argument_bytes"] < 1.5 * state
    assert facts["step_seconds"] == pytest.approx(of_pictures / (197e12 * 0.4))

    # How long and how fast it is trained makes no other program.
    other = {"ema_decay": 0.99, "learning_rate": 1e-3, "seed": 1}
    changed = make_recipe(tmp_path, least_model, **other, **settings)
    show_plan(changed, "v5e-1", None, search=False, as_json=True)
    assert _read(capsys) == (facts, "")

    refused = make_recipe(tmp_path, least_model, optimizer="adafactor", **settings)
    with pytest.raises(Refused, match="adafactor"):
        show_plan(refused, "v5e-1", None, search=False, as_json=True)


def _read(capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    said = capsys.readouterr()
    return json.loads(said.out), said.err


@dataclass
class Program:
    """A compiled step that needs so many bytes."""

    argument_size_in_bytes: int
    temp_size_in_bytes = output_size_in_bytes = 0
    alias_size_in_bytes = generated_code_size_in_bytes = 0

    def memory_analysis(self) -> Program:
        return self


@dataclass
class Lowered:
    """A step whose compilation needs so many bytes, or fails with a message, by effort."""

    least: int | str
    full: int | str

    def compile(self, options: dict[str, Any]) -> Program:
        found = self.least if options == LEAST_EFFORT else self.full
        if isinstance(found, str):
            raise RuntimeError(found)
        return Program(found)


def test_the_compiler_of_training_decides_what_does_not_fit() -> None:
    """With full effort it may save memory; the plan's own effort is the least."""
    small, large, refused = Program(10), Program(11), "RESOURCE_EXHAUSTED: "
    for least, full, expected in (
        (10, 9, (small, LEAST_EFFORT, "")),
        (12, 10, (small, {}, "")),
        (12, 11, (large, {}, "")),
        (refused + "one", 10, (small, {}, "")),
        (refused + "one", refused + "two", (None, {}, refused + "two")),
        (12, refused + "two", (None, {}, refused + "two")),
    ):
        assert _compile(Lowered(least, full), 10) == expected  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="unknown"):
        _compile(Lowered("unknown operation", 10), 10)


MESHES = """
import sys
from runtimes.spmd.tpu_sharding import parse_slice
from runtimes.jax.tpu_step_memory import _devices
for words in sys.argv[1:]:
    name, _, fsdp = words.partition(":")
    where = parse_slice(name)
    _, devices = _devices(where)
    from runtimes.jax.mesh import Mesh
    assert Mesh(int(fsdp), devices).mesh.devices.shape == (where.chips // int(fsdp), int(fsdp))
    assert len({device.process_index for device in devices}) == where.hosts, name
"""


REFUSED = """
import sys
import jax
from jax import ShapeDtypeStruct
from jax.sharding import SingleDeviceSharding
from runtimes.spmd.tpu_sharding import parse_slice
from runtimes.jax.tpu_step_memory import _cost, _devices, _refused
for name in sys.argv[1:]:
    where = parse_slice(name)
    _, devices = _devices(where)
    here = SingleDeviceSharding(devices[0])
    matrix = ShapeDtypeStruct((2**15, 2**20), "float32", sharding=here)  # 128 GiB
    step = jax.jit(lambda x: (x @ x.T) @ x).trace(matrix).lower(lowering_platforms=("tpu",))
    words = ""
    try:
        step.compile()
    except Exception as error:
        words = str(error)
    assert _refused(words, 2**37)["total"] > 2**38, words  # and a result as large
    assert f"({where.chip.hbm_bytes / 2**30:.2f}G)" in words, words
    small = ShapeDtypeStruct((256, 512), "float32", sharding=here)
    step = jax.jit(lambda x: (x @ x.T) @ x).trace(small).lower(lowering_platforms=("tpu",))
    fits = step.compile()
    assert fits.memory_analysis().output_size_in_bytes == 256 * 512 * 4
    assert fits.cost_analysis()["flops"] >= 2 * 2 * 256 * 256 * 512
    rotary = ShapeDtypeStruct((256, 512), "complex64", sharding=here)
    step = jax.jit(lambda x: (x * x).real).trace(rotary).lower(lowering_platforms=("tpu",))
    assert 0 < _cost(step.compile())["optimal_seconds"] < 1e-3, name
"""


ATTENTION = """
import sys
import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from runtimes.spmd.tpu_sharding import parse_slice
from runtimes.jax.tpu_step_memory import _devices
for name in sys.argv[1:]:
    _, devices = _devices(parse_slice(name))
    from runtimes.jax.torchax_bridge import attend
    from runtimes.jax.mesh import Mesh
    from runtimes.spmd.splash_attention import SplashAttention, using
    mesh = Mesh(1, devices)

    def moved(kernel, size):
        def loss(query, key, value):
            with using(kernel):
                found = attend(query, key, value, scale=size**-0.5)
            return jnp.square(found.astype(jnp.float32)).sum()

        shape = (len(devices), 2, 2048, size)
        given = ShapeDtypeStruct(shape, jnp.bfloat16, sharding=mesh.row_sharding(0))
        step = jax.jit(jax.grad(loss, (0, 1, 2))).trace(given, given, given)
        compiled = step.lower(lowering_platforms=("tpu",)).compile()
        return compiled.cost_analysis()["bytes accessed"]

    for size in (40, 64, 128, 160):
        kernel = mesh.splash_attention()
        assert moved(kernel, size) < moved(None, size) / 2, (name, size)
        assert kernel.forward_flops == [4 * len(devices) * 2 * 2048 * 2048 * size]
"""


@pytest.fixture
def libtpu() -> None:
    lacking = "" if tpu.compiler_folder() else "there is no libtpu: make setup-plan"
    if reason := chips.not_selected("jax") or chips.unless_required("libtpu", lacking):
        pytest.skip(reason)


def ask_compiler(program: str, *slices: str) -> None:
    paths = [os.environ.get("PYTHONPATH", ""), str(tpu.compiler_folder()), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", program, *slices], check=True, env=environment)


@pytest.mark.soak
@pytest.mark.usefixtures("libtpu")
def test_with_libtpu_the_step_is_compiled_for_the_slice(
    least_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path, least_model, ema_decay=0.9, global_batch_size=8)
    show_plan(recipe, "v5e-1", None, search=False, as_json=True)
    facts, _ = _read(capsys)
    assert facts["compiler"] == f"libtpu {tpu.compiler_version()}" and facts["fits"]
    of_pictures = 8 * facts["flops_per_image"]
    assert 0.9 * of_pictures < facts["flops"] < 1.5 * of_pictures
    state = 4 * 4 * facts["parameters"]  # weights, moments and average, laid out in tiles
    assert state < facts["argument_bytes"] < facts["total_bytes"] < facts["hbm_bytes"]
    assert facts["temporary_bytes"] > 0 and facts["step_seconds"] > 0
    assert "as the compiler estimates" in facts["assumption"]


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_the_compiler_knows_slices_of_every_kind() -> None:
    """One chip, chips of two cores, several hosts, arrays sharded over part of a row."""
    slices = ["v4-8:2", "v4-32:4", "v5e-1:1", "v5e-8:4", "v5p-128:8", "v6e-16:2", "v6e-64:4"]
    ask_compiler(MESHES, *slices)


@pytest.mark.soak
@pytest.mark.usefixtures("libtpu")
def test_attention_kernels_compile_for_each_generation_and_move_fewer_bytes() -> None:
    ask_compiler(ATTENTION, "v4-8", "v5e-4", "v5p-8", "v6e-4")


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_the_compilers_memory_limit_is_that_of_our_table() -> None:
    """It refuses a larger program and compiles one that fits; complex arguments have a time."""
    ask_compiler(REFUSED, "v4-8", "v5e-4", "v5p-8", "v6e-4")
