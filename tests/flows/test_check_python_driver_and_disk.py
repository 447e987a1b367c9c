"""The checks of a machine by `kiln doctor`; programs and files of other machines are faked."""

import platform
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from configs.checks import Check, Finding, collect
from flows import doctor
from runtimes import detect_hardware
from runtimes.detect_hardware import find_c_compiler
from runtimes.torch_models.gpu_specs import GIB, parse_gpu
from tasks.plan.shipped_plans import shipped_plans

SMI = "#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24564'\necho 'NVIDIA GeForce RTX 4090, 24564'\n"
PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without programs, driver or device files; returns its folder of programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(detect_hardware, "NVIDIA_MODULE", tmp_path / "proc/version")
    monkeypatch.setattr(detect_hardware, "NVIDIA_DEVICES", tmp_path / "dev")
    return programs


def add_program(programs: Path, name: str, script: str = "#!/bin/sh\n") -> None:
    (programs / name).write_text(script)
    (programs / name).chmod(0o755)


def add_driver(programs: Path) -> None:
    module = programs.parent / "proc/version"
    module.parent.mkdir()
    module.write_text(PROC)


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Set the CUDA version of the installed PyTorch."""
    return lambda cuda: monkeypatch.setattr(
        doctor.detect_hardware, "torch_cuda_version", lambda: cuda
    )


def nvidia(*devices: str, wanted: bool = False) -> list[Finding]:
    return list(doctor.nvidia_driver(devices, "2.13.0", wanted=wanted))


def test_a_machine_without_nvidia_has_nothing_to_mend(bare: Path) -> None:
    assert nvidia() == []
    (found,) = doctor.compiler()
    assert found.level == "note" and "xcode-select" in found.words


def test_a_cpu_build_beside_a_driver_is_a_problem_for_a_recipe_on_cuda(
    bare: Path, torch_cuda: Callable[[str | None], None]
) -> None:
    add_driver(bare)
    add_program(bare, "nvidia-smi", SMI)
    torch_cuda(None)
    assert nvidia()[0].level == "note"
    build, gpus = nvidia(wanted=True)
    assert build.level == "problem" and "2.13.0 is a CPU build beside an NVIDIA" in build.what
    assert build.mend and build.mend.startswith("make setup-cuda")
    assert gpus.what.startswith("gpu 0 to 1 NVIDIA GeForce RTX 4090, 24.0 GiB: fits ")


def test_the_build_of_this_machine_is_read_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    assert detect_hardware.torch_cuda_version() == torch.version.cuda
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\n")  # of a CUDA build
    package = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(detect_hardware, "find_spec", lambda _: package)
    assert detect_hardware.torch_cuda_version() == "13.0"


def test_a_driver_that_is_too_old_for_the_build_is_a_problem(
    bare: Path, torch_cuda: Callable[[str | None], None]
) -> None:
    add_driver(bare)
    add_program(bare, "nvidia-smi", SMI)
    torch_cuda("13.0")
    assert "(CUDA 13.0) sees no GPU with NVIDIA driver 550.54.14" in nvidia()[0].words
    assert [finding.level for finding in nvidia("cuda:0 (a)", "cuda:1 (a)")] == ["ok"]


def test_device_files_alone_show_a_driver(
    bare: Path, torch_cuda: Callable[[str | None], None]
) -> None:
    """As in a container without NVIDIA's tools."""
    torch_cuda(None)
    (bare.parent / "dev").mkdir()
    (bare.parent / "dev/nvidia0").touch()
    assert [finding.level for finding in nvidia()] == ["note", "note"]


def test_a_gpu_lists_the_recipes_that_fit_it(
    bare: Path, torch_cuda: Callable[[str | None], None]
) -> None:
    add_program(bare, "nvidia-smi", SMI)
    torch_cuda("13.0")
    (line,) = nvidia("cuda:0 (NVIDIA GeForce RTX 4090)")
    fits, _, large = line.what.partition("; too small for ")
    for plan in shipped_plans():
        assert (plan.recipe in fits.replace(",", "").split()) == plan.fits(24564 * 2**20)
        assert (plan.recipe in large.replace(",", "").split()) != plan.fits(24564 * 2**20)
    (sdxl_lora,) = [plan for plan in shipped_plans() if plan.recipe == "sdxl-lora"]
    spec = parse_gpu("RTX 4090").spec
    assert spec and f"sdxl-lora ({sdxl_lora.hours(spec):.1f} h)" in fits
    assert not sdxl_lora.fits(8 * GIB) and sdxl_lora.fits(24 * GIB)


def test_python_of_another_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor.python_version()) == []
    monkeypatch.setattr(platform, "python_version", lambda: "3.13.1")
    (found,) = doctor.python_version()
    assert found.level == "problem" and "PYTHON=python3.12" in found.words


@pytest.mark.parametrize(
    ("name", "version", "is_trap"),
    [
        ("fastapi", "0.150.0", False),
        ("fastapi", "0.151.0", True),
        ("sqlalchemy", "2.0.58", False),
        ("sqlalchemy", "2.1.0b1", True),
        ("dataclasses", "0.6", True),
        ("prefect", "3.9.1", True),
        ("prefect", "a version of nobody", False),
    ],
)
def test_versions_that_break_prefect_are_problems(name: str, version: str, is_trap: bool) -> None:
    installed = dict.fromkeys(doctor.PINNED, "1") | {name: version}
    found = list(doctor.packages(installed))
    assert [finding.level for finding in found] == ["problem"] * is_trap
    assert all(sys.executable in finding.words for finding in found)


def test_a_compiler_is_found_by_variable_or_path(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_c_compiler() is None
    add_program(bare, "mycc")
    monkeypatch.setenv("CC", "mycc")
    assert find_c_compiler() == str(bare / "mycc")
    add_program(bare, "gcc")
    monkeypatch.delenv("CC")
    assert find_c_compiler() == str(bare / "gcc")
    assert list(doctor.compiler()) == []


def test_a_disk_for_small_recipes_only_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_FREE", 10**18)
    (found,) = doctor.disk()
    assert found.level == "note" and "kiln gc" in found.words
    assert list(doctor.disk("memory://a/bucket")) == []


def test_a_token_is_neither_shown_nor_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert list(doctor.hub_token()) == []
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere")
    assert [finding.level for finding in doctor.hub_token()] == ["note"]


def test_a_cache_that_is_a_file_is_a_problem(tmp_path: Path, own_cache: Path) -> None:
    assert list(doctor.caches()) == []
    (tmp_path / "cache").write_text("in the way")
    assert [finding.level for finding in doctor.caches()] == ["problem"]


def test_a_check_that_does_not_answer_ends() -> None:
    never = threading.Event()

    def mute_bucket() -> Iterator[Finding]:
        never.wait()
        yield Finding("ok", "x")

    checks = [Check("mute bucket", mute_bucket), Check("python", doctor.python_version)]
    (found,) = collect(checks, seconds=0.05)
    never.set()
    assert found == Finding("problem", "mute bucket did not answer within 0.05 s")


def test_a_check_that_fails_hides_no_other() -> None:
    def disk_of_mars() -> Iterator[Finding]:
        raise OSError("no such planet at https://me:word@mars/")

    found = list(
        collect(
            [
                Check("disk of mars", disk_of_mars),
                Check("python", doctor.python_version),
                Check("x", lambda: [Finding("ok", "x")]),
            ]
        )
    )
    assert found[0].words == "disk of mars failed: OSError: no such planet at https://mars/"
    assert found[1:] == [Finding("ok", "x")]
