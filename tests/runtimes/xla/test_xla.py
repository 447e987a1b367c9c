"""What only runtime xla has: one compilation, nothing on the host, state in parts on the devices.

XLA counts in its own process: each test calls functions of a driver in a process of the runtime's
environment, on four virtual devices of the CPU.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import chips
import pytest
from driver_process import DriverProcess
from jobs import SAMPLER
from safetensors import safe_open
from tolerances import LOSS, NORM
from training import losses, norms, train

from runtimes.process.job import TrainJob
from runtimes.registry import interpreter

pytestmark = pytest.mark.slow
MakeJob = Callable[..., TrainJob]
TinyModel = Callable[[str], Path]
FAMILIES = ("sd", "sdxl")
COMMON: dict[str, Any] = {
    "global_batch_size": 8,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 5,
    "ema_decay": 0.9,
    "logging_steps": 5,
    "fsdp": 2,
}
ONE_SIZE, TWO_SIZES = {"train/8x8": 9}, {"train/8x8": 9, "train/4x12": 9}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    """A process in the runtime's environment."""
    chips.require("xla")
    driver, folder = Path(__file__).with_name("driver.py"), tmp_path_factory.mktemp("xla")
    variables = {**chips.ENVIRONMENT["xla"], "OMP_NUM_THREADS": "1"}
    with closing(DriverProcess(driver, interpreter("xla"), folder, variables)) as process:
        yield process


@pytest.fixture
def make_job(
    make_job: MakeJob, write_latents: Callable[..., str], tiny_model: TinyModel, tmp_path: Path
) -> MakeJob:
    """On pictures of one size: each is a program of its own. On the least model: a larger one takes
    XLA longer, and is in the conformance suite."""
    url, model = write_latents(tmp_path / "store", [ONE_SIZE]), tiny_model("least-sdxl")
    return partial(make_job, runtime="xla", latents=url, model=str(model))


@pytest.mark.extended
@pytest.mark.parametrize(
    "sizes", [ONE_SIZE, pytest.param(TWO_SIZES, marks=pytest.mark.soak)], ids=["one", "two"]
)
def test_a_size_of_pictures_is_compiled_once_and_a_resume_compiles_nothing(
    sizes: dict[str, int],
    driver: DriverProcess,
    make_job: MakeJob,
    write_latents: Callable[..., str],
    tmp_path: Path,
) -> None:
    """With a learning rate that changes, an average, checkpoints, metrics and a profile; the step
    is partitioned over four devices, and the state lies in parts."""
    settings = {**COMMON, "steps": 12, "checkpointing_steps": 4, "checkpoints_total_limit": 9}
    made = make_job(**settings, profile={"start": 9, "steps": 1})
    job, dump = replace(made, latents=write_latents(tmp_path / "sizes", [sizes])), tmp_path / "hlo"
    found = driver.call("train_and_dump", asdict(job), str(dump), 8)
    assert found["began"] == [0, 8]
    first, second = found["by_step"]
    assert (len(first), len(second)) == (12, 4)
    assert sum(first) == len(sizes) and first[0] == 1, first
    assert found["left"][1] == found["left"][0]
    whole, again = found["compiles"]
    assert again == whole <= len(sizes) + 2  # where the average begins, and the state is fetched
    assert found["fallbacks"] == []
    for group in ("weights", "exp_avg", "exp_avg_sq", "ema"):
        assert f"{group} unet.conv_in.weight" in found["shared"]
    assert list(Path(job.work, "profile").glob("**/*.xplane.pb"))

    headers = [path.open().readline() for path in dump.glob("*after_optimizations.txt")]
    assert any("num_partitions=4" in header for header in headers)


