"""Frozen linear layers in 8 or 4 bits, for a base under LoRA adapters and for text encoders.

Products are computed in the input's dtype, with weights that are dequantized for one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

#: As QuantizedLinear.dequantize.
Dequantize = Callable[[torch.Tensor, torch.Tensor, Any, int, torch.dtype], torch.Tensor]
#: On CUDA, bitsandbytes dequantizes 4-bit weights in one kernel, to the same bits.
HAS_KERNEL = torch.cuda.is_available() and find_spec("bitsandbytes") is not None


class QuantizedLinear(torch.nn.Linear):
    """A frozen linear layer whose weight is integers; subclasses say how.

    Checkpoints hold adapters alone and the base is rounded at each start, so constants are
    buffers that no state_dict has.
    """

    scale: torch.Tensor
    pairs: torch.Tensor | None
    multiple = 1  # of the number of weights; layers of other sizes keep their dtype

    @classmethod
    @torch.no_grad()
    def of(cls, layer: torch.nn.Linear, weight: torch.Tensor | None = None) -> QuantizedLinear:
        """The quantized layer of a linear layer, on the device of its weight; `meta` included.

        Args:
            weight: [out_features, in_features], in place of the layer's own.
        """
        with torch.device("meta"):
            made = cls(layer.in_features, layer.out_features, bias=layer.bias is not None)
        tensors = cls.quantize((layer.weight if weight is None else weight).float())
        made.weight = torch.nn.Parameter(tensors.pop("weight"), requires_grad=False)
        made.bias = layer.bias
        for name, tensor in tensors.items():
            made.register_buffer(name, tensor, persistent=False)
        return made.train(layer.training)

    @staticmethod
    def quantize(weight: torch.Tensor) -> dict[str, Any]:
        """`weight` [out_features, in_features] f32 as integers, and its constants, by name."""
        raise NotImplementedError

    @staticmethod
    def dequantize(
        weight: torch.Tensor, scale: torch.Tensor, pairs: Any, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The weight [out_features, in_features] in `dtype`, from what `quantize` returned.

        Args:
            pairs: None if there is no such constant.
            width: in_features.
        """
        raise NotImplementedError

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The layer's weight [out_features, in_features] in a dtype."""
        return self.dequantize(self.weight, self.scale, self.pairs, self.in_features, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return _Linear.apply(input, bias, self.weight, self.scale, self.pairs, self.dequantize)


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass keeps the integers alone.

    Autograd of a plain product would keep the dequantized weight of each layer.
    """

    @staticmethod
    def forward(
        context: Any,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        scale: torch.Tensor,
        pairs: torch.Tensor | None,
        dequantize: Dequantize,
    ) -> torch.Tensor:
        context.save_for_backward(weight, scale, pairs)
        context.dequantize = dequantize
        context.width = input.shape[-1]
        full = dequantize(weight, scale, pairs, context.width, input.dtype)
        return torch.nn.functional.linear(input, full, bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        full = context.dequantize(*context.saved_tensors, context.width, gradient.dtype)
        return gradient @ full, None, None, None, None, None


class Int8Linear(QuantizedLinear):
    """8-bit weights with one float32 scale per output feature.

    The scale is the row's largest absolute weight / 127 (absmax quantization, as in LLM.int8(),
    arXiv 2208.07339, for weights alone).
    """

    scale: torch.Tensor  # [out_features, 1] float32

    @staticmethod
    def quantize(weight: torch.Tensor) -> dict[str, Any]:
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "scale": scale, "pairs": None}

    @staticmethod
    def dequantize(
        weight: torch.Tensor, scale: torch.Tensor, pairs: Any, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return (weight * scale).to(dtype)  # a scale in bfloat16 would be 0.4% off


#: The values of NormalFloat4 (QLoRA, arXiv 2305.14314, appendix E).
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
BOUNDS = (NF4[1:] + NF4[:-1]) / 2
#: Byte -> the two values that it stands for, the first in its high half.
PAIRS = torch.stack([NF4.repeat_interleave(16), NF4.repeat(16)], 1)  # [256, 2]
BLOCK = 64  # weights with a common scale


class Nf4Linear(QuantizedLinear):
    """4-bit weights, two a byte, with one float32 scale per 64 weights (QLoRA, arXiv 2305.14314).

    Bytes, scales and dequantized weights are those of bitsandbytes. The bytes are typed int8,
    since transformers' T5 casts activations to any other dtype of a weight.
    """

    scale: torch.Tensor  # [blocks, 1] float32, the largest absolute weight of each
    pairs: torch.Tensor  # [256, 2] float32
    multiple = BLOCK

    @staticmethod
    def quantize(weight: torch.Tensor) -> dict[str, Any]:
        if HAS_KERNEL:
            import bitsandbytes  # noqa: F401  # registers the operator
        blocks = weight.view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True)
        ratios = blocks * (1 / scale.clamp(min=1e-38))
        codes = torch.bucketize(ratios, BOUNDS.to(weight.device), out_int32=True).to(torch.uint8)
        packed = codes[:, ::2] << 4 | codes[:, 1::2]
        return {
            "weight": packed.flatten().view(torch.int8),
            "scale": scale,
            "pairs": PAIRS.to(weight.device),
        }

    @staticmethod
    def dequantize(
        weight: torch.Tensor, scale: torch.Tensor, pairs: Any, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        packed = weight.view(torch.uint8)
        rows = 2 * len(weight) // width
        if HAS_KERNEL and weight.is_cuda:
            dequantize = torch.ops.bitsandbytes.dequantize_4bit
            return dequantize(packed, scale.flatten(), BLOCK, "nf4", (rows, width), dtype)
        values = torch.nn.functional.embedding(packed.int(), pairs).view(-1, BLOCK)
        values *= scale
        return values.view(rows, width).to(dtype)


PRECISIONS: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "nf4": Nf4Linear}


def quantize_blocks(
    model: torch.nn.Module,
    precision: str,
    kept: Sequence[str] = (),
    read: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Replace the linear layers of a model's repeated blocks, one after another.

    Embeddings and the last projection, outside of the blocks, are small and keep their dtype.

    Args:
        precision: name in PRECISIONS.
        kept: parts of names of layers that keep their dtype.
        read: name of a weight -> its values; None: the model has them.
    """
    paths = {
        f"{prefix}.{name}"
        for prefix, blocks in model.named_modules()
        if isinstance(blocks, torch.nn.ModuleList)
        for name, layer in blocks.named_modules()
        if type(layer) is torch.nn.Linear
    }
    kind = PRECISIONS[precision]
    for path in sorted(paths):
        layer: Any = model.get_submodule(path)
        if set(path.split(".")) & set(kept) or layer.weight.numel() % kind.multiple:
            continue
        weight = read(f"{path}.weight") if read else None
        model.set_submodule(path, kind.of(layer, weight))
