"""The table of runtimes; probes and checks, also in a runtime's own environment."""

import sys
from pathlib import Path
from typing import Any, get_args

import chips
import pytest

from configs.errors import Refused
from configs.settings.recipe import RuntimeName
from configs.settings.train import Train
from runtimes import registry
from runtimes.registry import (
    RuntimeSpec,
    check_elsewhere,
    check_family,
    check_installed,
    check_settings,
    interpreter,
    probe_runtime,
)


def test_recipes_accept_exactly_the_registered_runtimes() -> None:
    assert set(get_args(RuntimeName)) == set(registry.RUNTIMES)


def test_torch_runs_in_this_interpreter() -> None:
    check_installed("torch")
    assert interpreter("torch") == sys.executable
    assert probe_runtime("torch").devices[-1].startswith("cpu")


def test_an_unknown_runtime_is_refused_with_the_known_ones() -> None:
    known = ", ".join(registry.RUNTIMES)
    assert probe_runtime("abacus").reason == f"runtime 'abacus' is not known here (known: {known})"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        registry.RUNTIMES, "other", RuntimeSpec("runtimes.other", ("json", "nowhere"))
    )
    with pytest.raises(Refused, match="needs nowhere, not installed"):
        check_installed("other")
    assert "cannot be imported" in probe_runtime("other").reason


@pytest.mark.parametrize(
    ("runtime", "device", "words"),
    [
        ("mindspore", "auto", "is not for runtime mindspore"),
        ("torch", "hpu:0", "is not for device hpu: its rotary embeddings are"),
    ],
)
@pytest.mark.parametrize("family", ["flux", "flux2", "z_image", "qwen_image"])
def test_a_transformer_is_refused_where_it_cannot_run(
    runtime: str, device: str, words: str, family: str
) -> None:
    with pytest.raises(Refused, match=f"of family {family} {words}"):
        check_family(runtime, family, device)
    check_family("torch", family, "cuda:0")
    check_family("torch", "sdxl", "hpu")


@pytest.mark.slow
def test_a_runtime_is_probed_in_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = RuntimeSpec("runtimes.torch", ("torch",), environment="-other")
    monkeypatch.setitem(registry.RUNTIMES, "torch", elsewhere)
    prefix = sys.prefix
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(Refused, match="make setup-torch"):
        check_installed("torch")
    assert not probe_runtime("torch").available

    (tmp_path / ".venv-other").symlink_to(prefix)  # where it is our own again
    check_installed("torch")
    assert interpreter("torch") == str(tmp_path / ".venv-other/bin/python")
    found = probe_runtime("torch")
    assert found.available and found.devices[-1].startswith("cpu") and found.versions["torch"]
    check_settings("torch", Train(device="cpu"))
    with pytest.raises(Refused, match="device cuda:99: this machine has"):
        check_settings("torch", Train(device="cuda:99"))


def test_environments_of_runtimes_lie_beside_each_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / ".venv312-xla/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(Refused, match="make setup-xla"):
        interpreter("xla")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv312"))
    assert interpreter("xla") == str(python)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv312-xla"))
    assert interpreter("xla") == sys.executable


def test_settings_without_a_supporting_device_are_refused() -> None:
    check_settings("torch", Train(device="cpu"))
    with pytest.raises(Refused, match="device cuda:99: this machine has"):
        check_settings("torch", Train(device="cuda:99"))


@pytest.mark.slow
def test_a_check_for_an_npu_loads_torch_npu_in_another_process() -> None:
    chips.require("npu")
    with chips.standing_in("npu"):
        check_settings("torch", Train(device="npu"))
        with pytest.raises(Refused, match="device npu:9: this machine has 2 Ascend NPU"):
            check_settings("torch", Train(device="npu:9"))
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize(
    ("runtime", "settings", "words"),
    [
        ("mindspore", {"fsdp": "all"}, "all: runtime mindspore does not shard weights, .* set 1$"),
        ("torch", {"fsdp": 2, "device": "hpu"}, "2: device hpu does not shard weights, .* set 1$"),
        ("torch", {"fsdp": 2, "device": "npu"}, "device npu has no shard groups, .* set 1 or all$"),
        ("torch", {"fsdp": 4, "hosts": 3}, "4 does not divide the 6 processes of all hosts"),
        ("torch", {"device": "tpu"}, "tpu is not for runtime torch: set auto, cpu, mps, cuda, npu"),
        ("torch", {"device": "cuda:1"}, "train.device: cuda:1 is one device for 4 processes"),
        ("torch", {"device": "npu", "optimizer": "adamw_8bit"}, "8bit is not for device npu"),
        ("torch", {"device": "hpu", "allow_tf32": True}, "allow_tf32 needs a CUDA device, not hpu"),
        ("torch", {"device": "cpu", "attention": "efficient"}, "attention needs a CUDA device"),
        ("xla", {}, "train.processes is not for runtime xla"),
        ("mindspore", {"optimizer": "lion"}, "lion is not for runtime mindspore: set adamw"),
    ],
)
def test_what_a_runtime_lacks_on_hosts_is_known_without_them(
    runtime: str, settings: dict[str, Any], words: str
) -> None:
    shared = {"hosts": 2, "processes": 2, "global_batch_size": 12}
    with pytest.raises(Refused, match=words):
        check_elsewhere(runtime, Train(**shared | settings))
    check_elsewhere("torch", Train(**shared, fsdp=2))
