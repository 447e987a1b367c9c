"""Low-rank adapters on diffusers and transformers models, through PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from configs.training import Lora
from runtimes.adapters.lora import (
    ADAPTER,
    Adapter,
    Layer,
    alpha,
    choose_layers,
    initial_down,
    stored_name,
)
from runtimes.contract import WrongInput
from runtimes.torch.products import linear, product

#: How much longer a product with one side of an adapter's rank takes for its size.
THIN = 4


def add_adapters(
    part: str, model: torch.nn.Module, lora: Lora, seed: int, attention: Sequence[str] = ()
) -> None:
    """Freeze a part of the pipeline and put fresh float32 adapters beside its layers.

    They change nothing yet: `up` is zero, and DoRA's magnitudes are the lengths that there are.

    Args:
        attention: ends of the names of attention's layers (families/family.py).

    Raises:
        WrongInput: the targets name no layer.
    """
    from peft import LoraConfig, inject_adapter_in_model  # seconds to import

    chosen = choose_layers(part, _layers(model), lora, attention)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha(lora),  # type: ignore[arg-type]  # takes any number
        lora_dropout=lora.dropout,
        target_modules=chosen,
        use_dora=lora.dora,
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # what PEFT draws is drawn again below
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    adapted = dict(_adapted(model))
    if adapted.keys() != set(chosen):  # a name that is the end of another's
        odd = min(adapted.keys() ^ set(chosen))
        raise WrongInput(f"train.lora.targets: {odd} of the {part} cannot be told from others")
    for name, layer in adapted.items():
        _start(f"{part}.{stored_name(part, name)}", layer, seed)


def with_less_work(model: torch.nn.Module) -> None:
    """Have adapted linear layers of a float32 model compute what PEFT's do, in fewer passes over
    the activations.

    Where that is less, `up @ down` is added to the weight, and multiplied once; else the products
    of layer and adapter are added up as they are made. In bfloat16 the former would round a small
    change of a weight away; dropout and DoRA need the adapter by itself.
    """
    from peft.tuners.lora import Linear

    for _, layer in _adapted(model):
        drops = not isinstance(layer.lora_dropout[ADAPTER], torch.nn.Identity)
        if type(layer) is Linear and not drops and not layer.use_dora[ADAPTER]:
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    base, down, up = layer.base_layer, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    scale = layer.scaling[ADAPTER]
    if not merging_is_cheaper(base.weight.shape, len(down), inputs.numel() // inputs.shape[-1]):
        return cast(torch.Tensor, _Beside.apply(inputs, base.weight, base.bias, down, up, scale))
    weight = torch.addmm(base.weight, up, down, alpha=scale)
    return linear(inputs, weight, base.bias)


class _Beside(torch.autograd.Function):
    """`x W^T + b + scale (x down^T) up^T` of a frozen layer (W, b) and its adapter (arXiv
    2106.09685), for inputs [..., in]."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        hidden = product(rows, down)
        output = product(rows, weight, bias)
        output.addmm_(hidden, up.t(), alpha=scale)
        ctx.save_for_backward(rows, weight, down, up, hidden)
        ctx.scale = scale
        return output.view(*inputs.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, down, up, hidden = ctx.saved_tensors
        of_output = gradient.reshape(len(rows), -1)
        of_hidden = product(of_output, up.t()).mul_(ctx.scale)
        of_up = (of_output.t() @ hidden).mul_(ctx.scale)
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = product(of_output, weight.t()).addmm_(of_hidden, down)
            of_inputs = of_inputs.view(*gradient.shape[:-1], -1)
        return of_inputs, None, None, of_hidden.t() @ rows, of_up, None


def merging_is_cheaper(shape: torch.Size, rank: int, rows: int) -> bool:
    """Whether a layer of `out` x `in` weights takes less time once its adapter is added to it, for
    so many rows.

    Forward and backward, in multiplications and additions: merging takes 2 r in out, and as much
    twice for the adapter's gradients, and a row 2 in out for that of the weight; beside the layer
    the adapter takes 6 r (in + out) a row, in products too thin to be as fast (docs/decisions.md).
    """
    out, inputs = shape
    return (2 * rows + 6 * rank) * inputs * out <= THIN * 6 * rank * (inputs + out) * rows


@torch.no_grad()
def lay_over(part: str, model: torch.nn.Module, adapters: Mapping[str, Adapter]) -> None:
    """Merge adapters into the weights of a part, in float32.

    Raises:
        WrongInput: they are for layers that it does not have, or of another size.
    """
    layers = {stored_name(part, n): m for n, m in model.named_modules() if _kind(m)}
    for name, adapter in adapters.items():
        if name not in layers:
            raise WrongInput(f"the adapters are for another model: the {part} here has no {name}")
        weight: torch.Tensor = layers[name].weight
        try:
            merged = adapter.merged(weight.float().numpy())
        except ValueError:
            raise WrongInput(f"the adapters are for another model: {name} differs") from None
        weight.copy_(torch.from_numpy(merged))


def _layers(model: torch.nn.Module) -> dict[str, Layer]:
    kinds = ((name, _kind(module)) for name, module in model.named_modules())
    return {name: kind for name, kind in kinds if kind is not None}


def _kind(module: torch.nn.Module) -> Layer | None:
    if isinstance(module, torch.nn.Linear):
        return "linear"
    return "conv" if isinstance(module, torch.nn.Conv2d) else None


def _adapted(model: torch.nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]


@torch.no_grad()
def _start(name: str, layer: Any, seed: int) -> None:
    """Give one layer's adapter its first values, in float32 whatever the base is kept in."""
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    down.weight.data = torch.from_numpy(initial_down(seed, name, down.weight.shape))
    up.weight.data = torch.zeros_like(up.weight, dtype=torch.float32)
    if ADAPTER in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight
        lengths = torch.linalg.vector_norm(layer.weight.float().flatten(1), dim=1)
        magnitude.data = lengths.view(magnitude.shape)
