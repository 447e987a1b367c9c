"""Plan training on a GPU without the GPU: peak memory, what would make it fit, time and cost.

Separate processes run the step of a recipe and its variants on fake tensors
(runtimes/torch/gpu_step_memory.py). The store caches their results by the content of the requests.

`recipe_memory.json` has plans of the shipped recipes for runtime torch, computed ahead. A plan
takes up to a minute; `kiln doctor` reads this file instead. `python -m bench.recipe_memory --write`
renews it.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any

from artifacts.records import digest_json
from artifacts.store import Store
from configs.errors import Refused
from configs.load_recipe import CHECKOUT
from configs.settings.evaluate import Evaluate
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base, replacement_config, trained_config
from runtimes.process.questions import GpuStepRequest, StepMemory, Unanswered, ask
from runtimes.sample.sampling_inputs import image_size
from runtimes.torch_models.gpu_specs import USABLE, Gpu, GpuSpec
from tasks.evaluate.metrics import sample_prompts
from tasks.plan.plan import Say, TrainingPlan, cache_key, checkpoint_bytes, load_or_compute
from tasks.progress import gib

#: Increment when the recorded step or the meaning of its bytes changes.
VERSION = 2
PROCESSES = 2  # planners at once
LARGEST = 2**20  # micro-batch of a search
#: Train settings that affect the recorded step.
STEP_SETTINGS = Train.names_with("plan", "gpu")
#: Packages that record the step.
STEP_PACKAGES = ("torch", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Peaks:
    """Peak memory in bytes of what a run does on the GPU."""

    parts: dict[str, int]  # of training
    sampling: int  # of the evaluation, in a process of its own
    samples: int  # pictures drawn during training; 0: none are drawn
    checkpoint: int
    host: int  # of the host's memory, for offloaded weights of the evaluation

    @property
    def training(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> int:
        return max(self.training, self.sampling, self.samples, self.checkpoint)


class Planner:
    """Computes and keeps the memory of the steps that variants of a recipe need."""

    def __init__(self, recipe: Recipe, base: Base, say: Say) -> None:
        self.recipe = recipe
        self._base = base
        self._say = say
        self._found: dict[str, StepMemory] = {}
        self.seconds = 0.0

    def compute(self, requests: Sequence[GpuStepRequest]) -> None:
        """Compute several requests at once."""
        lacking = {repr(request): request for request in requests}
        lacking = {name: r for name, r in lacking.items() if name not in self._found}
        with ThreadPoolExecutor(PROCESSES) as pool:
            self._found |= zip(lacking, pool.map(self._load, lacking.values()), strict=True)

    def _load(self, request: GpuStepRequest) -> StepMemory:
        def compute() -> dict[str, Any]:
            dtype = request.sampling_dtype
            what = "a training step" if dtype is None else f"drawing pictures in {dtype}"
            self._say(f"computing the memory of {what}: seconds to a minute")
            answer = ask("-m", "runtimes.torch.gpu_step_memory", json.dumps(asdict(request)))
            self.seconds += answer["seconds"]
            return answer

        versions = {name: version(name) for name in STEP_PACKAGES}
        key = cache_key(VERSION, request, versions)
        return StepMemory.from_json(load_or_compute(Store(self.recipe.store), key, compute))

    def requests(self) -> list[GpuStepRequest]:
        """All that `peaks` of the recipe needs."""
        train = self.recipe.train
        sampling = [self._sampling(self.recipe.evaluate.dtype)]
        if train.sample_every_n_steps:
            sampling.append(self._sampling(train.compute_dtype))
        return [self.training_request(train), *sampling]

    def permits(self, train: Train) -> bool:
        """Whether the base can be trained so: adapters add no inputs to a denoiser."""
        try:
            trained_config(self._base.denoiser, train, replacement_config(train))
        except Refused:
            return False
        return True

    def training_request(self, train: Train) -> GpuStepRequest:
        optimizer = "adamw" if train.optimizer == "adamw_8bit" else train.optimizer
        settings = train.model_dump(mode="json", include=STEP_SETTINGS) | {"optimizer": optimizer}
        if train.gradient_checkpointing == "selective" and train.compile != "none":
            settings["gradient_checkpointing"] = "none"  # as compile_denoiser does
        return self._request(settings)

    def _sampling(self, dtype: str) -> GpuStepRequest:
        names = {"inpainting", "aesthetic_score", "init", "denoiser_config"}
        settings = self.recipe.train.model_dump(mode="json", include=names)
        base = self._base
        scale = base.encoders["vae_scale_factor"]
        asked = self.recipe.evaluate.model_dump(include={"height", "width"})
        size = image_size(asked, base.family, base.denoiser, scale)
        return replace(self._request(settings), sampling_dtype=dtype, drawn_size=size)

    def _request(self, train: dict[str, Any]) -> GpuStepRequest:
        return GpuStepRequest(
            **self._base.job_fields,
            train=train,
            resolution=self.recipe.encode.resolution,
            denoiser_config=replacement_config(self.recipe.train),
            text_dtype=self.recipe.encode.text_dtype,
        )

    def step(self, train: Train) -> StepMemory:
        return self._get(self.training_request(train))

    def _get(self, request: GpuStepRequest) -> StepMemory:
        self.compute([request])
        return self._found[repr(request)]

    def peaks(self, train: Train, evaluate: Evaluate) -> Peaks:
        """Peak memory of a variant of the recipe."""
        step = self.step(train)
        average = 0 if train.ema_decay is None else step.ema
        moments = step.optimizer_8bit if train.optimizer == "adamw_8bit" else step.optimizer
        state = {"weights": step.weights, "optimizer": moments, "ema": average}
        samples, several = micro_batch(train)
        held = sum(state.values())
        drawn = 0
        if train.sample_every_n_steps:
            batch = min(evaluate.batch_size, len(sample_prompts(evaluate)))
            within = self._get(self._sampling(train.compute_dtype)).peak(batch)
            # Autocast keeps a copy of each trained weight until all pictures are drawn.
            casts = 0 if train.compute_dtype == "float32" else 2 * step.parameters
            drawn = held + casts + step.encoders + sum(within.values())
        drawing = self._get(self._sampling(evaluate.dtype))
        weights = drawing.offloaded if evaluate.offload else drawing.weights
        return Peaks(
            parts=state | step.peak(samples, accumulating=several),
            sampling=weights + sum(drawing.peak(evaluate.batch_size).values()),
            samples=drawn,
            checkpoint=held + step.largest,  # one array at a time is copied to the host
            host=drawing.weights if evaluate.offload else 0,
        )

    def largest_micro_batch(
        self,
        train: Train,
        evaluate: Evaluate,
        usable: int,
        most: int = 4096,
        *,
        enlarges: bool = False,
    ) -> int | None:
        """The largest micro-batch that fits, among those that the global batch size permits.

        Args:
            enlarges: whether the global batch size may grow to one micro-batch per GPU.
        """
        share = train.global_batch_size // train.processes

        def exceeds(size: int) -> bool:
            batch = max(train.global_batch_size, size * train.processes)
            sizes = {"micro_batch_size": size, "global_batch_size": batch}
            return self.peaks(with_train(train, sizes), evaluate).largest > usable

        if enlarges and not exceeds(share):
            return bisect(range(share, LARGEST + 1), False, key=exceeds) + share - 1
        sizes = (size for size in range(min(share, most), 0, -1) if not exceeds(size))
        return next(sizes, None)


def with_train(train: Train, settings: dict[str, Any]) -> Train:
    """The settings with others; names of nested settings are dotted."""
    for name, value in settings.items():
        section, _, nested = name.rpartition(".")
        if section:
            value = getattr(train, section).model_copy(update={nested: value})
        train = train.model_copy(update={section or name: value})
    return train


def micro_batch(settings: Train) -> tuple[int, bool]:
    """Samples per micro-batch and GPU, and whether gradients exist before the last micro-batch.

    DistributedDataParallel keeps its buckets of gradients, too.
    """
    size = settings.micro_batch(settings.processes)
    share = settings.global_batch_size // settings.processes
    return size, size < share or settings.processes > 1


def executed_flops(step: StepMemory) -> float:
    """FLOPs per image, with recomputation."""
    return step.flops_per_image + step.recomputed_flops_per_image


Change = tuple[dict[str, Any], str]  # train settings, and what they cost besides FLOPs
#: Changes that save memory, cheapest first.
CHANGES: tuple[Change, ...] = (
    ({"gradient_checkpointing": "blocks", "cuda_graphs": False}, "activations are computed twice"),
    ({"lora.base_precision": "int8"}, "8-bit weights of the frozen base"),
    ({"optimizer": "adamw_8bit"}, "8-bit moments; needs bitsandbytes"),
    ({"ema_decay": None, "ema_every_n_steps": 1}, "publishes the last weights, not their average"),
    ({"method": "lora"}, "trains adapters, not all weights; needs a higher learning_rate"),
)


@dataclass(frozen=True)
class Advice:
    """Changed settings that make a recipe fit."""

    settings: dict[str, Any]  # dotted setting -> value
    peak: int  # bytes
    flops_ratio: float  # executed FLOPs per picture, relative to the recipe's
    notes: tuple[str, ...]  # what the changes cost besides FLOPs

    @property
    def options(self) -> str:
        """The settings as options of `kiln run`."""
        values = {n: v if isinstance(v, str) else json.dumps(v) for n, v in self.settings.items()}
        return " ".join(f"-o {name}={value}" for name, value in values.items())


def advise(planner: Planner, usable: int) -> list[Advice]:
    """Minimal sets of changes that make the recipe fit, those with the fewest FLOPs first.

    Adapters are advised only if nothing else fits.

    Args:
        usable: bytes for tensors.
    """
    recipe = planner.recipe
    train = recipe.train
    smaller, sampling = _smaller_sampling(planner, usable)
    changes = [change for change in CHANGES if _applies(change[0], recipe.runtime, train)]
    changes = [c for c in changes if planner.permits(with_train(train, c[0]))]
    cheap = [change for change in changes if "method" not in change[0]]
    before = executed_flops(planner.step(train))
    suggestions: list[Advice] = []
    fitting = _that_fit(planner, smaller, cheap, usable)
    for settings, notes in fitting or _that_fit(planner, smaller, changes, usable):
        variant = with_train(train, settings)
        ratio = executed_flops(planner.step(variant)) / before
        changed = {n: v for n, v in settings.items() if attrgetter(n)(train) != v}
        dotted = {f"train.{name}": value for name, value in changed.items()} | sampling
        peaks = planner.peaks(variant, smaller)
        if "evaluate.offload" in sampling:
            notes += (f"{gib(peaks.host, 1)} of the host's memory for the evaluation",)
        suggestions.append(Advice(dotted, peaks.largest, ratio, notes))
    return sorted(suggestions, key=lambda advice: (advice.flops_ratio, len(advice.settings)))


def _that_fit(
    planner: Planner, evaluate: Evaluate, changes: Sequence[Change], usable: int
) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Minimal sets of changes that fit, with the largest micro-batch for each, and their notes.

    A set with more changes must permit a larger micro-batch than each of its subsets.
    """
    train = planner.recipe.train
    current, _ = micro_batch(train)
    sets = [_merged(some) for n in range(len(changes) + 1) for some in combinations(changes, n)]
    if train.method != "lora":
        sets = [s for s in sets if "method" in s[0] or "lora.base_precision" not in s[0]]
    variants = [with_train(train, settings) for settings, _ in sets]
    planner.compute([planner.training_request(variant) for variant in variants])
    kept: dict[frozenset[str], int] = {}
    fitting = []
    for (settings, notes), variant in zip(sets, variants, strict=True):
        names = frozenset(settings)
        size = planner.largest_micro_batch(variant, evaluate, usable, current)
        if size is None or any(names >= k and size <= other for k, other in kept.items()):
            continue
        kept[names] = size
        smaller = {} if size == current else {"micro_batch_size": size}
        fitting.append((settings | smaller, notes))
    return fitting


