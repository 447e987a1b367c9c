"""Kinds of image sources: the section `source`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from configs.redact_urls import check_read_url
from configs.settings.base_section import ReadUrl, Section

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
