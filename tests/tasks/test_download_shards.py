"""The download stage against a real server: outcomes, determinism, resume, damage and outages."""

import errno
import gc
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from store_servers import REMOTE, UrlOf

from artifacts.artifact_key import KeyParts
from artifacts.hashing import digest_bytes
from artifacts.image_shards import Sample, read_rows, read_tar, write_tar
from artifacts.store import Artifact, Store
from configs.settings.recipe import Recipe
from tasks import download
from tasks.beam_options import BeamOptionsError, check_options
from tasks.build_or_reuse import StorageAway, TransientError
from tasks.download.download_on_beam import MOST_DEFERRED, THREADS, DownloadShard, _clear
from tasks.download.duplicates_hosts_and_sizes import DownloadStatistics
from tasks.download.filter_resize_encode_by_img2dataset import img2dataset_resizer
from tasks.download.plan_shards import ShardSpec
from tasks.download.stage_errors import Outage
from tasks.encode.buckets import bucket_sizes
from tasks.encode.decode_and_crop import TransformSettings, transform
from tasks.panels import PicturePanel, Table

pytestmark = pytest.mark.slow

PICTURES = 24


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))


class Web:
    """A server of pictures at /good/<n> and of every kind of failure; it counts its requests."""

    def __init__(self, port: int = 0) -> None:
        self.requests: Counter[str] = Counter()
        self.robots: bytes | None = None  # robots.txt
        self.robots_requests = 0
        self.is_down = False
        self.broken: set[str] = set()  # numbers of the pictures that it answers with 503
        self.is_silent: Callable[[], bool] = lambda: False
        self.released = threading.Event()  # ends the silence, which lasts a minute at most
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with suppress(OSError):
                    web.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.server.socket.listen(64)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.host = f"127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        if path == "/robots.txt":
            return self.answer_robots(handler)
        self.requests[path] += 1
        name, _, number = path.partition("?")[0].strip("/").partition("/")
        if name == "silent" or self.is_silent():
            self.released.wait(60)
        if self.is_down or number in self.broken or (name == "flaky" and self.requests[path] == 1):
            self.reply(handler, 503)
        elif name in ("good", "flaky"):
            self.reply(handler, 200, picture(int(number)))
        elif name == "sized":  # sized/<width>x<height>
            width, _, height = number.partition("x")
            self.reply(handler, 200, plain_picture(int(width), int(height)))
        elif name == "rotated":
            self.reply(handler, 200, rotated_picture())
        elif name == "optout":
            self.reply(handler, 200, picture(0), {"X-Robots-Tag": "noai"})
        elif name == "away":
            self.reply(handler, 302, b"", {"Location": "http://169.254.169.254/latest"})
        elif name == "endless":
            handler.send_response(200)
            handler.end_headers()
            while True:
                handler.wfile.write(bytes(65536))
        else:
            self.reply(handler, *((200, b"<html>") if name == "html" else (404, b"")))

    def answer_robots(self, handler: BaseHTTPRequestHandler) -> None:
        self.robots_requests += 1
        self.reply(handler, 404 if self.robots is None else 200, self.robots or b"")

    def reply(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)


def picture(number: int) -> bytes:
    return plain_picture(40, 32, number * 9 % 256)


def plain_picture(width: int, height: int, red: int = 0) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (width, height), (red, 60, 90)).save(buffer, "PNG")
    return buffer.getvalue()


def rotated_picture() -> bytes:
    """40 x 32 when upright, red above blue; stored rotated, as phones do."""
    upright = Image.new("RGB", (40, 32), (220, 30, 30))
    upright.paste((30, 30, 220), (0, 16, 40, 32))
    exif, buffer = Image.Exif(), BytesIO()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    rotated = upright.transpose(Image.Transpose.ROTATE_90)
    rotated.save(buffer, "JPEG", quality=95, exif=exif)
    return buffer.getvalue()


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


def rows(*paths: str) -> list[dict[str, Any]]:
    listed = [f"good/{n}" for n in range(PICTURES)] + list(paths)
    return [{"url": path, "caption": f"caption of {path}"} for path in listed]


