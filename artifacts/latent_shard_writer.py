"""Write latent shards, deterministically; latent_shards.py describes and reads their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import DTYPES, PAIRS, LatentSample, Texts, to_bfloat16
from artifacts.tensor_header import header_bytes


def write_latent_shard(
    path: Path, groups: Mapping[str, Sequence[LatentSample]], texts: Texts
) -> None:
    """Write a shard as a safetensors file, deterministically and tensor by tensor.

    Args:
        groups: `<split>/<h>x<w>` -> samples, in reading order.
        texts: the captions that the samples' `caption_rows` refer to.

    Raises:
        ValueError: samples of one group differ in shape.
    """
    tensors = _text_tensors(texts)
    for group, samples in groups.items():
        tensors |= {f"{group}/{name}": tensor for name, tensor in _group_tensors(samples).items()}
    # Wide types first: this aligns every tensor, since the format allows no padding.
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPES[item[1].dtype].itemsize, item[0]))
    described = ((name, one.dtype, one.shape, one.nbytes) for name, one in ordered)
    with path.open("wb") as stream:
        stream.write(header_bytes(described))
        for _, tensor in ordered:
            for chunk in tensor.chunks:
                stream.write(np.ascontiguousarray(chunk).data)


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def _bf16_rows(rows: Sequence[NDArray[Any]]) -> _Tensor:
    shape = rows[0].shape
    if any(row.shape != shape for row in rows):
        raise ValueError(f"rows of one tensor differ in shape: {sorted({r.shape for r in rows})}")
    return _Tensor("BF16", (len(rows), *shape), (to_bfloat16(row) for row in rows))


def _whole(dtype: str, array: NDArray[Any]) -> _Tensor:
    return _Tensor(dtype, array.shape, [array.astype(DTYPES[dtype])])


def _text_tensors(texts: Texts) -> dict[str, _Tensor]:
    rows = texts.prompt_embeds
    tensors = {"text/input_ids": _whole("I32", texts.input_ids)}
    if rows is None:
        return tensors
    if texts.varying_lengths:
        offsets = np.cumsum([0, *(len(row) for row in rows)])
        shape = (int(offsets[-1]), rows[0].shape[1])
        tensors["text/prompt_embeds"] = _Tensor("BF16", shape, (to_bfloat16(row) for row in rows))
        tensors["text/prompt_offsets"] = _whole("I32", offsets)
    else:
        tensors["text/prompt_embeds"] = _bf16_rows(rows)
    if texts.pooled_prompt_embeds is not None:
        tensors["text/pooled_prompt_embeds"] = _bf16_rows(texts.pooled_prompt_embeds)
    return tensors


def _group_tensors(samples: Sequence[LatentSample]) -> dict[str, _Tensor]:
    rows = [sample.caption_rows for sample in samples]
    offsets = np.cumsum([0, *(len(r) for r in rows)])
    ids = np.frombuffer(b"".join(sample.id for sample in samples), np.uint8)
    extra = {}
    if samples[0].aesthetic_score is not None:
        extra["aesthetic_score"] = _whole("F32", np.array([s.aesthetic_score for s in samples]))
    if masked := [s.masked for s in samples if s.masked is not None]:
        extra["masks"] = _whole("U8", np.stack([m.masks for m in masked]))
        extra["masked_means"] = _bf16_rows([m.means for m in masked])
    return {
        "mean": _bf16_rows([sample.mean for sample in samples]),
        "logvar": _bf16_rows([sample.logvar for sample in samples]),
        "id": _whole("U8", ids.reshape(len(samples), 32)),
        "flip": _whole("U8", np.array([sample.flip for sample in samples])),
        "caption_offsets": _whole("I32", offsets),
        "caption_rows": _whole("I32", np.array([row for r in rows for row in r])),
        **{name: _whole("I32", np.array([getattr(s, name) for s in samples])) for name in PAIRS},
        **extra,
    }
