"""Settings of the data: the sections `source`, `download` and `encode`.

A source is of one of several kinds. `download` has fetching, limits and resizing of pictures.
`encode` has crops, buckets, masks and the held-out split.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat, PositiveFloat, PositiveInt

from configs.settings.base_section import BaseUrl, Dtype, Fraction, ReadUrl, Section, setting
from configs.settings.evaluate import Prompts, SchedulerName

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

Where = Annotated[
    str | None,
    Field(
        description="SQL condition over the list's columns, such as `aesthetic > 5.5 and punsafe < "
        "0.1`; other rows are not downloaded (docs/data.md). null: all rows are."
    ),
]

MaskColumn = Annotated[
    Literal["alpha", "column"] | None,
    Field(
        description="Where each picture's mask is, for train.masked_loss: its alpha channel, or "
        "`mask_column`; null: pictures have none. White is trained on, black is not; a picture "
        "without a mask is trained on as a whole."
    ),
]
ControlColumn = Annotated[
    Literal["column"] | None,
    Field(
        description="Where each picture's control picture is, for train.method controlnet, such as "
        "its edges, depth or pose: `control_column`; null: pictures have none."
    ),
]
ControlFiles = Annotated[
    Literal["files"] | None,
    Field(
        description="Where each picture's control picture is, for train.method controlnet, such as "
        "its edges, depth or pose: a file; null: pictures have none."
    ),
]
MaskFiles = Annotated[
    Literal["alpha", "files"] | None,
    Field(
        description="Where each picture's mask is, for train.masked_loss: its alpha channel, or a "
        "file; null: pictures have none. White is trained on, black is not; a picture without a "
        "mask is trained on as a whole."
    ),
]

ReferenceColumns = Annotated[
    tuple[str, ...],
    Field(
        description="Columns of the reference pictures of an edit model, in order. A column may "
        "have lists, of any length; an empty value is no reference. A reference is fetched and "
        "encoded once for all pictures that have it."
    ),
]


class UrlSource(Section):
    """Lists of image URLs, with one row per image."""

    kind: Literal["urls"]
    path: ReadUrl
    """File, folder or glob of lists: local path or fsspec URL."""
    format: Literal["parquet", "csv", "tsv", "jsonl", "json", "txt"] = "parquet"
    """Format of the lists. json is an array of objects; txt has one URL per line, in a column
    `url`. Text may be packed: .gz, .zst."""
    url_column: str = "url"
    """Column with the image URL."""
    caption_column: str | None = "caption"
    """Column with the caption; null: no captions."""
    sha256_column: str | None = None
    """Column with the sha256 (hex) of the image bytes; null: none. A download with another digest
    is a failed row."""
    mask: MaskColumn = None
    mask_column: str = setting("mask", needs="mask == column")
    """Column with the URL of the picture's mask, which is fetched as pictures are; an empty URL: no
    mask."""
    reference_columns: ReferenceColumns = ()
    control: ControlColumn = None
    control_column: str = setting("control", needs="control == column")
    """Column with the URL of the control picture, which is fetched as pictures are."""
    aesthetic_column: AestheticColumn = None
    additional_columns: AdditionalColumns = ()
    where: Where = None
    base_url: BaseUrl | None = None
    """Base of relative URLs; null: all URLs are absolute."""

    def faults(self) -> Iterator[str]:
        is_web = self.path.startswith(("http://", "https://"))  # elsewhere ? is of a pattern
        name = self.path.partition("?")[0] if is_web else self.path
        name = re.sub(r"\.(gz|zst)$", "", name)
        suffix = name.rpartition(".")[2].lower()
        if self.format == "parquet" and suffix in TEXT_FORMATS:
            yield f"format is parquet, and path ends in .{suffix}: set format to {suffix}"


class FolderSource(Section):
    """A folder of pictures, with captions in tables `metadata.*` or in one `<name>.txt` each."""

    kind: Literal["folder"]
    path: ReadUrl = setting(aka="train_data_dir in_json instance_data_dir (DKS): `kind: folder`")
    """Folder: local path or fsspec URL."""
    caption_column: str = "text"
    """Column of the tables with the caption."""
    mask: MaskFiles = setting(None, aka="alpha_mask (K): `alpha`, and `train.masked_loss: {}`")
    mask_folder: ReadUrl | None = setting(
        None,
        needs="mask == files",
        aka=(
            "conditioning_data_dir (K): of masks, with `mask: files`",
            "conditioning_type (S): `mask` is `mask: files`, whose pictures are in this folder",
        ),
    )
    """Folder of masks with the names of their pictures, in any format; null: the mask of NAME.jpg
    is NAME.mask.png or NAME-masklabel.png beside it."""
    references: Literal["files"] | None = None
    """Whether pictures have references, for an edit model, as files; null: they have none. Those of
    NAME.jpg are NAME.ref1.png, NAME.ref2.jpg... beside it."""
    reference_folders: tuple[ReadUrl, ...] = setting((), needs="references == files")
    """Folders of references with the names of their pictures, in any format, instead of files
    beside them; of NAME.jpg, NAME_0.png, NAME_1.png... are several. A picture has those of the
    first folder first."""
    control: ControlFiles = None
    control_folder: ReadUrl | None = setting(
        None,
        needs="control == files",
        aka="conditioning_data_dir (K): of control pictures, with `control: files`",
    )
    """Folder of control pictures with the names of their pictures, in any format; null: that of
    NAME.jpg is NAME.control.png beside it."""
    aesthetic_column: AestheticColumn = None
    additional_columns: AdditionalColumns = ()


class DatasetSource(Section):
    """Parquet files with embedded image bytes, the storage format of Hugging Face datasets."""

    kind: Literal["dataset"]
    path: ReadUrl = setting(aka="dataset_name (D): with `source.kind: dataset`")
    """Hub dataset id (owner/name), or parquet file, folder or glob: local path or fsspec URL."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset; null: the default branch."""
    split: str = "train"
    """Split: the whole name of its files, without their numbers, or of its folder."""
    image_column: str = setting("image", aka="image_column (D)")
    """Column with the encoded image."""
    caption_column: str = setting("text", aka="caption_column (D)")
    """Column with the caption."""
    mask: MaskColumn = None
    mask_column: str = setting("mask", needs="mask == column")
    """Column with the encoded mask; null in it: no mask."""
    reference_columns: ReferenceColumns = ()
    control: ControlColumn = None
    control_column: str = setting(
        "control", needs="control == column", aka="conditioning_image_column (D)"
    )
    """Column with the encoded control picture."""
    aesthetic_column: AestheticColumn = None
    additional_columns: AdditionalColumns = ()
    where: Where = None