def make_recipe(
    tmp_path: Path, web: Web, listed: list[dict[str, Any]], *, store: str = "store", **settings: Any
) -> Recipe:
    (tmp_path / store).mkdir(exist_ok=True)
    path = tmp_path / "urls.parquet"
    pq.write_table(pa.Table.from_pylist(listed), path)
    beam = settings.pop("beam", {"direct_running_mode": "in_memory", "direct_num_workers": 1})
    sha256 = {"sha256_column": "sha256"} if "sha256" in listed[0] else {}
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {"path": "unused"},
            "store": str(tmp_path / store),
            "source": {
                "kind": "urls",
                "path": str(path),
                "base_url": f"http://{web.host}",
                **sha256,
            },
            "download": {
                "image_size": 16,
                "allow_hosts": ["127.0.0.1"],
                "max_connections": 4,
                "max_requests_per_host": None,
                "timeout": 60.0,
                "backoff": 0.01,
                "retries": 1,
                "max_bytes": 100_000,
                "shard_size": 8,
                **settings,
            },
            "beam": beam,
            "evaluate": {"clip": "unused", "prompts": {"all": {"prompts": ["a"]}}},
            "publish": {"name": "unused"},
        }
    )


def build(recipe: Recipe, *, retry_failed: bool = False) -> Artifact:
    plan, store = download.plan(recipe), Store(recipe.store)
    retry = download.choose_retry(recipe, plan, store, retry_failed=retry_failed)
    draft = store.draft(download.key_parts(recipe, plan, retry))
    retry_run = uuid4().hex if retry_failed else None
    summary = download.build(recipe, plan, draft, lambda *_: None, retry_run=retry_run)
    return draft.commit(summary, {})


def shard_bytes(artifact: Artifact) -> dict[str, bytes]:
    return {entry.path: artifact.read(entry.path) for entry in artifact.files}


FAILURES = (
    "flaky/1",
    "gone/1",
    "gone/2",
    "away",
    "endless",
    "html",
    "optout",
    "file:///etc/passwd",
)


def test_every_row_has_an_outcome_and_every_success_a_picture(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows(*FAILURES), max_transient=0.5)
    seen: list[tuple[int, int]] = []
    plan = download.plan(recipe)
    parts = KeyParts(download.STAGE, download.VERSION, {}, {"source": plan.source_digest})
    draft = Store(recipe.store).draft(parts)
    summary = download.build(recipe, plan, draft, lambda done, total, _: seen.append((done, total)))
    artifact = draft.commit(summary, {})
    assert summary["outcomes"] == {
        "http 404": 2,
        "not an image": 1,
        "opted out": 1,
        "refused address": 1,
        "refused scheme": 1,
        "success": PICTURES + 1,
        "too large": 1,
    }
    assert (summary["rows"], summary["images"]) == (PICTURES + len(FAILURES), PICTURES + 1)
    assert seen[-1] == (summary["rows"], summary["rows"])
    assert Store(recipe.store).fault(artifact) is None
    samples = [
        s for e in artifact.files if e.path.endswith(".tar") for s in read_tar(artifact.url(e.path))
    ]
    assert len(samples) == summary["images"]
    for sample in samples:
        assert sample.captions == (f"caption of {sample.meta['url']}",)
        number = sample.meta["url"].rpartition("/")[2]
        assert sample.meta["sha256"] == digest_bytes(picture(int(number)))
        with Image.open(BytesIO(sample.image)) as image:
            assert image.size == (20, 16) == (sample.meta["width"], sample.meta["height"])
        assert (sample.meta["original_width"], sample.meta["original_height"]) == (40, 32)
    listed = [
        r
        for e in artifact.files
        if e.path.endswith(".parquet")
        for r in read_rows(artifact.read(e.path))
    ]
    assert {row["url"] for row in listed} == {row["url"] for row in rows(*FAILURES)}
    assert {r["url"]: r["error_message"] for r in listed}["gone/1"] == "http 404"
    panels = download.show(artifact)
    assert [panel.title for panel in panels] == [
        "Download",
        "Outcomes",
        "Examples of failed rows",
        "Data",
        "Caption lengths",
        "Hosts with the most failures",
        "Hosts that took the longest",
        "Some of the pictures",
    ]


