"""Gaudi: device `hpu` of runtime torch, with its fused AdamW.

habana_frameworks, Intel's bridge, is imported only if device hpu is selected. The bridge has two
modes. Eager mode executes each operator immediately, and torch.compile compiles subgraphs. Lazy
mode records operators until `mark_step` and compiles the recorded graph once for its operators,
shapes and Python numbers. Numbers that change with each step (learning rate, weight decay, EMA
decay) are therefore sent as tensors.

AdamW is Habana's fused optimizer by PyTorch's rule, or PyTorch's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import import_module
from typing import Any

import torch

from configs.errors import Refused
from configs.settings.train import Train
from configs.settings.train_parts import Hpu
from runtimes.detect_hardware import hpu_bridge_version, missing_for_hpu
from runtimes.process.compile_cache import CompileCache
from runtimes.torch.kernels import DeviceHooks, not_loaded

LAZY = "PT_HPU_LAZY_MODE"
RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
MODULE = "HLS_MODULE_ID"  # number of the Gaudi that this process uses
BRIDGE = "habana_frameworks.torch"


def load(settings: Hpu | None = None, compiled: str | None = None) -> CompileCache:
    """Load Habana's bridge, which registers device hpu with PyTorch.

    The mode is that of the settings, else of PT_HPU_LAZY_MODE, else eager. PyTorch caches the list
    of accelerators at the first query, so the bridge must be loaded before any query.

    Args:
        settings: mode, recipe cache size and GPU migration.
        compiled: URL of the folder of compiled programs (recipes); None disables the cache.

    Raises:
        Refused: the bridge cannot be loaded, or this process has loaded it in the other mode.
    """
    settings = settings or Hpu()
    if hpu_bridge_version() is None:
        raise Refused(f"device hpu: {'; '.join(missing_for_hpu())}")
    compile_cache = _compile_cache(compiled)
    if BRIDGE not in sys.modules:  # the bridge reads these variables at import
        os.environ.setdefault(LAZY, "0")
        if settings.mode is not None:
            os.environ[LAZY] = str(int(settings.mode == "lazy"))
        if compile_cache.path is not None:
            size = settings.recipe_cache_megabytes
            os.environ.setdefault(RECIPES, f"{compile_cache.path},false,{size},false")
    try:
        import_module(f"{BRIDGE}.core")
        import_module(f"{BRIDGE}.hpu")
        if settings.gpu_migration:
            import_module(f"{BRIDGE}.gpu_migration")
    # AssertionError: the bridge was built for another version of PyTorch.
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        raise not_loaded("device hpu: habana_frameworks", error, missing_for_hpu()) from None
    if settings.mode not in (None, mode()):
        raise Refused(f"train.hpu.mode: {settings.mode}: this process is in mode {mode()}")
    return compile_cache


@cache
def _compile_cache(compiled: str | None) -> CompileCache:
    return CompileCache(compiled, f"hpu-{hpu_bridge_version()}")


def load_hccl() -> None:
    """Register backend hccl with torch.distributed."""
    import_module(f"{BRIDGE}.distributed.hccl")


def count() -> int:
    """Number of Gaudis that the bridge finds; older drivers do not list them in /sys."""
    try:
        load()
    except Refused:
        return 0
    return int(torch.get_device_module("hpu").device_count())


def mode() -> str:
    """Mode of the bridge in this process (`lazy` or `eager`), loaded or not."""
    return "lazy" if os.environ.get(LAZY) == "1" else "eager"


def check(settings: Train) -> None:
    """Raise Refused for train settings that Gaudi does not support."""
    if settings.fsdp != 1:
        raise Refused(f"train.fsdp: {settings.fsdp} is not for device hpu: set 1")
    lazy = (settings.hpu.mode or mode()) == "lazy"
    if settings.compile in ("blocks", "denoiser") and lazy:
        raise Refused("train.compile is for mode eager of device hpu: lazy makes graphs itself")
    if settings.hpu.graphs and not lazy:
        raise Refused("train.hpu.graphs needs mode lazy: set train.hpu.mode to lazy")
    share = -(-settings.global_batch_size // settings.world_size)
    if settings.hpu.graphs and (settings.micro_batch_size or share) < share:
        raise Refused(
            "train.hpu.graphs: a replayed graph overwrites the gradients of the previous "
            "micro-batch: leave train.micro_batch_size out"
        )


class Gaudi(DeviceHooks):
    """Hooks of a Gaudi; the bridge must be loaded."""

    compile_backend = "hpu_backend"
    pads_batches = True
    foreach = None

    def __init__(self, settings: Hpu, compile_cache: CompileCache) -> None:
        super().__init__(torch.device("hpu"))
        self._settings = settings
        self._compile_cache = compile_cache
        self._lazy = mode() == "lazy"
        self.prefetches_batches = not self._lazy  # operators are collected by one thread
        # A recorded graph must not read cached casts: autocast frees them after each step.
        self.autocast_caches_casts = not settings.graphs
        self._clippers: dict[float, Any] = {}
        self._core = import_module(f"{BRIDGE}.core")
        self._hpu = import_module(f"{BRIDGE}.hpu")

    def prepare_training(self, denoiser: Any) -> None:
        if self._settings.graphs:
            cacher = self._hpu.ModuleCacher(max_graphs=self._settings.max_graphs)
            cacher(model=denoiser, inplace=True, allow_unused_input=True)

    def prepare_sampling(self, denoiser: Any) -> None:
        if self._lazy:
            denoiser.register_forward_pre_hook(_copy_timestep, with_kwargs=True)
            self._hpu.wrap_in_hpu_graph(denoiser)
            denoiser.register_forward_hook(_copy_output)
        else:  # compiles `forward` only: each batch adds and removes forward hooks
            denoiser.forward = torch.compile(
                denoiser.forward, backend=self.compile_backend, dynamic=False
            )

    def clip_grad_norm(self, masters: Sequence[torch.Tensor], most: float) -> torch.Tensor | None:
        """Clip by FusedClipNorm in eager mode; in lazy mode it would only split the graph."""
        if self._lazy or not self._settings.fused:
            return None
        if most not in self._clippers:
            kind = fused_kernel("normalization", "FusedClipNorm")
            self._clippers[most] = None if kind is None else kind(masters, most)
        clipper = self._clippers[most]
        return None if clipper is None else clipper.clip_norm(masters).reshape(())

    def scalar(self, value: float) -> torch.Tensor:
        return to_device(value)

    def mark_step(self) -> None:
        if self._lazy:
            self._core.mark_step()

    def save_compiled(self) -> None:
        self._compile_cache.upload()

    def figures(self) -> dict[str, float]:
        """Number of compiled graphs, seconds of compilation, and bytes of device memory."""
        figures = {"device_memory_bytes": float(self._hpu.memory_stats()["Limit"])}
        if self._compilations is not None:
            stats = dict(self._compilations.stats())
            figures["graphs"] = float(stats["TotalNumber"])
            figures["compile_seconds"] = stats["TotalTime"] / 1e6
        return figures

    def compile_seconds(self) -> float:
        return self.figures().get("compile_seconds", 0.0)

    @cached_property
    def _compilations(self) -> Any:
        try:
            metrics = import_module(f"{BRIDGE}.hpu.metrics")
        except ImportError:
            return None
        return metrics.metric_global("graph_compilation")


def _copy_timestep(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Copy the timestep before each forward pass.

    Timesteps of a scheduler are views with different offsets. HPU graphs are keyed by the offset,
    so views would record one graph per timestep; copies share one graph.
    """
    if len(inputs) > 1:
        return (inputs[0], inputs[1].clone(), *inputs[2:]), named
    return inputs, {**named, "timestep": named["timestep"].clone()}