class TarsSource(Section):
    """WebDataset tars: the files of one name are a sample, such as `1.jpg`, `1.txt`, `1.json`."""

    kind: Literal["tars"]
    path: ReadUrl
    """Tar, folder, glob or range such as `{00000..00123}.tar`: local path or fsspec URL."""
    image_extension: str | None = setting(None, pattern=r"^[^./][^/]*$")
    """Extension of the picture's file, such as `jpg` or `output.png`; null: a sample has one
    picture, and two are a failed row."""
    caption_column: str | None = "txt"
    """`txt`: the caption is the sample's .txt file. Another name is a key of its json; null: no
    captions."""
    mask: MaskFiles = None
    mask_extension: str = setting("mask.png", pattern=r"^[^./][^/]*$", needs="mask == files")
    """Extension of the mask's file; a sample without one has no mask."""
    reference_extensions: tuple[str, ...] = ()
    """Extensions of the files of references, for an edit model, in order, such as `ref1.png`; a
    sample may lack some."""
    control: ControlFiles = None
    control_extension: str = setting(
        "control.png", pattern=r"^[^./][^/]*$", needs="control == files"
    )
    """Extension of the control picture's file."""
    aesthetic_column: AestheticColumn = None
    additional_columns: AdditionalColumns = ()


class DigitsSource(Section):
    """The demo's pictures: scikit-learn's digits drawn in chalk, served at URLs on loopback."""

    kind: Literal["digits"]
    port: int = setting(0, ge=0, le=65535)
    """Loopback port of the server; 0: any free port."""
    seed: int = setting(0, ge=0)
    """Seed of the rendering."""
    count: int = setting(1797, ge=0, le=1797)
    """Number of digits in the new style; a larger one adds rows and changes none."""
    rehearsal: int = setting(900, ge=0)
    """Number of pictures in the base's styles, against forgetting."""
    board: Literal["green", "black"] = "green"
    """Colour of the board in the new style; the base knows neither."""
    edit: bool = False
    """Whether each picture has a reference, the same handwriting in ink. Captions then name the
    style alone."""

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """Columns of its list with references."""
        return ("reference",) if self.edit else ()


