"""The settings that make a recipe fit a GPU, the fastest first.

A smaller batch comes before a base of fewer bits, and that before streamed blocks: each costs more
time (gpu_time.py). Blocks are streamed only where no frozen base stays on the GPU at that speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from operator import attrgetter
from typing import Any

from configs.settings.evaluate import Evaluate
from configs.settings.train import Train
from runtimes.torch_models.gpu_specs import Gpu, GpuSpec, parse_gpu
from tasks.plan.gpu_memory import Planner, micro_batch, with_settings
from tasks.plan.gpu_time import executed_flops, step_seconds
from tasks.progress import gib

Change = tuple[dict[str, Any], str]  # train settings, and what they cost besides FLOPs
Merged = tuple[dict[str, Any], tuple[str, ...]]  # several changes
RECOMPUTED = {"gradient_checkpointing": "blocks", "cuda_graphs": False}
PRECISIONS = {"int8": "8-bit weights of the frozen base", "nf4": "4-bit weights of the frozen base"}
#: Changes that save memory, cheapest first.
CHANGES: tuple[Change, ...] = (
    (RECOMPUTED, "activations are computed twice"),
    ({"sample_every_n_steps": 0}, "draws no pictures during training"),
    *(({"lora.base_precision": name}, words) for name, words in PRECISIONS.items()),
    ({"fused_backward": True, "max_grad_norm": None}, "gradients are freed at once, not clipped"),
    ({"optimizer": "adamw_8bit"}, "8-bit moments; needs bitsandbytes"),
    ({"ema_decay": None, "ema_every_n_steps": 1}, "publishes the last weights, not their average"),
    ({"method": "lora"}, "trains adapters, not all weights; needs a higher learning_rate"),
)
LEAST_STREAMED = 3  # blocks; two buffers stay on the device
#: The GPU whose rates order the changes, if those of the asked one are unknown.
TYPICAL = "RTX 4070"


@dataclass(frozen=True)
class Advice:
    """Changed settings that make a recipe fit."""

    settings: dict[str, Any]  # dotted setting -> value
    peak: int  # bytes
    host: int  # bytes of the host's memory
    flops_ratio: float  # executed FLOPs per picture, relative to the recipe's
    time_ratio: float  # duration of a step, relative to the recipe's if it fitted
    notes: tuple[str, ...]  # what the changes cost besides FLOPs

    @property
    def options(self) -> str:
        """The settings as options of `kiln run`."""
        values = {n: v if isinstance(v, str) else json.dumps(v) for n, v in self.settings.items()}
        return " ".join(f"-o {name}={value}" for name, value in values.items())


def advise(planner: Planner, gpu: Gpu, changes: Sequence[Change] = CHANGES) -> list[Advice]:
    """Minimal sets of changes that make the recipe fit, the fastest first.

    Adapters are advised only if nothing else fits.

    Args:
        changes: those that may be made.
    """
    recipe = planner.recipe
    train = recipe.train
    sections = _smaller_encoding(planner, gpu.usable)
    planner.recipe = with_settings(recipe, sections)  # all peaks below are those with it
    smaller, sampling = _smaller_sampling(planner, gpu.usable)
    sections |= sampling
    changes = [change for change in changes if _applies(change[0], recipe.runtime, train)]
    changes = [c for c in changes if planner.permits(with_settings(train, c[0]))]
    cheap = [change for change in changes if "method" not in change[0]]
    fitting = _that_fit(planner, smaller, cheap, gpu.usable)
    fitting = fitting or _that_fit(planner, smaller, changes, gpu.usable)
    spec = _ordering(gpu, train)
    before = step_seconds(train, planner.step(train), spec)
    assert before is not None
    suggestions: list[Advice] = []
    for settings, notes in fitting:
        variant = with_settings(train, settings)
        step = planner.step(variant)
        changed = {n: v for n, v in settings.items() if attrgetter(n)(train) != v}
        peaks = planner.peaks(variant, smaller)
        suggestions.append(
            Advice(
                {f"train.{name}": value for name, value in changed.items()} | sections,
                peaks.largest,
                peaks.host,
                executed_flops(step) / executed_flops(planner.step(train)),
                (step_seconds(variant, step, spec) or 0) / before,
                notes + ((f"{gib(peaks.host, 1)} of the host's memory",) if peaks.host else ()),
            )
        )
    return sorted(suggestions, key=lambda a: (a.time_ratio, len(a.settings)))


def _ordering(gpu: Gpu, train: Train) -> GpuSpec:
    """The GPU whose rates order the changes."""
    is_known = gpu.spec is not None and gpu.spec.peak(train.product_dtype) is not None
    spec = gpu.spec if is_known else parse_gpu(TYPICAL).spec
    assert spec is not None
    return spec


def _that_fit(
    planner: Planner, evaluate: Evaluate, changes: Sequence[Change], usable: int
) -> list[Merged]:
    """Minimal sets of changes that fit, with the largest micro-batch for each, and their notes.

    A set with more changes must permit a larger micro-batch than each of its subsets.
    """
    train = planner.recipe.train
    current, _ = micro_batch(train)
    variants = [(with_settings(train, s), s, notes) for s, notes in _sets(train, changes)]
    planner.compute([planner.training_request(variant) for variant, *_ in variants])
    kept: dict[frozenset[tuple[str, Any]], int] = {}
    fitting: list[Merged] = []
    for variant, settings, notes in variants:
        changed = _costs(settings)
        size = planner.largest_micro_batch(variant, evaluate, usable, current)
        is_one = size == current or not variant.fused_backward  # which requires one micro-batch
        if (
            size is None
            or not is_one
            or any(changed >= k and size <= other for k, other in kept.items())
        ):
            continue
        kept[changed] = size
        smaller = {} if size == current else {"micro_batch_size": size}
        fitting.append((settings | smaller, notes))
    if all(settings.get("lora.base_precision") == "nf4" for settings, _ in fitting):
        fitting += _streamed(planner, evaluate, changes, usable)
    return fitting


def _costs(settings: dict[str, Any]) -> frozenset[tuple[str, Any]]:
    """What a set of changes costs: a 4-bit base includes the cost of an 8-bit one.

    So a 4-bit base that fits does not hide the faster 8-bit one with another change.
    """
    precision = settings.get("lora.base_precision")
    below = list(PRECISIONS)[: list(PRECISIONS).index(precision)] if precision else []
    return frozenset([*settings.items(), *(("lora.base_precision", name) for name in below)])


def _sets(train: Train, changes: Sequence[Change]) -> Iterator[Merged]:
    """All sets of changes that do not contradict each other or another setting."""
    for number in range(len(changes) + 1):
        for some in combinations(changes, number):
            settings = {name: value for change, _ in some for name, value in change.items()}
            variant = with_settings(train, settings)
            has_both = sum("lora.base_precision" in change for change, _ in some) > 1
            is_idle = "lora.base_precision" in settings and variant.method != "lora"
            if not has_both and not is_idle and not any(variant.faults()):
                yield settings, tuple(note for _, note in some)


def _streamed(
    planner: Planner, evaluate: Evaluate, changes: Sequence[Change], usable: int
) -> list[Merged]:
    """The fewest streamed blocks that fit, of the most precise base that does not fit resident.

    The smallest micro-batch leaves the most blocks on the GPU.
    """
    train = planner.recipe.train
    precisions = [c for c in changes if "lora.base_precision" in c[0]]
    if train.lora.base_precision is not None:
        precisions = [({}, "")]
    without_pictures = [c for c in changes if "sample_every_n_steps" in c[0]]
    for precision in precisions:
        for some in ([precision], [precision, *without_pictures]):
            settings: dict[str, Any] = RECOMPUTED | {"micro_batch_size": 1}
            for change, _ in some:
                settings |= change
            count = fewest_blocks(planner, evaluate, with_settings(train, settings), usable)
            if count:
                notes = (*(note for _, note in some if note), "frozen blocks are copied over PCIe")
                return [(settings | {"stream_blocks": count}, notes)]
    return []


def fewest_blocks(planner: Planner, evaluate: Evaluate, train: Train, usable: int) -> int | None:
    """The smallest `stream_blocks` with which all fits, or 0; None if there is none."""

    def fits(count: int) -> bool:
        variant = with_settings(train, {"stream_blocks": count})
        return planner.peaks(variant, evaluate).largest <= usable

    if fits(0):
        return 0
    if any(with_settings(train, {"stream_blocks": LEAST_STREAMED}).faults()):
        return None
    resident = planner.step(with_settings(train, {"stream_blocks": 0}))
    counts = range(LEAST_STREAMED, len(resident.streaming))
    return next(filter(fits, counts), None)


def _smaller_sampling(planner: Planner, usable: int) -> tuple[Evaluate, dict[str, Any]]:
    """The settings with the largest batch_size whose sampling fits, and what they change.

    Layers are offloaded only if no batch fits without.
    """
    recipe = planner.recipe
    evaluate = recipe.evaluate
    offloads = recipe.runtime == "torch" and _may_be_cuda(evaluate.device)
    for offload in sorted({evaluate.offload, evaluate.offload or offloads}):
        for size in range(evaluate.batch_size, 0, -1):
            changed = {"batch_size": size, "offload": offload}
            variant = evaluate.model_copy(update=changed)
            if planner.peaks(recipe.train, variant).sampling <= usable:
                others = {n: v for n, v in changed.items() if getattr(evaluate, n) != v}
                return variant, {f"evaluate.{name}": value for name, value in others.items()}
    return evaluate, {}


def _smaller_encoding(planner: Planner, usable: int) -> dict[str, Any]:
    """What changes in `encode` so that it fits: offloading, a smaller batch, then fewer bits."""
    encode = planner.recipe.encode
    may_offload = planner.recipe.runtime == "torch" and _may_be_cuda(encode.device)
    offloads = (encode.offload, True) if may_offload else (encode.offload,)
    sizes = [encode.batch_size >> n for n in range(encode.batch_size.bit_length())]
    precisions = dict.fromkeys((encode.text_precision, "int8", "nf4"))
    for precision, size, offload in product(precisions, sizes, dict.fromkeys(offloads)):
        changed = {"text_precision": precision, "batch_size": size, "offload": offload}
        variant = encode.model_copy(update=changed)
        if planner.peaks(planner.recipe.train, planner.recipe.evaluate, variant).encoding <= usable:
            others = {n: v for n, v in changed.items() if getattr(encode, n) != v}
            return {f"encode.{name}": value for name, value in others.items()}
    return {}


def _may_be_cuda(device: str) -> bool:
    """Whether a setting's device permits what only CUDA devices have, such as offloaded layers."""
    return device.partition(":")[0] in ("auto", "cpu", "cuda")


def _applies(change: dict[str, Any], runtime: str, settings: Train) -> bool:
    """Whether a change changes a setting, and is permitted."""
    if "lora.base_precision" in change:
        is_possible = runtime == "torch" and settings.fsdp == 1 and not settings.lora.dora
        return is_possible and settings.init == "base" and settings.lora.base_precision is None
    if "sample_every_n_steps" in change:
        by_samples = settings.best_checkpoint is not None and settings.best_checkpoint.by_samples
        return settings.sample_every_n_steps > 0 and not by_samples
    if "optimizer" in change:
        is_possible = runtime == "torch" and settings.fsdp == 1 and _may_be_cuda(settings.device)
        return is_possible and settings.optimizer == "adamw"
    if "fused_backward" in change:
        return runtime == "torch" and settings.method == "full" and not settings.fused_backward
    if "method" in change:
        return settings.method == "full" and settings.init == "base"
    return any(getattr(settings, name) != value for name, value in change.items())