def _merged(changes: Sequence[Change]) -> tuple[dict[str, Any], tuple[str, ...]]:
    settings = {name: value for change, _ in changes for name, value in change.items()}
    return settings, tuple(note for _, note in changes)


def _smaller_sampling(planner: Planner, usable: int) -> tuple[Evaluate, dict[str, Any]]:
    """The settings with the largest batch_size whose sampling fits, and what they change.

    Layers are offloaded only if no batch fits without.
    """
    recipe = planner.recipe
    evaluate = recipe.evaluate
    for offload in sorted({evaluate.offload, evaluate.offload or recipe.runtime == "torch"}):
        for size in range(evaluate.batch_size, 0, -1):
            changed = {"batch_size": size, "offload": offload}
            variant = evaluate.model_copy(update=changed)
            if planner.peaks(recipe.train, variant).sampling <= usable:
                others = {n: v for n, v in changed.items() if getattr(evaluate, n) != v}
                return variant, {f"evaluate.{name}": value for name, value in others.items()}
    return evaluate, {}


def _applies(change: dict[str, Any], runtime: str, settings: Train) -> bool:
    """Whether a change changes a setting, and is permitted."""
    if "lora.base_precision" in change:
        is_possible = runtime == "torch" and settings.fsdp == 1 and not settings.lora.dora
        return is_possible and settings.init == "base" and settings.lora.base_precision is None
    if "optimizer" in change:
        is_possible = runtime == "torch" and settings.fsdp == 1
        return is_possible and settings.optimizer == "adamw"
    if "method" in change:
        return settings.method == "full" and settings.init == "base"
    return any(getattr(settings, name) != value for name, value in change.items())