class DrawnSource(Prompts):
    """Pictures that the base draws of prompts, once for all runs; their captions are the prompts.

    As of a class, to keep what the base knows: `sources.NAME.regularisation: images`.
    """

    kind: Literal["drawn"]
    count: PositiveInt = setting(200, aka="num_class_images (D)")
    """Number of pictures, which have the prompts in turn. A larger number keeps whole hundreds."""
    seed: int = setting(0, ge=0, lt=2**63)
    """Seed of the noise."""
    scheduler: SchedulerName | None = None
    """Sampling scheduler; null: that of `evaluate`, as its size, precision and device are."""
    num_inference_steps: PositiveInt | None = None
    """Denoising steps; null: those of `evaluate`."""
    guidance_scale: float | None = setting(None, ge=0)
    """Guidance scale; null: that of `evaluate`."""


Source = Annotated[
    UrlSource | FolderSource | DatasetSource | TarsSource | DigitsSource | DrawnSource,
    Field(discriminator="kind"),
]


def references_of(source: Any) -> tuple[str, ...]:
    """The columns, extensions or folders of a source's references; empty if it has none."""
    match source:
        case UrlSource() | DatasetSource() | DigitsSource():
            return source.reference_columns
        case TarsSource():
            return source.reference_extensions
        case FolderSource(references="files"):
            return source.reference_folders or (source.path,)
    return ()


class Download(Section):
    """Fetch, check and resize pictures into WebDataset shards (Beam; resized by img2dataset)."""

    image_size: PositiveInt = 1024
    """Target length of the side, in pixels."""
    resize_mode: Literal["no", "keep_ratio", "keep_ratio_largest", "center_crop", "border"] = (
        "keep_ratio"
    )
    """img2dataset's resize mode; keep_ratio resizes the shorter side."""
    only_if_bigger: bool = True
    """Keep the size of smaller pictures."""
    min_image_size: int = setting(32, ge=0)
    """Minimum length of the shorter side, in pixels; smaller pictures fail. The default excludes
    icons and tracking pixels."""
    max_aspect_ratio: FiniteFloat = setting(4.0, ge=1.0)
    """Maximum ratio of the longer side to the shorter one; thinner pictures fail. The default is
    that of SDXL's widest bucket."""
    max_pixels: PositiveInt = 2**26
    """Maximum picture area (width x height), in pixels, and of all pictures that a process decodes
    at once. Decoding needs up to 79 bytes per pixel."""
    max_bytes: PositiveInt = 64 * 2**20
    """Maximum size of a downloaded picture, in bytes."""
    encode_format: Literal["jpg", "png", "webp"] = "jpg"
    """Format of the stored pictures."""
    encode_quality: int = setting(95, ge=0, le=100)
    """Quality of jpg and webp (0 to 100), or compression level of png (0 to 9)."""
    max_connections: PositiveInt = setting(256, not_in_key="execution")
    """Maximum concurrent connections of a process."""
    max_connections_per_host: PositiveInt = setting(8, not_in_key="execution")
    """Maximum concurrent requests to a host, of all processes of a machine; one if the host's
    robots.txt has a crawl delay."""
    max_requests_per_host: PositiveFloat | None = setting(20.0, not_in_key="execution")
    """Maximum requests per second to a host, of all processes of a machine; null: unlimited."""
    robots_txt: bool = True
    """Fetch what each host's robots.txt permits, at its crawl delay (RFC 9309)."""
    contact: str | None = setting(None, pattern=r"^[\x21-\x7e]+$", not_in_key="execution")
    """Page or mail address in the User-Agent header, for the owners of hosts."""
    timeout: PositiveFloat = setting(10.0, not_in_key="execution")
    """Timeout per connect and per read, in seconds."""
    deadline: PositiveFloat = setting(60.0, not_in_key="execution")
    """Maximum time per URL, in seconds, redirects and retries included."""
    retries: int = setting(2, ge=0, not_in_key="execution")
    """Maximum retries after a transient failure."""
    backoff: float = setting(0.5, ge=0, not_in_key="execution")
    """Wait before the first retry, in seconds; it doubles per retry."""
    user_agent_token: str | None = setting(None, pattern=r"^[A-Za-z0-9._-]+$")
    """Name in the User-Agent header, to which robots.txt and X-Robots-Tag refer; null:
    kilnworks."""
    opt_out_headers: tuple[str, ...] = ("noai", "noimageai", "noindex", "noimageindex")
    """X-Robots-Tag values that exclude a picture."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts (host or host:port) that may have private or loopback addresses, and any port."""
    allow_ports: tuple[int, ...] = (80, 443)
    """Ports from which pictures may be fetched."""
    max_failed: Fraction = setting(0.5, not_in_key="limit")
    """Maximum fraction of rows without a picture, 0 to 1. Above it the stage fails."""
    max_duplicates: Fraction = setting(1.0, not_in_key="limit")
    """Maximum fraction of pictures with the bytes of another one, 0 to 1. Above it the stage fails.
    Above a million rows it is that of a sample."""
    min_caption_length: int = setting(1, ge=1, le=64, not_in_key="limit")
    """Length of a caption in characters below which it is short."""
    max_short_captions: Fraction = setting(1.0, not_in_key="limit")
    """Maximum fraction of pictures with a short caption, 0 to 1. Above it the stage fails."""
    max_undersized: Fraction = setting(1.0, not_in_key="limit")
    """Maximum fraction of pictures whose shorter side is below `image_size`, 0 to 1. Above it the
    stage fails."""
    max_transient: Fraction = setting(0.5, not_in_key="limit")
    """Maximum fraction of a shard's rows, and of its hosts, with transient failures (timeout, 5xx)
    after all retries, 0 to 1. Above it, which is an outage, the shard is deferred to the next
    run."""
    max_host_failures: PositiveInt = setting(20, not_in_key="limit")
    """Consecutive requests of a shard that a host does not answer. After these, the shard's other
    rows of the host fail without a request."""
    retry_failed: int = setting(3, ge=0, not_in_key="limit")
    """Maximum number of runs with --retry-failed that fetch a row with a transient failure again.
    Rows with permanent failures (404, no picture) are not fetched again."""
    # Keys in a tar have five digits for a row, and a shard up to twice as many rows.
    shard_size: PositiveInt = setting(1000, le=50_000)
    """Average number of rows per shard."""
    beam: dict[str, Any] = setting({}, not_in_key="execution")
    """Beam pipeline options of this stage, over those of section `beam`."""


