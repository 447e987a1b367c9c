"""Settings that the devices of a machine cannot serve are refused before anything is loaded."""

import sys
from typing import Any

import pytest
import torch

from configs.train import Train
from runtimes.contract import WrongInput
from runtimes.torch.device import check, make_deterministic


@pytest.mark.parametrize(
    ("settings", "devices", "words"),
    [
        ({"processes": 8}, 2, "8 processes need one CUDA device each, this machine has 2"),
        ({"processes": 2, "device": "cuda:0"}, 2, "cuda:0 is one device for 2 processes"),
        ({"device": "cuda:2"}, 2, "this machine has 2 CUDA devices"),
        ({"optimizer": "adamw_8bit"}, 0, "needs a CUDA device"),
        ({"optimizer": "adamw_8bit", "device": "cpu"}, 1, "needs a CUDA device"),
        ({"optimizer": "adamw_8bit"}, 1, "needs bitsandbytes"),
    ],
)
def test_what_the_devices_cannot_serve(
    settings: dict[str, Any], devices: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    with pytest.raises(WrongInput, match=words):
        check(Train(**settings))


@pytest.mark.parametrize(
    ("settings", "devices"), [({"processes": 2}, 2), ({"processes": 8}, 0), ({}, 1)]
)
def test_what_they_can(
    settings: dict[str, Any], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    check(Train(**settings))


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
