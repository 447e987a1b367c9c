"""Settings of the data: the sections `source`, `download` and `encode`.

A source is of one of several kinds. `download` has fetching, limits and resizing of pictures.
`encode` has crops, buckets, masks and the held-out split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat, PositiveInt, model_validator

from configs.secrets import check_read_url
from configs.settings.base_section import Dtype, Fraction, ReadUrl, Section

AestheticColumn = Annotated[
    str | None,
    Field(description="Column of the aesthetic scores, for train.aesthetic_score; null: none."),
]

#: Formats of lists that are text; also the suffixes of such files.
TEXT_FORMATS = ("csv", "tsv", "jsonl", "json", "txt")
#: Names in a picture's metadata that have a meaning of their own.
RESERVED = {
    *("key", "url", "caption", "captions", "status", "error_message", "attempts", "row_hash"),
    *("width", "height", "original_width", "original_height", "sha256", "aesthetic_score"),
}


def _free_names(names: Sequence[str]) -> Sequence[str]:
    if taken := sorted(RESERVED.intersection(names)):
        raise ValueError(f"pictures have {', '.join(taken)} already: rename the list's column")
    if len({name.lower() for name in names}) < len(names):
        raise ValueError("a column is named twice (capitals are as small letters)")
    if odd := [name for name in names if not name.strip() or not set('"\\\0').isdisjoint(name)]:
        raise ValueError(f"{odd[0]!r} is no name of a column: rename the list's column")
    return names


AdditionalColumns = Annotated[
    tuple[str, ...],
    AfterValidator(_free_names),
    Field(
        description="Further columns to keep in the metadata of each picture. Their URLs have no "
        "secrets there."
    ),
]


class UrlSource(Section):
    """Lists of image URLs, with one row per image."""

    kind: Literal["urls"]
    path: ReadUrl = Field(description="File, folder or glob of lists: local path or fsspec URL.")
    format: Literal["parquet", "csv", "tsv", "jsonl", "json", "txt"] = Field(
        "parquet",
        description="Format of the lists. json is an array of objects; txt has one URL per line, "
        "in a column `url`. Text may be packed: .gz, .zst.",
    )
    url_column: str = Field("url", description="Column with the image URL.")
    caption_column: str | None = Field(
        "caption", description="Column with the caption; null: no captions."
    )
    sha256_column: str | None = Field(
        None,
        description="Column with the sha256 (hex) of the image bytes; null: none. A download with "
        "another digest is a failed row.",
    )
    aesthetic_column: AestheticColumn = None
    additional_columns: AdditionalColumns = ()
    base_url: Annotated[str, AfterValidator(check_read_url)] | None = Field(
        None, description="Base of relative URLs; null: all URLs are absolute."
    )

    @model_validator(mode="after")
    def _is_no_text(self) -> UrlSource:
        is_web = self.path.startswith(("http://", "https://"))  # elsewhere ? is of a pattern
        name = self.path.partition("?")[0] if is_web else self.path
        name = re.sub(r"\.(gz|zst)$", "", name)
        suffix = name.rpartition(".")[2].lower()
        if self.format == "parquet" and suffix in TEXT_FORMATS:
            raise ValueError(
                f"format is parquet, and path ends in .{suffix}: set format to {suffix}"
            )
        return self


class FolderSource(Section):
    """A folder of pictures, with captions in tables `metadata.*` or in one `<name>.txt` each."""

    kind: Literal["folder"]
    path: ReadUrl = Field(description="Folder: local path or fsspec URL.")
    caption_column: str = Field("text", description="Column of the tables with the caption.")
    aesthetic_column: AestheticColumn = None
    additional_columns: AdditionalColumns = ()


class DatasetSource(Section):
    """Parquet files with embedded image bytes, the storage format of Hugging Face datasets."""

    kind: Literal["dataset"]
    path: ReadUrl = Field(
        description="Hub dataset id (owner/name), or parquet file, folder or glob: local path or "
        "fsspec URL."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub dataset; null: the default branch."
    )
    split: str = Field(
        "train",
        description="Split: the whole name of its files, without their numbers, or of its folder.",
    )
    image_column: str = Field("image", description="Column with the encoded image.")
    caption_column: str = Field("text", description="Column with the caption.")
    aesthetic_column: AestheticColumn = None
    additional_columns: AdditionalColumns = ()


class TarsSource(Section):
    """WebDataset tars: the files of one name are a sample, such as `1.jpg`, `1.txt`, `1.json`."""

    kind: Literal["tars"]
    path: ReadUrl = Field(
        description="Tar, folder, glob or range such as `{00000..00123}.tar`: local path or fsspec "
        "URL."
    )
    image_extension: str | None = Field(
        None,
        pattern=r"^[^./][^/]*$",
        description="Extension of the picture's file, such as `jpg` or `output.png`; null: a "
        "sample has one picture, and two are a failed row.",
    )
    caption_column: str | None = Field(
        "txt",
        description="`txt`: the caption is the sample's .txt file. Another name is a key of its "
        "json; null: no captions.",
    )
    aesthetic_column: AestheticColumn = None
    additional_columns: AdditionalColumns = ()


class DigitsSource(Section):
    """The demo's pictures: scikit-learn's digits drawn in chalk, served at URLs on loopback."""

    kind: Literal["digits"]
    port: int = Field(
        0, ge=0, le=65535, description="Loopback port of the server; 0: any free port."
    )
    seed: int = Field(0, ge=0, description="Seed of the rendering.")
    count: int = Field(
        1797,
        ge=0,
        le=1797,
        description="Number of digits in the new style; a larger one adds rows and changes none.",
    )
    rehearsal: int = Field(
        900, ge=0, description="Number of pictures in the base's styles, against forgetting."
    )


Source = Annotated[
    UrlSource | FolderSource | DatasetSource | TarsSource | DigitsSource,
    Field(discriminator="kind"),
]


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


class Encode(Section):
    """Encode image shards into latent shards: VAE moments and text embeddings."""

    resolution: PositiveInt = Field(
        1024, description="Side of the square pictures, in pixels; buckets have about its area."
    )
    aspect_buckets: bool = Field(
        False, description="Bucket pictures by aspect ratio; false crops all to squares."
    )
    bucket_step: PositiveInt = Field(64, description="Step of the bucket sides, in pixels.")
    max_aspect: float = Field(
        2.0, ge=1.0, description="Maximum ratio of a bucket's longer side to its shorter one."
    )
    crop: Literal["center", "random"] = Field("center", description="Position of the crop.")
    flip: bool = Field(
        False,
        description="Mirror each training sample left-right with probability 0.5; the store holds "
        "the latents of both variants.",
    )
    masks: int = Field(
        0,
        ge=0,
        description="Inpainting masks per picture, for train.inpainting; the store holds the "
        "latents of each masked picture.",
    )
    seed: int = Field(
        0, ge=0, description="Seed of the crops and masks, combined with each picture's sha256."
    )
    holdout: float = Field(
        0.05,
        ge=0.0,
        lt=1.0,
        description="Fraction of the pictures, 0 to below 1, in the held-out split. The sha256 of "
        "the downloaded bytes selects them.",
    )
    batch_size: PositiveInt = Field(
        8, description="Pictures per forward pass of the VAE; part of the cache key."
    )
    max_bad: Fraction = Field(
        0.05, description="Maximum fraction of undecodable or NaN samples, 0 to 1."
    )
    device: str = Field(
        "auto", description="Device: see train.device; without a number, all devices of its kind."
    )
    processes: PositiveInt | None = Field(
        None,
        description="Encoder processes per machine; null: one per accelerator, one on a CPU.",
    )
    dtype: Dtype = Field("float32", description="Compute precision of the encoders.")
    text: Literal["embeddings", "token_ids"] = Field(
        "embeddings",
        description="What the store holds of a caption. With token_ids, each training step runs "
        "the text encoders; families sd and sdxl.",
    )
    beam: dict[str, Any] = Field(
        default_factory=dict,
        description="Beam pipeline options of this stage, over those of section `beam`.",
    )

    @property
    def text_dtype(self) -> str | None:
        """Dtype of the text encoders that each step runs; None: the store holds embeddings."""
        return self.dtype if self.text == "token_ids" else None