@pytest.mark.soak
def test_what_is_compiled_has_the_same_key_in_another_process(
    driver: DriverProcess, make_job: MakeJob, tmp_path: Path
) -> None:
    """On a CPU, XLA writes its cache and finds what is there, but cannot load it."""
    kept = tmp_path / "compiled"
    job = replace(make_job(steps=1, **{**COMMON, "lr_warmup_steps": 0}), compiled=str(kept))
    assert driver.call("train", asdict(job))["cache"]["PersistentCacheMiss"] > 0
    names = sorted(path.name for path in kept.glob("*/*"))
    again = replace(job, work=str(tmp_path / "again"), out=str(tmp_path / "again"))
    found = driver.call("train", asdict(again))["cache"]
    assert found.get("PersistentCacheMiss", 0) == 0
    assert found["PersistentCacheDeserializeFailure"] == len(names) > 0
    assert sorted(path.name for path in kept.glob("*/*")) == names


@pytest.mark.extended
@pytest.mark.parametrize(
    "model", ["least-sd", *(pytest.param(f"tiny-{f}", marks=pytest.mark.soak) for f in FAMILIES)]
)
def test_pictures_are_compiled_once_and_are_those_of_diffusers(
    model: str, driver: DriverProcess, tiny_model: TinyModel
) -> None:
    """For every scheduler, in batches that must be filled up for four devices; other prompts give
    pictures that are far from them."""
    found = driver.call("draw", str(tiny_model(model)))
    assert found["fallbacks"] == []
    assert set(found["drawn"]) == {
        "EulerDiscreteScheduler",
        "DDIMScheduler",
        "DPMSolverMultistepScheduler",
    }
    for name, one in found["drawn"].items():
        furthest = max(one["furthest"], one["furthest of others"])
        assert furthest <= 1e-4 < 1e-2 < one["by prompts"], (name, one)
        assert one["second"] == 0, (name, one)
    assert sum(one["first"] for one in found["drawn"].values()) > 0  # schedulers may share one


def test_unequal_micro_batches_train_as_one_batch_of_torch(
    driver: DriverProcess, make_job: MakeJob
) -> None:
    settings = {"steps": 2, "global_batch_size": 5, "logging_steps": 1}
    expected = make_job("torch", **settings, runtime="torch")
    train(expected)
    job = make_job(**settings, micro_batch_size=3)
    driver.call("train", asdict(job))
    assert losses(job) == pytest.approx(losses(expected), rel=LOSS)
    assert norms(job) == pytest.approx(norms(expected), rel=NORM)


def test_rows_of_a_host_are_put_in_their_order(driver: DriverProcess) -> None:
    """Devices of a host need not have the lowest numbers, nor lie in the order of its rows."""
    assert driver.call("ordered") == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("devices", [1, 4])
def test_rows_come_back_as_they_were_sent(devices: int, driver: DriverProcess) -> None:
    """One device has them whole, and says so otherwise than several do."""
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    assert driver.call("sent_and_fetched", devices) == [devices, rows]


@pytest.mark.parametrize(
    ("shape", "rows"), [((8, 3), [0, 8]), ((3, 8), [0, 3]), ((3, 5), []), ((4,), [0, 4])]
)
def test_an_array_is_loaded_from_the_rows_of_this_host(
    shape: tuple[int, ...], rows: list[int], driver: DriverProcess
) -> None:
    """Whether it is sharded along its rows, along its columns, or not at all."""
    index, values, compiled = driver.call("loaded", shape)
    assert index == rows and compiled == 0
    assert values == list(range(math.prod(shape)))


def test_a_host_reads_the_rows_of_its_devices_alone(driver: DriverProcess) -> None:
    assert driver.call("rows_of_hosts") == [[0, 4], [4, 8]]


def test_sampling_models_leave_the_devices(driver: DriverProcess, make_job: MakeJob) -> None:
    assert driver.call("left_after_sampling", asdict(make_job())) == [True, False]


@pytest.mark.extended
def test_half_precision_stays_near(driver: DriverProcess, make_job: MakeJob) -> None:
    """With recomputed activations and trained text encoders: farther than float32, and not far."""
    settings = {"steps": 4, "logging_steps": 1, "global_batch_size": 8, "train_text_encoder": True}
    near = make_job("near", **settings, runtime="torch")
    train(near)
    settings |= {"mixed_precision": "bf16", "sample_every_n_steps": 2}
    job = make_job("half", **settings, gradient_checkpointing="blocks")
    driver.call("train", asdict(replace(job, sample_prompts=("a",), sampler=SAMPLER)))
    assert len(list(Path(job.work, "samples").iterdir())) == 2
    apart = [abs(ours / theirs - 1) for ours, theirs in zip(losses(job), losses(near), strict=True)]
    assert 1e-4 < max(apart) < 2e-2


