"""What only device npu has, on an emulated Ascend host (tests/npu_host/README.md); torch_npu itself
does not load without CANN. What it has in common with others is in the conformance suite."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chips
import pytest

from configs.training import Train
from runtimes.base import WrongInput
from runtimes.job import TrainJob, write_job
from runtimes.torch.device import choose_device

pytestmark = pytest.mark.slow
emulated = pytest.mark.skipif(bool(chips.why_not("npu")), reason="needs a C++ compiler")
TESTS = Path(__file__).parents[2]


def on_host(*command: str) -> Any:
    """What a process of an emulated Ascend host prints last."""
    with chips.standing_in("npu"):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=600, env=os.environ
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def code(lines: str) -> Any:
    """What `lines` leave in `found`."""
    begin = "from runtimes.torch import device; from runtimes.ranks import Ranks\n"
    return on_host("-c", begin + lines + "\nimport json; print(json.dumps(found))")


@emulated
def test_each_process_has_an_npu_of_its_own() -> None:
    found = code(
        "ranks = Ranks(rank=3, world=4, local_rank=1, local_world=2)\n"
        "first, own = device.choose_device('npu'), device.choose_device('npu', ranks)\n"
        "import torch\n"
        "x = torch.ones(1024, device=first)\n"
        "found = [str(x.device), device.describe(first), device.peak_bytes(first)]\n"
        "y = torch.ones(1024, device=own)\n"
        "del y; y = torch.ones(1024, device=own)\n"
        "found += [str(y.device), device.describe(own), device.peak_bytes(own)]\n"
        "try: x + y\n"
        "except RuntimeError as error: found.append(str(error))\n"
    )
    first, own = found[:3], found[3:6]
    assert first == ["npu:0", "npu:0 (Ascend910B2 (emulated))", 4096]
    assert own == ["npu:1", "npu:1 (Ascend910B2 (emulated))", 4096]
    assert "on the same device" in found[6]


@emulated
def test_more_processes_than_npus_are_refused() -> None:
    found = code(
        "from configs.training import Train\n"
        "try: device.check(Train(device='npu', processes=4, global_batch_size=4))\n"
        "except Exception as error: found = [type(error).__name__, str(error)]"
    )
    assert found[0] == "WrongInput"
    assert "4 processes want" in found[1] and "this machine has 2" in found[1]


@pytest.fixture(scope="module")
def told(
    tiny_sd3: Path, tiny_sdxl: Path, latents_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What npu_driver.py says."""
    folder = tmp_path_factory.mktemp("npu")
    train = Train(
        steps=3,
        global_batch_size=4,
        compute_dtype="bfloat16",
        max_grad_norm=0.5,
        ema_decay=0.9,
        device="npu",
    ).model_dump(mode="json")
    job = TrainJob("torch", str(tiny_sdxl), latents_url, train, str(folder), str(folder))
    write_job(job, folder / "job.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=":")
        driver = str(Path(__file__).with_name("npu_driver.py"))
        return on_host(driver, str(tiny_sd3), str(folder / "job.json"))


@emulated
def test_a_denoiser_attends_by_the_fused_operator_in_half_precision(told: Any) -> None:
    found = told["attention"]
    assert found["calls"] == {"torch.float32": 0, "torch.bfloat16": found["layers"]}
    assert max(found["apart"]) < 0.01  # bfloat16 keeps 1/256


@emulated
def test_geglu_is_not_approximated(told: Any) -> None:
    found = told["geglu"]
    assert max(found["npu"], found["cpu"]) < 1e-5 < 1e-4 < found["diffusers"]


@emulated
def test_sd3_predicts_as_on_the_cpu(told: Any) -> None:
    assert max(told["sd3"]) < 1e-5


@emulated
def test_no_step_waits_for_the_device(told: Any) -> None:
    """Nor is any product computed in another type than bfloat16: the driver would have failed."""
    found = told["steps"]
    assert found["devices"] == ["npu:0"]
    assert len(found["losses"]) == 3 and min(found["losses"]) > 0
    assert found["flops"] > 0


@emulated
def test_torch_npu_is_not_imported_unasked() -> None:
    found = code(
        "import sys\n"
        "device.choose_device('auto'); device.probe(); device.free_memory()\n"
        "found = 'torch_npu' in sys.modules"
    )
    assert found is False


def test_without_it_the_message_says_what_is_missing() -> None:
    with pytest.raises(WrongInput, match=r"torch_npu does not load: .*no CANN: install it"):
        choose_device("npu")
