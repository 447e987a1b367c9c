"""Describers of CLIP: the embedding with its likeness to the caption, and a score of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from configs.errors import Refused, naming
from configs.secrets import one_line
from runtimes.pipeline_folder.folder import read_config
from tasks.describe.describers import Describer, Picture, Spec
from tasks.evaluate import features

CLIP_WIDTH = 512  # of transformers' CLIPConfig, where a config names none


class Clip(Describer):
    """The embedding of what CLIP's image processor keeps of a picture, f16 [D] of length 1.

    likeness: 100 times the cosine with the first caption's embedding, as CLIPScore before its cut
    at 0 (Hessel et al. 2021, arXiv 2104.08718); null without a caption.
    """

    reads_captions = True

    @classmethod
    def transform(cls, dtype: str) -> dict[str, Any]:
        return {"dtype": dtype}

    @classmethod
    def check(cls, spec: Spec, setting: str, of: Spec | None) -> None:
        features.check_clip(_folder(spec), f"{setting}.model")

    @classmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        return {"": pa.list_(pa.float16()), "likeness": pa.float32()}

    def __init__(self, spec: Spec, device: str) -> None:
        super().__init__(spec, device)
        dtype = spec.transform["dtype"]
        self._model = features.Clip(_folder(spec), device, "describe.describers", dtype)

    def prepare(self, source: Picture) -> tuple[Any, str]:
        return self._model.pixels([np.asarray(source.image)]), source.caption

    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        import torch

        captions = [caption for _, caption in prepared]
        with torch.inference_mode():
            pixels = torch.cat([pixels for pixels, _ in prepared])
            pictures = _unit(self._model.features_of(pixels))
            texts = _unit(self._model.features_of_texts(captions)) if any(captions) else pictures
        cosines = (pictures * texts).sum(axis=1)
        return [
            (picture, 100 * cosine if caption else None)
            for picture, cosine, caption in zip(
                pictures.astype(np.float16), cosines, captions, strict=True
            )
        ]


def _folder(spec: Spec) -> Path:
    assert spec.model is not None
    return Path(spec.model)


def _unit(rows: Any) -> NDArray[np.float32]:
    """Rows of a tensor [N, D] with length 1."""
    found = rows.float().cpu().numpy()
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), np.float32)


class Aesthetic(Describer):
    """The score of a linear head on an embedding.

    The layers of LAION's improved aesthetic predictor have no activation between them
    (github.com/christophschuhmann/improved-aesthetic-predictor): together they are one.
    """

    @classmethod
    def check(cls, spec: Spec, setting: str, of: Spec | None) -> None:
        assert of is not None
        with naming(f"{setting}.head"):
            weight, _ = _linear(spec)
            width = read_config(_folder(of) / "config.json").get("projection_dim", CLIP_WIDTH)
            if len(weight) != width:
                raise Refused(
                    f"{spec.model} takes embeddings of {len(weight)} numbers, those of "
                    f"{of.model} have {width}"
                )

    @classmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        return {"": pa.float32()}

    def __init__(self, spec: Spec, device: str) -> None:
        super().__init__(spec, device)
        self._weight, self._bias = _linear(spec)

    def prepare(self, source: NDArray[np.float16]) -> NDArray[np.float64]:
        return source.astype(np.float64)

    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        scores = (np.stack(prepared) * self._weight).sum(axis=1) + self._bias
        return [(score,) for score in scores]


def _linear(spec: Spec) -> tuple[NDArray[np.float64], float]:
    """Weight [D] and bias of all layers of a head together. Raises Refused."""
    path = _folder(spec)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path}: not a readable safetensors file: {one_line(error)}") from None
    names = [name.removesuffix("weight") for name in tensors if name.endswith("weight")]
    names.sort(key=lambda name: [int(part) for part in name.split(".") if part.isdecimal()])
    weight = None
    bias: Any = 0.0
    try:
        for name in names:
            layer = tensors[f"{name}weight"].astype(np.float64)
            weight = layer if weight is None else layer @ weight
            bias = layer @ bias if np.ndim(bias) else bias
            bias = bias + tensors[f"{name}bias"].astype(np.float64)
        if weight is None or weight.shape[0] != 1 or len(tensors) != 2 * len(names):
            raise ValueError("they give no single score")
    except (KeyError, ValueError) as error:
        raise Refused(
            f"{path}: its layers ({', '.join(sorted(tensors)[:4])}) are no linear head: "
            f"{one_line(error)}"
        ) from None
    return weight[0], float(bias[0])
