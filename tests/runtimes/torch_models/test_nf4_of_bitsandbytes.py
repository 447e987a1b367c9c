"""4-bit layers have the codes, scales and weights of bitsandbytes, in a process that has it."""

import os
import sys
from pathlib import Path

import chips
import pytest
from kiln_command import ROOT, python

PACKAGES = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-bitsandbytes")
CODE = """
import torch
from bitsandbytes import functional
from runtimes.torch_models.quantized import NF4, Nf4Linear
for rows, columns in ((192, 128), (64, 1280)):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(rows)
        layer = torch.nn.Linear(columns, rows, bias=False).to(dtype).requires_grad_(False)
        layer.weight.view(-1)[:64] = 0
        layer.weight.view(-1)[64:128] *= 1000
        made = Nf4Linear.of(layer)
        packed, state = functional.quantize_4bit(layer.weight.data, blocksize=64, quant_type="nf4")
        assert torch.equal(made.weight.view(torch.uint8), packed.view(-1)), "codes"
        assert torch.equal(made.scale.flatten(), state.absmax), "scales"
        assert torch.equal(state.code, NF4), "values"
        assert torch.equal(made.dequantized(dtype), functional.dequantize_4bit(packed, state))
print("equal")
"""


@pytest.mark.slow
def test_codes_scales_and_weights_are_those_of_bitsandbytes() -> None:
    if not PACKAGES.is_dir():
        pytest.skip(chips.unless_required("torch", "make setup-bitsandbytes"))
    path = os.pathsep.join((str(ROOT), str(PACKAGES)))
    done = python("-c", CODE, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout.strip() == "equal", done.stderr