@pytest.mark.extended
def test_frozen_text_encoders_in_the_step_replace_stored_embeddings(
    driver: DriverProcess, make_job: MakeJob, both_forms: Callable[..., tuple[str, str]]
) -> None:
    embeds, ids = both_forms(Path(make_job().model))
    settings = {"steps": 3, "caption_dropout_rate": 0.3, "global_batch_size": 8}
    stored = make_job("embeddings", latents=embeds, **settings)
    encoded = replace(make_job("token_ids", **settings), latents=ids, text_dtype="float32")
    for job in (stored, encoded):
        found = driver.call("train", asdict(job))
        assert not found["fallbacks"]
    assert losses(encoded) == pytest.approx(losses(stored), rel=LOSS)


@pytest.mark.parametrize("fsdp", [pytest.param(1, marks=pytest.mark.extended), 4])
def test_devices_gather_weights_and_no_activations(
    fsdp: int, driver: DriverProcess, make_job: MakeJob, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """With recomputation; sharded weights of a block are gathered in both passes."""
    settings = {"fsdp": fsdp, "gradient_checkpointing": "blocks", "lr_warmup_steps": 0}
    job = make_job(steps=1, **{**COMMON, **settings})
    driver.call("train_and_dump", asdict(job), str(tmp_path / "hlo"))
    programs = [path.read_text() for path in tmp_path.glob("hlo/*after_optimizations.txt")]
    shapes = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", max(programs, key=len))
    weights = Path(job.model, "unet", "diffusion_pytorch_model.safetensors")
    with safe_open(weights, "np") as file:
        of = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    sizes = {math.prod(shape) for shape in of.values()}
    assert {math.prod(map(int, shape.split(","))) for shape in shapes} <= sizes
    convolutions = [name for name, shape in of.items() if shape == (16, 16, 3, 3)]
    # diffusers checkpoints all residual blocks but the first one of the middle.
    twice = [name for name in convolutions if not name.startswith("mid_block.resnets.0.")]
    assert 0 < len(twice) < len(convolutions)
    expected = len(twice) + len(convolutions) if fsdp > 1 else 0
    assert shapes.count("16,16,3,3") == expected


@pytest.mark.parametrize("is_half", [False, True])
def test_replaced_operators_equal_those_of_pytorch(is_half: bool, driver: DriverProcess) -> None:
    """Outputs and gradients of norms and of upsampling; none is computed on the host."""
    found = driver.call("replaced_operators", is_half)
    assert found["fallbacks"] == []
    for name, apart in found["apart"].items():
        assert apart < (5e-2 if is_half else 2e-5), (name, apart)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "size"),
    [(512, 600, 40), pytest.param(600, 512, 64, marks=pytest.mark.extended)],
)
def test_the_attention_kernel_and_its_gradients_equal_the_plain_formula(
    queries: int, keys: int, size: int, is_padded: bool, driver: DriverProcess
) -> None:
    """By Pallas' interpreter, on rows that four devices share; captions are padded."""
    apart, lowered = driver.call("attended", queries, keys, size, is_padded)
    assert apart < 5e-5 and lowered == 1


@pytest.mark.extended
def test_attention_of_a_vae_or_of_short_captions_uses_no_kernel(driver: DriverProcess) -> None:
    assert driver.call("attended", 512, 77, 40, True)[1] == 0
    assert driver.call("attended", 512, 512, 257, False)[1] == 0


def test_a_tpu_runs_one_kernel_in_each_pass(driver: DriverProcess) -> None:
    """The backward pass does not run the forward kernel again."""
    assert driver.call("kernels_of_a_tpu") == [1, 1]


def test_autocast_attends_with_float32_queries_and_half_values(driver: DriverProcess) -> None:
    assert driver.call("attended_in_autocast") == ["torch.bfloat16", "torch.float32"]