#: Assumed share of a GPU's peak FLOP/s, about that of SD2 without torch.compile on an H100.
TYPICAL_MFU = 0.2
#: Compiled blocks need at least this share of the planned activations (SD2 on an H100: 0.77).
COMPILED = 0.5
#: A model is small if the memory is this many times its stored weights: a 16-bit weight has up to
#: 20 bytes of state, and the activations of large batches are up to ten times the state.
SMALL = 100
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class GpuPlan(TrainingPlan):
    """Memory, time and cost of a recipe's training on a GPU, or on several by data parallelism."""

    recipe: Recipe
    gpu: Gpu
    step: StepMemory
    peaks: Peaks
    info: Mapping[str, Any]  # of the encoders, `Base.encoders`
    seconds: float  # duration of the plan, without cached parts
    largest_micro_batch: int | None = None  # the largest that fits; None if none does
    advice: tuple[Advice, ...] = ()  # the first costs least; empty if the recipe fits

    @property
    def fits(self) -> bool:
        return self.peaks.largest <= self.gpu.usable

    @property
    def least_training(self) -> int:
        """Bytes that training needs at least, if compiled blocks save most activations."""
        parts = dict(self.peaks.parts)
        if self.recipe.train.compile != "none":
            parts |= {n: int(parts[n] * COMPILED) for n in ("activations", "temporaries")}
        return sum(parts.values())

    @property
    def chips(self) -> int:
        return self.recipe.train.processes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint on disk."""
        return checkpoint_bytes(self.recipe.train, self.step.parameters, self.step.optimizer)

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step at TYPICAL_MFU; None if the GPU's peak is unknown."""
        spec = self.gpu.spec
        peak = None if spec is None else spec.peak(self.recipe.train.product_dtype)
        if peak is None:
            return None
        images = self.recipe.train.global_batch_size / self.chips
        return images * executed_flops(self.step) / (peak * TYPICAL_MFU)

    @property
    def assumption(self) -> str:
        """The assumption behind `step_seconds`."""
        return f"at {TYPICAL_MFU:.0%} of the GPU's peak, batches always ready"

    def refusal(self) -> str:
        """The error of a recipe that does not fit."""
        text = (
            f"{self.recipe.name} needs {gib(self.peaks.largest, 1)}, {self.gpu.name} has "
            f"{gib(self.gpu.usable, 1)} for tensors: "
        )
        if not self.advice:
            trains = self.peaks.training <= self.gpu.usable
            smaller = "evaluate.height and evaluate.width" if trains else "encode.resolution"
            return text + f"no settings known here make it fit; lower {smaller}"
        return text + f"it fits with {self.advice[0].options}"


