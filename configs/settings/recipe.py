"""A recipe: its sections, and the rules between them.

The sections `model`, `place`, `plan`, `publish`, `retrain` and `sweep` are defined here, the larger
ones in files of their own. A warning names settings that another one disables, and no
key has them.
"""

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_serializer,
)

from configs.settings.base_section import Dtype, ModelPlace, NullDrops, Section, StoredUrl, setting
from configs.settings.caption import Caption
from configs.settings.clusters import SOFTWARE, AnyCluster, Kubernetes, Ray, Slurm, Ssh, Tpu
from configs.settings.data import Download, Encode, Source, references_of
from configs.settings.describe import Describe
from configs.settings.evaluate import Evaluate
from configs.settings.select import Select
from configs.settings.sources import NAME as SOURCE_NAME
from configs.settings.sources import SECTIONS, MixtureSource, faults_between, merged, own_sections
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
    """Pipeline folder: hub id, local path or fsspec URL (gs://, s3://). Or a checkpoint file
    `.safetensors` of SD 1 and 2, SDXL or FLUX.1: local path or URL; it is converted once."""
    revision: str | None = setting(None, aka="revision (DS)")
    """Branch, tag or commit of a hub id."""
    components: ModelPlace | None = None
    """For a checkpoint file: pipeline folder with the configs, and with the parts that the file
    lacks, such as FLUX.1's text encoders: hub id or local path; null: the published pipeline of the
    file's architecture, on the hub."""
    vae: ModelPlace | None = setting(None, aka="pretrained_vae_model_name_or_path vae (DKS)")
    """AutoencoderKL to use instead of the pipeline's: hub id, path or fsspec URL."""

    @model_serializer(mode="wrap")
    def _without_unused_components(
        self, serialize: Callable[[Self], dict[str, Any]]
    ) -> dict[str, Any]:
        """A folder's settings lack `components`: keys of publications have them."""
        values = serialize(self)
        if self.components is None:
            del values["components"]
        return values


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
    references: PositiveInt | None = setting(None, needs="has_references")
    """References of a picture in a planned step; null: one for each column, folder or extension."""
    chip_hour_price: PositiveFloat | None = None
    """Price per chip and hour, in any currency; null: no cost estimate."""
    network_gbits: PositiveFloat = 100.0
    """Network of each host of train.hosts, in Gbit/s."""
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


RuntimeName = Literal["torch", "xla", "jax", "mindspore"]
#: The stages of a run, in their order.
StageName = Literal[
    "download", "describe", "select", "caption", "encode", "train", "evaluate", "publish"
]
STAGES: tuple[StageName, ...] = get_args(StageName)
#: Stages that a mixture has for each of its sources.
DATA_STAGES: tuple[StageName, ...] = ("download", "describe", "select", "caption", "encode")
#: Stages that a run has if its recipe has their section.
OPTIONAL_STAGES: tuple[StageName, ...] = ("describe", "select", "caption")


