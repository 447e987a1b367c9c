"""URLs lose what lets somebody in, and nothing else."""

import pytest

from configs.urls import without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://us:pa%40ss@example.org:8443/a.png", "https://example.org:8443/a.png"),
        ("https://example.org/a?w=1&X-Amz-Signature=f00", "https://example.org/a?w=1&X-Amz-Signature=..."),
        ("https://example.org/a?sig=f00%3D&w=1#top", "https://example.org/a?sig=...&w=1#top"),
        ("https://example.org/a?Signature=f&token=g", "https://example.org/a?Signature=...&token=..."),
        ("https://example.org/a?X-Goog-Signature=f00", "https://example.org/a?X-Goog-Signature=..."),
    ],
)  # fmt: skip
def test_secrets_are_left_out(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/a@b.png?width=40&design=x#y",
        "hf://datasets/owner/name@main/a.parquet",
        "s3://bucket/key/token=1/a.parquet",
        "images/00001.png",
        "sha256:abcdef",
        "http://[oops/a.png",
        "",
    ],
)
def test_everything_else_stays(text: str) -> None:
    assert without_secrets(text) == text
