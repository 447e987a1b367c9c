"""The device layer on an emulated Ascend host; torch_npu itself does not load without CANN."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtimes.base import WrongInput
from runtimes.torch.device import choose_device

HOST = Path(__file__).with_name("npu_host")


def on_host(code: str, path: Path | None = HOST) -> Any:
    """What `code` leaves in `found`, in a process that finds torch_npu on `path`."""
    begin = "" if path is None else f"import sys; sys.path.insert(0, {str(path)!r})\n"
    begin += "from runtimes.torch import device; from runtimes.ranks import Ranks; import torch\n"
    end = "\nimport json; print(json.dumps(found))"
    command = [sys.executable, "-c", begin + code + end]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_each_process_has_an_npu_of_its_own() -> None:
    found = on_host(
        "ranks = Ranks(rank=3, world=4, local_rank=1, local_world=2)\n"
        "first = device.choose_device('npu')\n"
        "found = [str(first), device.describe(first), device.peak_bytes(first),\n"
        "         str(device.choose_device('npu:1')), str(device.choose_device('npu', ranks))]"
    )
    assert found == ["npu", "npu:0 (Ascend910B2)", 5 * 2**30, "npu:1", "npu:1"]


def test_more_processes_than_npus_are_refused() -> None:
    found = on_host(
        "from configs.training import Train\n"
        "try: device.check(Train(device='npu', processes=4, global_batch_size=4))\n"
        "except Exception as error: found = [type(error).__name__, str(error)]"
    )
    assert found[0] == "WrongInput"
    assert "4 processes want" in found[1] and "this machine has 2" in found[1]


def test_weights_lie_as_torch_npu_takes_them() -> None:
    found = on_host(
        "from runtimes.torch.layout import memory_format\n"
        "devices = torch.device('cpu'), device.choose_device('npu')\n"
        "found = [str(memory_format(device, sharded=False)) for device in devices]"
    )
    assert found == ["torch.channels_last", "torch.contiguous_format"]


def test_a_denoiser_gets_the_fused_attention() -> None:
    found = on_host(
        "from diffusers import UNet2DConditionModel\n"
        "from runtimes.torch.npu import attend\n"
        "unet = UNet2DConditionModel(block_out_channels=(8, 8), norm_num_groups=4,\n"
        "    layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,\n"
        "    down_block_types=('DownBlock2D', 'CrossAttnDownBlock2D'),\n"
        "    up_block_types=('CrossAttnUpBlock2D', 'UpBlock2D'))\n"
        "attend(unet, torch.device('cpu'))\n"
        "kinds = lambda: sorted({type(p).__name__ for p in unet.attn_processors.values()})\n"
        "found = [kinds()]\n"
        "attend(unet, device.choose_device('npu'))\n"
        "found.append(kinds())"
    )
    assert found == [["AttnProcessor2_0"], ["AttnProcessorNPU"]]


def test_the_device_layer_does_not_import_it_unasked() -> None:
    found = on_host(
        "import sys\n"
        "device.choose_device('auto'); device.probe(); device.free_memory()\n"
        "found = 'torch_npu' in sys.modules"
    )
    assert found is False


def test_without_it_the_message_says_what_is_missing() -> None:
    with pytest.raises(WrongInput, match=r"torch_npu does not load: .*no CANN: install it"):
        choose_device("npu")
