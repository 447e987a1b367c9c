"""URLs lose credentials and values that may be secret, and nothing else."""

import pytest

from configs.secrets import has_secrets, is_secret, without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://us:pa%40ss@example.org:8443/a.png", "https://example.org:8443/a.png"),
        ("https://example.org/a?w=1&X-Amz-Signature=f00", "https://example.org/a?w=1&X-Amz-Signature=..."),
        ("https://example.org/a?sig=f00%3D&w=1#top", "https://example.org/a?sig=...&w=1#top"),
        ("https://example.org/a?Signature=f&token=g", "https://example.org/a?Signature=...&token=..."),
        ("https://example.org/a?X-Goog-Signature=f00", "https://example.org/a?X-Goog-Signature=..."),
        ("https://example.org/a?auth=f00&width=40", "https://example.org/a?auth=...&width=40"),
        ("https://example.org/a?jwt=f00", "https://example.org/a?jwt=..."),
        ("https://example.org/a?client_secret=f00", "https://example.org/a?client_secret=..."),
        ("https://example.org/a?hdnea=st=1~hmac=f00", "https://example.org/a?hdnea=..."),
        ("https://example.org/a?f00", "https://example.org/a?..."),
        ("https://example.org/a#access_token=f00", "https://example.org/a#access_token=..."),
        ("a.png?unknown=f00", "a.png?unknown=..."),
        ("hf://user:f00@datasets/owner/name/a.parquet", "hf://datasets/owner/name/a.parquet"),
        ("abfs://us:f00@account.dfs.core.windows.net/a", "abfs://account.dfs.core.windows.net/a"),
        ("s3://KEY:f/0/0@bucket/a@b.png", "s3://bucket/a@b.png"),
        ("no 's3://KEY:f/00@bucket/a': 403", "no 's3://bucket/a': 403"),
        ("https://us:f/00@example.org/a", "https://example.org/a"),
        ("gs::https://us:f00@example.org/a", "gs::https://example.org/a"),
        ("no 'https://example.org/a?jwt=f00': 404", "no 'https://example.org/a?jwt=...': 404"),
        ("https://example.org/a?f00: gone", "https://example.org/a?...: gone"),
        ("HTTPError in https://us:f00@example.org/a?jwt=f00 (401)",
         "HTTPError in https://example.org/a?jwt=... (401)"),
    ],
)  # fmt: skip
def test_secrets_are_masked(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/a@b.png?width=40&format=x#y",
        "https://example.org/@user/a.png",
        "https://example.org:8443/a@b.png",
        "https://[::1]:8443/a@b.png",
        "https://example.org:8443/a:b/c@d.png",
        "zip://a.csv::https://example.org/@user/a.zip",
        "s3://arn:aws:s3:us-west-2:123:accesspoint/mine/a@b.png",
        "gs://bucket/part-?.parquet",
        "abfs://container@account.dfs.core.windows.net/a.parquet",
        "is it a cat?no: x=y",
        "hf://datasets/owner/name@main/a.parquet",
        "s3://bucket/key/token=1/a.parquet",
        "images/00001.png",
        "sha256:abcdef",
        "http://[oops/a.png",
        "",
    ],
)
def test_other_text_is_unchanged(text: str) -> None:
    assert without_secrets(text) == text


def test_only_urls_have_secrets() -> None:
    assert has_secrets("https://example.org/a?jwt=f00") and has_secrets("s3://key:f00@bucket/a")
    assert not has_secrets("https://example.org/a?width=4") and not has_secrets("is it?a=b")


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("beam.s3_secret_access_key", True),
        ("s3_access_key_id", True),
        ("beam.sdk_credentials", True),
        ("beam.azure_connection_string", True),
        ("beam.account_key", True),
        ("beam.privateKey", True),
        ("beam.passwd", True),
        ("beam.key_passphrase", True),
        ("publish.signing_key", False),
        ("beam.allow_non_deterministic_key_coders", False),
        ("download.user_agent_token", False),
        ("evaluate.prompts.secret.prompts", False),
        ("cache_key", False),
    ],
)
def test_the_last_part_of_a_name_says_whether_it_is_a_secret(name: str, secret: bool) -> None:
    assert is_secret(name, "value") == secret
