"""What every test may use: tiny models and compiled programs, made once for all workers."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["made_up_family", "stores"]
#: Groups that take longest, in the order they are started in; a group runs on one worker.
LONGEST_FIRST = ("conformance-",)
#: Of whatever tests draw by chance: another one kills at other moments.
SEED = os.environ.get("KILN_TEST_SEED", "0")


def _cpu() -> str:
    """Which processor programs are compiled for: another one may lack its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def pytest_configure() -> None:
    """Keep compiled programs from one session to the next, outside the tree."""
    # With these set, pytest spells out each failed comparison: of two long lists, for hours.
    for variable in ("CI", "BUILD_NUMBER"):
        os.environ.pop(variable, None)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("KILN_TEST_CACHE") or f"{home}/kilnworks-tests").expanduser()
    os.environ["KILN_TEST_CACHE"] = str(root)  # for what tests start, too
    kept = root / hashlib.sha256(_cpu().encode()).hexdigest()[:12]
    for variable, name in (
        ("JAX_COMPILATION_CACHE_DIR", "jax"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    ):
        os.environ.setdefault(variable, str(kept / name))


def pytest_report_header() -> str:
    """Say what `chance` is seeded with."""
    return f"KILN_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file share one worker, as they share fixtures; the longest groups start first."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))

    def rank(item: pytest.Item) -> int:
        marker = item.get_closest_marker("xdist_group")
        name = str(marker.args[0]) if marker else ""
        ranks = (place for place, start in enumerate(LONGEST_FIRST) if name.startswith(start))
        return next(ranks, len(LONGEST_FIRST))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session that all xdist workers see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of a test's own, the same ones for the same KILN_TEST_SEED."""
    return random.Random(f"{SEED} {request.node.name}")


MakeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once(shared: Path) -> MakeOnce:
    """`once(name, make)` is the folder of that name, which `make` fills in one worker alone."""

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
def tiny_model(once: MakeOnce) -> Callable[[str], Path]:
    """`tiny_model(name)` is a folder of tiny_models.MODELS."""

    def saved(name: str) -> Path:
        from tiny_models import MODELS  # PyTorch and diffusers, which unit tests do without

        return once(name, MODELS[name])

    return saved


@pytest.fixture(scope="session")
def tiny_sdxl(tiny_model: Callable[[str], Path]) -> Path:
    """A StableDiffusionXLPipeline folder: 32 x 32 pictures, a VAE that shrinks by four."""
    return tiny_model("tiny-sdxl")


@pytest.fixture(scope="session")
def tiny_sd(tiny_model: Callable[[str], Path]) -> Path:
    """A StableDiffusionPipeline folder, as Stable Diffusion 1 and 2 have it."""
    return tiny_model("tiny-sd")


@pytest.fixture(scope="session")
def tiny_sd3(tiny_model: Callable[[str], Path]) -> Path:
    """A StableDiffusion3Pipeline folder, as Stable Diffusion 3 and 3.5 have it."""
    return tiny_model("tiny-sd3")


@pytest.fixture(scope="session")
def tiny_sd3_without_t5(tiny_model: Callable[[str], Path]) -> Path:
    """The same without its third text encoder, as it is often used to save memory."""
    return tiny_model("tiny-sd3-without-t5")


@pytest.fixture(scope="session")
def tiny_vae(tiny_model: Callable[[str], Path]) -> Path:
    """Another AutoencoderKL, in a folder of its own."""
    return tiny_model("tiny-vae")


@pytest.fixture(scope="session")
def tiny_clip(tiny_model: Callable[[str], Path]) -> Path:
    """A CLIPModel folder with image processor and tokenizer: 32 x 32 pictures, 24 features."""
    return tiny_model("tiny-clip")
