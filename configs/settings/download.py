"""Settings of the section `download`: fetching, limits and resizing of pictures."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat, PositiveInt

from configs.settings.base_section import Fraction, Section


class Download(Section):
    """Fetch, check and resize pictures into WebDataset shards (Beam; resized by img2dataset)."""

    image_size: PositiveInt = Field(1024, description="Target length of the side, in pixels.")
    resize_mode: Literal["no", "keep_ratio", "keep_ratio_largest", "center_crop", "border"] = Field(
        "keep_ratio", description="img2dataset's resize mode; keep_ratio resizes the shorter side."
    )
    only_if_bigger: bool = Field(True, description="Keep the size of smaller pictures.")
    min_image_size: int = Field(
        32,
        ge=0,
        description="Minimum length of the shorter side, in pixels; smaller pictures fail. The "
        "default excludes icons and tracking pixels.",
    )
    max_aspect_ratio: FiniteFloat = Field(
        4.0,
        ge=1.0,
        description="Maximum ratio of the longer side to the shorter one; thinner pictures fail. "
        "The default is that of SDXL's widest bucket.",
    )
    max_pixels: PositiveInt = Field(
        2**26,
        description="Maximum picture area (width x height), in pixels, and of all pictures that a "
        "process decodes at once. Decoding needs up to 79 bytes per pixel.",
    )
    max_bytes: PositiveInt = Field(
        64 * 2**20, description="Maximum size of a downloaded picture, in bytes."
    )
    encode_format: Literal["jpg", "png", "webp"] = Field(
        "jpg", description="Format of the stored pictures."
    )
    encode_quality: int = Field(
        95,
        ge=0,
        le=100,
        description="Quality of jpg and webp (0 to 100), or compression level of png (0 to 9).",
    )
    max_connections: PositiveInt = Field(
        256, description="Maximum concurrent connections of a process."
    )
    max_connections_per_host: PositiveInt = Field(
        8,
        description="Maximum concurrent requests to a host, of all processes of a machine; one "
        "if the host's robots.txt has a crawl delay.",
    )
    max_requests_per_host: float | None = Field(
        20.0,
        gt=0,
        description="Maximum requests per second to a host, of all processes of a machine; null: "
        "unlimited.",
    )
    robots_txt: bool = Field(
        True,
        description="Fetch what each host's robots.txt permits, at its crawl delay (RFC 9309).",
    )
    contact: str | None = Field(
        None,
        pattern=r"^[\x21-\x7e]+$",
        description="Page or mail address in the User-Agent header, for the owners of hosts.",
    )
    timeout: float = Field(10.0, gt=0, description="Timeout per connect and per read, in seconds.")
    deadline: float = Field(
        60.0, gt=0, description="Maximum time per URL, in seconds, redirects and retries included."
    )
    retries: int = Field(2, ge=0, description="Maximum retries after a transient failure.")
    backoff: float = Field(
        0.5, ge=0, description="Wait before the first retry, in seconds; it doubles per retry."
    )
    user_agent_token: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Name in the User-Agent header, to which robots.txt and X-Robots-Tag refer; "
        "null: kilnworks.",
    )
    opt_out_headers: tuple[str, ...] = Field(
        ("noai", "noimageai", "noindex", "noimageindex"),
        description="X-Robots-Tag values that exclude a picture.",
    )
    allow_hosts: tuple[str, ...] = Field(
        (),
        description="Hosts (host or host:port) that may have private or loopback addresses, and "
        "any port.",
    )
    allow_ports: tuple[int, ...] = Field(
        (80, 443), description="Ports from which pictures may be fetched."
    )
    max_failed: Fraction = Field(
        0.5,
        description="Maximum fraction of rows without a picture, 0 to 1. Above it the stage fails.",
    )
    max_duplicates: Fraction = Field(
        1.0,
        description="Maximum fraction of pictures with the bytes of another one, 0 to 1. Above it "
        "the stage fails. Above a million rows it is that of a sample.",
    )
    min_caption_length: int = Field(
        1, ge=1, le=64, description="Length of a caption in characters below which it is short."
    )
    max_short_captions: Fraction = Field(
        1.0,
        description="Maximum fraction of pictures with a short caption, 0 to 1. Above it the stage "
        "fails.",
    )
    max_undersized: Fraction = Field(
        1.0,
        description="Maximum fraction of pictures whose shorter side is below `image_size`, 0 to "
        "1. Above it the stage fails.",
    )
    max_transient: Fraction = Field(
        0.5,
        description="Maximum fraction of a shard's rows, and of its hosts, with transient failures "
        "(timeout, 5xx) after all retries, 0 to 1. Above it, which is an outage, the shard is "
        "deferred to the next run.",
    )
    max_host_failures: PositiveInt = Field(
        20,
        description="Consecutive requests of a shard that a host does not answer. After these, the "
        "shard's other rows of the host fail without a request.",
    )
    retry_failed: int = Field(
        3,
        ge=0,
        description="Maximum number of runs with --retry-failed that fetch a row with a transient "
        "failure again. Rows with permanent failures (404, no picture) are not fetched again.",
    )
    shard_size: PositiveInt = Field(
        1000,
        le=50_000,  # keys in a tar have five digits for a row, and a shard up to twice as many rows
        description="Average number of rows per shard.",
    )
    beam: dict[str, Any] = Field(
        default_factory=dict,
        description="Beam pipeline options of this stage, over those of section `beam`.",
    )
