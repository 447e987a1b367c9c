"""Servers of remote stores on loopback, and what makes the real clients use them."""

import os
from collections.abc import Iterator

import pytest
from gcs_server import GcsServer, serving

# No client looks for anybody's credentials, or asks a cloud's own servers for them.
os.environ |= {
    "FSSPEC_GS_TOKEN": "anon",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
}


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    """Google Cloud Storage: any `gs://<bucket>`, here and in processes that inherit from us."""
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server
