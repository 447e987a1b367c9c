"""A model is found as a folder, a URL or a hub id; what is not there is said in one line."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path

import fsspec
import pytest
from gcs_server import GcsServer
from loopback_server import LoopbackServer
from store_servers import REMOTE, S3Server, UrlOf

from artifacts import models
from artifacts.models import (
    cache_folder,
    check_file_available,
    digest_model,
    fetch_model,
    files_below,
    resolve_file,
    resolve_model,
)
from artifacts.store import Store
from configs.errors import Away, Failed, Refused


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
    ours = models.digest_model

    def others_mend(read: Path) -> str:
        digest = ours(read)
        if not (read / "README.md").exists():
            monkeypatch.setattr(models, "digest_model", ours)
            shutil.rmtree(read)
            assert resolve_model(url) == read
            (read / "README.md").write_bytes(b"of the other process")
        return digest

    monkeypatch.setattr(models, "digest_model", others_mend)
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
    with pytest.raises(Refused, match="no files there"):
        fetch_model(f"{url}/none", "0", digest_model)


def test_a_name_that_leads_out_of_a_remote_model_is_refused(
    s3: S3Server, url_of: UrlOf, tmp_path: Path, own_cache: Path
) -> None:
    """`..` is a name like any other to a bucket, and the folder above to a disk."""
    url = url_of("s3")
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe({f"{root}/model_index.json": b"{}", f"{root}/../../../../outside.txt": b"evil"})
    with pytest.raises(Refused, match="leads out of its folder"):
        resolve_model(url)
    with pytest.raises(ValueError, match="leads out of its folder"):
        fetch_model(url, "0", digest_model)
    assert not list(tmp_path.rglob("outside.txt"))


def test_a_model_in_a_closed_bucket_is_a_one_line_error(
    gcs: GcsServer, url_of: UrlOf, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "forbidden", ".*")
    with pytest.raises(Refused, match="Forbidden: "):
        resolve_model(url_of("gs"))


def test_a_model_whose_files_are_listed_and_not_given_is_a_one_line_error(
    gcs: GcsServer, url_of: UrlOf, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of("gs")
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/model_index.json", b"{}")
    monkeypatch.setattr(gcs, "forbidden", "GET .*model_index.json$")
    with pytest.raises(Refused, match=f"^model {url}: Forbidden: "):
        resolve_model(url)


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


MISSING = ["memory://none.pth", "none.pth", "memory://", "foo://none.pth", "~nobody-here/none.pth"]


@pytest.mark.parametrize("path", MISSING)
def test_a_missing_file_is_a_one_line_error(path: str) -> None:
    for find in (resolve_file, check_file_available):
        with pytest.raises(Refused, match=f"file {path}: ") as error:
            find(path)
        assert "\n" not in str(error.value)


class Web(LoopbackServer):
    """A web server that redirects `/weights` to a URL that it signs anew."""

    def __init__(self) -> None:
        super().__init__(Answers)
        self.content, self.refused, self.has_etag = b"one", set[str](), True
        self.status = 403  # of what is refused
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
        found = 200 if is_file else 404 if self.path == "/none" else self.server.status
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
    with pytest.raises(Refused, match=r"weights: ClientResponseError: 403"):
        resolve_file(web.url)
    web.refused = {"HEAD", "GET"}
    for find in (resolve_file, check_file_available):
        with pytest.raises(Refused, match=r"weights: ClientResponseError: 403") as error:
            find(web.url)
        assert "Signature=1" not in str(error.value)
    with pytest.raises(Refused, match=r"none: no such file$"):
        resolve_file(web.url.replace("weights", "none"))


def test_an_outage_is_no_missing_file(web: Web, refusing_url: str) -> None:
    """Else the retries of a stage do not try it again."""
    busy = r"weights: cannot be fetched now \(503.*\): run again later$"
    away = r"weights: cannot be fetched now \(Cannot connect .*\): run again later$"
    web.status, web.refused = 503, {"HEAD", "GET"}
    folder, file = web.url.partition("/weights")[0], f"{refusing_url}/weights"
    for find in (resolve_file, check_file_available):
        for url, words in ((web.url, busy), ("http://127.0.0.1:9/weights", away)):
            with pytest.raises(Away, match=words):
                find(url)
        with pytest.raises(Away, match=r"weights: cannot be fetched now \(.*invalid at this"):
            find(file)
    for url in (folder, "http://127.0.0.1:9/model"):
        with pytest.raises(Away, match=rf"^model {url}: cannot be fetched now"):
            resolve_model(url)
    web.refused = {"GET"}  # once the file is found
    with pytest.raises(Away, match=busy):
        resolve_file(web.url)


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_is_no_missing_file(s3_away: None) -> None:
    for find in (resolve_file, check_file_available):
        with pytest.raises(Away, match=r"weights: .*[Cc]onnect") as error:
            find("s3://bucket/weights")
        assert "\n" not in str(error.value) and "no such file" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_no_missing_model(remote: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    for resolve in (resolve_model, lambda url: resolve_file(f"{url}/unet/config.json")):
        with pytest.raises(Failed, match=r"Not a directory\): set KILN_CACHE to a writable"):
            resolve(remote)


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
    with pytest.raises(Away, match=f"no space left for the cache {cache_folder()}: free"):
        resolve(remote)