#: Sections of clusters whose machines run our agents.
CLUSTERS = ("slurm", "ssh", "kubernetes", "ray", "tpu")


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
        None, not_in_key="content", validate_default=False, exclude_if=lambda source: source is None
    )
    sources: Annotated[dict[str, MixtureSource], NullDrops] = setting(
        {}, exclude_if=lambda sources: not sources, aka="dataset_config data_backend_config (KS)"
    )
    """Name -> source of a mixture, instead of `source`."""
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
    """Cloud TPU slice that trains, with runtime jax or xla; null: none."""
    slurm: Slurm | None = setting(None, not_in_key="execution")
    """Slurm cluster whose hosts train; null: none, or the one of this machine for a stage's
    `hosts`."""
    ssh: Ssh | None = setting(None, not_in_key="execution")
    """Machines reached by ssh that train; null: none."""
    kubernetes: Kubernetes | None = setting(None, not_in_key="execution")
    """Kubernetes cluster whose pods train; null: none."""
    ray: Ray | None = setting(None, not_in_key="execution")
    """Ray cluster whose nodes train; null: none, or that of RAY_ADDRESS for a stage's `hosts`."""
    evaluate: Evaluate = setting(
        aka="validation_guidance validation_num_inference_steps (S): guidance_scale, "
        "num_inference_steps"
    )
    publish: Publish
    retrain: Retrain = Retrain()
    sweep: Sweep = setting(Sweep(), not_in_key="command")
    plan: Plan = setting(Plan(), not_in_key="command")

    @property
    def cluster(self) -> AnyCluster | None:
        """The section of the cluster that trains; None without one."""
        return next(iter(self._clusters.values()), None)

    @property
    def trains_elsewhere(self) -> bool:
        """Whether other machines than the flow's train."""
        return self.train.hosts > 1 or self.cluster is not None

    def hosts_of(self, stage: StageName) -> int | None:
        """Machines of the cluster that compute a stage; None: the flow's machine does."""
        if stage == "train":
            return self.train.hosts if self.trains_elsewhere else None
        hosts: int | None = getattr(getattr(self, stage, None), "hosts", None)
        return hosts

    @property
    def _clusters(self) -> dict[str, AnyCluster]:
        sections = {name: getattr(self, name) for name in CLUSTERS}
        return {name: section for name, section in sections.items() if section is not None}

    @property
    def stages(self) -> tuple[StageName, ...]:
        """The stages of a run of this recipe, in their order."""
        parts = self.by_source.values()
        without = [n for n in OPTIONAL_STAGES if all(getattr(part, n) is None for part in parts)]
        return tuple(stage for stage in STAGES if stage not in without)

    def of_source(self, name: str) -> Self:
        """The recipe of one source of the mixture, which `source` and its own sections have."""
        settings = self.model_dump(exclude={"sources"})
        settings["train"]["masked_loss"] = None  # another source may have the masks
        settings["train"]["reference_dropout_rate"] = 0.0  # or the references
        own = own_sections(self.sources, name)
        return type(self).model_validate(merged(settings, own))

    @property
    def by_source(self) -> dict[str, Self]:
        """Name -> recipe of each source of the mixture; without one, "" -> this recipe."""
        return {name: self.of_source(name) for name in self.sources} or {"": self}

    @property
    def largest_resolution(self) -> int:
        """Of all sources, in pixels."""
        return max(part.encode.resolution for part in self.by_source.values())

    @property
    def learnt(self) -> list[str]:
        """The sources without regularisation, whose pictures an evaluation compares with."""
        return [name for name, source in self.sources.items() if source.regularisation is None]

    @property
    def has_masks(self) -> bool:
        """Whether pictures of a source have masks."""
        return any(getattr(part.source, "mask", None) for part in self.by_source.values())

    @property
    def has_references(self) -> bool:
        """Whether pictures of a source have references."""
        return any(references_of(part.source) for part in self.by_source.values())

    @property
    def mixture(self) -> dict[str, dict[str, Any]]:
        """Name -> how much each source of the mixture counts, as TrainJob.mixture."""
        return {
            name: source.model_dump(mode="json", exclude={*SECTIONS, "like"})
            for name, source in self.sources.items()
        }

    @property
    def has_prior(self) -> bool:
        """Whether a source of the mixture has the frozen base's prediction as its target."""
        return any(source.regularisation == "prior" for source in self.sources.values())

    def faults(self) -> Iterator[str]:
        yield from self._faults_of_prior()
        if self.train.method == "controlnet":
            yield from self._faults_of_control()
        if self.sources:
            yield from self._faults_of_sources()
        else:
            if self.source is None:
                yield "source: missing; set it, or sources for a mixture"
            yield from self._faults_of_extra_inputs()
            yield from self._faults_of_selection()
        yield from self._faults_of_references()
        if self.train.masked_loss is not None and not self.has_masks:
            yield "train.masked_loss requires masks: set source.mask"
        runtime = f"runtime: {self.runtime}"
        if self.runtime != "mindspore" and self.train.mindspore != MindSpore():
            yield f"train.mindspore requires runtime mindspore, not {self.runtime}"
        if self.runtime != "mindspore" and self.train.mixed_precision == "fp16":
            yield "train.mixed_precision: fp16 requires runtime mindspore: set bf16"
        if self.train.hpu != Hpu() and not self.train.device.startswith("hpu"):
            yield f"train.hpu requires train.device: hpu, not {self.train.device}"
        if self.encode.reading["emphasis"] == "weights" and (
            self.encode.text == "token_ids" or self.train.train_text_encoder
        ):
            yield (
                "encode.captions.emphasis: weights multiplies stored embeddings: set encode.text: "
                "embeddings and train.train_text_encoder: false, or emphasis: text"
            )
        if self.runtime != "torch":
            kernels = ("allow_tf32", "compile", "attention", "cuda_graphs", "deterministic")
            self.train.refuse_changed((*kernels, "stream_blocks", "memory"), runtime)
            self.train.lora.refuse_changed(("base_precision",), runtime)
            self.evaluate.refuse_changed(("offload",), runtime)
            self.encode.refuse_changed(("offload", "text_precision"), runtime)
        if self.encode.device.startswith(("hpu", "npu")):
            self.encode.refuse_changed(("offload",), f"device: {self.encode.device}")
        if self.runtime == "mindspore":
            self.train.lora.refuse_changed(("assistant",), runtime)
        if self.evaluate.device.startswith(("hpu", "npu")):
            self.evaluate.refuse_changed(("offload",), f"device: {self.evaluate.device}")
        describers = self.describe.describers.values() if self.describe else ()
        is_compared = self.caption and self.caption.checks.min_likeness is not None
        if is_compared and all(describer.kind != "clip" for describer in describers):
            yield (
                "caption.checks.min_likeness requires embeddings of pictures: add a describer of "
                "kind clip to describe.describers"
            )
        if len(self._clusters) > 1:
            names = ", ".join(self._clusters)
            yield f"{names}: a training has one cluster: set the others to null"
        if self.ssh is not None and len(self.ssh.hosts) != self.train.hosts:
            yield f"train.hosts: ssh.hosts names {len(self.ssh.hosts)} machines: set as many"
        for stage in ("describe", "caption", "encode", "evaluate"):
            hosts = self.hosts_of(stage) or 0
            if self.ssh is not None and hosts > len(self.ssh.hosts):
                yield f"{stage}.hosts: ssh.hosts names {len(self.ssh.hosts)} machines: lower it"
        if self.tpu is not None:
            yield from self._faults_of_slice(self.tpu)

    def _faults_of_slice(self, tpu: Tpu) -> Iterator[str]:
        """What a slice of the cloud cannot run."""
        if tpu.kind in SOFTWARE and self.train.hosts > 1:
            yield "train.hosts: the hosts of a slice are those of tpu.accelerator_type: set 1"
        if self.runtime not in ("jax", "xla"):
            yield f"tpu requires runtime jax or xla, not {self.runtime}"

    def _faults_of_prior(self) -> Iterator[str]:
        """Settings without a frozen base that could predict targets."""
        if not self.has_prior:
            return
        if self.train.init == "random":
            yield "regularisation: prior keeps what the base knows: set train.init to base"
        if self.train.method == "lora" and self.train.hpu.graphs:
            yield (
                "regularisation: prior switches adapters off, which a recorded HPU graph does not: "
                "set train.hpu.graphs to false"
            )

    def _faults_of_references(self) -> Iterator[str]:
        """What does not go with references."""
        if not self.has_references:
            if self.train.reference_dropout_rate:
                words = "requires references: set source.reference_columns"
                yield f"train.reference_dropout_rate {words}"
            return
        if self.runtime not in ("torch", "jax"):
            yield f"source: references require runtime torch or jax, not {self.runtime}"
        if self.train.inpainting:
            yield "train.inpainting: an edit model has references instead: set one of the two"
        parts = self.by_source.values()
        if any(part.encode.flip for part in parts if references_of(part.source)):
            yield "encode.flip would mirror pictures and not their references: set false"

    def _faults_of_control(self) -> Iterator[str]:
        """A ControlNet without control pictures, or where it cannot be trained."""
        if not self.sources and getattr(self.source, "control", None) is None:
            yield "train.method: controlnet requires control pictures: set source.control"
        if self.runtime != "torch":
            yield f"train.method: controlnet requires runtime torch, not {self.runtime}"
        if self.has_prior:
            yield "regularisation: prior keeps what a denoiser knows, which controlnet freezes"
        if self.train.hpu.graphs:
            yield "train.method: controlnet requires train.hpu.graphs: false"
        if self.evaluate.hosts is not None:  # which lack the files of control pictures
            yield "train.method: controlnet requires evaluate.hosts: null"

    def _faults_of_sources(self) -> Iterator[str]:
        """What is wrong with the mixture, or with the recipe of one of its sources."""
        if self.source is not None:
            yield "source and sources: set one, a single source or a mixture"
        for name in self.sources:
            if not re.fullmatch(SOURCE_NAME, name):
                words = "a name has small letters, digits, _ and -, and is not level1 to level8"
                yield f"sources.{name}: {words}"
        yield from faults_between(self.sources)
        for name in self.sources:
            try:
                self.of_source(name)
            except ValidationError as error:
                from configs.explain_errors import explain  # which has all sections of a recipe

                yield explain(f"sources.{name}", error, own_sections(self.sources, name))

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


def warnings_without_effect(recipe: Recipe) -> list[str]:
    """A line for each setting without effect, or with next to none."""
    lines = [f"{name} has no effect with {why}" for name, why in recipe.without_effect()]
    if recipe.train.masked_loss is None and recipe.has_masks:
        lines.append("source.mask: its masks are not trained with: set train.masked_loss to {}")
    controlled = [getattr(part.source, "control", None) for part in recipe.by_source.values()]
    if any(controlled) and recipe.train.method != "controlnet":
        lines.append("source.control: its pictures are not used: set train.method to controlnet")
    if recipe.train.sample_every_n_steps and not recipe.evaluate.has_samples:
        lines.append(
            "train.sample_every_n_steps draws nothing, since all prompts have references or are "
            "held_out: add a prompt without to evaluate.prompts, or set it to 0"
        )
    rate = recipe.train.learning_rate
    if recipe.train.optimizer == "prodigy" and rate < 0.1:
        lines.append(f"train.learning_rate: {rate:g} is a factor with optimizer: prodigy: set 1")
    return lines


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