def rows_of(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """{URL: row} of the parquet files."""
    parquets = [e.path for e in artifact.files if e.path.endswith(".parquet")]
    return {row["url"]: row for path in parquets for row in read_rows(artifact.read(path))}


def test_further_columns_are_in_each_picture_and_each_row(tmp_path: Path, web: Web) -> None:
    listed = [{**row, "likes": n, "licence": "cc0"} for n, row in enumerate(rows("gone/1"))]
    recipe = make_recipe(tmp_path, web, listed)
    source = recipe.source.model_copy(update={"additional_columns": ("likes", "licence")})
    artifact = build(recipe.model_copy(update={"source": source}))
    kept = {row["url"]: {"licence": "cc0", "likes": row["likes"]} for row in listed}
    tars = [artifact.url(e.path) for e in artifact.files if e.path.endswith(".tar")]
    samples = [sample for tar in tars for sample in read_tar(tar)]
    assert len(samples) == PICTURES
    for sample in samples:
        assert kept[sample.meta["url"]].items() <= sample.meta.items()
    found = {url: json.loads(row["additional"]) for url, row in rows_of(artifact).items()}
    assert found == kept


ODD = ("sized/4000x2", "sized/1x1", "sized/31x64", "sized/200x40", "sized/40x161")


def test_small_and_thin_pictures_are_dropped_by_default_and_counted(
    tmp_path: Path, web: Web
) -> None:
    recipe = make_recipe(tmp_path, web, rows(*ODD, "sized/160x40", "sized/32x32"))
    expected = {"success": PICTURES + 2, "too small": 3, "too thin": 2}
    assert build(recipe).summary["outcomes"] == expected


def test_small_and_thin_pictures_are_shown_if_the_recipe_allows_them(
    tmp_path: Path, web: Web
) -> None:
    listed = [{"url": url, "caption": ""} for url in ODD]
    recipe = make_recipe(tmp_path, web, listed, min_image_size=0, max_aspect_ratio=10_000)
    artifact = build(recipe)
    assert artifact.summary["outcomes"] == {"success": len(ODD)}
    assert [panel.title for panel in download.show(artifact)][-1] == "Some of the pictures"


def samples_of(artifact: Artifact) -> list[Sample]:
    tars = [entry.path for entry in artifact.files if entry.path.endswith(".tar")]
    return [sample for tar in tars for sample in read_tar(artifact.url(tar))]


def test_pictures_of_later_shards_are_shown_where_the_first_has_none(tmp_path: Path) -> None:
    red = BytesIO()
    Image.new("RGB", (40, 20), "red").save(red, "PNG")
    store = Store(str(tmp_path / "store"))
    draft = store.draft(KeyParts(download.STAGE, download.VERSION, {}, {}))
    write_tar(tmp_path / "a.tar", [])
    write_tar(tmp_path / "b.tar", [Sample("0", red.getvalue(), "png", ("red",))])
    for name in ("a.tar", "b.tar"):
        draft.write(name, (tmp_path / name).read_bytes())
    counts = {"rows": 2, "images": 1, "outcomes": {"success": 1}, "shards": 1}
    artifact = draft.commit({**counts, "data": DownloadStatistics().summary()}, {})
    panel = download.show(artifact)[-1]
    assert isinstance(panel, PicturePanel)
    with Image.open(BytesIO(panel.png)) as grid:
        assert grid.getpixel((grid.width // 2, grid.height // 2)) == (255, 0, 0)


def test_a_server_without_an_answer_is_a_timeout_outcome(tmp_path: Path, web: Web) -> None:
    listed = [{"url": "silent", "caption": "a picture"}]
    recipe = make_recipe(tmp_path, web, listed, timeout=0.2, retries=0, max_transient=1.0)
    with pytest.raises(download.TooManyFailed, match=r"1 of 1 rows failed \(timeout: 1\)"):
        build(recipe)


def test_a_picture_with_an_exif_orientation_is_stored_upright(tmp_path: Path, web: Web) -> None:
    listed = [{"url": "rotated", "caption": "", "sha256": digest_bytes(rotated_picture())}]
    (sample,) = samples_of(build(make_recipe(tmp_path, web, listed)))
    assert [sample.meta[name] for name in ("width", "height")] == [20, 16]
    assert [sample.meta[f"original_{name}"] for name in ("width", "height")] == [40, 32]
    square = TransformSettings(
        resolution=16,
        aspect_buckets=False,
        bucket_step=8,
        max_aspect=2.0,
        crop="center",
        flip=False,
        seed=0,
        holdout=0.0,
        max_pixels=10_000,
    )
    sha256 = hashlib.sha256(sample.image).digest()
    (seen,) = transform(sample.image, sha256, sample.meta, square, bucket_sizes(square, 4))
    assert seen.original_size == (32, 40)
    red, _, blue = seen.pixels
    assert (red[:6] > 0.5).all() and (red[-6:] < -0.5).all() and (blue[-6:] > 0.5).all()


def test_a_pictures_identity_is_its_download_whatever_the_url_and_the_stored_size(
    tmp_path: Path, web: Web
) -> None:
    listed = rows(*(f"good/{n}?signature=again" for n in range(PICTURES)))
    found = []
    for number, size in enumerate((16, 24)):
        recipe = make_recipe(tmp_path, web, listed, store=f"store{number}", image_size=size)
        samples = samples_of(build(recipe))
        found.append({s.captions: (s.source_sha256, digest_bytes(s.image)) for s in samples})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 2 * PICTURES
    for caption, (identity, stored) in found[0].items():
        assert found[1][caption][0] == identity
        assert found[1][caption][1] != stored
    assert len({identity for identity, _ in found[0].values()}) == PICTURES


def test_secrets_of_urls_are_not_stored(tmp_path: Path, web: Web) -> None:
    signed = f"http://user:pass-word@{web.host}/good/1?X-Amz-Signature=sesame&width=40"
    listed = [{"url": url, "caption": ""} for url in (signed, signed.replace("good", "gone"))]
    artifact = build(make_recipe(tmp_path, web, listed))
    assert artifact.summary["images"] == 1
    (shown,) = (p for p in download.show(artifact) if p.title == "Examples of failed rows")
    named = f"http://{web.host}/gone/1?X-Amz-Signature=...&width=40"
    assert isinstance(shown, Table) and shown.rows == [{"outcome": "http 404", "row": named}]
    with pytest.raises(download.TooManyFailed) as error:
        build(make_recipe(tmp_path, web, listed, max_failed=0.1))
    assert str(error.value).endswith(f"; for example http 404: {named}")
    assert samples_of(artifact)[0].meta["url"].endswith("/good/1?X-Amz-Signature=...&width=40")
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    (listed,) = (e.path for e in artifact.files if e.path.endswith(".parquet"))
    stored.append(json.dumps(read_rows(artifact.read(listed))).encode())
    assert not any(secret in data for data in stored for secret in (b"sesame", b"pass-word"))


def test_bytes_do_not_depend_on_the_run_or_the_beam_mode(tmp_path: Path, web: Web) -> None:
    listed, built = rows("gone/1", "html", "away"), []
    for number, mode in enumerate(["in_memory", "multi_threading", "multi_threading"]):
        beam = {"direct_running_mode": mode, "direct_num_workers": 1 + number}
        # At most eight rows a shard: the server's random port is in what cuts the shards.
        recipe = make_recipe(tmp_path, web, listed, store=f"store{number}", beam=beam, shard_size=4)
        built.append(build(recipe))
    assert built[0].summary["shards"] >= 3
    assert shard_bytes(built[0]) == shard_bytes(built[1]) == shard_bytes(built[2])
    assert built[0].digest == built[1].digest == built[2].digest


def test_only_missing_or_damaged_shards_are_fetched_again(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows())
    first = build(recipe)
    before = shard_bytes(first)
    shards = download.plan(recipe).shards
    folder = tmp_path / "store/download/shards"
    (folder / f"{shards[0].key}.json").unlink()
    (tar,) = folder.glob(f"{shards[1].key}.*.tar")
    tar.write_bytes(tar.read_bytes()[:-600] + b"\xff" * 600)
    web.requests.clear()
    again = build(recipe)
    assert web.requests.total() == shards[0].rows + shards[1].rows
    assert again.digest == first.digest
    assert shard_bytes(again) == before
    web.requests.clear()
    build(recipe)
    assert not web.requests


def test_one_changed_caption_or_picture_fetches_one_shard(tmp_path: Path, web: Web) -> None:
    listed = [
        {**row, "sha256": hashlib.sha256(picture(n)).hexdigest()} for n, row in enumerate(rows())
    ]
    first = build(make_recipe(tmp_path, web, listed))
    for change in ({"caption": "edited"}, {"sha256": hashlib.sha256(b"").hexdigest()}):
        web.requests.clear()
        edited = [*listed[:10], {**listed[10], **change}, *listed[11:]]
        changed = build(make_recipe(tmp_path, web, edited))
        kept = {entry.path for entry in first.files}
        (fresh,) = (e for e in changed.files if e.path.endswith(".tar") and e.path not in kept)
        assert len(web.requests) == sum(fresh.meta["outcomes"].values())  # a retry may repeat one
    assert changed.summary["outcomes"] == {"sha256 differs": 1, "success": PICTURES - 1}


@pytest.mark.parametrize("kind", REMOTE)
def test_notes_of_deferred_shards_are_deleted_in_a_store_with_a_bracket(
    kind: str, url_of: UrlOf
) -> None:
    store = Store(f"{url_of(kind)}/run[1]")
    store.fs.pipe_file(f"{store.root}/notes/a.json", b"{}")
    _clear(store, f"{store.root}/notes")
    assert not store.fs.exists(f"{store.root}/notes")


def test_an_outage_defers_shards_to_the_next_run(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows())
    folder = tmp_path / "store/download/shards"
    shards = download.plan(recipe).shards
    build(recipe)
    (folder / f"{shards[0].key}.json").unlink()
    (tar,) = folder.glob(f"{shards[1].key}.*.tar")
    tar.write_bytes(b"damaged" + tar.read_bytes()[7:])
    web.is_down = True
    with pytest.raises(TransientError, match=rf"2 of {len(shards)} shards .*\(http 503: \d+\)"):
        build(recipe)
    committed = {path.stem for path in folder.glob("*.json")}
    assert committed == {s.key for s in shards[2:]}
    web.is_down = False
    web.requests.clear()
    assert build(recipe).summary["images"] == PICTURES
    assert web.requests.total() == shards[0].rows + shards[1].rows


def test_an_outage_stops_the_stage_after_a_few_shards(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=1, max_host_failures=100)
    shards = len(download.plan(recipe).shards)
    assert shards > 2 * MOST_DEFERRED
    web.is_down = True
    words = (
        rf"stopped, since {MOST_DEFERRED} shards in a row .* of {shards} in all \(http 503: \d+\)"
    )
    with pytest.raises(Outage, match=words):
        build(recipe)
    assert web.requests.total() < MOST_DEFERRED + THREADS  # each thread may end what it had begun
    web.is_down = False
    assert build(recipe).summary["images"] == PICTURES


def test_shards_of_the_store_do_not_hide_an_outage(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=1)
    build(recipe)
    shards = [spec.key for spec in download.plan(recipe).shards]
    assert len(shards) > 2 * MOST_DEFERRED
    for key in shards[::2]:
        (tmp_path / f"store/download/shards/{key}.json").unlink()
    web.is_down = True
    with pytest.raises(Outage):
        build(recipe)


def test_a_shard_that_a_repeated_bundle_downloads_is_not_deferred(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = DownloadShard.process

    def repeated(self: DownloadShard, spec: ShardSpec) -> Iterator[str]:
        web.is_down = True
        list(process(self, spec))
        web.is_down = False
        yield from process(self, spec)

    monkeypatch.setattr(DownloadShard, "process", repeated)
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=100)
    assert build(recipe).summary["images"] == PICTURES


def test_a_committed_shard_whose_retry_is_deferred_is_an_outage(tmp_path: Path, web: Web) -> None:
    web.broken = {"3"}
    build(make_recipe(tmp_path, web, rows(), retries=0, shard_size=100))
    stricter = make_recipe(tmp_path, web, rows(), retries=0, shard_size=100, max_transient=0.0)
    with pytest.raises(TransientError, match=r"1 of 1 shards were deferred .*\(http 503: 1\)"):
        build(stricter, retry_failed=True)


class TwoOfThree(set[str]):
    """The numbers of two requests in three."""

    asked = 0

    def __contains__(self, _: object) -> bool:
        self.asked += 1
        return self.asked % 3 != 0


def test_a_shard_that_is_downloaded_ends_a_row_of_deferred_ones(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=1, max_host_failures=100)
    web.broken = TwoOfThree()
    with pytest.raises(TransientError, match=r"(\d+) of \d+ shards were deferred") as failure:
        build(recipe)
    assert int(re.findall(r"\d+", str(failure.value))[0]) > MOST_DEFERRED


def test_only_rows_with_transient_failures_are_fetched_again_on_request(
    tmp_path: Path, web: Web
) -> None:
    web.broken = {"3", "17"}
    recipe = make_recipe(tmp_path, web, rows("gone/1"), retries=0, shard_size=100)
    first = build(recipe)
    assert first.summary["outcomes"] == {"http 404": 1, "http 503": 2, "success": PICTURES - 2}
    web.broken = set()
    web.requests.clear()
    assert build(recipe).digest == first.digest
    assert not web.requests
    second = build(recipe, retry_failed=True)
    assert second.key != first.key
    assert second.summary["outcomes"] == {"http 404": 1, "success": PICTURES}
    assert web.requests == {"/good/3": 1, "/good/17": 1}
    web.requests.clear()
    for retry_failed in (True, False):  # without a transient failure no retry is left
        assert build(recipe, retry_failed=retry_failed).key == second.key
    assert not web.requests
    never_broken = build(make_recipe(tmp_path, web, rows("gone/1"), store="other", shard_size=100))
    assert shard_bytes(second) == shard_bytes(never_broken)


def test_a_row_is_fetched_again_by_as_many_runs_as_the_recipe_allows(
    tmp_path: Path, web: Web
) -> None:
    web.broken = {"3"}
    recipe = make_recipe(tmp_path, web, rows("gone/1"), retry_failed=2, shard_size=100)
    requests, attempts = [], []
    for retry_failed in (True, True, True, True, False):
        web.requests.clear()
        artifact = build(recipe, retry_failed=retry_failed)
        requests.append(web.requests["/good/3"])
        attempts.append(rows_of(artifact)["good/3"]["attempts"])
    assert requests == [2, 2, 2, 0, 0]
    assert attempts == [2, 4, 6, 6, 6]
    assert rows_of(artifact)["gone/1"]["attempts"] == 1
    assert rows_of(artifact)["good/4"]["attempts"] is None  # a picture has no failure
    kinds = {row["outcome"]: row["failure"] for row in download.show(artifact)[1].rows}
    assert kinds == {"success": "", "http 404": "permanent", "http 503": "transient"}


def test_a_later_try_of_a_run_fetches_no_row_again_that_the_run_fetched_again(
    tmp_path: Path, web: Web
) -> None:
    """Else the tries of one run after an outage could use up what the recipe allows to runs."""
    web.broken = {"3"}
    recipe = make_recipe(tmp_path, web, rows("gone/1"), retries=0, shard_size=100)
    build(recipe)
    plan, requests = download.plan(recipe), []
    for run in ("one", "one", "two"):
        web.requests.clear()
        draft = Store(recipe.store).draft(download.key_parts(recipe, plan, 1))  # not committed
        download.build(recipe, plan, draft, lambda *_: None, retry_run=run)
        requests.append(web.requests["/good/3"])
    assert requests == [1, 0, 1]


def test_the_bytes_and_times_of_a_shard_are_those_of_all_its_downloads(
    tmp_path: Path, web: Web
) -> None:
    web.broken = {"3"}
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=100)
    first = build(recipe).summary["data"]
    web.broken = set()
    again = build(recipe, retry_failed=True).summary["data"]
    whole = build(make_recipe(tmp_path, web, rows(), store="other", shard_size=100))
    assert first["bytes"] < again["bytes"] == whole.summary["data"]["bytes"]


def test_a_retry_is_possible_after_too_many_failures(tmp_path: Path, web: Web) -> None:
    web.broken = {"3"}
    recipe = make_recipe(tmp_path, web, rows(), retries=0, max_failed=0.0)
    with pytest.raises(download.TooManyFailed, match="--retry-failed fetches those with transient"):
        build(recipe)
    web.broken = set()
    web.requests.clear()
    assert build(recipe, retry_failed=True).summary["images"] == PICTURES
    assert web.requests == {"/good/3": 1}


@pytest.fixture
def dead() -> Iterator[str]:
    """A host on loopback that refuses connections: its port is bound, but nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """{port: connection attempts}"""
    counts: Counter[int] = Counter()
    connect = socket.socket.connect

    def counted(self: socket.socket, address: Any) -> None:
        counts[address[1]] += 1
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counted)
    return counts


def test_a_dead_host_is_requested_a_few_times_and_the_stage_succeeds(
    tmp_path: Path, web: Web, dead: str, connections: Counter[int]
) -> None:
    lost = [{"url": f"http://{dead}/{n}", "caption": ""} for n in range(100)]
    alive = [{"url": f"http://{web.host}/good/{n}", "caption": ""} for n in range(PICTURES)] * 10
    listed = [*alive[:100], *lost, *alive[100:]]  # 30% are dead
    small = {"retries": 2, "backoff": 0.0, "max_host_failures": 10, "robots_txt": False}
    recipe = make_recipe(tmp_path, web, listed, shard_size=4 * len(listed), **small)
    summary = build(recipe).summary
    connected = recipe.download.max_connections
    assert 10 <= connections[int(dead.rpartition(":")[2])] < 10 + connected
    assert summary["images"] == len(alive)
    failed = {reason: n for reason, n in summary["outcomes"].items() if reason != "success"}
    assert failed.keys() <= {"host does not answer", "connection refused"}
    assert sum(failed.values()) == len(lost)
    assert failed["host does not answer"] > len(lost) - 10 - connected


def test_a_dead_host_is_requested_again_by_a_later_run(tmp_path: Path, web: Web) -> None:
    away = Web()
    away.close()
    lost = [{"url": f"http://{away.host}/good/{n}", "caption": ""} for n in range(8)]
    one = {"retries": 0, "max_connections": 1, "max_host_failures": 2, "robots_txt": False}
    recipe = make_recipe(tmp_path, web, [*rows(), *lost], shard_size=100, **one)
    first = build(recipe)
    expected = {"connection refused": 2, "host does not answer": 6, "success": PICTURES}
    assert first.summary["outcomes"] == expected
    assert [rows_of(first)[row["url"]]["attempts"] for row in lost] == [1] * 2 + [0] * 6
    back = Web(away.server.server_address[1])
    try:
        assert build(recipe, retry_failed=True).summary["images"] == PICTURES + len(lost)
        assert set(back.requests.values()) == {1} and len(back.requests) == len(lost)
    finally:
        back.close()


def test_an_outage_of_most_hosts_is_deferred(tmp_path: Path, web: Web, dead: str) -> None:
    lost = [{"url": f"http://{dead}/{n}", "caption": ""} for n in range(2 * PICTURES)]
    recipe = make_recipe(tmp_path, web, [*rows(), *lost], retries=0, shard_size=1000, max_failed=1)
    assert build(recipe).summary["images"] == PICTURES  # one of two hosts is dead
    recipe = make_recipe(tmp_path, web, lost, retries=0, shard_size=1000, max_failed=1)
    with pytest.raises(TransientError, match=r"1 of 1 shards .*host does not answer: \d+"):
        build(recipe)


def test_a_list_with_many_dead_hosts_is_downloaded(tmp_path: Path, web: Web) -> None:
    web.broken = {str(n) for n in range(0, PICTURES, 3)}  # a third of every shard
    artifact = build(make_recipe(tmp_path, web, rows(), retries=0, shard_size=PICTURES))
    assert artifact.summary["images"] == PICTURES - len(web.broken)


def test_too_many_failed_rows_raise_with_their_reasons(tmp_path: Path, web: Web) -> None:
    listed = rows(*(f"gone/{n}" for n in range(PICTURES)), "html", "html/2")
    recipe = make_recipe(tmp_path, web, listed)
    words = r"26 of 50 rows failed \(http 404: 24, not an image: 2\); .* allows 50%"
    with pytest.raises(download.TooManyFailed, match=words):
        build(recipe)
    web.requests.clear()
    assert build(recipe.model_copy(update={"download": recipe.download.model_copy(
        update={"max_failed": 0.6})})).summary["images"] == PICTURES  # fmt: skip
    assert not web.requests


@pytest.mark.parametrize("mode", ["in_memory", "multi_threading"])
def test_a_full_disk_raises_and_keeps_committed_shards(
    tmp_path: Path, web: Web, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beam = {"direct_running_mode": mode, "direct_num_workers": 1}
    recipe = make_recipe(tmp_path, web, rows(), beam=beam)
    first = build(recipe)
    key = download.plan(recipe).shards[-1].key
    folder = tmp_path / "store/download/shards"
    (folder / f"{key}.json").unlink()
    next(folder.glob(f"{key}.*.tar")).unlink()

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    with monkeypatch.context() as patch:
        patch.setattr("artifacts.checksummed_files.shutil.copyfile", full)
        with pytest.raises(StorageAway, match=f"^no space left for {folder}/{key}"):
            build(recipe)
    assert not (folder / f"{key}.json").exists()
    web.requests.clear()
    assert build(recipe).digest == first.digest
    assert web.requests.total() == download.plan(recipe).shards[-1].rows


@pytest.mark.parametrize(
    ("beam", "words"),
    [
        ({"runner": "NoSuchRunner"}, "beam: runner NoSuchRunner cannot be used"),
        ({"direct_num_worker": 2}, r"beam\.direct_num_worker: .* mean beam\.direct_num_workers\?"),
    ],
)
def test_invalid_beam_options_are_named(
    tmp_path: Path, web: Web, beam: dict[str, Any], words: str
) -> None:
    with pytest.raises(BeamOptionsError, match=words):
        check_options(beam)
    with pytest.raises(BeamOptionsError, match=words):
        build(make_recipe(tmp_path, web, rows(), beam=beam))
    check_options({"direct_num_workers": 2})


@pytest.mark.slow
def test_importing_beam_prints_nothing() -> None:
    command = [
        sys.executable,
        "-c",
        "import tasks.beam_pipeline, logging; assert not logging.root.handlers",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_killed_run_resumes_after_its_committed_shards(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows())
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    script = (
        "import sys; from configs.settings.recipe import Recipe; from tasks import download;"
        "from artifacts.store import KeyParts, Store;"
        "recipe = Recipe.model_validate_json(open(sys.argv[1]).read());"
        "draft = Store(recipe.store).draft(KeyParts('download', 0, {}, {}));"
        "download.build(recipe, download.plan(recipe), draft, lambda *_: None)"
    )
    folder = tmp_path / "store/download/shards"
    web.is_silent = lambda: any(folder.glob("*.json"))  # from the first shard on
    command = [sys.executable, "-c", script, str(tmp_path / "recipe.json")]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while not list(folder.glob("*.json")) and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    web.released.set()
    kept = {path.stem for path in folder.glob("*.json")}
    shards = download.plan(recipe).shards
    assert 0 < len(kept) < len(shards)
    web.requests.clear()
    resumed = build(recipe)
    # Distinct ones: a request of the killed run may be counted late.
    assert len(web.requests) == sum(s.rows for s in shards if s.key not in kept)
    other = build(make_recipe(tmp_path, web, rows(), store="other"))
    assert resumed.digest == other.digest


def test_decoding_does_not_redirect_the_output_of_other_threads(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Talking(BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            os.write(1, b"another thread's line\n")
            return super().read(size)

    resizer = img2dataset_resizer()
    assert resizer(16, "keep_ratio", True)(Talking(picture(0)))[1:3] == (20, 16)
    assert "another thread's line" in capfd.readouterr().out


def test_a_download_leaves_the_global_opener_of_urllib_alone(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)
    build(make_recipe(tmp_path, web, rows()))
    assert urllib.request._opener is None


def test_embedded_pictures_have_the_outcomes_of_fetched_ones(tmp_path: Path, web: Web) -> None:
    inside = [{"image": {"bytes": picture(n), "path": ""}, "text": f"{n}"} for n in range(6)]
    inside.append({"image": {"bytes": b"broken", "path": ""}, "text": "broken"})
    pq.write_table(pa.Table.from_pylist(inside), tmp_path / "inside.parquet")
    recipe = make_recipe(tmp_path, web, rows())
    source = {"kind": "dataset", "path": str(tmp_path / "inside.parquet")}
    recipe = Recipe.model_validate({**recipe.model_dump(), "source": source})
    artifact = build(recipe)
    assert artifact.summary["outcomes"] == {"not an image": 1, "success": 6}
    assert not web.requests


def test_the_demo_is_downloaded_from_its_own_server(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache/kilnworks/demo/digits-0-1797-0"
    (folder / "images").mkdir(parents=True)
    listed = []
    for n in range(6):
        (folder / f"images/{n}.png").write_bytes(picture(n))
        digest = hashlib.sha256(picture(n)).hexdigest()
        listed.append({"url": f"images/{n}.png", "caption": f"{n}", "sha256": digest})
    pq.write_table(pa.Table.from_pylist(listed), folder / "urls.parquet")
    monkeypatch.setattr("demo.dataset.write", lambda *_, **__: folder / "urls.parquet")
    recipe = make_recipe(tmp_path, web, rows(), allow_hosts=[])
    digits = {"kind": "digits", "rehearsal": 0}
    artifact = build(Recipe.model_validate({**recipe.model_dump(), "source": digits}))
    assert artifact.summary["outcomes"] == {"success": 6}
    first = next(e for e in artifact.files if e.path.endswith(".parquet"))
    assert read_rows(artifact.read(first.path))[0]["url"].startswith("images/")


def test_failed_rows_leave_no_objects(tmp_path: Path, web: Web) -> None:
    """The errors of rows and their frames refer to each other: plain counting never frees them."""

    def objects_after(shard: int) -> int:
        refused = [{"url": f"file:///{shard}/{n}", "caption": ""} for n in range(300)]
        listed = [{"url": f"good/{shard}", "caption": ""}, *refused]
        build(make_recipe(tmp_path, web, listed, max_failed=1.0, shard_size=400))
        return len(gc.get_objects())

    objects_after(0)
    before = objects_after(1)
    assert objects_after(2) - before < 3000  # 37 for each row without a collection
