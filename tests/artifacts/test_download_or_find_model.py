"""A model is found as a folder, a URL or a hub id; what is not there is said in one line."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path
from uuid import UUID

import fsspec
import pytest
from gcs_server import GcsServer
from hub_server import HubServer, Repository
from huggingface_hub.utils import filter_repo_objects
from loopback_server import LoopbackServer
from store_servers import REMOTE, S3Server, UrlOf

from artifacts import download_or_find_model
from artifacts.cache_errors import CacheFull, CacheUnusable
from artifacts.check_model_available import check_file_available, check_on_hub
from artifacts.download_or_find_model import (
    HUB_FILES,
    HUB_SKIPPED,
    HUB_VARIANTS,
    HubAway,
    ModelNotFound,
    cache_folder,
    digest_model,
    files_below,
    resolve_configs,
    resolve_file,
    resolve_model,
)
from artifacts.model_in_store import fetch_model
from artifacts.store import Store

SDXL = {
    "model_index.json",
    "README.md",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
}


@pytest.fixture(params=["memory", *REMOTE])
def remote(request: pytest.FixtureRequest, url_of: UrlOf, own_cache: Path) -> str:
    url = url_of(request.param)
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


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"[1]"), Path.unlink])
def test_a_damaged_copy_of_a_remote_model_is_fetched_again(
    remote: str, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve_model(remote)
    damage(folder / "unet/config.json")
    again = resolve_model(remote)
    assert (again / "unet/config.json").read_bytes() == b"[]"
    assert f"{remote} is fetched again: its local copy is damaged" in caplog.messages
    assert list((cache_folder() / "models").iterdir()) == [again]


def test_a_copy_that_another_process_mends_meanwhile_stays(
    own_cache: Path, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of("memory")
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe({f"{root}/model_index.json": b"{}"})
    folder = resolve_model(url)
    (folder / "model_index.json").write_bytes(b"[1]")
    ours = download_or_find_model.digest_model

    def others_mend(read: Path) -> str:
        monkeypatch.setattr(download_or_find_model, "digest_model", ours)
        found = ours(read)
        shutil.rmtree(read)
        assert resolve_model(url) == read
        (read / "README.md").write_bytes(b"of the other process")
        return found

    monkeypatch.setattr(download_or_find_model, "digest_model", others_mend)
    assert (resolve_model(url) / "README.md").read_bytes() == b"of the other process"


@pytest.mark.parametrize("kind", REMOTE)
def test_a_model_is_not_mixed_with_one_that_its_url_matches_as_a_pattern(
    kind: str, url_of: UrlOf, own_cache: Path
) -> None:
    url = url_of(kind)
    fs, root = fsspec.core.url_to_fs(url)
    for name in ("m1", "m[1]"):
        fs.pipe_file(f"{root}/{name}/unet/config.json", name.encode())
    own = resolve_model(f"{url}/m[1]")
    assert (own / "unet/config.json").read_bytes() == b"m[1]"
    staged = fetch_model(f"{url}/m[1]", digest_model(own), digest_model)
    assert (staged / "unet/config.json").read_bytes() == b"m[1]"
    with pytest.raises(ModelNotFound, match="no files there"):
        fetch_model(f"{url}/none", "0", digest_model)


def test_a_name_that_leads_out_of_a_remote_model_is_refused(
    s3: S3Server, url_of: UrlOf, tmp_path: Path, own_cache: Path
) -> None:
    """`..` is a name like any other to a bucket, and the folder above to a disk."""
    url = url_of("s3")
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe({f"{root}/model_index.json": b"{}", f"{root}/../../../../outside.txt": b"evil"})
    with pytest.raises(ModelNotFound, match="leads out of its folder"):
        resolve_model(url)
    with pytest.raises(ValueError, match="leads out of its folder"):
        fetch_model(url, "0", digest_model)
    assert not list(tmp_path.rglob("outside.txt"))


def test_a_model_in_a_closed_bucket_is_a_one_line_error(
    gcs: GcsServer, url_of: UrlOf, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "forbidden", ".*")
    assert "Forbidden: " in refused(url_of("gs"))


def test_a_remote_model_that_changes_is_copied_again(remote: str) -> None:
    before = resolve_model(remote)
    fs, root = fsspec.core.url_to_fs(remote)
    fs.pipe_file(f"{root}/unet/config.json", b"{}")
    after = resolve_model(remote)
    assert after != before
    assert (after / "unet/config.json").read_bytes() == b"{}"
    assert (before / "unet/config.json").read_bytes() == b"[]"
    Store(remote).fs.pipe_file(f"{root}/model.sig", b"by another client")
    assert (resolve_model(remote) / "model.sig").read_bytes() == b"by another client"


def test_a_remote_file_is_copied_once_per_version(remote: str) -> None:
    url = f"{remote}/unet/config.json"
    assert check_file_available(url) == "remote file"
    first = resolve_file(url)
    written = first.stat().st_mtime_ns
    assert first.read_bytes() == b"[]"
    assert resolve_file(url) == first and first.stat().st_mtime_ns == written
    assert list((cache_folder() / "models").iterdir()) == [first]
    first.write_bytes(b"[1]")  # damaged
    assert resolve_file(url).read_bytes() == b"[]"
    assert list((cache_folder() / "models").iterdir()) == [first]
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(path, b"{}")
    assert resolve_file(url).read_bytes() == b"{}"


def test_a_local_file_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"one")
    path = str(tmp_path / "weights.pth")
    assert (str(resolve_file(path)), check_file_available(path)) == (path, "local file")


def test_a_model_has_the_files_of_a_linked_folder(tmp_path: Path) -> None:
    """A shared VAE may be a link; its weights are an input of the latents like any other."""
    shared, model, copy = (tmp_path / name for name in ("shared", "model", "copy"))
    for vae in (shared, copy / "vae"):
        vae.mkdir(parents=True)
        (vae / "weights").write_bytes(b"one")
    for folder in (model, copy):
        folder.mkdir(exist_ok=True)
        (folder / "model_index.json").write_bytes(b"{}")
    (model / "vae").symlink_to(shared)
    (shared / "back").symlink_to(model)  # a walk does not go round
    digest = digest_model(model)
    assert digest == digest_model(copy)
    names = [path.relative_to(model).as_posix() for path in files_below(model)]
    assert names == ["model_index.json", "vae/weights"]
    (shared / "weights").write_bytes(b"other")
    assert digest_model(model) != digest


def test_files_that_others_fetch_into_the_cache_of_the_hub_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "models--ours--tiny/snapshots/1234"
    (folder / "vae").mkdir(parents=True)
    (tmp_path / "models--ours--tiny/blobs").mkdir()
    for name in ("model_index.json", "vae/diffusion_pytorch_model.safetensors"):
        (folder / name).write_bytes(b"one")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    digests = [digest_model(folder), digest_model(folder, ("vae",)), digest_model(folder / "vae")]
    assert digests[0] == digest_model(copy)
    for name in ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin"):
        (folder / "vae" / name).write_bytes(b"two")
        (copy / "vae" / name).write_bytes(b"two")
    (folder / "all.safetensors").write_bytes(b"two")  # a single-file checkpoint
    again = [digest_model(folder), digest_model(folder, ("vae",)), digest_model(folder / "vae")]
    assert again == digests
    assert digests[0] != digest_model(copy)  # a user's own folder counts as it is
    (folder / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"two")
    assert digest_model(folder) != digests[0]


def test_a_variant_in_the_cache_of_the_hub_counts_where_it_is_read(tmp_path: Path) -> None:
    """Without plain weights a part is read from its fp16 variant."""
    folder = tmp_path / "models--ours--tiny/snapshots/1234"
    (folder / "vae").mkdir(parents=True)
    (tmp_path / "models--ours--tiny/blobs").mkdir()
    (folder / "chat_template.jinja").write_bytes(b"one")
    (folder / "vae/diffusion_pytorch_model.fp16.safetensors").write_bytes(b"one")
    digests = {digest_model(folder)}
    for name in ("vae/diffusion_pytorch_model.fp16.safetensors", "chat_template.jinja"):
        (folder / name).write_bytes(b"two")
        digests.add(digest_model(folder))
    assert len(digests) == 3


MISSING = ["memory://none.pth", "none.pth", "memory://", "foo://none.pth", "~nobody-here/none.pth"]


@pytest.mark.parametrize("path", MISSING)
def test_a_missing_file_is_a_one_line_error(path: str) -> None:
    for find in (resolve_file, check_file_available):
        with pytest.raises(ModelNotFound, match=f"file {path}: ") as error:
            find(path)
        assert "\n" not in str(error.value)


class Web(LoopbackServer):
    """A web server that redirects `/weights` to a URL that it signs anew."""

    def __init__(self) -> None:
        super().__init__(Answers)
        self.content, self.refused, self.has_etag = b"one", set[str](), True
        self.gets, self.redirects = 0, count()
        self.url = f"http://{self.host}/weights"


class Answers(BaseHTTPRequestHandler):
    server: Web

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        if self._answer():
            self.server.gets += 1
            self.wfile.write(self.server.content)

    def _answer(self) -> bool:
        is_file = self.path.startswith("/stored?") and self.command not in self.server.refused
        found = 200 if is_file else 404 if self.path == "/none" else 403
        self.send_response(302 if self.path == "/weights" else found)
        if self.path == "/weights":
            self.send_header("Location", f"/stored?Signature={next(self.server.redirects)}")
        content = self.server.content if is_file else b""
        if is_file and self.server.has_etag:
            self.send_header("ETag", f'"{hashlib.md5(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return is_file


@pytest.fixture
def web(own_cache: Path) -> Iterator[Web]:
    with Web() as server:
        yield server


def test_a_file_behind_a_signed_redirect_is_copied_once_per_version(web: Web) -> None:
    first = resolve_file(web.url)
    assert first.read_bytes() == b"one"
    assert resolve_file(web.url) == first and web.gets == 1
    web.content = b"two"
    assert resolve_file(web.url).read_bytes() == b"two" and web.gets == 2


def test_a_file_of_a_server_without_versions_is_never_stale(web: Web) -> None:
    web.has_etag = False
    for web.content in b"one", b"two":
        assert resolve_file(web.url).read_bytes() == web.content


def test_a_refusal_is_no_missing_file(web: Web) -> None:
    web.refused = {"GET"}  # of the file alone
    assert check_file_available(web.url) == "remote file"
    with pytest.raises(ModelNotFound, match=r"weights: ClientResponseError: 403"):
        resolve_file(web.url)
    web.refused = {"HEAD", "GET"}
    for find in (resolve_file, check_file_available):
        with pytest.raises(ModelNotFound, match=r"weights: ClientResponseError: 403") as error:
            find(web.url)
        assert "Signature=1" not in str(error.value)
    with pytest.raises(ModelNotFound, match=r"none: no such file$"):
        resolve_file(web.url.replace("weights", "none"))
    with pytest.raises(ModelNotFound, match="weights: ClientConnectorError: "):
        resolve_file("http://127.0.0.1:9/weights")


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_is_no_missing_file(s3_away: None) -> None:
    for find in (resolve_file, check_file_available):
        with pytest.raises(ModelNotFound, match=r"weights: .*[Cc]onnect") as error:
            find("s3://bucket/weights")
        assert "\n" not in str(error.value) and "no such file" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_no_missing_model(remote: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    for resolve in (resolve_model, lambda url: resolve_file(f"{url}/unet/config.json")):
        with pytest.raises(CacheUnusable, match=r"Not a directory\): set KILN_CACHE to a writable"):
            resolve(remote)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://nothing-here", "no files there"),
        ("foo://bar", "Protocol not known: foo"),
        ("no/such/folder", "no such folder"),
        ("no--such/repository", "'no--such/repository'"),
        ("no/repository", "the hub has no such model visible to you: if it is private, log in"),
        ("hf://no/repository", "no files there"),
    ],
)
def test_a_missing_model_is_a_one_line_error(url: str, words: str, hub: HubServer) -> None:
    assert words in refused(url)


def test_a_model_that_the_cache_of_the_hub_lacks_offline_is_a_one_line_error(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE to fetch it" in refused("some/model")
    with pytest.raises(ModelNotFound, match="unset HF_HUB_OFFLINE"):
        check_on_hub("some/model", revision=None)
    assert hub.requests == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    check_on_hub("some/model", revision=None)
    resolve_model("some/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check_on_hub("some/model", revision=None)


def test_a_model_in_the_cache_of_the_hub_is_not_asked_for(
    hub: HubServer, repository: Repository
) -> None:
    resolve_model("some/model")
    hub.requests.clear()
    check_on_hub("some/model", revision=None)
    assert hub.requests == []


def refused(url: str, revision: str | None = None, *, away: bool = False) -> str:
    """The one line that says why there is no such model.

    Args:
        away: whether the hub may have it later.
    """
    with pytest.raises(ModelNotFound) as raised:
        resolve_model(url, revision=revision)
    assert isinstance(raised.value, HubAway) == away
    line = str(raised.value)
    assert line.startswith(f"model {url}: ") and "\n" not in line
    return line


@pytest.fixture
def repository(hub: HubServer) -> Repository:
    hub.repositories["some/model"] = Repository(
        {path: f"{path} of the hub".encode() for path in sorted(SDXL)}
    )
    return hub.repositories["some/model"]


def test_a_model_of_the_hub_is_fetched_once(hub: HubServer, repository: Repository) -> None:
    repository.files["some-checkpoint.safetensors"] = b"not what would be loaded"
    folder = resolve_model("some/model")
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}
    assert found == {path: repository.files[path] for path in SDXL}
    assert folder.name == repository.commit
    fetched = len(hub.requests)
    assert resolve_model("some/model") == folder
    assert not [path for _, path in hub.requests[fetched:] if not path.startswith("/api/")]


def test_damaged_weights_in_the_cache_of_the_hub_are_refused(repository: Repository) -> None:
    before = digest_model(folder := resolve_model("some/model"))
    weights = (folder / "unet/diffusion_pytorch_model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights} is damaged: delete it to have it fetched again" in refused("some/model")
    resolve_configs("some/model")
    weights.unlink()
    assert digest_model(resolve_model("some/model")) == before


def test_of_a_model_of_the_hub_the_configs_alone_may_be_had(repository: Repository) -> None:
    folder = resolve_configs("some/model")
    assert (folder / "unet/config.json").read_bytes() == b"unet/config.json of the hub"
    assert not list(folder.rglob("*.safetensors"))


def test_a_revision_is_what_it_was(hub: HubServer, repository: Repository) -> None:
    old = repository.commit
    before = resolve_model("some/model", revision=old)
    repository.files = {**repository.files, "unet/config.json": b"{}"}
    assert (resolve_model("some/model") / "unet/config.json").read_bytes() == b"{}"
    assert resolve_model("some/model", revision=old) == before
    assert "no revision nonesuch" in refused("some/model", revision="nonesuch")


def test_a_model_of_the_hub_by_its_url(repository: Repository, own_cache: Path) -> None:
    folder = resolve_model("hf://some/model")
    assert (folder / "unet/config.json").read_bytes() == b"unet/config.json of the hub"


def test_a_gated_model_requires_accepted_terms(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.accepted_by = {"hf_mine"}
    terms = f"accept its terms at {hub.url}/some/model, then log in"
    assert terms in refused("some/model")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert terms in refused("some/model")
    assert "hub has no such model visible to you" in refused("no/repository")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert resolve_model("some/model").name == repository.commit


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (500, "could not serve it (Server error '500 Internal Server Error'"),
        (403, "could not serve it (403 Forbidden"),
        (429, "could not serve it (429 Too Many Requests"),
        ("page", "could not serve it (Expecting value"),
        ("cut", "could not serve it (peer closed connection"),
    ],
)
def test_hub_errors_are_one_line_errors(
    fault: int | str,
    words: str,
    hub: HubServer,
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own tries
    hub.fault = fault
    assert words in refused("some/model", away=fault in (500, 429, "cut"))


def test_without_a_network_only_what_was_fetched_before_is_there(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("some/model")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("some/model") == folder
    assert "the hub cannot be reached at http://127.0.0.1:9" in refused("other/model", away=True)


def test_a_full_disk_is_no_missing_model(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(repository.files["unet/diffusion_pytorch_model.safetensors"])
    monkeypatch.setattr("uuid.uuid4", lambda: UUID(int=0))  # part of the name that is written to
    blobs = tmp_path / "hub/models--some--model/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest.hexdigest()}.{UUID(int=0).hex[:8]}.incomplete").symlink_to("/dev/full")
    with pytest.raises(CacheFull, match=f"no space left for the cache {tmp_path}/hub: .* HF_HOME"):
        resolve_model("some/model")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("resolve", [resolve_model, lambda url: resolve_file(f"{url}/a.json")])
def test_a_full_cache_says_where_to_free_space(
    remote: str, monkeypatch: pytest.MonkeyPatch, number: int, resolve: Callable[[str], Path]
) -> None:
    fs, root = fsspec.core.url_to_fs(remote)
    fs.pipe_file(f"{root}/a.json", b"")

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))  # as `write`, which names no file

    monkeypatch.setattr(fs, "get_file", full)
    monkeypatch.setattr(fs, "get", full)
    with pytest.raises(CacheFull, match=f"no space left for the cache {cache_folder()}: free"):
        resolve(remote)


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
            {"LICENSE", "LICENCE", "NOTICE", "Dockerfile", "tokenizer/chat_template.jinja"},
            {"LICENSE", "LICENCE", "NOTICE", "tokenizer/chat_template.jinja"},
        ),
        (
            {"config.json", "model.safetensors", "pytorch_model.bin"},
            {"config.json", "model.safetensors"},
        ),
        (
            {"config.json", "diffusion_pytorch_model.safetensors", "sdxl_vae.safetensors"},
            {"config.json", "diffusion_pytorch_model.safetensors"},
        ),
        (
            {"pytorch_lora_weights.safetensors", "mine_kohya.safetensors", "recipe.yaml"},
            {"pytorch_lora_weights.safetensors", "recipe.yaml"},
        ),
    ],
)
def test_only_what_would_be_loaded_is_taken_from_the_hub(there: set[str], wanted: set[str]) -> None:
    skipped = [*HUB_SKIPPED, *HUB_VARIANTS]
    found = filter_repo_objects(there, allow_patterns=HUB_FILES, ignore_patterns=skipped)
    assert set(found) == wanted
