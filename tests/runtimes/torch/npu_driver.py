"""Functions that test_npu.py calls in a process of an emulated Ascend host."""

import copy
import math
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import jobs
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.families import FAMILIES
from runtimes.process.job import TrainJob
from runtimes.process.launcher import Ranks
from runtimes.torch import device as devices
from runtimes.torch import kernels
from runtimes.torch_models.loading import load_denoiser
from runtimes.torch_models.network import Network

NPU, CPU = devices.choose_device("npu"), devices.choose_device("cpu")
import torch_npu  # noqa: E402  # lies beside its host
from device_emulator import watch  # noqa: E402


def of_each() -> dict[str, Any]:
    """What two processes of a host compute on, and what mixing that says."""
    ranks = Ranks(rank=3, world=4, local_rank=1, local_world=2)
    found = {"tensors": [], "words": [], "peaks": []}
    tensors = []
    for device in (NPU, devices.choose_device("npu", ranks)):
        tensors.append(torch.ones(1024, device=device))
        torch.ones(512, device=device)  # and gone
        found["tensors"].append(str(tensors[-1].device))
        found["words"].append(devices.describe(device))
        found["peaks"].append(devices.peak_bytes(device))
    return {**found, "mixed": said(lambda: tensors[0] + tensors[1])}


def too_many() -> str:
    """What is said to four processes."""
    settings = Train(device="npu", processes=4, global_batch_size=4)
    return said(lambda: devices.check(settings))


def said(do: Callable[[], object]) -> str:
    """What it is refused with."""
    try:
        do()
    except (RuntimeError, Refused) as error:
        return str(error)
    return ""


def unet() -> Any:
    """With two layers of attention, each followed by one of cross attention and a GEGLU."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        mid_block_type=None,
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def placed(family: str, part: str, denoiser: Any, device: torch.device) -> Network:
    """A copy of a denoiser on a device, as a job has it."""
    network = Network(FAMILIES[family], {part: copy.deepcopy(denoiser)})
    network.place(device, torch.contiguous_format)
    kernels.enable_npu_attention(network.denoiser, device)
    return network


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def apart(on: Callable[[torch.device], list[torch.Tensor]]) -> list[float]:
    """How far each result on the NPU is from the CPU's, relative to its size."""
    pairs = zip(on(NPU), on(CPU), strict=True)
    return [float((npu.float().cpu() - cpu.float()).norm() / cpu.norm()) for npu, cpu in pairs]


def attention() -> dict[str, Any]:
    """Of one layer in bfloat16, forward and backward; and the calls in a whole UNet."""
    base = unet()

    def layer(device: torch.device) -> list[torch.Tensor]:
        network = placed("sd", "unet", base, device)
        attend = network.denoiser.down_blocks[1].attentions[0].transformer_blocks[0].attn2
        states = (8 * normal(2, 9, 16)).to(device).requires_grad_()
        texts = (8 * normal(2, 5, 8)).to(device).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            output = attend(states, encoder_hidden_states=texts)
        (output * normal(2, 9, 16).to(device)).sum().backward()
        return [output.detach(), states.grad, texts.grad]

    calls = {}
    network = placed("sd", "unet", base, NPU)
    given = [x.to(NPU) for x in (normal(2, 4, 8, 8), torch.tensor([3, 9]), normal(2, 5, 8))]
    for dtype in (torch.float32, torch.bfloat16):
        before = torch_npu.calls["npu_fusion_attention"]
        with torch.autocast("npu", torch.bfloat16, enabled=dtype != torch.float32):
            network(given[0], given[1], {"prompt_embeds": given[2]})
        calls[str(dtype)] = torch_npu.calls["npu_fusion_attention"] - before
    return {"apart": apart(layer), "calls": calls, "layers": len(base.attn_processors)}


def geglu() -> dict[str, Any]:
    """A layer of ours and one of diffusers' own, each against the formula."""
    base, inputs = unet(), 3 * normal(2, 9, 16)

    @torch.no_grad()
    def furthest(layer: GEGLU, device: torch.device) -> float:
        states, gate = layer.proj(inputs.to(device)).cpu().chunk(2, -1)
        exact = states * gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
        return float((layer(inputs.to(device)).cpu() - exact).abs().max())

    found = {}
    for device in (NPU, CPU):
        modules = placed("sd", "unet", base, device).modules()
        found[device.type] = furthest(next(m for m in modules if isinstance(m, GEGLU)), device)
    theirs = next(m for m in base.to(NPU).modules() if isinstance(m, GEGLU))
    return {**found, "diffusers": furthest(theirs, NPU)}


def sd3(folder: str) -> list[float]:
    """The prediction of a transformer."""
    base = load_denoiser(Path(folder) / "transformer")
    config = base.config

    def predict(device: torch.device) -> list[torch.Tensor]:
        conditioning = {
            "prompt_embeds": normal(2, 5, config.joint_attention_dim).to(device),
            "pooled_prompt_embeds": normal(2, config.pooled_projection_dim).to(device),
        }
        noisy, levels = normal(2, config.in_channels, 8, 8), torch.tensor([300.0, 700.0])
        network = placed("sd3", "transformer", base, device)
        return [network(noisy.to(device), levels.to(device), conditioning).detach()]

    return apart(predict)


def steps(given: dict[str, Any]) -> dict[str, Any]:
    """Of a job: where its weights are, and its losses, read once all steps are done."""
    job = TrainJob(**given)
    runtime, batch = jobs.start(job)
    outputs = []
    for step in range(job.train["steps"]):
        ahead = runtime.put(batch(step))
        with watch.no_host_syncs(), watch.casts("BFloat16"):
            outputs.append(runtime.step(ahead, 1e-3))
    return {
        "devices": sorted({str(p.device) for p in runtime._network.parameters()}),
        "losses": [float(output.loss) for output in outputs],
        "flops": runtime.flops(batch(0)),
    }


def streamed(given: dict[str, Any]) -> dict[str, Any]:
    """Of a job: losses, a digest of its adapters, and of each step blocks copied and peak bytes."""
    job = TrainJob(**given)
    runtime, batch = jobs.start(job)
    stream = runtime._stream
    outputs, copies, peaks = [], [0], []
    for step in range(job.train["steps"]):
        ahead = runtime.put(batch(step))
        torch.npu.reset_peak_memory_stats()
        with watch.no_host_syncs():  # as a copy to the host is
            outputs.append(runtime.step(ahead, 1e-2))
        peaks.append(torch.npu.max_memory_allocated())
        copies.append(stream.copies if stream else 0)
    arrays = runtime.state()["weights"]
    return {
        "losses": [float(output.loss) for output in outputs],
        "adapters": sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest(),
        "copies": [after - before for before, after in pairwise(copies)],
        "peak": max(peaks[1:]),
        "late": stream.late if stream else 0,
        "pinned": stream.arena.nbytes if stream and stream.arena.is_pinned() else 0,
    }
