"""A recipe: its sections, and the rules between them.

The sections `model`, `place`, `plan`, `publish`, `retrain`, `sweep` and `tpu` are defined here,
the larger ones in files of their own. A warning names settings that another one disables, and no
key has them.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from configs.settings.base_section import Dtype, ModelPlace, NullDrops, Section, StoredUrl, setting
from configs.settings.caption import Caption
from configs.settings.data import Download, Encode, Source
from configs.settings.describe import Describe
from configs.settings.evaluate import Evaluate
from configs.settings.select import Select
from configs.settings.train import Train
from configs.settings.train_parts import HOLDOUT_LOSS, Hpu, MindSpore

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
#: Pattern of a model's name in the registry: MODEL or TEAM/MODEL.
NAME = rf"{_PART}(/{_PART})?"
#: Pattern of a team's name, and of its models' own.
TEAM = r"[a-z0-9]+(-[a-z0-9]+)*"
#: Names with a team differ in Prefect's keys too, where two dashes stand for the slash, and no
#: folder of a team's model is that of a version, or the champion, of a model named like the team.
_TEAM_NAME = rf"{TEAM}/(?!(champion|v\d+)$){TEAM}"


def team_of(model: str) -> str:
    """The team in a model's name, such as `vision` of `vision/digits`; empty without one."""
    return model.rpartition("/")[0]


class Hub(Section):
    """A repository of the Hugging Face hub that receives each published model.

    The token is that of HF_TOKEN, of `hf auth login`, or of Prefect's secret block `hub-token`, of
    a team `hub-token-TEAM`.
    """

    repo: str = setting(pattern=r"^[\w.-]+/[\w.-]+$")
    """Repository, as owner/name."""
    private: bool = True
    """Create the repository as private, and refuse a public one."""


class Publish(Section):
    """The gate, the weights to publish and the registry."""

    name: str = setting(pattern=f"^{NAME}$", aka="output_name (KS)")
    """Model name in the registry; TEAM/MODEL, such as vision/digits, has lower-case letters, digits
    and single dashes."""
    gate: tuple[str, ...] = ()
    """Rules that a model must pass, such as `digit/new >= 0.9`, `cmmd < base`, `clip_score >=
    champion * 0.98` or, for 95% confidence, `kid < champion at 95%`; without rules every model
    passes."""
    require_license: bool = False
    """Refuse a model without `license` and without one in the base's card."""
    smoke_test: bool = True
    """Load the folder by plain diffusers in a process of its own, and draw, before it is
    registered."""
    max_bytes: PositiveInt | None = None
    """Maximum size of the published folder, in bytes; null: no limit."""
    registry: StoredUrl | None = setting(None, not_in_key="destination")
    """Registry folder or fsspec URL; null: `registry` in the store."""
    dtype: Dtype = setting("float16", aka="save_precision (K)")
    """Precision of the published files; diffusers loads them as float32, or as the `dtype` of
    `from_pretrained`."""
    merge: bool = setting(False, needs="train.method == lora")
    """For train.method lora: publish a full pipeline with merged adapters, and the adapters in
    `lora/`; false publishes the adapters only."""
    license: str | None = None
    """Licence; null: that of the base's card."""
    hub: Hub | None = setting(
        None,
        not_in_key="destination",
        aka="push_to_hub hub_model_id (DS): `{repo: owner/name}`, if the gate passes",
    )
    """Push published models to the hub; null: none."""
    signing_key: str | None = setting(None, not_in_key="destination")
    """PEM file of the private elliptic-curve key that signs published models; its password is
    KILN_SIGNING_PASSWORD."""
    promote: Literal["auto", "manual"] = setting("auto", not_in_key="destination")
    """What a model that passes becomes. auto: the champion; manual: the candidate, until a person
    promotes or rejects it (docs/publishing.md)."""
    approval_days: PositiveFloat = setting(
        14.0, not_in_key="destination", needs="promote == manual", le=36_525
    )
    """Days that a candidate awaits approval; the next run of its recipe asks anew."""
    keep_versions: PositiveInt | None = setting(None, not_in_key="destination")
    """Newest versions to keep in the registry, beside the champion, the one before it, which a
    rollback restores, and a candidate that awaits approval; null: all."""

    @property
    def file_stem(self) -> str:
        """The name without its team, for names of files."""
        return self.name.rpartition("/")[2]

    def faults(self) -> Iterator[str]:
        if team_of(self.name) and not re.fullmatch(_TEAM_NAME, self.name):
            yield (
                f"name {self.name}: a team and its model have lower-case letters, digits and "
                "single dashes, and no model is called champion or, as a version, v1"
            )


