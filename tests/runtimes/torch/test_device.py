"""Settings that the devices of a machine cannot serve are refused before anything is loaded."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.process.launcher import Ranks
from runtimes.torch import gaudi
from runtimes.torch.device import (
    check,
    check_on_device,
    choose_device,
    free_memory,
    make_deterministic,
    open_device,
    warn_of_slow_float32,
)
from runtimes.torch.kernels import DeviceHooks, compile_denoiser


@pytest.mark.parametrize(
    ("settings", "devices", "words"),
    [
        ({"processes": 8}, 2, "8 processes need one CUDA device each, this machine has 2"),
        ({"processes": 2, "device": "cuda:0"}, 2, "cuda:0 is one device for 2 processes"),
        ({"device": "cuda:2"}, 2, "this machine has 2 CUDA devices"),
        ({"optimizer": "adamw_8bit", "device": "cpu"}, 1, "adamw_8bit needs bitsandbytes"),
        ({"optimizer": "lion_8bit"}, 1, "lion_8bit needs bitsandbytes"),
        ({"cuda_graphs": True, "device": "cpu"}, 1, "cuda_graphs needs a CUDA device, not cpu"),
        ({"allow_tf32": True, "device": "cpu"}, 1, "allow_tf32 needs a CUDA device, not cpu"),
        ({"attention": "efficient", "device": "cpu"}, 1, "attention needs a CUDA device, not cpu"),
        ({"fsdp": 3, "processes": 4, "device": "cpu"}, 0, "fsdp 3 does not divide"),
        ({"fsdp": 8, "processes": 4, "device": "cpu"}, 0, "fsdp 8 does not divide"),
        ({"fsdp": 2, "device": "cpu"}, 0, "fsdp 2 does not divide train.processes 1"),
    ],
)
def test_settings_that_the_devices_cannot_serve_are_refused(
    settings: dict[str, Any], devices: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    with pytest.raises(Refused, match=words):
        check(Train(**settings))


@pytest.mark.parametrize(
    ("settings", "devices"),
    [({"processes": 2}, 2), ({"processes": 8}, 0), ({"processes": 8, "fsdp": 4}, 8), ({}, 1)],
)
def test_settings_that_the_devices_can_serve_are_accepted(
    settings: dict[str, Any], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    check(Train(**settings))


def test_npus_form_no_shard_groups() -> None:
    npu: Any = SimpleNamespace(type="npu")
    check_on_device(Train(fsdp=4), npu, Ranks(world=4))
    with pytest.raises(Refused, match="fsdp: 2 is not for device npu: set 1 or all"):
        check_on_device(Train(fsdp=2), npu, Ranks(world=4))


def test_attention_takes_no_kernel_that_adds_in_any_order() -> None:
    """As one does on CUDA where PyTorch is to warn only; conformance on `cuda` shows the rest."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@pytest.mark.parametrize(
    ("name", "ranks", "chosen"),
    [
        ("cuda:1", Ranks(), ["cuda:1"]),
        ("cuda", Ranks(1, 2, 1, 2), ["cuda:1"]),
        ("cuda", Ranks(), []),
        ("cpu", Ranks(), []),
    ],
)
def test_a_device_with_a_number_is_the_current_one(
    name: str, ranks: Ranks, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise events of copies to the host, and CUDA graphs, are of the first device."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(str(device)))
    open_device(name, ranks)
    assert seen == chosen


def test_apples_gpu_is_used_when_named_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Refused, match="no Apple GPU; set auto or cpu"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("mps") == torch.device("mps")
    assert "mps is untested" in caplog.text
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(Refused, match=r"set train\.processes=1"):
        check(Train(device="mps", processes=2))
    with pytest.raises(Refused, match="is not for runtime torch"):
        choose_device("mps:0")


def test_without_a_compiler_auto_trains_uncompiled_and_a_demand_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(Refused, match="blocks: no C compiler is on PATH"):
        check(Train(device="cpu", compile="blocks"))
    check(Train(device="cpu", compile="none"))
    module = torch.nn.Linear(1, 1)
    compile_denoiser(module, "auto", DeviceHooks(torch.device("cuda")))
    assert "training is not compiled, and slower: no C compiler" in caplog.text
    assert module._compiled_call_impl is None


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({}, "cuda", "train.allow_tf32"),
        ({"allow_tf32": True}, "cuda", ""),
        ({"mixed_precision": "bf16"}, "cuda", ""),
        ({}, "cpu", ""),
    ],
)
def test_slow_float32_is_warned_of(
    settings: dict[str, Any], kind: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_slow_float32(Train(**settings), torch.device(kind))
    assert words in caplog.text and bool(caplog.text) == bool(words)


def test_tf32_is_off_unless_set() -> None:
    try:
        for enabled in (True, False):
            make_deterministic(tf32=enabled)
            assert torch.backends.cudnn.allow_tf32 == enabled
            assert torch.backends.cuda.matmul.allow_tf32 == enabled
    finally:
        make_deterministic()


def test_pinned_memory_of_deleted_models_is_returned_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next offloaded model would otherwise be read beside that of the one before."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: emptied.append(True))
    free_memory()
    assert emptied


def test_graphs_of_gaudis_count_the_processes_of_all_hosts() -> None:
    settings = {"hpu": {"graphs": True, "mode": "lazy"}, "global_batch_size": 8}
    gaudi.check(Train(**settings, hosts=2, micro_batch_size=4))
    with pytest.raises(Refused, match="micro_batch_size"):
        gaudi.check(Train(**settings, hosts=2, micro_batch_size=2))
