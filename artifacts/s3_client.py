"""The client of `s3://`: connections for many requests, and no checksums that its store refuses."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import BotoCoreError
from botocore.session import Session
from s3fs import S3FileSystem

from artifacts.filesystems import AT_ONCE

#: Ends of the names of Amazon's own hosts.
AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")
#: botocore's settings of the checksums that it adds since 2025, by headers and trailers that other
#: stores refuse.
CHECKSUMS = ("request_checksum_calculation", "response_checksum_validation")


class S3(S3FileSystem):
    """fsspec's filesystem of `s3://`, with other defaults of botocore's client.

    Args:
        config_kwargs: botocore's settings; what a person gives in fsspec's config stays.

    Attributes:
        is_of_amazon: whether the store is Amazon's. Other stores get a checksum only on demand.
    """

    def __init__(self, *args: Any, config_kwargs: dict[str, Any] | None = None, **options: Any):
        client = options.get("client_kwargs") or {}
        given = options.get("endpoint_url") or client.get("endpoint_url")
        profile, endpoint = _profile_and_endpoint(options.get("profile"))
        host = urlsplit(given or endpoint or "").hostname
        self.is_of_amazon = host is None or host.endswith(AMAZON)
        defaults = {"max_pool_connections": AT_ONCE}
        if not self.is_of_amazon:
            defaults |= _on_demand(profile)
        super().__init__(*args, config_kwargs=defaults | (config_kwargs or {}), **options)


def _profile_and_endpoint(name: str | None) -> tuple[dict[str, Any], str | None]:
    """Settings of a profile (None: that of the environment), and the URL that replaces Amazon's."""
    session = Session(profile=name)
    try:
        files = session.full_config
    except BotoCoreError:  # the client raises it at its first request
        files = {"profiles": {}}
    profile = files["profiles"].get(session.profile or "default", {})
    return profile, ConfiguredEndpointProvider(files, profile, "s3").provide()


def _on_demand(profile: dict[str, Any]) -> dict[str, Any]:
    """Settings of checksums that neither the environment nor the profile has."""
    known = Config.OPTION_DEFAULTS  # runtime mindspore's environment has a botocore without them
    chosen = {name for name in CHECKSUMS if name in profile or f"AWS_{name.upper()}" in os.environ}
    return {name: "when_required" for name in CHECKSUMS if name in known and name not in chosen}
