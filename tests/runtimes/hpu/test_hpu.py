"""What only device hpu has, on an emulated Gaudi host (tests/hpu_host/README.md): graphs, the host
that does not wait, fused kernels, casts."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import chips
import pytest
from driver_process import DriverProcess
from kiln_command import python
from tolerances import GOLDEN
from training import losses

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.process.job import TrainJob
from runtimes.torch.device import choose_device
from runtimes.torch.gaudi import check

pytestmark = pytest.mark.slow
MakeJob = Callable[..., TrainJob]
WriteLatents = Callable[..., str]
MODES = ("eager", "lazy")
LOGGED, SAVED = 5, 8


@pytest.fixture(scope="module", autouse=True)
def _emulated() -> None:
    chips.require("hpu-lazy")


def make_host(mode: str, folder: Path) -> Iterator[DriverProcess]:
    """A process of an emulated Gaudi host, in one mode."""
    with chips.standing_in(f"hpu-{mode}"):
        process = DriverProcess(Path(__file__).with_name("driver.py"), sys.executable, folder)
    with closing(process):
        yield process


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    yield from make_host("eager", tmp_path_factory.mktemp("eager"))


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    yield from make_host("lazy", tmp_path_factory.mktemp("lazy"))


@pytest.fixture
def host(request: pytest.FixtureRequest, mode: str) -> DriverProcess:
    """The process in the mode of the test."""
    return request.getfixturevalue(mode)


@pytest.fixture
def make_job(make_job: MakeJob, tiny_model: Callable[[str], Path]) -> MakeJob:
    """On the least model: a larger one takes longer, and is in the conformance suite."""
    return partial(make_job, model=str(tiny_model("least-sdxl")))


@pytest.fixture
def one_size(write_latents: WriteLatents, tmp_path: Path) -> str:
    """Latents of one bucket."""
    return write_latents(tmp_path / "one", [{"train/8x8": 9}])


def test_the_emulator_notices_what_a_gaudi_would_not_forgive(eager: DriverProcess) -> None:
    found = eager.call("unforgiven")
    assert found["where"] == ["hpu:0"]
    assert all("on the same device" in words for words in found["devices"])
    assert all("the host waits" in words for words in found["waits"])
    assert found["met before"] == found["cast"] == [""]
    assert all("did not have before" in words for words in found["new"])
    assert "Float" in found["not cast"][0]


def test_in_lazy_mode_a_number_in_a_graph_is_another_graph(lazy: DriverProcess) -> None:
    same, number, shape = lazy.call("numbers_in_graphs")
    assert same == ""
    assert "a new graph" in number and "a new graph" in shape


@pytest.mark.parametrize(
    ("mode", "fused", "steps"), [("lazy", True, 50), ("lazy", False, 20), ("eager", True, 20)]
)
def test_steps_are_three_graphs_and_never_wait(
    fused: bool, steps: int, mode: str, host: DriverProcess, make_job: MakeJob, one_size: str
) -> None:
    """With a schedule, weight decay, an average and checkpoints."""
    made = make_job(
        device="hpu",
        hpu={"mode": mode, "fused": fused},
        steps=steps,
        logging_steps=LOGGED,
        checkpointing_steps=SAVED,
        lr_scheduler="cosine",
        lr_warmup_steps=5,
        ema_decay=0.9,
        max_grad_norm=0.5,
    )
    found = host.call("train", asdict(replace(made, latents=one_size)), 2)
    loading, first, *_, last = found["compiled"]
    assert last == first > loading
    if mode == "lazy":
        assert last - loading <= 3
    reported = {n for n in range(1, steps + 1) if n % LOGGED == 0 or n % SAVED == 0}
    waited = {n for n, syncs in enumerate(found["syncs"], start=1) if syncs}
    assert waited == reported - {steps}
    told = found["figures"][-1]
    assert told["graphs"] == last and told["compile_seconds"] > 0
    assert told["device_memory_bytes"] > told["memory_bytes"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_what_products_are_computed_in(
    mode: str, host: DriverProcess, make_job: MakeJob, one_size: str
) -> None:
    """The losses are farther from those of float32 than its own are, and not far."""
    kinds, found = {}, {}
    for dtype in ("float32", "bfloat16"):
        made = make_job(
            dtype,
            device="hpu",
            hpu={"mode": mode},
            steps=2,
            mixed_precision={"float32": "no", "bfloat16": "bf16"}[dtype],
        )
        job = replace(made, latents=one_size)
        kinds[dtype] = set(host.call("train", asdict(job))["products"])
        found[dtype] = losses(job)
    assert kinds == {"float32": {"Float"}, "bfloat16": {"BFloat16"}}
    near = zip(found["bfloat16"], found["float32"], strict=True)
    assert 1e-4 < max(abs(half / whole - 1) for half, whole in near) < 2e-2


@pytest.mark.parametrize("mode", MODES)
def test_frozen_text_encoders_in_the_step_replace_stored_embeddings(
    mode: str, host: DriverProcess, make_job: MakeJob, both_forms: Callable[..., tuple[str, str]]
) -> None:
    """In float32 beside a step in bfloat16, and no step waits or has a new graph."""
    settings = {"device": "hpu", "hpu": {"mode": mode}, "steps": 3, "mixed_precision": "bf16"}
    embeds, ids = both_forms(Path(make_job().model))
    stored = make_job("embeddings", latents=embeds, **settings)
    encoded = make_job("token_ids", latents=ids, text_dtype="float32", **settings)
    kinds = [set(host.call("train", asdict(job), 2)["products"]) for job in (stored, encoded)]
    assert kinds[1] - kinds[0] == {"Float"}
    assert losses(encoded) == pytest.approx(losses(stored), rel=GOLDEN["bfloat16"])


def test_hpu_graphs_are_recorded_once_a_shape(lazy: DriverProcess, make_job: MakeJob) -> None:
    """Two buckets; the casts of one step are not kept for the next."""
    hpu = {"mode": "lazy", "graphs": True}
    job = make_job(device="hpu", hpu=hpu, steps=8, mixed_precision="bf16", ema_decay=0.9)
    assert lazy.call("train", asdict(job))["recorded"] == 2


@pytest.mark.parametrize(
    ("mode", "guidance"),
    [("lazy", 1.0), ("lazy", 3.0), pytest.param("eager", 3.0, marks=pytest.mark.extended)],
)
def test_drawing_records_one_graph_and_its_replays_are_no_ones_past(
    guidance: float, mode: str, host: DriverProcess, tiny_sd: Path
) -> None:
    """By HPU graphs or torch.compile. PNDM keeps what the denoiser gave in steps before, which a
    replay writes over."""
    recorded, apart, by_prompts = host.call("draw", str(tiny_sd), guidance)
    assert recorded == 1
    assert apart == [0, 0, 0] and by_prompts > 0  # of 255 levels


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compile": "denoiser", "hpu": {"mode": "lazy"}}, "train.compile is for mode eager"),
        ({"hpu": {"graphs": True}}, "train.hpu.graphs needs mode lazy"),
        (
            {
                "hpu": {"graphs": True, "mode": "lazy"},
                "global_batch_size": 4,
                "micro_batch_size": 2,
            },
            "leave train.micro_batch_size out",
        ),
    ],
)
def test_unsupported_settings_of_the_modes_are_one_line_errors(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        check(Train(device="hpu", **settings))


@pytest.mark.extended
def test_torch_compile_is_given_habana_s_backend(
    eager: DriverProcess, make_job: MakeJob, one_size: str
) -> None:
    """What it compiles gives the numbers of operators one by one."""
    recorded, found = {}, {}
    for name, compiled in (("plain", "none"), ("compiled", "denoiser")):
        made = make_job(name, device="hpu", hpu={"mode": "eager"}, steps=3, compile=compiled)
        job = replace(made, latents=one_size)
        recorded[name] = eager.call("train", asdict(job))["recorded"]
        found[name] = losses(job)
    assert recorded["plain"] == 0 < recorded["compiled"]
    assert found["compiled"] == pytest.approx(found["plain"], rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_fused_kernels_follow_the_shared_update(mode: str, host: DriverProcess) -> None:
    """Two groups of learning rates, clipping, decay, an average; gradients of one and of 1e-7 times
    that, where epsilon is felt, which FusedAdamW does not correct by itself."""
    for scale in (1.0, 1e-7):
        norm, far = host.call("furthest", scale)
        assert norm < 1e-5 and set(far) == {"weights", "exp_avg", "exp_avg_sq", "ema"}
        assert all(distance < 2e-6 for distance in far.values()), far


UNASKED = """
import json, os, sys
from runtimes.torch import device, runtime, sampler
from configs.settings.train_parts import Hpu
device.choose_device("auto"); device.free_memory()
unasked = "habana_frameworks.torch" in sys.modules
chip = device.open_device("hpu:3", settings=Hpu(), compiled=sys.argv[1])
names = ("PT_HPU_RECIPE_CACHE_CONFIG", "HLS_MODULE_ID", "PT_HPU_LAZY_MODE")
print(json.dumps([unasked, str(chip.device), *map(os.environ.get, names)]))
"""


@pytest.mark.extended
def test_habana_frameworks_is_imported_when_asked_and_its_recipes_lie_in_the_store(
    tmp_path: Path,
) -> None:
    """In the four fields of Intel's page: the folder, kept, its size in MB, not on NFS."""
    with chips.standing_in("hpu-lazy"):
        done = python("-c", UNASKED, str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    unasked, *found = json.loads(done.stdout.splitlines()[-1])
    assert unasked is False
    folder = tmp_path / "hpu-1.23.0+emulated"
    assert found == ["hpu", f"{folder},false,1024,false", "3", "1"]
    assert folder.is_dir()


def test_without_it_the_message_says_what_to_install() -> None:
    with pytest.raises(Refused, match=r"device hpu: .*use Intel's container \(deploy/gaudi\)"):
        choose_device("hpu")
