"""Remote workers fetch the encoders from the store, once per machine, and check their digest."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from artifacts.store import Store
from configs.errors import Refused
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob
from tasks.encode.encoders import put_encoders

pytestmark = pytest.mark.slow


@pytest.fixture
def models(tiny_model: Callable[[str], Path]) -> tuple[Path, Path]:
    """Folders of a pipeline and of a VAE that replaces its own."""
    return tiny_model("tiny-sdxl"), tiny_model("tiny-vae")


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/kilnworks/models"


@pytest.mark.parametrize("with_vae", [False, True])
def test_fetched_encoders_have_the_digest_of_the_flows(
    local: Store, cache: Path, models: tuple[Path, Path], with_vae: bool
) -> None:
    model, vae = models[0], models[1] if with_vae else None
    copy = put_encoders(local, Base.open(model, vae))
    job = EncodeJob("torch", "/on/the/flows/machine", str(vae) if vae else None)
    fetched = copy.fetched(job)
    assert fetched.model.startswith(str(cache))
    assert (fetched.vae is not None) == with_vae
    assert Base.of(fetched).digest_encoders() == copy.digest
    assert copy.digest == Base.open(model, vae).digest_encoders()
    assert not list(Path(fetched.model).glob("unet/*.safetensors"))


def test_workers_of_a_machine_fetch_once(
    local: Store, cache: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, gets = put_encoders(local, Base.open(models[0])), []
    get = type(local.fs).get
    monkeypatch.setattr(
        type(local.fs), "get", lambda fs, *a, **k: gets.append(a) or get(fs, *a, **k)
    )
    job = EncodeJob("torch", "")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(copy.fetched, [job] * 4))
    assert len(found) == len(gets) == 1


@pytest.mark.parametrize("name", ["config.json", "*.safetensors"])
def test_a_damaged_copy_in_the_cache_is_fetched_again(
    local: Store, cache: Path, models: tuple[Path, Path], name: str
) -> None:
    """Else a worker would store wrong latents under the key of the right ones."""
    copy, job = put_encoders(local, Base.open(models[0])), EncodeJob("torch", "")
    (file,) = Path(copy.fetched(job).model, "vae").glob(name)
    whole, status = file.read_bytes(), file.stat()
    file.write_bytes(bytes([whole[0] ^ 255, *whole[1:]]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # as another process finds it
    (file,) = Path(copy.fetched(job).model, "vae").glob(name)
    assert file.read_bytes() == whole


def test_changed_bytes_in_the_store_are_refused(
    local: Store, cache: Path, models: tuple[Path, Path]
) -> None:
    copy = put_encoders(local, Base.open(models[0]))
    (weights,) = Path(copy.url, "pipeline/vae").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(Refused, match=rf"other bytes .*: delete {copy.url}\.json"):
        copy.fetched(EncodeJob("torch", ""))
    assert not list(cache.iterdir())
