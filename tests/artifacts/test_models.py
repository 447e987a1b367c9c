"""A model is found as a folder, a URL or a hub id; what is not there is said in one line."""

import errno
from pathlib import Path
from unittest.mock import Mock
from uuid import uuid4

import fsspec
import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, XetDownloadError
from huggingface_hub.utils import filter_repo_objects

from artifacts.models import (
    HUB_FILES,
    HUB_SKIPPED,
    HUB_VARIANTS,
    ModelNotFound,
    cache_folder,
    resolve_model,
)

REQUEST = httpx2.Request("GET", "https://example.org")
SDXL = {
    "model_index.json",
    "README.md",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
}


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))
    url = f"memory://{uuid4()}"
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe({f"{root}/model_index.json": b"{}", f"{root}/unet/config.json": b"[]"})
    return url


def test_a_remote_model_is_copied_once_and_nothing_else_stays(remote: str) -> None:
    folder = resolve_model(remote)
    assert (folder / "model_index.json").read_bytes() == b"{}"
    assert (folder / "unet/config.json").read_bytes() == b"[]"
    written = (folder / "model_index.json").stat().st_mtime_ns
    assert resolve_model(remote) == folder
    assert (folder / "model_index.json").stat().st_mtime_ns == written
    assert list((cache_folder() / "models").iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_is_no_missing_model(remote: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(OSError) as raised:
        resolve_model(remote)
    assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://nothing-here", "nothing is there"),
        ("foo://bar", "Protocol not known: foo"),
        ("no/such/folder", "no such folder"),
        ("no--such/repository", "the hub could not give it"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(url: str, words: str) -> None:
    with pytest.raises(ModelNotFound, match=words) as raised:
        resolve_model(url)
    assert str(raised.value).startswith(f"model {url}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        HfHubHTTPError("cut off\nhere", response=httpx2.Response(500, request=REQUEST)),
        LocalEntryNotFoundError("cut off\nhere"),
        XetDownloadError("cut off\nhere"),
        httpx2.ReadError("cut off\nhere"),
    ],
)
def test_what_the_hub_cannot_give_is_said_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(ModelNotFound, match=r"the hub could not give it \(cut off\)$"):
        resolve_model("some/model")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), AssertionError("a bug")])
def test_a_full_disk_or_a_bug_is_no_missing_model(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(type(error)):
        resolve_model("some/model")


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        (
            {
                *SDXL,
                "sd_xl_base_1.0.safetensors",
                "sd_xl_base_1.0_0.9vae.safetensors",
                "sd_xl_offset_example-lora_1.0.safetensors",
                "unet/diffusion_pytorch_model.fp16.safetensors",
                "text_encoder/flax_model.msgpack",
                "unet/diffusion_pytorch_model.bin",
            },
            SDXL,
        ),
        (
            {
                "text_encoder_3/model-00001-of-00002.safetensors",
                "text_encoder_3/model.fp16-00001-of-00002.safetensors",
                "tokenizer_3/spiece.model",
                "text_encoders/t5xxl_fp16.safetensors",
                "transformer/diffusion_pytorch_model.safetensors",
            },
            {
                "text_encoder_3/model-00001-of-00002.safetensors",
                "tokenizer_3/spiece.model",
                "transformer/diffusion_pytorch_model.safetensors",
            },
        ),
        (
            {"config.json", "model.safetensors", "pytorch_model.bin"},
            {"config.json", "model.safetensors"},
        ),
        (
            {"config.json", "diffusion_pytorch_model.safetensors", "sdxl_vae.safetensors"},
            {"config.json", "diffusion_pytorch_model.safetensors"},
        ),
    ],
)
def test_only_what_would_be_loaded_is_taken_from_the_hub(there: set[str], wanted: set[str]) -> None:
    skipped = [*HUB_SKIPPED, *HUB_VARIANTS]
    found = filter_repo_objects(there, allow_patterns=HUB_FILES, ignore_patterns=skipped)
    assert set(found) == wanted
