"""Attention kernels are those of `train.attention`."""

import sys
from pathlib import Path

import pytest
import torch
from jobs import MakeJob, start
from tiny_models import make_text_config
from torch.nn import attention
from transformers import CLIPTextModel

from configs.errors import Refused
from runtimes.families import family_named
from runtimes.torch.kernels import FLASH_3, attention_kernel, check_attention
from runtimes.torch_models.vae_text_encoders import KERNELS, FrozenTextEncoders, encode_ids

#: Operators with the names and arguments of FlashAttention 3.
FLASH_ATTENTION_3 = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q, Tensor k, Tensor v) -> Tensor")
library.define("bwd(Tensor dout, Tensor q, Tensor k, Tensor v) -> Tensor")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that registers the operators of FlashAttention 3."""
    (tmp_path / f"{FLASH_3}.py").write_text(FLASH_ATTENTION_3)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, FLASH_3, raising=False)


def test_attention_uses_the_kernel_of_the_settings() -> None:
    with attention_kernel("math"):
        assert not torch.backends.cuda.flash_sdp_enabled()
    with attention_kernel("flash_3"):
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
    with attention_kernel("auto"):
        assert torch.backends.cuda.flash_sdp_enabled()


def test_blocks_are_recomputed_by_the_kernel_of_their_forward_pass(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kernel saves other tensors, which PyTorch's checkpoint refuses."""
    monkeypatch.setattr("runtimes.torch.device.check_on_device", lambda *_: None)
    runtime, batch = start(make_job(attention="math", gradient_checkpointing="blocks"))
    assert torch.isfinite(runtime.step(batch(0), 1e-4).grad_norm)


def test_frozen_text_encoders_may_use_any_kernel() -> None:
    """Those in float32 have no flash attention. A CPU has no `efficient` one."""
    encoders, family = FrozenTextEncoders([CLIPTextModel(make_text_config())]), family_named("sd")
    ids = torch.zeros(2, 1, 77, dtype=torch.int32)
    with attention_kernel("efficient"):
        states, _ = encoders.encode(family, torch.float32, ids)
        assert states is not None and states.shape == (2, 77, 32)
    with (
        pytest.raises(Refused, match="efficient does not compute this model's attention"),
        attention_kernel("efficient"),
    ):
        encode_ids(family, encoders, ids)
    cudnn = "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."
    with pytest.raises(Refused, match="cudnn does not compute"), attention_kernel("cudnn"):
        raise RuntimeError(cudnn)
    with pytest.raises(RuntimeError, match="another"), attention_kernel("efficient"):
        raise RuntimeError("another error")


def test_frozen_text_encoders_have_the_kernels_of_the_encode_stage() -> None:
    """Also those of NPU and HPU, which have a kind of their own."""
    usual = attention._cur_sdpa_kernel_backends()
    with attention_kernel("efficient"), attention.sdpa_kernel(KERNELS):
        assert attention._cur_sdpa_kernel_backends() == usual


def test_flash_3_is_refused_where_it_cannot_run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    with pytest.raises(Refused, match=f"{FLASH_3} is not installed: install it, or set flash"):
        check_attention("flash_3", device)
    request.getfixturevalue("installed")
    for capability in ((8, 9), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        with pytest.raises(Refused, match="needs a Hopper GPU"):
            check_attention("flash_3", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_attention("flash_3", device)
    monkeypatch.delattr(attention, "activate_flash_attention_impl")
    with pytest.raises(Refused, match=r"needs PyTorch 2\.11"):
        check_attention("flash_3", device)


@pytest.mark.usefixtures("installed")
def test_the_runtime_replaces_pytorch_s_flash_attention(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention.current_flash_attention_impl() is None
    monkeypatch.setattr("runtimes.torch.device.check_on_device", lambda *_: None)
    try:
        start(make_job(attention="flash_3", mixed_precision="bf16"))
        assert attention.current_flash_attention_impl() == "FA3"
    finally:
        attention.restore_flash_attention_impl()
