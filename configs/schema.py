"""Every setting a recipe may hold, with its type, range, default and unit."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveInt, model_validator

from configs.section import Fraction, Section
from configs.tpu import Tpu
from configs.training import Hpu, MindSpore, Train

#: Of a model in the registry.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
RuntimeName = Literal["torch", "xla", "jax", "mindspore"]
#: The stages of a run, in their order.
StageName = Literal["download", "encode", "train", "evaluate", "publish"]
STAGES: tuple[StageName, ...] = get_args(StageName)


SchedulerName = Literal[
    "ddim",
    "ddim_parallel",
    "ddpm",
    "dpm++",
    "euler",
    "euler_ancestral",
    "flow_euler",
    "lms",
    "pndm",
]


class Model(Section):
    """The base model: a diffusers pipeline folder whose parts are encoded with and fine-tuned."""

    path: str = Field(
        description="Pipeline folder: hub id, local path or fsspec URL (gs://, s3://)."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    vae: str | None = Field(
        None, description="Another AutoencoderKL in place of the pipeline's: hub id, path or URL."
    )


class UrlSource(Section):
    """Lists of image URLs: parquet, csv or jsonl files, one row an image."""

    kind: Literal["urls"]
    path: str = Field(description="File, folder or glob of lists; any fsspec URL.")
    format: Literal["parquet", "csv", "jsonl"] = Field(
        "parquet", description="Format of the lists."
    )
    url_column: str = Field("url", description="Column with the image URL.")
    caption_column: str | None = Field("caption", description="Column with the caption, if any.")
    sha256_column: str | None = Field(
        None,
        description="Column with the sha256 of the image bytes (hex). With it a changed picture "
        "is a changed row, and a download that does not match is refused.",
    )
    aesthetic_column: str | None = Field(
        None, description="Column with the picture's aesthetic score, for train.aesthetic_score."
    )
    base_url: str | None = Field(None, description="What relative URLs are joined to.")


class FolderSource(Section):
    """A folder of pictures; captions in `<name>.txt` beside each or in `metadata.jsonl`."""

    kind: Literal["folder"]
    path: str = Field(description="Folder; any fsspec URL.")
    caption_column: str = Field("text", description="Caption key in metadata.jsonl.")
    aesthetic_column: str | None = Field(
        None, description="Key of the aesthetic score in metadata.jsonl, if any."
    )


class DatasetSource(Section):
    """Parquet files with the image bytes inside, as Hugging Face datasets are stored."""

    kind: Literal["dataset"]
    path: str = Field(
        description="Dataset id on the hub (owner/name), or a parquet file, folder or glob at any "
        "fsspec URL."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub dataset.")
    split: str = Field("train", description="Split: files whose name begins with it are read.")
    image_column: str = Field("image", description="Column with the encoded image.")
    caption_column: str = Field("text", description="Column with the caption.")
    aesthetic_column: str | None = Field(
        None, description="Column with the aesthetic score, if any."
    )


class DigitsSource(Section):
    """The demo's pictures: scikit-learn's digits drawn in chalk, served on loopback as URLs."""

    kind: Literal["digits"]
    port: int = Field(
        0, ge=0, le=65535, description="Loopback port to serve on; 0 takes a free one."
    )
    seed: int = Field(0, ge=0, description="Seed of the rendering.")
    count: int = Field(1797, ge=1, le=1797, description="Digits drawn in the new style.")
    rehearsal: int = Field(
        900, ge=0, description="Pictures in styles that the base knows, so that it keeps them."
    )


Source = Annotated[
    UrlSource | FolderSource | DatasetSource | DigitsSource, Field(discriminator="kind")
]


class Download(Section):
    """Fetch, check and resize pictures into WebDataset shards (img2dataset inside Beam)."""

    image_size: PositiveInt = Field(1024, description="Length of the side resized to, in pixels.")
    resize_mode: Literal["no", "keep_ratio", "keep_ratio_largest", "center_crop", "border"] = Field(
        "keep_ratio", description="img2dataset's resize mode; keep_ratio resizes the shorter side."
    )
    only_if_bigger: bool = Field(True, description="Leave smaller pictures at their size.")
    min_image_size: int = Field(0, ge=0, description="Smallest side accepted, in pixels.")
    max_pixels: PositiveInt = Field(178_956_970, description="Most pixels decoded, in pixels.")
    max_bytes: PositiveInt = Field(64 * 2**20, description="Most bytes read for one URL.")
    encode_format: Literal["jpg", "png", "webp"] = Field("jpg", description="Format stored.")
    encode_quality: int = Field(
        95, ge=0, le=100, description="Quality of jpg and webp (0-100); compression of png (0-9)."
    )
    threads: PositiveInt = Field(16, description="Fetching threads a worker.")
    timeout: float = Field(10.0, gt=0, description="Seconds for connecting and for each read.")
    deadline: float = Field(60.0, gt=0, description="Seconds for one URL, redirects included.")
    retries: int = Field(2, ge=0, description="Tries after a transient failure, with backoff.")
    backoff: float = Field(
        0.5, ge=0, description="Seconds before the first retry; doubled each time."
    )
    user_agent_token: str | None = Field(None, description="Name told to web servers.")
    opt_out_headers: tuple[str, ...] = Field(
        ("noai", "noimageai", "noindex", "noimageindex"),
        description="X-Robots-Tag values that are honoured by leaving the picture out.",
    )
    allow_hosts: tuple[str, ...] = Field(
        (), description="Private or loopback hosts that may be fetched from nevertheless."
    )
    max_failed: Fraction = Field(
        0.5, description="Most of all rows that may fail for good (404, broken picture, refused)."
    )
    max_transient: Fraction = Field(
        0.05,
        description="Most of a shard's rows that may still fail for passing reasons (timeouts, "
        "5xx) after the retries; above it the shard is left for the next run.",
    )
    shard_size: PositiveInt = Field(1000, description="Rows a shard, on average.")


class Encode(Section):
    """Turn image shards into latent shards: VAE moments and text embeddings."""

    resolution: PositiveInt = Field(1024, description="Side of the square whose area buckets keep.")
    aspect_buckets: bool = Field(
        False, description="Group by aspect ratio (sides in steps of `bucket_step`); else squares."
    )
    bucket_step: PositiveInt = Field(64, description="Step of bucket sides, in pixels.")
    max_aspect: float = Field(2.0, ge=1.0, description="Longest side over shortest, at most.")
    crop: Literal["center", "random"] = Field("center", description="Where an overhang is cut off.")
    flip: bool = Field(
        False,
        description="Mirror pictures left-right with probability one half, drawn anew each time "
        "that one is trained on; both variants are stored.",
    )
    masks: int = Field(
        0,
        ge=0,
        description="Masks a picture, each stored with the latents of what it leaves to be seen: "
        "for train.inpainting.",
    )
    seed: int = Field(
        0, ge=0, description="Seed of crops and masks, keyed with the picture's bytes."
    )
    holdout: Fraction = Field(
        0.05,
        description="Share of pictures, chosen by their bytes, kept from training to measure on.",
    )
    batch_size: PositiveInt = Field(
        8, description="Pictures the VAE takes at once; the last bits depend on it, and so the key."
    )
    max_bad: Fraction = Field(
        0.05, description="Most samples that may give a NaN latent or not decode."
    )
    device: str = Field("auto", description="As train.device.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Compute precision of the encoders."
    )


class PromptSet(Section):
    """Prompts drawn and judged together."""

    prompts: tuple[str, ...] = Field((), description="The prompts, in order.")
    file: str | None = Field(None, description="Or a text file with one prompt a line.")
    images_per_prompt: PositiveInt = Field(
        1, description="Pictures a prompt, each with its own noise."
    )
    compare: bool = Field(
        True,
        description="Whether these pictures are compared with the held-out ones (cmmd, fd). Say "
        "false for subjects that the held-out pictures do not show.",
    )

    @model_validator(mode="after")
    def _some_prompts(self) -> PromptSet:
        if bool(self.prompts) == bool(self.file):
            raise ValueError("give either prompts or file")
        return self


class Evaluate(Section):
    """Measure the tuned model against its base on the same prompts and noise."""

    prompts: dict[str, PromptSet] = Field(description="Named prompt sets.", min_length=1)
    clip: str = Field(description="CLIPModel folder that scores: hub id, local path or fsspec URL.")
    judges: tuple[Literal["digits"], ...] = Field((), description="Further judges of the pictures.")
    scheduler: SchedulerName | None = Field(
        None, description="What steps are taken by; null is the model's own scheduler."
    )
    aesthetic_score: float = Field(
        6.0, description="Asked of a model that was trained with train.aesthetic_score."
    )
    negative_aesthetic_score: float = Field(
        2.5, description="What guidance leads away from, in such a model."
    )
    num_inference_steps: PositiveInt = Field(30, description="Denoising steps.")
    guidance_scale: float = Field(5.0, ge=0, description="Classifier-free guidance.")
    height: PositiveInt | None = Field(None, description="Pixels; null is the model's own size.")
    width: PositiveInt | None = Field(None, description="Pixels; null is the model's own size.")
    batch_size: PositiveInt = Field(4, description="Pictures drawn at once.")
    seed: int = Field(
        0, ge=0, description="Seed of the start noise, of the loss noise, of resampling."
    )
    bootstrap: PositiveInt = Field(200, description="Resamples behind each confidence interval.")
    holdout_samples: PositiveInt = Field(
        256, description="Most held-out samples the loss is taken on."
    )
    holdout_draws: PositiveInt = Field(4, description="Noise draws a held-out sample.")
    device: str = Field("auto", description="As train.device.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the pipeline that draws."
    )


class Publish(Section):
    """Let a model through the gate, and put it into the registry."""

    name: str = Field(description="Name in the registry.", pattern=f"^{NAME}$")
    gate: tuple[str, ...] = Field(
        (),
        description="Rules that must all hold, such as `digit/new >= 0.9`, `cmmd < base` or "
        "`clip_score >= champion * 0.98`; none lets everything pass.",
    )
    registry: str | None = Field(
        None, description="Registry folder; null is `registry` in the store."
    )
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float16", description="Precision of the published weights."
    )
    merge: bool = Field(
        False,
        description="Of adapters: publish a whole pipeline with them merged into its weights, and "
        "them in `lora/`; else them alone.",
    )
    license: str | None = Field(None, description="Licence; null takes the base's from its card.")


class Plan(Section):
    """What `kiln plan` reckons with."""

    pictures: PositiveInt | None = Field(
        None, description="Pictures that storage is planned for; null tells that of one."
    )
    chip_hour_price: float | None = Field(
        None, gt=0, description="Price of one chip for an hour, in any currency; null tells none."
    )


class Recipe(Section):
    """From a list of images to a published model."""

    name: str = Field(description="Name of the recipe.")
    description: str = Field("", description="What it makes, in a sentence.")
    runtime: RuntimeName = Field("torch", description="What trains and draws.")
    store: str = Field("store", description="Where artifacts live: a folder or any fsspec URL.")
    model: Model
    source: Source
    download: Download = Download()
    beam: dict[str, Any] = Field(
        default_factory=dict,
        description="Options passed through to Beam, such as runner or direct_num_workers.",
    )
    encode: Encode = Encode()
    train: Train = Train()
    tpu: Tpu | None = Field(
        None, description="A slice that runtime xla trains on; null trains where the flow runs."
    )
    evaluate: Evaluate
    publish: Publish
    plan: Plan = Plan()

    @model_validator(mode="after")
    def _runtime_has_it(self) -> Recipe:
        self._extras_go_together()
        if self.runtime != "mindspore" and self.train.mindspore != MindSpore():
            raise ValueError(
                f"train.mindspore is for runtime mindspore, this one is {self.runtime}"
            )
        if self.train.hpu != Hpu() and not self.train.device.startswith("hpu"):
            raise ValueError(f"train.hpu is for train.device: hpu, not {self.train.device}")
        if self.tpu is not None and self.runtime != "xla":
            raise ValueError(f"tpu is for runtime xla, this one is {self.runtime}")
        return self

    def _extras_go_together(self) -> None:
        """What the denoiser sees beside text must be encoded, and what is encoded be seen."""
        if self.train.inpainting != (self.encode.masks > 0):
            raise ValueError(
                "train.inpainting needs masks: set encode.masks, such as 4"
                if self.train.inpainting
                else "encode.masks are for train.inpainting: set it, or leave them at 0"
            )
        scored = getattr(self.source, "aesthetic_column", None) is not None
        if self.train.aesthetic_score != scored:
            raise ValueError(
                "train.aesthetic_score needs scores: name their column in source.aesthetic_column"
                if self.train.aesthetic_score
                else "source.aesthetic_column is for train.aesthetic_score: set it, or leave it out"
            )
        if not scored:
            names = ("aesthetic_score", "negative_aesthetic_score")
            self.evaluate.refuse_changed(names, "train.aesthetic_score: false")
