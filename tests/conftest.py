"""Fixtures of all tests: tiny models and compiled programs, created once for all workers."""

from __future__ import annotations

import atexit
import fcntl
import gc
import hashlib
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
#: Time in seconds since 1970 from which no soak test starts; the gate sets it for slow machines.
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


def pytest_configure() -> None:
    """Keep compiled programs of all sessions in one folder outside the tree; collect rarely."""
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
    """Skip soak tests that would start too late for the gate's time limit."""
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
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KILN_CACHE is a folder of this test."""
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))


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


@pytest.fixture(scope="session")
def tiny_sdxl(tiny_model: Callable[[str], Path]) -> Path:
    """A StableDiffusionXLPipeline folder: 32 x 32 pictures, VAE with factor 4."""
    return tiny_model("tiny-sdxl")


@pytest.fixture(scope="session")
def tiny_sd(tiny_model: Callable[[str], Path]) -> Path:
    """A StableDiffusionPipeline folder, in the layout of Stable Diffusion 1 and 2."""
    return tiny_model("tiny-sd")


@pytest.fixture(scope="session")
def tiny_sd3(tiny_model: Callable[[str], Path]) -> Path:
    """A StableDiffusion3Pipeline folder, in the layout of Stable Diffusion 3 and 3.5."""
    return tiny_model("tiny-sd3")


@pytest.fixture(scope="session")
def tiny_flux(tiny_model: Callable[[str], Path]) -> Path:
    """A FluxPipeline folder, in the layout of FLUX.1 dev."""
    return tiny_model("tiny-flux")


@pytest.fixture(scope="session")
def tiny_flux_schnell(tiny_model: Callable[[str], Path]) -> Path:
    """A FluxPipeline folder, in the layout of FLUX.1 schnell."""
    return tiny_model("tiny-flux-schnell")


@pytest.fixture(scope="session")
def tiny_flux2(tiny_model: Callable[[str], Path]) -> Path:
    """A Flux2KleinPipeline folder: 32 x 32 pictures, VAE with factor 4."""
    return tiny_model("tiny-flux2")


@pytest.fixture(scope="session")
def tiny_flux2_distilled(tiny_model: Callable[[str], Path]) -> Path:
    """The same, distilled: its pipeline ignores the guidance scale."""
    return tiny_model("tiny-flux2-distilled")


@pytest.fixture(scope="session")
def sdxl_projecting(tiny_model: Callable[[str], Path]) -> Path:
    """An SDXL whose first text encoder has a projection, as only few published ones have."""
    return tiny_model("least-sdxl-projecting")


@pytest.fixture(scope="session")
def tiny_z_image(tiny_model: Callable[[str], Path]) -> Path:
    """A ZImagePipeline folder: 32 x 32 pictures, VAE with factor 4."""
    return tiny_model("tiny-z-image")


@pytest.fixture(scope="session")
def tiny_qwen_image(tiny_model: Callable[[str], Path]) -> Path:
    """A QwenImagePipeline folder: 32 x 32 pictures, VAE with factor 4."""
    return tiny_model("tiny-qwen-image")


@pytest.fixture(scope="session")
def tiny_sd3_without_t5(tiny_model: Callable[[str], Path]) -> Path:
    """The same without the T5 text encoder, a common choice to save memory."""
    return tiny_model("tiny-sd3-without-t5")


@pytest.fixture(scope="session")
def tiny_vae(tiny_model: Callable[[str], Path]) -> Path:
    """An AutoencoderKL folder with other weights."""
    return tiny_model("tiny-vae")


@pytest.fixture(scope="session")
def tiny_clip(tiny_model: Callable[[str], Path]) -> Path:
    """A CLIPModel folder with image processor and tokenizer: 32 x 32 pictures, 24 features."""
    return tiny_model("tiny-clip")
