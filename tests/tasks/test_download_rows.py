"""Hashes of rows and keys of shards: every value that affects a picture or its caption."""

import hashlib
from typing import Any

import pytest

from configs.settings.data import Download
from tasks.download.lists import hash_rows
from tasks.download.shard import shard_key

ROW: dict[str, Any] = {
    "url": "http://example.org/0.png",
    "captions": ("a cat", "a tabby"),
    "sha256": None,
    "aesthetic_score": 5.0,
}
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
    "robots_txt": False,
}
#: Settings that only affect how a shard is fetched, or how rows are cut into shards.
OTHERS = {
    "max_connections",
    "max_connections_per_host",
    "max_requests_per_host",
    "contact",
    "timeout",
    "deadline",
    "retries",
    "backoff",
    "max_failed",
    "max_duplicates",
    "min_caption_length",
    "max_short_captions",
    "max_undersized",
    "max_transient",
    "max_host_failures",
    "retry_failed",
    "shard_size",
    "beam",
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
    assert hash_of(ROW | change) != hash_of(ROW)


def hash_of(row: dict[str, Any], base_url: str | None = None) -> str:
    (table,) = hash_rows([row], base_url)
    return bytes(table["hash"][0].as_py()).hex()


def test_texts_of_a_row_are_not_confused() -> None:
    """The boundary between two texts counts, and so does what a text looks like."""
    captions = [("a b",), ("a", "b"), ("a 1:b",), ("", "a b"), ("a b", ""), ("a b score 5",)]
    urls = ["u", "u captions 3:a b", ""]
    rows = [{**ROW, "url": url, "captions": c} for url in urls for c in captions]
    (table,) = hash_rows(rows)
    assert len(set(table["hash"].to_pylist())) == len(rows)


def test_the_hash_of_a_row_is_a_sha256_that_other_versions_compute_too() -> None:
    text = "url 24:http://example.org/0.png captions 5:a cat 7:a tabby score 5"
    assert hash_of(ROW) == hashlib.sha256(text.encode()).hexdigest()
    text = f"sha256 64:{'0' * 64} captions 12:ein B\u00e4r \u2603 score 0.10000000000000001"
    row = {**ROW, "sha256": "0" * 64, "captions": ("ein B\u00e4r \u2603",), "aesthetic_score": 0.1}
    assert hash_of(row) == hashlib.sha256(text.encode()).hexdigest()


def test_another_url_of_a_picture_with_a_listed_sha256_is_the_same_row() -> None:
    listed = {**ROW, "sha256": "0" * 64}
    signed_again = {**listed, "url": f"{ROW['url']}?X-Amz-Signature=f00"}
    assert hash_of(signed_again, "http://b.org") == hash_of(listed)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_every_setting_that_changes_a_shard_is_in_its_key(name: str) -> None:
    plain, changed = Download(), Download(**{name: CHANGES[name]})
    assert shard_key(changed)("0") != shard_key(plain)("0") != shard_key(plain)("1")


def test_every_setting_is_listed_as_in_the_key_or_not() -> None:
    assert set(Download.model_fields) == CHANGES.keys() | OTHERS