def plan_for(
    recipe: Recipe, gpu: Gpu, base: Base, say: Say = log.info, *, search: bool = False
) -> GpuPlan:
    """Plan a recipe's training on a GPU, by runtime torch.

    Args:
        base: opened; its configs are enough.
        search: search for the largest micro-batch beyond the recipe's global batch size.

    Raises:
        Refused: the plan does not support the recipe.
        Unanswered: the planner failed.
    """
    if recipe.train.fsdp != 1 and recipe.train.processes > 1:
        raise Refused("train.fsdp: a GPU plan knows unsharded weights only: set 1")
    planner = Planner(recipe, base, say)
    planner.compute(planner.requests())
    about = (recipe.train, recipe.evaluate)
    peaks = planner.peaks(*about)
    step = planner.step(recipe.train)
    plan = GpuPlan(recipe, gpu, step, peaks, base.encoders, planner.seconds)
    largest = planner.largest_micro_batch(*about, gpu.usable, enlarges=search)
    advice = () if plan.fits else tuple(advise(planner, gpu.usable))
    return replace(plan, largest_micro_batch=largest, advice=advice, seconds=planner.seconds)


def check_fits(
    recipe: Recipe, base: Base, memory: int, host: int | None, *, small: int = SMALL
) -> None:
    """Raise Refused for a recipe that cannot train or be evaluated on a GPU.

    A recipe that may fit is accepted, with a warning if the plan says that it does not. A model
    that is small beside the memory is not planned, since that costs seconds to a minute.

    Args:
        memory: memory of the GPU, in bytes, as its driver reports it.
        host: bytes of the host's memory; None: this host evaluates nothing.
        small: how many times the stored weights the memory of a GPU is for a small model.
    """
    weights = base.denoiser_folder.glob("*.safetensors")
    stored = sum(path.stat().st_size for path in weights)
    if 0 < small * stored < memory:
        return
    try:
        plan = plan_for(recipe, Gpu("this GPU", memory), base)
    except Unanswered as error:
        log.warning("the memory of training is unknown: %s", error)
        return
    if plan.least_training > memory:
        raise Refused(plan.refusal())
    if host is not None and plan.peaks.host > host:
        raise Refused(
            f"evaluate.offload keeps {gib(plan.peaks.host, 1)} of weights in the host's "
            f"memory, which has {gib(host, 1)}: set false, or use a larger host"
        )
    if not plan.fits:
        log.warning("training may run out of memory: %s", plan.refusal())