class Captions(Section):
    """Changes of the captions to encode. Held-out pictures keep all tags, in their order."""

    replace: dict[str, str] = setting({})
    """Whole words, or texts of several, and what stands in their place, such as
    `{sks dog: dog}`."""
    prompts: tuple[str, ...] = ()
    """Captions of each picture, in place of its own."""
    shuffle: bool = setting(False, aka="shuffle_caption (K)")
    """Shuffle the tags of a caption, those after `keep_tags`."""
    tag_dropout: Fraction = setting(0.0, aka="caption_tag_dropout_rate (K)")
    """Probability, 0 to 1, that a tag after `keep_tags` is left out."""
    keep_tags: int = setting(0, ge=0, needs="shuffle or tag_dropout", aka="keep_tokens (K)")
    """First tags of a caption that stay first."""
    separator: str = setting(
        ",", min_length=1, needs="shuffle or tag_dropout", aka="caption_separator (K)"
    )
    """Text between the tags of a caption."""
    variants: PositiveInt = setting(8, needs="shuffle or tag_dropout")
    """Variants of each caption that the store holds, drawn by the picture's sha256; a step takes
    one. With `encode.text: token_ids`, one needs about a kilobyte."""
    seed: int = setting(0, ge=0, needs="shuffle or tag_dropout")
    """Seed of the variants."""
    emphasis: Literal["text", "weights"] = setting("text", aka="weighted_captions (K): weights")
    """`weights`: in captions and prompts, `(word:1.2)`, `(word)` and `[word]` multiply the
    embeddings of these tokens, by 1.2, 1.1 and 1 / 1.1; families sd and sdxl. `text`: they are
    text."""

    @property
    def varies(self) -> bool:
        """Whether a caption has variants."""
        return self.shuffle or self.tag_dropout > 0


