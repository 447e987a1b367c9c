"""Hashes of rows and keys of shards: every value that affects a picture or its caption."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.download import Download
from configs.source import UrlSource
from tasks.download.download_shard import DownloadContext, ShardSpec, download_shard, shard_key
from tasks.download.errors import SourceError
from tasks.download.parquet_csv_jsonl import Span
from tasks.download.rows import Row
from tasks.download.sources import ServedAt, UrlList

ROW = Row("http://example.org/0.png", ("a cat", "a tabby"), aesthetic_score=5.0)
#: Settings that affect a shard's content, each with a value that is not the default.
CHANGES: dict[str, Any] = {
    "image_size": 64,
    "resize_mode": "center_crop",
    "only_if_bigger": False,
    "min_image_size": 8,
    "max_aspect_ratio": 8.0,
    "max_pixels": 1000,
    "max_bytes": 1000,
    "encode_format": "png",
    "encode_quality": 9,
    "user_agent_token": "me",
    "opt_out_headers": (),
    "allow_hosts": ("127.0.0.1",),
    "allow_ports": (80,),
}
#: Settings that only affect how a shard is fetched, or how rows are cut into shards.
OTHERS = {
    "threads",
    "timeout",
    "deadline",
    "retries",
    "backoff",
    "max_failed",
    "max_transient",
    "max_host_failures",
    "retry_failed",
    "shard_size",
}


@pytest.mark.parametrize(
    "change",
    [
        {"url": "http://example.org/1.png"},
        {"captions": ("a cat", "a kitten")},
        {"captions": ("a cat",)},
        {"sha256": "0" * 64},
        {"aesthetic_score": 5.5},
        {"aesthetic_score": None},
    ],
)
def test_every_listed_value_of_a_picture_changes_its_hash(change: dict[str, Any]) -> None:
    assert replace(ROW, **change).hash != ROW.hash


def test_another_url_of_a_picture_with_a_listed_sha256_is_the_same_row() -> None:
    listed = replace(ROW, sha256="0" * 64)
    signed_again = replace(listed, url=f"{ROW.url}?X-Amz-Signature=f00", base_url="http://b.org")
    assert signed_again.hash == listed.hash


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_every_setting_that_changes_a_shard_is_in_its_key(name: str) -> None:
    plain, changed = Download(), Download(**{name: CHANGES[name]})
    assert shard_key(changed, [ROW.hash]) != shard_key(plain, [ROW.hash])


def test_every_setting_is_listed_as_in_the_key_or_not() -> None:
    assert set(Download.model_fields) == CHANGES.keys() | OTHERS


def test_a_row_that_changes_after_it_was_planned_is_not_committed(tmp_path: Path) -> None:
    listed, settings = tmp_path / "list.csv", Download()
    source = UrlSource(kind="urls", path=str(listed), format="csv")
    listed.write_text("url,caption\nhttp://127.0.0.1:1/,a cat\n")
    found = list(UrlList(source).scan())
    key = shard_key(settings, (row_hash for row_hash, _ in found))
    listed.write_text("url,caption\nhttp://127.0.0.1:1/,a dog\n")
    store = tmp_path / "store"
    work = DownloadContext(str(store), str(store / "notes"), source, settings, ServedAt())
    spans = tuple(Span(*span) for _, span in found)
    with pytest.raises(SourceError, match="it changed while it was being read"):
        download_shard(ShardSpec(key, 1, spans), work)
    assert not list(store.rglob("*.json"))