class Model(Section):
    """The base model: a diffusers pipeline."""

    path: ModelPlace = setting(aka="pretrained_model_name_or_path (DKS)")
    """Pipeline folder: hub id, local path or fsspec URL (gs://, s3://)."""
    revision: str | None = setting(None, aka="revision (DS)")
    """Branch, tag or commit of a hub id."""
    vae: ModelPlace | None = setting(None, aka="pretrained_vae_model_name_or_path vae (DKS)")
    """AutoencoderKL to use instead of the pipeline's: hub id, path or fsspec URL."""


#: Stages that a work pool can run; publishing takes seconds, and stays with the flow.
PlacedStage = Literal["download", "describe", "select", "caption", "encode", "train", "evaluate"]
PLACED_STAGES: tuple[PlacedStage, ...] = get_args(PlacedStage)
Pool = Annotated[str, Field(pattern=r"^[^/%&<>\s]+(/[^/%&<>\s]+)?$")]


class Place(Section):
    """Prefect work pools, as POOL or POOL/QUEUE, that run stages; null: where the flow runs."""

    download: Pool | None = None
    """Work pool that downloads; null: here."""
    describe: Pool | None = None
    """Work pool that describes; null: here."""
    select: Pool | None = None
    """Work pool that selects; null: here."""
    caption: Pool | None = None
    """Work pool that captions; null: here."""
    encode: Pool | None = None
    """Work pool that encodes; null: here."""
    train: Pool | None = None
    """Work pool that trains; null: here."""
    evaluate: Pool | None = None
    """Work pool that evaluates; null: here."""

    def pools(self) -> dict[PlacedStage, str]:
        """Stage -> POOL or POOL/QUEUE, for the stages that have a pool."""
        return {stage: pool for stage in PLACED_STAGES if (pool := getattr(self, stage))}


class Plan(Section):
    """Assumptions of `kiln plan` and of the estimates before a run."""

    pictures: PositiveInt | None = None
    """Pictures in the dataset; null: storage per picture."""
    chip_hour_price: PositiveFloat | None = None
    """Price per chip and hour, in any currency; null: no cost estimate."""
    disk_gb: float | None = setting(None, ge=0)
    """Disk that a run needs, in GB, where its estimate is wrong; 0: no check of the free disk;
    null: the estimate."""


class Retrain(Section):
    """Train again when the source has new rows; used by `kiln retrain` alone."""

    start: Literal["champion", "base"] = "champion"
    """Weights at step 0. champion: its weights, trained on the new samples and a replay; base: the
    base's, trained by section `train` on all samples."""
    epochs: PositiveFloat = setting(10.0, needs="start == champion")
    """Passes over the new samples and the replay; the number of steps is therefore proportional to
    the new samples."""
    max_steps: PositiveInt = setting(10_000, needs="start == champion")
    """Maximum number of steps."""
    replay: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(0.5, needs="start == champion")
    """Share of the champion's samples among the training samples, 0 to below 1, against forgetting.
    It is lower if the champion's unchanged shards have fewer samples."""
    learning_rate: PositiveFloat | None = setting(None, needs="start == champion")
    """Peak learning rate; null: train.learning_rate."""
    min_new_rows: PositiveInt = 1
    """New rows of the source below which nothing is trained."""
    candidate: Literal["wait", "replace"] = setting("wait", not_in_key="execution")
    """While a candidate awaits approval: wait trains nothing, replace trains a new candidate."""