FILE = Path(__file__).with_name("recipe_memory.json")
#: Settings beside STEP_SETTINGS that a plan reads.
TRAIN_SETTINGS = STEP_SETTINGS | Train.names_with("plan", "run")


@dataclass(frozen=True)
class RecipeMemory:
    """A recipe's plan: peak bytes on a GPU, bytes of a checkpoint, and work."""

    recipe: str
    settings: str  # sha256 of the settings that the plan reads
    training: int
    samples: int  # 0: training draws none
    sampling: int  # of the evaluation
    checkpoint: int
    parameters: int  # trained
    checkpoint_bytes: int  # on disk
    flops_per_image: float  # with recomputation
    images: int | None  # of all steps; None: known only with the number of pictures
    product_dtype: str  # of the recipe, whose train.allow_tf32 changes nothing else here

    @property
    def largest(self) -> int:
        """Bytes of the largest peak."""
        return max(self.training, self.samples, self.sampling, self.checkpoint)

    def fits(self, memory: int) -> bool:
        """Whether it fits a GPU with `memory` bytes."""
        return self.largest <= USABLE * memory

    def hours(self, gpu: GpuSpec) -> float | None:
        """Hours of training at TYPICAL_MFU; None if unknown."""
        peak = gpu.peak(self.product_dtype)
        if peak is None or self.images is None:
            return None
        return self.images * self.flops_per_image / (peak * TYPICAL_MFU) / 3600


def digest_settings(recipe: Recipe) -> str:
    """sha256 of the settings that a plan reads."""
    models = (recipe.model.path, recipe.model.vae)
    evaluate = recipe.evaluate
    return digest_json(
        {
            "train": recipe.train.model_dump(mode="json", include=TRAIN_SETTINGS),
            "resolution": recipe.encode.resolution,
            "evaluate": [
                *(evaluate.dtype, evaluate.batch_size, len(sample_prompts(recipe.evaluate))),
                *(evaluate.height, evaluate.width),
            ],
            "models": [None if path is None else _without_checkout(path) for path in models],
            **({"offload": True} if evaluate.offload else {}),
            **({} if recipe.encode.text_dtype is None else {"text": recipe.encode.text_dtype}),
        }
    )


def _without_checkout(path: str) -> str:
    """A model's path; that of a shipped folder is equal in all checkouts."""
    inside = Path(path).is_relative_to(CHECKOUT)
    return Path(path).relative_to(CHECKOUT).as_posix() if inside else path


@cache
def read_table() -> Mapping[str, RecipeMemory]:
    """Digest of the settings -> plan."""
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {row["settings"]: RecipeMemory(**row) for row in rows}


def memory_of(recipe: Recipe) -> RecipeMemory | None:
    """The plan of a recipe with the settings of a shipped recipe; None if there is none."""
    shipped = None if recipe.runtime != "torch" else read_table().get(digest_settings(recipe))
    return shipped and replace(shipped, product_dtype=recipe.train.product_dtype)


def shipped_plans() -> list[RecipeMemory]:
    """The plans of the shipped recipes, the smallest first."""
    return sorted(read_table().values(), key=lambda plan: plan.largest)
