"""What only device hpu has, on an emulated Gaudi host (tests/hpu_host/README.md): graphs, the host
that does not wait, fused kernels, casts. Each test runs a process of such a host."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import pytest

from configs.training import Train
from runtimes.base import WrongInput
from runtimes.job import TrainJob, write_job
from runtimes.torch.device import choose_device
from runtimes.torch.hpu import check

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).with_name("driver.py")
MakeJob = Callable[..., TrainJob]
WriteLatents = Callable[..., str]
MODES = ("eager", "lazy")
STEPS, LOGGED, SAVED = 50, 10, 20
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "log_every": LOGGED,
    "checkpoint_every": SAVED,
    "lr_schedule": "cosine",
    "warmup_steps": 5,
    "ema_decay": 0.9,
    "max_grad_norm": 0.5,
}


@pytest.fixture(scope="module", autouse=True)
def _emulated() -> None:
    if reason := chips.reason_to_skip("hpu-lazy"):
        pytest.skip(reason)


def on_host(mode: str, *command: str) -> Any:
    """What a process of an emulated Gaudi host prints last."""
    with chips.standing_in(f"hpu-{mode}"):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=600, env=os.environ
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def code(mode: str, lines: str) -> Any:
    """What `lines` leave in `found`."""
    begin = (
        "import runtimes.torch, torch, json\n"
        "from configs.training import Hpu, Train\n"
        "from runtimes.torch.device import open_chip\n"
        f"chip = open_chip('hpu', settings=Hpu(mode={mode!r}))\n"
        "from hpu_emulator import graphs, watch\n"
        "def refused(do):\n"
        "    try: do()\n"
        "    except (RuntimeError, AssertionError) as error: return str(error).splitlines()[0]\n"
    )
    return on_host(mode, "-c", begin + lines + "\nprint(json.dumps(found))")


def train(mode: str, job: TrainJob, folder: Path, *arguments: str) -> Any:
    write_job(job, folder / "job.json")
    return on_host(mode, str(DRIVER), str(folder / "job.json"), *arguments)


@pytest.fixture
def one_size(write_latents: WriteLatents, tmp_path: Path) -> str:
    """Latents of one bucket."""
    return write_latents(tmp_path / "one", [{"train/8x8": 9}])


def test_the_emulator_notices_what_a_gaudi_would_not_forgive() -> None:
    found = code(
        "eager",
        "x, on_host = torch.ones(4, 4, device='hpu'), torch.ones(4, 4)\n"
        "found = [str((x @ x).device)]\n"
        "found += [refused(lambda: x + on_host), refused(lambda: torch.mm(x, on_host))]\n"
        "with watch.no_host_syncs():\n"
        "    found += [refused(lambda: x.sum().item()), refused(x.cpu), refused(x.nonzero)]\n"
        "with watch.no_new_graphs():\n"
        "    found += [refused(lambda: x @ x), refused(lambda: x[:2] @ x)]\n"
        "    found.append(refused(lambda: x * 0.3))\n"
        "def product():\n"
        "    with watch.casts('BFloat16'): x @ x\n"
        "found.append(refused(product))\n"
        "with torch.autocast('hpu', torch.bfloat16): found.append(refused(product))\n",
    )
    assert found[0] == "hpu:0"
    assert all("on the same device" in words for words in found[1:3])
    assert all("the host waits" in words for words in found[3:6])
    assert found[6] is None
    assert all("did not have before" in words for words in found[7:9])
    assert "Float" in found[9] and found[10] is None


def test_in_lazy_mode_a_number_in_a_graph_is_another_graph() -> None:
    found = code(
        "lazy",
        "x = torch.ones(4, 4, device='hpu')\n"
        "def step(factor, rows=4):\n"
        "    (x[:rows] * factor).sum(); chip.cut()\n"
        "chip.cut(); step(0.5)\n"
        "with watch.no_new_graphs():\n"
        "    found = [refused(lambda: step(*given)) for given in ((0.5,), (0.3,), (0.5, 2))]\n",
    )
    assert found[0] is None
    assert "a new graph" in found[1] and "a new graph" in found[2]


@pytest.mark.parametrize(("mode", "fused"), [("lazy", True), ("lazy", False), ("eager", True)])
def test_fifty_steps_are_three_graphs_and_never_wait(
    mode: str, fused: bool, make_job: MakeJob, one_size: str, tmp_path: Path
) -> None:
    """With a schedule, weight decay, an average and checkpoints."""
    hpu = {"mode": mode, "fused": fused}
    job = replace(make_job(device="hpu", hpu=hpu, **COMMON), latents=one_size)
    found = train(mode, job, tmp_path, "2")
    loading, first, *_, last = found["compiled"]
    assert last == first > loading
    if mode == "lazy":
        assert last - loading <= 3
    reported = {n for n in range(1, STEPS + 1) if n % LOGGED == 0 or n % SAVED == 0}
    waited = {n for n, syncs in enumerate(found["syncs"], start=1) if syncs}
    assert waited == reported - {STEPS}
    told = found["figures"][-1]
    assert told["graphs"] == last and told["compile_seconds"] > 0
    assert told["device_memory_bytes"] > told["memory_bytes"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_what_products_are_computed_in(
    mode: str, make_job: MakeJob, one_size: str, tmp_path: Path
) -> None:
    job = make_job(device="hpu", hpu={"mode": mode}, steps=2, compute_dtype="bfloat16")
    train(mode, replace(job, latents=one_size), tmp_path)


def test_hpu_graphs_are_recorded_once_a_shape(make_job: MakeJob, tmp_path: Path) -> None:
    """Two buckets; the casts of one step are not kept for the next."""
    hpu = {"mode": "lazy", "graphs": True}
    job = make_job(device="hpu", hpu=hpu, steps=8, compute_dtype="bfloat16", **{"ema_decay": 0.9})
    found = train("lazy", job, tmp_path)
    assert found["recorded"] == 2


@pytest.mark.parametrize(("mode", "guidance"), [("lazy", 1.0), ("lazy", 3.0), ("eager", 3.0)])
def test_drawing_records_one_graph_and_its_replays_are_no_ones_past(
    mode: str, guidance: float, tiny_sd: Path
) -> None:
    """By HPU graphs or torch.compile. PNDM keeps what the denoiser gave in steps before, which a
    replay writes over."""
    found = code(
        mode,
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from runtimes.torch.generate import Sampler\n"
        "from runtimes.torch.models import load_denoiser\n"
        f"folder = Path({str(tiny_sd)!r})\n"
        "sampler = dict(seed=3, scheduler='pndm', num_inference_steps=6, height=None, width=None,\n"
        f"    guidance_scale={guidance}, batch_size=2)\n"
        "def drawn(chip):\n"
        "    unet = load_denoiser(folder / 'unet').to(chip.device).eval().requires_grad_(False)\n"
        "    chip.prepare_drawing(unet)\n"
        "    pipe = Sampler(folder, {'unet': unet}, chip)\n"
        "    return pipe.draw(['a', 'b', 'c'], sampler, first=0)\n"
        "one, other = (drawn(c).astype(int) for c in (chip, open_chip('cpu')))\n"
        "found = [len(graphs.recorded), int(abs(one - other).max()), len(one)]\n",
    )
    assert found == [1, 0, 3]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compile": True, "hpu": {"mode": "lazy"}}, "train.compile is for mode eager"),
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
def test_what_the_modes_cannot_do_is_said_in_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongInput, match=words):
        check(Train(device="hpu", **settings))


def test_torch_compile_is_given_habana_s_backend(
    make_job: MakeJob, one_size: str, tmp_path: Path
) -> None:
    job = make_job(device="hpu", hpu={"mode": "eager"}, steps=3, compile=True)
    found = train("eager", replace(job, latents=one_size), tmp_path)
    assert found["recorded"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_fused_kernels_follow_the_shared_update(mode: str) -> None:
    """Two groups of learning rates, clipping, decay, an average; gradients of one and of 1e-7 times
    that, where epsilon is felt, which FusedAdamW does not correct by itself."""
    found = code(
        mode,
        "from runtimes.torch.update import Update\n"
        "from runtimes.torch.chip import Chip\n"
        "names = ('unet.a', 'unet.b', 'text_encoder.c')\n"
        "common = dict(weight_decay=0.1, ema_decay=0.9, text_encoders=True, learning_rate=1e-2,\n"
        "    text_encoder_learning_rate=1e-3, max_grad_norm=2.0, hpu=Hpu(mode=None))\n"
        "def weights(where):\n"
        "    draw = torch.Generator().manual_seed(0)\n"
        "    drawn = (torch.randn(5, 7, generator=draw).to(where) for _ in names)\n"
        "    return dict(zip(names, map(torch.nn.Parameter, drawn)))\n"
        "def furthest(scale):\n"
        "    ours, plain = weights('hpu'), weights('cpu')\n"
        "    on_hpu = Update(ours, Train(**common), None, chip)\n"
        "    on_cpu = Update(plain, Train(**common))\n"
        "    draw, norms = torch.Generator().manual_seed(1), []\n"
        "    for step in range(12):\n"
        "        for name in names:\n"
        "            plain[name].grad = scale * torch.randn(5, 7, generator=draw)\n"
        "            ours[name].grad = plain[name].grad.to('hpu')\n"
        "        rate = 1e-2 * (step + 1) / 12\n"
        "        norms.append([float(on_hpu.apply(rate)), float(on_cpu.apply(rate))])\n"
        "    one, other = on_hpu.state(), on_cpu.state()\n"
        "    def apart(g): return max(float(abs(one[g][n] - other[g][n]).max()) for n in names)\n"
        "    far = {g: apart(g) for g in one}\n"
        "    return max(abs(a / b - 1) for a, b in norms), far\n"
        "found = [furthest(1.0), furthest(1e-7)]\n",
    )
    for norm, far in found:
        assert norm < 1e-5 and set(far) == {"weights", "exp_avg", "exp_avg_sq", "ema"}
        assert all(distance < 2e-6 for distance in far.values()), far


def test_the_recipe_cache_lies_in_the_store(tmp_path: Path) -> None:
    found = on_host(
        "lazy",
        "-c",
        "import runtimes.torch, os, json\n"
        "from configs.training import Hpu\n"
        "from runtimes.torch.device import open_chip\n"
        f"chip = open_chip('hpu:3', settings=Hpu(), compiled={str(tmp_path)!r})\n"
        "names = ('PT_HPU_RECIPE_CACHE_CONFIG', 'HLS_MODULE_ID', 'PT_HPU_LAZY_MODE')\n"
        "print(json.dumps([str(chip.device), *map(os.environ.get, names)]))",
    )
    folder = tmp_path / "hpu-1.23.0+emulated"
    assert found == ["hpu", f"{folder},false,1024,false", "3", "1"]
    assert folder.is_dir()


def test_habana_frameworks_is_not_imported_unasked() -> None:
    found = on_host(
        "eager",
        "-c",
        "import sys, json\n"
        "from runtimes.torch import device, generate, runtime\n"
        "device.choose_device('auto'); device.free_memory()\n"
        "print(json.dumps('habana_frameworks.torch' in sys.modules))",
    )
    assert found is False


def test_without_it_the_message_says_what_to_install() -> None:
    with pytest.raises(WrongInput, match=r"device hpu: .*take Intel's container \(deploy/gaudi\)"):
        choose_device("hpu")