class Sweep(Section):
    """Train once per combination of values; used by `kiln sweep` alone."""

    values: Annotated[dict[str, tuple[Any, ...]], NullDrops] = setting({})
    """Dotted setting of section `train` or `caption` -> the values to try. Several settings form a
    grid; null instead of values drops those of the extended recipe."""
    metric: str = HOLDOUT_LOSS
    """Metric of the evaluation that selects the best trial."""
    mode: Literal["min", "max"] | None = None
    """Best value of the metric: min or max; null: min for losses, distances and memorisation, else
    max."""

    @field_validator("values")
    @classmethod
    def _check_values(cls, values: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for name, tried in values.items():
            if not name.startswith(("train.", "caption.")):
                raise ValueError(
                    f"{name} cannot be swept: trials share download, selection and evaluation, so "
                    "only settings of `train` and `caption` can"
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

    name: str = setting(pattern=r"^[a-z][-a-z0-9]*$", max_length=60)
    """Name of the slice."""
    zone: str
    """Google Cloud zone, such as us-east5-a."""
    project: str | None = None
    """Google Cloud project; null: gcloud's configured one."""
    accelerator_type: str
    """Kind and size of the slice, such as v5p-8."""
    version: str | None = None
    """Software version of the workers; null: the default of the kind."""
    capacity: Literal["on_demand", "reserved", "spot"] = "on_demand"
    """Provisioning model; a spot slice can be preempted."""
    queued: bool = False
    """Request the slice as a queued resource and wait."""
    network: str | None = None
    """VPC network; null: the project's default."""
    subnetwork: str | None = None
    """Subnetwork; null: the network's default."""
    service_account: str | None = None
    """Service account of the workers, with read and write access to the store; null: the project's
    default."""
    libtpu_args: str = ""
    """LIBTPU_INIT_ARGS of the training processes."""
    keep: bool = False
    """Keep the slice after training."""
    restarts: int = setting(20, ge=0)
    """Maximum restarts after a preemption, each from the last checkpoint."""

    @property
    def kind(self) -> str:
        """The prefix of the accelerator type, such as v5p."""
        return self.accelerator_type.partition("-")[0]

    @property
    def software(self) -> str:
        """The software version for gcloud. Raises KeyError if an unknown kind has no version."""
        return self.version or SOFTWARE[self.kind]

    def faults(self) -> Iterator[str]:
        if self.kind == "v5e":
            name = self.accelerator_type.replace("v5e", "v5litepod")
            yield f"accelerator_type {self.accelerator_type}: gcloud calls it {name}"
        known = SOFTWARE.get(self.kind)
        if known is None and self.version is None:
            yield (
                f"accelerator_type {self.accelerator_type}: set version too "
                f"(only {', '.join(SOFTWARE)} have a default)"
            )
        if known is not None and self.version in {*SOFTWARE.values()} - {known}:
            yield (
                f"version {self.version} does not support {self.accelerator_type}: "
                f"leave it at null ({known})"
            )


RuntimeName = Literal["torch", "xla", "jax", "mindspore"]
#: The stages of a run, in their order.
StageName = Literal[
    "download", "describe", "select", "caption", "encode", "train", "evaluate", "publish"
]
STAGES: tuple[StageName, ...] = get_args(StageName)
#: Stages that a run has if its recipe has their section.
OPTIONAL_STAGES: tuple[StageName, ...] = ("describe", "select", "caption")


class Recipe(Section):
    """A recipe: all settings from a source of images to a published model."""

    name: str = setting(not_in_key="label")
    """Name of the recipe."""
    description: str = setting("", not_in_key="label")
    """The resulting model, in one sentence."""
    runtime: RuntimeName = setting("torch", not_in_key="execution")
    """Runtime that trains and samples."""
    store: StoredUrl = setting(
        "store",
        not_in_key="destination",
        aka="output_dir logging_dir (DKS): content-addressed artifacts",
    )
    """Artifact store: folder or fsspec URL."""
    model: Model = setting(not_in_key="content")
    source: Source = setting(
        not_in_key="content", aka="dataset_config data_backend_config (KS): one source per recipe"
    )
    download: Download = Download()
    beam: dict[str, Any] = setting({}, not_in_key="execution")
    """Beam pipeline options of the stages download, describe, caption and encode, such as runner
    or direct_num_workers."""
    shared_folders: tuple[str, ...] = setting((), not_in_key="execution")
    """Folders that remote Beam workers and work pools have at the same paths as this machine, such
    as the mount of a network file system."""
    place: Place = setting(Place(), not_in_key="execution")
    describe: Describe | None = None
    """Values of each picture, computed once; null: none."""
    select: Select | None = None
    """Choice of the pictures to train on; null: all."""
    caption: Caption | None = None
    """Captions by a model; null: those of the source."""
    encode: Encode = setting(
        Encode(), aka="cache_latents cache_text_encoder_outputs (K): always precomputed"
    )
    train: Train = Train()
    tpu: Tpu | None = setting(None, not_in_key="execution")
    """Cloud TPU slice for runtime xla; null: train on the flow's machine."""
    evaluate: Evaluate = setting(
        aka="validation_guidance validation_num_inference_steps (S): guidance_scale, "
        "num_inference_steps"
    )
    publish: Publish
    retrain: Retrain = Retrain()
    sweep: Sweep = setting(Sweep(), not_in_key="command")
    plan: Plan = setting(Plan(), not_in_key="command")

    @property
    def stages(self) -> tuple[StageName, ...]:
        """The stages of a run of this recipe, in their order."""
        without = [name for name in OPTIONAL_STAGES if getattr(self, name) is None]
        return tuple(stage for stage in STAGES if stage not in without)

    def faults(self) -> Iterator[str]:
        yield from self._faults_of_extra_inputs()
        yield from self._faults_of_selection()
        runtime = f"runtime: {self.runtime}"
        if self.runtime != "mindspore" and self.train.mindspore != MindSpore():
            yield f"train.mindspore requires runtime mindspore, not {self.runtime}"
        if self.runtime != "mindspore" and self.train.mixed_precision == "fp16":
            yield "train.mixed_precision: fp16 requires runtime mindspore: set bf16"
        if self.train.hpu != Hpu() and not self.train.device.startswith("hpu"):
            yield f"train.hpu requires train.device: hpu, not {self.train.device}"
        if self.runtime != "torch":
            of_torch = ("allow_tf32", "compile", "attention", "cuda_graphs", "deterministic")
            self.train.refuse_changed(of_torch, runtime)
            self.train.lora.refuse_changed(("base_precision",), runtime)
            self.evaluate.refuse_changed(("offload",), runtime)
        if self.evaluate.device.startswith(("hpu", "npu")):
            self.evaluate.refuse_changed(("offload",), f"device: {self.evaluate.device}")
        describers = self.describe.describers.values() if self.describe else ()
        is_compared = self.caption and self.caption.checks.min_likeness is not None
        if is_compared and all(describer.kind != "clip" for describer in describers):
            yield (
                "caption.checks.min_likeness requires embeddings of pictures: add a describer of "
                "kind clip to describe.describers"
            )
        if self.tpu is not None and self.runtime != "xla":
            yield f"tpu requires runtime xla, not {self.runtime}"

    def _faults_of_selection(self) -> Iterator[str]:
        """Describers of duplicates and clusters that there are not."""
        kinds = {n: d.kind for n, d in self.describe.describers.items()} if self.describe else {}
        for named, (name, kind) in (self.select.describers if self.select else {}).items():
            if kinds.get(name) != kind:
                known = ", ".join(n for n, of in kinds.items() if of == kind) or "none"
                yield (
                    f"{named}: {name} is no describer of kind {kind} (those in "
                    f"describe.describers: {known})"
                )

    def _faults_of_extra_inputs(self) -> Iterator[str]:
        """Masks or scores that are used and not produced, or produced and not used."""
        if self.train.inpainting != (self.encode.masks > 0):
            yield (
                "train.inpainting requires masks: set encode.masks, such as 4"
                if self.train.inpainting
                else "encode.masks requires train.inpainting: set both or neither"
            )
        scored = getattr(self.source, "aesthetic_column", None) is not None
        if self.train.aesthetic_score != scored:
            yield (
                "train.aesthetic_score requires scores: set source.aesthetic_column"
                if self.train.aesthetic_score
                else "source.aesthetic_column requires train.aesthetic_score: set both or neither"
            )
        if not scored:
            names = ("aesthetic_score", "negative_aesthetic_score")
            self.evaluate.refuse_changed(names, "train.aesthetic_score: false")


AnySection = TypeVar("AnySection", bound=Section)


def warnings_without_effect(recipe: Section) -> list[str]:
    """A line for each setting without effect."""
    return [f"{name} has no effect with {why}" for name, why in recipe.without_effect()]


def with_defaults_without_effect(recipe: AnySection) -> AnySection:
    """The recipe with the default of each setting without effect: equal runs have equal keys."""
    for name, _ in recipe.without_effect():
        recipe = _with_default(recipe, name)
    return recipe


def _with_default(section: AnySection, dotted: str) -> AnySection:
    name, _, rest = dotted.partition(".")
    default = type(section).model_fields[name].default
    value = _with_default(getattr(section, name), rest) if rest else default
    return section.model_copy(update={name: value})