def _copy_output(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    """Copy the output after each forward pass.

    The next replay of the graph overwrites it, but multistep schedulers read earlier outputs.
    """
    if isinstance(output, tuple):
        return tuple(tensor.clone() for tensor in output)
    return type(output)(**{name: tensor.clone() for name, tensor in output.items()})


def to_device(value: float) -> torch.Tensor:
    """Copy a number asynchronously to a float32 scalar on the device."""
    return torch.tensor(value, dtype=torch.float32).to("hpu", non_blocking=True)


def fused_kernel(package: str, name: str) -> Any:
    """A fused kernel of hpex, or None if this Gaudi software version lacks it."""
    try:
        return getattr(import_module(f"{BRIDGE}.hpex.{package}"), name, None)
    except ImportError:
        return None


def counts_steps_on_host(settings: Train) -> bool:
    """Whether the optimizer from `adamw` counts steps in Python, not on the device."""
    return settings.hpu.fused and fused_kernel("optimizers", "FusedAdamW") is not None


def adamw(groups: list[dict[str, Any]], settings: Train) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) for weights on a Gaudi.

    Habana's FusedAdamW is used if it is available and `train.hpu.fused` is on, else PyTorch's AdamW
    with its scalars on the device. In lazy mode a step of either optimizer is a separate graph.

    Args:
        groups: parameter groups of torch.optim, with `rate`, the group's learning rate factor.
        settings: betas, epsilon, weight decay and `hpu`.
    """
    like: dict[str, Any] = {"betas": settings.adam_betas, "eps": settings.adam_epsilon}
    decay = settings.weight_decay
    if counts_steps_on_host(settings):
        kind = _as_pytorch(fused_kernel("optimizers", "FusedAdamW"))
        return kind(groups, decay=decay, weight_decay=0.0, **like)
    rate = torch.tensor(settings.learning_rate, device="hpu")
    return _OnDevice(groups, rate, weight_decay=decay, foreach=True, capturable=True, **like)


class _OnDevice(torch.optim.AdamW):
    """torch.optim.AdamW with learning rate and step count on the device."""

    def step(self, closure: Any = None) -> None:
        if mode() == "lazy":
            import_module(f"{BRIDGE}.core").mark_step()
        for group in self.param_groups:
            group["lr"] = to_device(float(group["lr"]))
        super().step(closure)


def _as_pytorch(fused: Any) -> Any:
    """A subclass of FusedAdamW that computes PyTorch's update and does not recompile each step.

    * FusedAdamW's weight decay is a Python number, which changes with the learning rate and would
      recompile the lazy graph. Weights are decayed before the fused step instead.
    * FusedAdamW does not apply the bias correction to epsilon. With c = 1 / sqrt(1 - beta2^s), the
      inputs (c g, c m, c^2 v) in place of gradient g and moments m and v make its update
      lr sqrt(1 - beta2^s) / (1 - beta1^s) * c m / (sqrt(c^2 v) + epsilon) equal to PyTorch's.
    * FusedAdamW counts steps per group; State has one count per parameter.
    """

    class AsPyTorch(fused):
        def __init__(self, groups: Any, *, decay: float, **more: Any) -> None:
            super().__init__(groups, **more)
            self._decay = decay

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            scaled = [self._scale(group) for group in self.param_groups]
            super().step(closure)
            for group, (scale, first, second) in zip(self.param_groups, scaled, strict=True):
                if first:
                    torch._foreach_mul_(first, to_device(1 / scale))
                    torch._foreach_mul_(second, to_device(scale**-2))
                for parameter in group["params"]:
                    self.state[parameter]["step"] = group["step"]

        def _scale(self, group: dict[str, Any]) -> tuple[float, list[Any], list[Any]]:
            """Decay weights, scale gradients and moments; returns c and both lists of moments."""
            done = group["step"] = self.state[group["params"][0]]["step"]
            scale = (1 - group["betas"][1] ** (done + 1)) ** -0.5
            parameters = [p for p in group["params"] if p.grad is not None]
            first, second = (
                [self.state[p][moment] for p in parameters] for moment in ("exp_avg", "exp_avg_sq")
            )
            if parameters:
                if self._decay:
                    torch._foreach_mul_(parameters, to_device(1.0 - self._decay * group["lr"]))
                factor = to_device(scale)
                torch._foreach_mul_([p.grad for p in parameters], factor)
                torch._foreach_mul_(first, factor)
                torch._foreach_mul_(second, to_device(scale**2))
            return scale, first, second

    return AsPyTorch