class Encode(Section):
    """Encode image shards into latent shards: VAE moments and text embeddings."""

    resolution: PositiveInt = setting(1024, aka="resolution (DKS): and `download.image_size`")
    """Side of the square pictures, in pixels; buckets have about its area."""
    aspect_buckets: bool = setting(False, aka="enable_bucket (K)")
    """Bucket pictures by aspect ratio; false crops all to squares."""
    bucket_step: PositiveInt = setting(
        64,
        needs="aspect_buckets or has_references",
        aka="bucket_reso_steps aspect_bucket_rounding (KS)",
    )
    """Step of the sides of buckets and references, in pixels."""
    max_aspect: float = setting(
        2.0, ge=1.0, needs="aspect_buckets", aka="max_bucket_reso min_bucket_reso (K)"
    )
    """Maximum ratio of a bucket's longer side to its shorter one."""
    crop: Literal["center", "random"] = setting("center", aka="center_crop crop_aspect (DS)")
    """Position of the crop."""
    flip: bool = setting(False, aka="random_flip flip_aug (DKS): the store holds both variants")
    """Mirror each training sample left-right with probability 0.5; the store holds the latents of
    both variants."""
    masks: int = setting(0, ge=0)
    """Inpainting masks per picture, for train.inpainting; the store holds the latents of each
    masked picture."""
    reference_pixels: PositiveInt = setting(2**20, not_in_key="content", needs="has_references")
    """Most pixels of a reference, which keeps its size up to it, and its aspect ratio."""
    seed: int = setting(0, ge=0, needs="crop == random or masks")
    """Seed of the crops and masks, combined with each picture's sha256."""
    holdout: float = setting(
        0.05, ge=0.0, lt=1.0, aka="validation_split (K): a fraction of the pictures"
    )
    """Fraction of the pictures, 0 to below 1, in the held-out split. The sha256 of the downloaded
    bytes selects them."""
    leave_out_copies: bool = setting(True, needs="holdout")
    """Leave near-duplicates of held-out pictures out of training: pictures saved again, resized or
    mirrored."""
    batch_size: PositiveInt = setting(8, aka="vae_batch_size (KS)")
    """Pictures per forward pass of the VAE; part of the cache key."""
    max_bad: Fraction = setting(0.05, not_in_key="limit")
    """Maximum fraction of undecodable or NaN samples, 0 to 1."""
    device: str = setting("auto", not_in_key="execution")
    """Device: see train.device; without a number, all devices of its kind."""
    processes: PositiveInt | None = setting(None, not_in_key="execution")
    """Encoder processes per machine; null: one per accelerator, one on a CPU."""
    hosts: PositiveInt | None = setting(None, not_in_key="execution")
    """Machines of the recipe's cluster that encode; null: the machine of the flow. On a TPU slice
    it is the number of its hosts."""
    dtype: Dtype = "float32"
    """Compute precision of the encoders."""
    text: Literal["embeddings", "token_ids"] = "embeddings"
    """What the store holds of a caption. With token_ids, each training step runs the text encoders;
    families sd and sdxl."""
    text_precision: Literal["int8", "nf4"] | None = setting(
        None,
        in_key_with="text_precision",
        needs="text == embeddings",
        aka="fp8_llm fp8_t5 fp8_vl text_encoder_1_precision text_encoder_2_precision (KS)",
    )
    """`int8`, `nf4`: the linear layers of the T5 or language model have 8 or 4 bits, a half or a
    quarter of the memory; CLIP keeps `dtype`. The evaluation draws with unquantized text encoders,
    as its users do. Runtime `torch`."""
    max_tokens: Literal[77, 150, 225] = setting(
        77, in_key_with="max_tokens != 77", aka="max_token_length (K)"
    )
    """Tokens of a caption or prompt that CLIP reads, in chunks of 75 above 77: in training,
    evaluation and `kiln generate`; families sd and sdxl."""
    captions: Captions | None = setting(None, in_key_with="captions")
    """Changes of the captions; null: none."""
    offload: bool = setting(False, not_in_key="execution")
    """Keep the weights of the text encoders in the host's memory, and copy each layer to the device
    when it runs. The embeddings are the same. Runtime `torch`."""
    beam: dict[str, Any] = setting({}, not_in_key="execution")
    """Beam pipeline options of this stage, over those of section `beam`."""

    @property
    def text_dtype(self) -> str | None:
        """Dtype of the text encoders that each step runs; None: the store holds embeddings."""
        return self.dtype if self.text == "token_ids" else None

    @property
    def variants(self) -> int:
        """Captions that the store holds for each one."""
        return self.captions.variants if self.captions is not None and self.captions.varies else 1

    @property
    def reading(self) -> dict[str, Any]:
        """How CLIP reads captions: arguments of `Base.open`."""
        emphasis = "text" if self.captions is None else self.captions.emphasis
        return {"max_tokens": self.max_tokens, "emphasis": emphasis}
