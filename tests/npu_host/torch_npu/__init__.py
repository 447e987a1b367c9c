"""Of an emulated Ascend host: registers device npu with PyTorch when it is imported, as Huawei's
does; see ../README.md."""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2] / "emulator"))

from device_emulator import build, hccl  # lies there
from device_emulator.device import emulate

#: How often each operator of its own was called.
calls = Counter[str]()


def _autoload() -> None:
    """What PyTorch calls when it is imported, unless it is told not to."""


class _Kernel(torch.autograd.Function):
    """A formula computed in the device's memory at once, which the host sees nothing of."""

    @staticmethod
    def forward(ctx: Any, formula: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.formula = formula
        ctx.save_for_backward(*tensors)
        given = [build.load().on_host(each) for each in tensors]
        return formula(*given).contiguous().to(tensors[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = [build.load().on_host(each).requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.formula(*given)
        found = torch.autograd.grad(output, given, build.load().on_host(gradient))
        return None, *(each.contiguous().to(gradient.device) for each in found)


def _compute(name: str, formula: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """By the operator of that name, which has no kernel for other devices."""
    for tensor in tensors:
        if tensor.device.type != "npu":
            raise NotImplementedError(f"Could not run 'npu::{name}' on {tensor.device}")
    calls[name] += 1
    return _Kernel.apply(formula, *tensors)


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Any, ...]:
    """Attention in half precision, its softmax in float32; `atten_mask` is true where nothing is
    looked at. Of the seven results, the first alone is emulated."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"npu_fusion_attention is for half precision, not {query.dtype}")
    given = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen)
    if any(each is not None for each in given) or keep_prob != 1 or sparse_mode != 0:
        raise NotImplementedError("npu_fusion_attention: not emulated")
    heads = {"BNSD": 1, "BSND": 2}[input_layout]
    if {each.shape[heads] for each in (query, key, value)} != {head_num}:
        raise RuntimeError(f"npu_fusion_attention: not {head_num} heads")
    mask = None if atten_mask is None else build.load().on_host(atten_mask)
    formula = partial(_attention, mask=mask, scale=scale, heads=heads)
    output = _compute("npu_fusion_attention", formula, query, key, value)
    return output, None, None, None, 0, 0, 0


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    heads: int,
) -> torch.Tensor:
    queries, keys, values = (x.float().transpose(1, heads) for x in (query, key, value))
    scores = queries @ keys.transpose(-1, -2) * scale  # [B, N, S, S']
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, heads).to(query.dtype)


def npu_geglu(
    self: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, None]:
    """One half times the GELU of the other, which is approximated by tanh unless `approximate` is
    0. Of the two results, the first alone is emulated."""

    def formula(both: torch.Tensor) -> torch.Tensor:
        left, right = both.chunk(2, dim)
        plain, gate = (right, left) if activate_left else (left, right)
        return plain * functional.gelu(gate, approximate="tanh" if approximate else "none")

    return _compute("npu_geglu", formula, self), None


def npu_rms_norm(
    self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, None]:
    """Over the dimensions that gamma has. Of the two results, the first alone is emulated."""

    def formula(inputs: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(inputs, gamma.shape, gamma, epsilon)

    return _compute("npu_rms_norm", formula, self, gamma), None


emulate("npu", 2, get_device_name=lambda device=None: "Ascend910B2 (emulated)")
hccl.register("npu")
