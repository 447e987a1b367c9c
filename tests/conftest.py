"""Fixtures of all tests: tiny models and compiled programs, created once for all workers."""

from __future__ import annotations

import atexit
import fcntl
import gc
import hashlib
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_processes import WarmInterpreter, forked

pytest_plugins = ["made_up_family", "store_servers"]
#: Prefixes of the xdist groups that start first, because they take longest.
LONGEST_FIRST = (
    *("deployed", "tests/flows/test_killed_and_resumed"),
    *("tests/flows/test_remote_store", "tests/flows/test_finetune"),
    *("tests/flows/test_journeys", "conformance-", "tests/flows/test_another_chip"),
    *("tests/flows/test_retrain", "engines"),
)
#: Time in seconds since 1970 from which no soak test starts; CI sets it for slow machines.
SOAK_UNTIL = float(os.environ.get("KILN_SOAK_UNTIL", "inf"))
#: Seed of the random numbers of tests, such as the moments of kills.
SEED = os.environ.get("KILN_TEST_SEED", "0")


def _cpu() -> str:
    """The processor's instruction sets; compiled programs depend on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


class _Loggers(dict[str, Any]):
    """All loggers by name, of which `values` gives a copy.

    pytest goes through them before each test without logging's lock (`catching_logs`), and fails
    the test if another thread makes a logger meanwhile, as an import does.
    """

    def values(self) -> list[Any]:  # type: ignore[override]
        return list(super().values())


def pytest_configure() -> None:
    """Keep compiled programs of all sessions in one folder outside the tree; collect rarely."""
    logging.root.manager.loggerDict = _Loggers(logging.root.manager.loggerDict)
    # The garbage collector visits all modules again and again: a third of the collection's time.
    gc.set_threshold(100_000, 50, 100)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Taking all modules apart takes 5 s. Handlers run in reverse order, so this ends them.
        atexit.register(os._exit, 0)
    # With these variables pytest prints full differences; for long lists that takes hours.
    for variable in ("CI", "BUILD_NUMBER"):
        os.environ.pop(variable, None)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("KILN_TEST_CACHE") or f"{home}/kilnworks-tests").expanduser()
    os.environ["KILN_TEST_CACHE"] = str(root)  # also for child processes
    kept = root / hashlib.sha256(_cpu().encode()).hexdigest()[:12]
    for variable, name in (
        ("JAX_COMPILATION_CACHE_DIR", "jax"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    ):
        os.environ.setdefault(variable, str(kept / name))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip soak tests that would start too late for CI's time limit."""
    if item.get_closest_marker("soak") and time.time() > SOAK_UNTIL:
        pytest.skip(f"{item.name}: KILN_SOAK_UNTIL is over")


def pytest_report_header() -> str:
    """Print the seed of the fixture `chance`."""
    return f"KILN_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests of a file on one worker, for fixtures; start the longest groups first."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))

    def rank(item: pytest.Item) -> int:
        marker = item.get_closest_marker("xdist_group")
        name = str(marker.args[0]) if marker else ""
        ranks = (place for place, start in enumerate(LONGEST_FIRST) if name.startswith(start))
        return next(ranks, len(LONGEST_FIRST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what lives as long as the session."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keep the collector also from what a file leaves, such as modules and traces of programs."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session that all xdist workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """A random number generator, seeded with KILN_TEST_SEED and the test's name."""
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """KILN_CACHE, a folder of this test."""
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


MakeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once(shared: Path) -> MakeOnce:
    """`once(name, make)` returns a shared folder, which one worker fills with `make(path)`."""

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        path, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                path.mkdir()
                make(path)
                done.touch()
        return path

    return folder


@pytest.fixture(scope="session")
def warm_interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmInterpreter]:
    """An interpreter that imports PyTorch at its first use, once for this worker."""
    interpreter = WarmInterpreter(tmp_path_factory.mktemp("warm") / "log")
    yield interpreter
    interpreter.close()


@pytest.fixture
def warm(warm_interpreter: WarmInterpreter) -> Iterator[None]:
    """Jobs and encoders that this process starts are forks of the warm interpreter."""
    with forked(warm_interpreter):
        yield


@pytest.fixture(scope="session")
def tiny_model(once: MakeOnce) -> Callable[[str], Path]:
    """`tiny_model(name)` returns the folder of a model in tiny_models.MODELS."""

    def saved(name: str) -> Path:
        from tiny_models import (
            MODELS,  # imports PyTorch and diffusers, which unit tests do not need
        )

        return once(name, MODELS[name])

    return saved


def _folder_of(name: str) -> Callable[..., Path]:
    """The fixture of a model's folder."""

    @pytest.fixture(scope="session")
    def folder(tiny_model: Callable[[str], Path]) -> Path:
        return tiny_model(name)

    return folder


# In the layout of a family; pictures have 32 x 32 pixels, VAEs the factor 4.
tiny_sdxl = _folder_of("tiny-sdxl")  # Stable Diffusion XL
#: Its first text encoder has a projection, as few published ones have.
sdxl_projecting = _folder_of("least-sdxl-projecting")
tiny_sd = _folder_of("tiny-sd")  # Stable Diffusion 1 and 2
tiny_sd3 = _folder_of("tiny-sd3")  # Stable Diffusion 3 and 3.5
tiny_sd3_without_t5 = _folder_of("tiny-sd3-without-t5")  # a common choice to save memory
tiny_flux = _folder_of("tiny-flux")  # FLUX.1 dev
tiny_flux_schnell = _folder_of("tiny-flux-schnell")  # FLUX.1 schnell
tiny_flux_kontext = _folder_of("tiny-flux-kontext")
tiny_flux2 = _folder_of("tiny-flux2")  # FLUX.2 klein
tiny_flux2_distilled = _folder_of("tiny-flux2-distilled")  # its pipeline ignores the guidance scale
tiny_z_image = _folder_of("tiny-z-image")
tiny_qwen_image = _folder_of("tiny-qwen-image")
tiny_qwen_image_edit = _folder_of("tiny-qwen-image-edit")
tiny_vae = _folder_of("tiny-vae")  # an AutoencoderKL with other weights
tiny_clip = _folder_of("tiny-clip")  # a CLIPModel with image processor and tokenizer, 24 features
