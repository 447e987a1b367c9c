"""A recipe: its sections, and the rules between them.

The sections `model`, `place`, `plan`, `retrain`, `sweep` and `tpu` are defined here, the larger
ones in files of their own. Settings that another one disables are told, and are no part of any key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import Field, PositiveInt, field_validator, model_validator

from configs.settings.base_section import ModelPlace, NullDrops, Section, StoredUrl
from configs.settings.data import Download, Encode, Source
from configs.settings.evaluate import Evaluate
from configs.settings.publish import Publish
from configs.settings.train import Train
from configs.settings.train_parts import HOLDOUT_LOSS, Hpu, MindSpore


class Model(Section):
    """The base model: a diffusers pipeline."""

    path: ModelPlace = Field(
        description="Pipeline folder: hub id, local path or fsspec URL (gs://, s3://)."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    vae: ModelPlace | None = Field(
        None,
        description="AutoencoderKL to use instead of the pipeline's: hub id, path or fsspec URL.",
    )


#: Stages that a work pool can run; publishing takes seconds, and stays with the flow.
PlacedStage = Literal["download", "encode", "train", "evaluate"]
PLACED_STAGES: tuple[PlacedStage, ...] = get_args(PlacedStage)
Pool = Annotated[str, Field(pattern=r"^[^/%&<>\s]+(/[^/%&<>\s]+)?$")]


class Place(Section):
    """Prefect work pools, as POOL or POOL/QUEUE, that run stages; null: where the flow runs."""

    download: Pool | None = Field(None, description="Work pool that downloads; null: here.")
    encode: Pool | None = Field(None, description="Work pool that encodes; null: here.")
    train: Pool | None = Field(None, description="Work pool that trains; null: here.")
    evaluate: Pool | None = Field(None, description="Work pool that evaluates; null: here.")

    def pools(self) -> dict[PlacedStage, str]:
        """Stage -> POOL or POOL/QUEUE, of the stages that have one."""
        found = {stage: getattr(self, stage) for stage in PLACED_STAGES}
        return {stage: pool for stage, pool in found.items() if pool is not None}


class Plan(Section):
    """Assumptions of `kiln plan` and of the estimates before a run."""

    pictures: PositiveInt | None = Field(
        None, description="Pictures in the dataset; null: storage per picture."
    )
    chip_hour_price: float | None = Field(
        None, gt=0, description="Price per chip and hour, in any currency; null: no cost estimate."
    )
    disk_gb: float | None = Field(
        None,
        ge=0,
        description="Disk that a run needs, in GB, where its estimate is wrong; 0: no check of the "
        "free disk; null: the estimate.",
    )


class Retrain(Section):
    """Train again when the source has new rows; used by `kiln retrain` alone."""

    start: Literal["champion", "base"] = Field(
        "champion",
        description="Weights at step 0. champion: its weights, trained on the new samples and a "
        "replay; base: the base's, trained by section `train` on all samples.",
    )
    epochs: float = Field(
        10.0,
        gt=0,
        description="Passes over the new samples and the replay; the number of steps is therefore "
        "proportional to the new samples.",
    )
    max_steps: PositiveInt = Field(10_000, description="Maximum number of steps.")
    replay: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.5,
        description="Share of the champion's samples among the training samples, 0 to below 1, "
        "against forgetting. It is lower if the champion's unchanged shards have fewer samples.",
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate; null: train.learning_rate."
    )
    min_new_rows: PositiveInt = Field(
        1, description="New rows of the source below which nothing is trained."
    )


class Sweep(Section):
    """Train once per combination of values; used by `kiln sweep` alone."""

    values: Annotated[dict[str, tuple[Any, ...]], NullDrops] = Field(
        default_factory=dict,
        description="Dotted setting of section `train` -> the values to try. Several settings form "
        "a grid; null instead of values drops those of the extended recipe.",
    )
    metric: str = Field(
        HOLDOUT_LOSS, description="Metric of the evaluation that selects the best trial."
    )
    mode: Literal["min", "max"] | None = Field(
        None,
        description="Best value of the metric: min or max; null: min for losses, distances and "
        "memorisation, else max.",
    )

    @field_validator("values")
    @classmethod
    def _check_values(cls, values: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for name, tried in values.items():
            if not name.startswith("train."):
                raise ValueError(
                    f"{name} cannot be swept: trials share download, encode and evaluation, so "
                    "only settings of `train` can"
                )
            if not tried:
                raise ValueError(f"{name} has no values")
        return values


#: Default software version by kind of accelerator, from Cloud TPU's page "TPU software versions".
#: A version is valid for its own kinds only.
SOFTWARE = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


class Tpu(Section):
    """A Cloud TPU slice, created by gcloud before training and deleted after it."""

    name: str = Field(description="Name of the slice.", pattern=r"^[a-z][-a-z0-9]*$", max_length=60)
    zone: str = Field(description="Google Cloud zone, such as us-east5-a.")
    project: str | None = Field(
        None, description="Google Cloud project; null: gcloud's configured one."
    )
    accelerator_type: str = Field(description="Kind and size of the slice, such as v5p-8.")
    version: str | None = Field(
        None, description="Software version of the workers; null: the default of the kind."
    )
    capacity: Literal["on_demand", "reserved", "spot"] = Field(
        "on_demand", description="Provisioning model; a spot slice can be preempted."
    )
    queued: bool = Field(False, description="Request the slice as a queued resource and wait.")
    network: str | None = Field(None, description="VPC network; null: the project's default.")
    subnetwork: str | None = Field(None, description="Subnetwork; null: the network's default.")
    service_account: str | None = Field(
        None,
        description="Service account of the workers, with read and write access to the store; "
        "null: the project's default.",
    )
    libtpu_args: str = Field("", description="LIBTPU_INIT_ARGS of the training processes.")
    keep: bool = Field(False, description="Keep the slice after training.")
    restarts: int = Field(
        20, ge=0, description="Maximum restarts after a preemption, each from the last checkpoint."
    )

    @property
    def kind(self) -> str:
        """The prefix of the accelerator type, such as v5p."""
        return self.accelerator_type.partition("-")[0]

    @property
    def software(self) -> str:
        """The software version for gcloud. Raises KeyError if an unknown kind has no version."""
        return self.version or SOFTWARE[self.kind]

    @model_validator(mode="after")
    def _check_accelerator(self) -> Tpu:
        if self.kind == "v5e":
            name = self.accelerator_type.replace("v5e", "v5litepod")
            raise ValueError(f"accelerator_type {self.accelerator_type}: gcloud calls it {name}")
        known = SOFTWARE.get(self.kind)
        if known is None and self.version is None:
            raise ValueError(
                f"accelerator_type {self.accelerator_type}: set version too "
                f"(only {', '.join(SOFTWARE)} have a default)"
            )
        if known is not None and self.version in {*SOFTWARE.values()} - {known}:
            raise ValueError(
                f"version {self.version} does not support {self.accelerator_type}: "
                f"leave it at null ({known})"
            )
        return self


RuntimeName = Literal["torch", "xla", "jax", "mindspore"]
#: The stages of a run, in their order.
StageName = Literal["download", "encode", "train", "evaluate", "publish"]
STAGES: tuple[StageName, ...] = get_args(StageName)


class Recipe(Section):
    """A recipe: all settings from a source of images to a published model."""

    name: str = Field(description="Name of the recipe.")
    description: str = Field("", description="The resulting model, in one sentence.")
    runtime: RuntimeName = Field("torch", description="Runtime that trains and samples.")
    store: StoredUrl = Field("store", description="Artifact store: folder or fsspec URL.")
    model: Model
    source: Source
    download: Download = Download()
    beam: dict[str, Any] = Field(
        default_factory=dict,
        description="Beam pipeline options of the stages download and encode, such as runner or "
        "direct_num_workers.",
    )
    shared_folders: tuple[str, ...] = Field(
        (),
        description="Folders that remote Beam workers and work pools have at the same paths as "
        "this machine, such as the mount of a network file system.",
    )
    place: Place = Place()
    encode: Encode = Encode()
    train: Train = Train()
    tpu: Tpu | None = Field(
        None, description="Cloud TPU slice for runtime xla; null: train on the flow's machine."
    )
    evaluate: Evaluate
    publish: Publish
    retrain: Retrain = Retrain()
    sweep: Sweep = Sweep()
    plan: Plan = Plan()

    @model_validator(mode="after")
    def _check_runtime(self) -> Recipe:
        self._check_extra_inputs()
        if self.runtime != "mindspore" and self.train.mindspore != MindSpore():
            raise ValueError(f"train.mindspore requires runtime mindspore, not {self.runtime}")
        if self.runtime != "mindspore" and self.train.mixed_precision == "fp16":
            raise ValueError("train.mixed_precision: fp16 requires runtime mindspore: set bf16")
        if self.train.hpu != Hpu() and not self.train.device.startswith("hpu"):
            raise ValueError(f"train.hpu requires train.device: hpu, not {self.train.device}")
        if self.runtime != "torch":
            self.train.refuse_changed(
                ("allow_tf32", "compile", "attention", "cuda_graphs", "deterministic"),
                f"runtime: {self.runtime}",
            )
            self.train.lora.refuse_changed(("base_precision",), f"runtime: {self.runtime}")
            self.evaluate.refuse_changed(("offload",), f"runtime: {self.runtime}")
        if self.evaluate.device.startswith(("hpu", "npu")):
            self.evaluate.refuse_changed(("offload",), f"device: {self.evaluate.device}")
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


AnySection = TypeVar("AnySection", bound=Section)


BIAS = ("train.timesteps.bias_strategy",)


class Needs(NamedTuple):
    """Settings that have an effect with certain values of others."""

    names: tuple[str, ...]
    others: tuple[str, ...]
    have_effect: Callable[..., Any]  # of the values of `others`


#: A recipe may inherit such a value, so that it is no error. `Section.refuse_changed` is stricter,
#: for what a runtime, a device or a model does not support.
TABLE = (
    Needs(("encode.bucket_step", "encode.max_aspect"), ("encode.aspect_buckets",), lambda on: on),
    Needs(
        ("encode.seed",),
        ("encode.crop", "encode.masks"),
        lambda crop, masks: crop == "random" or masks,
    ),
    Needs(("train.lora", "publish.merge"), ("train.method",), lambda method: method == "lora"),
    Needs(("train.lr_min_ratio",), ("train.lr_scheduler",), lambda name: name != "constant"),
    Needs(
        ("train.lr_num_cycles",),
        ("train.lr_scheduler",),
        lambda name: name == "cosine_with_restarts",
    ),
    Needs(("train.lr_power",), ("train.lr_scheduler",), lambda name: name == "polynomial"),
    Needs(
        ("train.adam_betas", "train.adam_epsilon"),
        ("train.optimizer",),
        lambda name: name != "adafactor",
    ),
    Needs(("train.ema_every_n_steps",), ("train.ema_decay",), lambda decay: decay is not None),
    Needs(("train.allow_tf32",), ("train.mixed_precision",), lambda name: name == "no"),
    Needs(
        ("train.timesteps.logit_mean", "train.timesteps.logit_std"),
        ("train.timesteps.distribution",),
        lambda name: name == "logit_normal",
    ),
    Needs(("train.timesteps.bias_multiplier",), BIAS, lambda name: name != "none"),
    Needs(("train.timesteps.bias_portion",), BIAS, lambda name: name in ("earlier", "later")),
    Needs(
        ("train.timesteps.bias_begin", "train.timesteps.bias_end"),
        BIAS,
        lambda name: name == "range",
    ),
    Needs(("train.mindspore.jit_level",), ("train.mindspore.mode",), lambda name: name == "graph"),
    Needs(
        ("train.holdout_loss.samples", "train.holdout_loss.draws"),
        ("train.holdout_loss.every_n_steps",),
        lambda steps: steps,
    ),
    Needs(
        ("train.divergence.patience",),
        ("train.divergence.factor",),
        lambda factor: factor is not None,
    ),
    Needs(
        ("train.divergence.max_skips",),
        ("train.divergence.action",),
        lambda action: action == "skip",
    ),
    Needs(("train.profile.start",), ("train.profile.steps",), lambda steps: steps),
    Needs(
        tuple(f"retrain.{name}" for name in ("epochs", "max_steps", "replay", "learning_rate")),
        ("retrain.start",),
        lambda start: start == "champion",
    ),
)


def settings_without_effect(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(dotted setting, what disables it) of each value that is not the default and is not used."""
    for row in TABLE:
        values = [attrgetter(name)(recipe) for name in row.others]
        if row.have_effect(*values):
            continue
        choice = " and ".join(
            f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
            for name, value in zip(row.others, values, strict=True)
        )
        for name in row.names:
            if attrgetter(name)(recipe) != _default(recipe, name):
                yield name, choice


def warnings_without_effect(recipe: Recipe) -> list[str]:
    """A line for each setting without effect."""
    return [f"{name} has no effect with {why}" for name, why in settings_without_effect(recipe)]


def with_defaults_without_effect(recipe: Recipe) -> Recipe:
    """The recipe with the default of each setting without effect: equal runs have equal keys."""
    for name, _ in settings_without_effect(recipe):
        recipe = _with(recipe, name, _default(recipe, name))
    return recipe


def _default(recipe: Recipe, dotted: str) -> Any:
    section, _, name = dotted.rpartition(".")
    return type(attrgetter(section)(recipe)).model_fields[name].default


def _with(section: AnySection, dotted: str, value: Any) -> AnySection:
    name, _, rest = dotted.partition(".")
    new = _with(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: new})
