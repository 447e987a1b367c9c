"""The download stage against a real server: outcomes, determinism, resume, damage and outages."""

import errno
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from download_stage import PICTURES, build, make_recipe, rows, samples_of, shard_bytes
from kiln_command import python
from picture_server import Web, picture
from PIL import Image
from waiting import wait_until

from artifacts.image_shards import read_rows, read_tar
from artifacts.records import digest_bytes
from artifacts.store import KeyParts, Store
from configs.errors import Away, Failed, Refused
from configs.settings.recipe import Recipe
from tasks import download
from tasks.beam.pipeline import make_pipeline
from tasks.download import DownloadStage
from tasks.panels import Table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


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
    parts = KeyParts("download", download.VERSION, {}, {"source": plan.source_digest})
    draft = Store(recipe.store).draft(parts)
    stage = DownloadStage(recipe, plan)
    summary = stage.build(draft, lambda done, total, _: seen.append((done, total)))
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
    panels = DownloadStage.show(artifact)
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


def test_a_server_without_an_answer_is_a_timeout_outcome(tmp_path: Path, web: Web) -> None:
    listed = [{"url": "silent", "caption": "a picture"}]
    recipe = make_recipe(tmp_path, web, listed, timeout=0.2, retries=0, max_transient=1.0)
    with pytest.raises(Failed, match=r"1 of 1 rows failed \(timeout: 1\)"):
        build(recipe)


def test_secrets_of_urls_are_not_stored(tmp_path: Path, web: Web) -> None:
    signed = f"http://user:pass-word@{web.host}/good/1?X-Amz-Signature=sesame&width=40"
    listed = [{"url": url, "caption": ""} for url in (signed, signed.replace("good", "gone"))]
    artifact = build(make_recipe(tmp_path, web, listed))
    assert artifact.summary["images"] == 1
    (shown,) = (p for p in DownloadStage.show(artifact) if p.title == "Examples of failed rows")
    named = f"http://{web.host}/gone/1?X-Amz-Signature=...&width=40"
    assert isinstance(shown, Table) and shown.rows == [{"outcome": "http 404", "row": named}]
    with pytest.raises(Failed) as error:
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


def test_too_many_failed_rows_raise_with_their_reasons(tmp_path: Path, web: Web) -> None:
    listed = rows(*(f"gone/{n}" for n in range(PICTURES)), "html", "html/2")
    recipe = make_recipe(tmp_path, web, listed)
    words = r"26 of 50 rows failed \(http 404: 24, not an image: 2\); .* allows 50%"
    with pytest.raises(Failed, match=words):
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
        patch.setattr("artifacts.records.shutil.copyfile", full)
        with pytest.raises(Away, match=f"^no space left for {folder}/{key}"):
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
    with pytest.raises(Refused, match=words):
        make_pipeline(beam)
    with pytest.raises(Refused, match=words):
        build(make_recipe(tmp_path, web, rows(), beam=beam))
    make_pipeline({"direct_num_workers": 2})


def test_importing_beam_prints_nothing() -> None:
    done = python("-c", "import tasks.beam.pipeline, logging; assert not logging.root.handlers")
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
        "stage = download.DownloadStage(recipe, download.plan(recipe));"
        "stage.build(draft, lambda *_: None)"
    )
    folder = tmp_path / "store/download/shards"
    web.is_silent = lambda: any(folder.glob("*.json"))  # from the first shard on
    command = [sys.executable, "-c", script, str(tmp_path / "recipe.json")]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_until(lambda: any(folder.glob("*.json")) or child.poll() is not None, 300)
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


def test_a_download_leaves_the_global_opener_of_urllib_alone(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)
    build(make_recipe(tmp_path, web, rows()))
    assert urllib.request._opener is None


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
