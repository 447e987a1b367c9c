"""What only device npu has, on an emulated Ascend host (tests/npu_host/README.md); torch_npu itself
does not load without CANN. What it has in common with others is in the conformance suite."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import chips
import pytest
from driver_process import DriverProcess
from kiln_command import python

from configs.errors import Refused
from runtimes.process.job import TrainJob
from runtimes.torch.device import choose_device

MakeJob = Callable[..., TrainJob]


@pytest.fixture(scope="module")
def _emulated() -> None:
    chips.require("npu")


@pytest.fixture(scope="module")
def host(_emulated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    """A process of an emulated Ascend host."""
    with chips.standing_in("npu"):
        driver = Path(__file__).with_name("npu_driver.py")
        process = DriverProcess(driver, sys.executable, tmp_path_factory.mktemp("npu"))
    with closing(process):
        yield process


@pytest.mark.extended
@pytest.mark.slow
def test_each_process_has_an_npu_of_its_own(host: DriverProcess) -> None:
    found = host.call("of_each")
    assert found["tensors"] == ["npu:0", "npu:1"]
    assert found["words"] == [f"npu:{number} (Ascend910B2 (emulated))" for number in (0, 1)]
    assert found["peaks"] == [6144, 6144]  # bytes
    assert "on the same device" in found["mixed"]


@pytest.mark.slow
def test_more_processes_than_npus_are_refused(host: DriverProcess) -> None:
    said = host.call("too_many")
    assert "4 processes need" in said and "this machine has 2" in said


@pytest.mark.slow
def test_a_unet_attends_by_the_fused_operator_in_half_precision(host: DriverProcess) -> None:
    found = host.call("attention")
    assert found["calls"] == {"torch.float32": 0, "torch.bfloat16": found["layers"]}
    assert max(found["apart"]) < 0.01  # bfloat16 keeps 1/256


@pytest.mark.slow
def test_geglu_is_not_approximated(host: DriverProcess) -> None:
    found = host.call("geglu")
    assert max(found["npu"], found["cpu"]) < 1e-5 < 1e-4 < found["diffusers"]


@pytest.mark.slow
def test_sd3_predicts_as_on_the_cpu(host: DriverProcess, tiny_sd3: Path) -> None:
    assert max(host.call("sd3", str(tiny_sd3))) < 1e-5


@pytest.mark.slow
def test_no_step_waits_and_all_products_are_bfloat16(
    host: DriverProcess, make_job: MakeJob
) -> None:
    """The driver fails where one is not."""
    settings = {"mixed_precision": "bf16", "max_grad_norm": 0.5, "ema_decay": 0.9}
    found = host.call("steps", asdict(make_job(device="npu", steps=3, **settings)))
    assert found["devices"] == ["npu:0"]
    assert len(found["losses"]) == 3 and min(found["losses"]) > 0
    assert found["flops"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_emulated")
def test_torch_npu_is_not_imported_unasked() -> None:
    """PyTorch would, by its entry point."""
    code = (
        "import sys; from runtimes.torch import device\n"
        "device.choose_device('auto'); device.probe(); device.free_memory()\n"
        "print('torch_npu' in sys.modules)"
    )
    with chips.standing_in("npu"):
        done = python("-c", code)
    assert done.stdout == "False\n", done.stderr


def test_without_it_the_message_says_what_is_missing() -> None:
    with pytest.raises(Refused, match=r"torch_npu does not load: .*no CANN: install it"):
        choose_device("npu")
