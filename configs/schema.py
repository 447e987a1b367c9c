"""The settings of a recipe: type, range, default and unit of each."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, PositiveInt, model_validator

from configs.hardware import Hpu, MindSpore
from configs.sampling import Prompts, Sampling
from configs.section import Dtype, Fraction, Section
from configs.sources import Source
from configs.tpu import Tpu
from configs.training import Train

#: Pattern of a model's name in the registry.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
RuntimeName = Literal["torch", "xla", "jax", "mindspore"]
#: The stages of a run, in their order.
StageName = Literal["download", "encode", "train", "evaluate", "publish"]
STAGES: tuple[StageName, ...] = get_args(StageName)


class Model(Section):
    """The base model: a diffusers pipeline."""

    path: str = Field(
        description="Pipeline folder: hub id, local path or fsspec URL (gs://, s3://)."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    vae: str | None = Field(
        None,
        description="AutoencoderKL to use instead of the pipeline's: hub id, path or fsspec URL.",
    )


class Download(Section):
    """Fetch, check and resize pictures into WebDataset shards (img2dataset on Beam)."""

    image_size: PositiveInt = Field(1024, description="Target length of the side, in pixels.")
    resize_mode: Literal["no", "keep_ratio", "keep_ratio_largest", "center_crop", "border"] = Field(
        "keep_ratio", description="img2dataset's resize mode; keep_ratio resizes the shorter side."
    )
    only_if_bigger: bool = Field(True, description="Keep the size of smaller pictures.")
    min_image_size: int = Field(
        0, ge=0, description="Minimum length of the shorter side, in pixels; smaller pictures fail."
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
    threads: PositiveInt = Field(16, description="Download threads per shard.")
    timeout: float = Field(10.0, gt=0, description="Timeout per connect and per read, in seconds.")
    deadline: float = Field(
        60.0, gt=0, description="Maximum time per URL, in seconds, redirects and retries included."
    )
    retries: int = Field(2, ge=0, description="Maximum retries after a transient failure.")
    backoff: float = Field(
        0.5, ge=0, description="Wait before the first retry, in seconds; it doubles per retry."
    )
    user_agent_token: str | None = Field(
        None, description="Token in the User-Agent header; null: img2dataset's default."
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
        description="Maximum fraction of rows, 0 to 1, with permanent failures (404, damaged "
        "picture, refused address).",
    )
    max_transient: Fraction = Field(
        0.5,
        description="Maximum fraction of a shard's rows, 0 to 1, with transient failures (timeout, "
        "5xx) after all retries. Above it the shard is deferred to the next run.",
    )
    retry_failed: int = Field(
        0,
        ge=0,
        description="Raise it by 1 to fetch the rows that failed again; other rows stay as they "
        "are.",
    )
    shard_size: PositiveInt = Field(1000, description="Average number of rows per shard.")


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
        0, ge=0, description="Seed of the crops and masks, combined with each picture's digest."
    )
    holdout: Fraction = Field(
        0.05, description="Fraction of the pictures, 0 to 1, in the held-out split (by digest)."
    )
    batch_size: PositiveInt = Field(
        8, description="Pictures per forward pass of the VAE; part of the cache key."
    )
    max_bad: Fraction = Field(
        0.05, description="Maximum fraction of undecodable or NaN samples, 0 to 1."
    )
    device: str = Field("auto", description="Device: see train.device.")
    dtype: Dtype = Field("float32", description="Compute precision of the encoders.")


class PromptSet(Prompts):
    """A named set of prompts, with metrics of its own."""

    images_per_prompt: PositiveInt = Field(
        1, description="Pictures per prompt, each with its own noise."
    )
    compare: bool = Field(
        True,
        description="Include these pictures in cmmd and fd, the comparison with held-out pictures. "
        "Use false for subjects absent from the held-out pictures.",
    )


class Evaluate(Sampling):
    """Compare the tuned model with its base on equal prompts and noise."""

    prompts: dict[str, PromptSet] = Field(description="Named prompt sets.", min_length=1)
    clip: str = Field(
        description="CLIPModel folder for the CLIP metrics: hub id, local path or fsspec URL."
    )
    judges: tuple[Literal["digits"], ...] = Field(
        (), description="Additional judges of the pictures."
    )
    num_inference_steps: PositiveInt = Field(30, description="Denoising steps.")
    guidance_scale: float = Field(
        5.0, ge=0, description="Classifier-free guidance scale; 1 or less turns guidance off."
    )
    batch_size: PositiveInt = Field(4, description="Pictures per sampling batch.")
    seed: int = Field(
        0, ge=0, description="Seed of the initial noise, the loss noise and the bootstrap."
    )
    bootstrap: PositiveInt = Field(200, description="Resamples per confidence interval.")
    holdout_samples: PositiveInt = Field(
        256, description="Maximum number of held-out samples for the loss."
    )
    holdout_draws: PositiveInt = Field(4, description="Noise draws per held-out sample.")
    device: str = Field("auto", description="Device: see train.device.")


class Publish(Section):
    """The gate, the weights to publish and the registry."""

    name: str = Field(description="Model name in the registry.", pattern=f"^{NAME}$")
    gate: tuple[str, ...] = Field(
        (),
        description="Rules that a model must pass, such as `digit/new >= 0.9`, `cmmd < base` "
        "or `clip_score >= champion * 0.98`; without rules every model passes.",
    )
    registry: str | None = Field(
        None, description="Registry folder or fsspec URL; null: `registry` in the store."
    )
    dtype: Dtype = Field("float16", description="Precision of the published weights.")
    merge: bool = Field(
        False,
        description="For train.method lora: publish a full pipeline with merged adapters, and the "
        "adapters in `lora/`; false publishes the adapters only.",
    )
    license: str | None = Field(None, description="Licence; null: that of the base's card.")


class Plan(Section):
    """Assumptions of `kiln plan`."""

    pictures: PositiveInt | None = Field(
        None, description="Pictures in the dataset; null: storage per picture."
    )
    chip_hour_price: float | None = Field(
        None, gt=0, description="Price per chip and hour, in any currency; null: no cost estimate."
    )


class Recipe(Section):
    """A recipe: all settings from a source of images to a published model."""

    name: str = Field(description="Name of the recipe.")
    description: str = Field("", description="The resulting model, in one sentence.")
    runtime: RuntimeName = Field("torch", description="Runtime that trains and samples.")
    store: str = Field("store", description="Artifact store: folder or fsspec URL.")
    model: Model
    source: Source
    download: Download = Download()
    beam: dict[str, Any] = Field(
        default_factory=dict,
        description="Beam pipeline options, such as runner or direct_num_workers.",
    )
    encode: Encode = Encode()
    train: Train = Train()
    tpu: Tpu | None = Field(
        None, description="Cloud TPU slice for runtime xla; null: train on the flow's machine."
    )
    evaluate: Evaluate
    publish: Publish
    plan: Plan = Plan()

    @model_validator(mode="after")
    def _check_runtime(self) -> Recipe:
        self._check_extra_inputs()
        if self.runtime != "mindspore" and self.train.mindspore != MindSpore():
            raise ValueError(f"train.mindspore requires runtime mindspore, not {self.runtime}")
        if self.train.hpu != Hpu() and not self.train.device.startswith("hpu"):
            raise ValueError(f"train.hpu requires train.device: hpu, not {self.train.device}")
        if self.tpu is not None and self.runtime != "xla":
            raise ValueError(f"tpu requires runtime xla, not {self.runtime}")
        return self

    def _check_extra_inputs(self) -> None:
        """Raise ValueError if masks or scores are used but not produced, or produced but unused."""
        if self.train.inpainting != (self.encode.masks > 0):
            raise ValueError(
                "train.inpainting requires masks: set encode.masks, such as 4"
                if self.train.inpainting
                else "encode.masks requires train.inpainting: set both or neither"
            )
        scored = getattr(self.source, "aesthetic_column", None) is not None
        if self.train.aesthetic_score != scored:
            raise ValueError(
                "train.aesthetic_score requires scores: set source.aesthetic_column"
                if self.train.aesthetic_score
                else "source.aesthetic_column requires train.aesthetic_score: set both or neither"
            )
        if not scored:
            names = ("aesthetic_score", "negative_aesthetic_score")
            self.evaluate.refuse_changed(names, "train.aesthetic_score: false")
