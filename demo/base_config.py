"""The settings of the demo's base model, read from configs/digits-base.yaml."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml


@dataclass(frozen=True)
class ClipConfig:
    width: int
    layers: int
    heads: int
    projection_dim: int
    patch_size: int
    embedding_std: float
    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True)
class VaeConfig:
    block_out_channels: list[int]
    latent_channels: int
    norm_num_groups: int
    initial_logvar: float
    kl_weight: float
    steps: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True)
class UnetConfig:
    block_out_channels: list[int]
    attention_head_dim: list[int]
    norm_num_groups: int
    addition_time_embed_dim: int
    pictures: int
    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    lr_warmup_steps: int
    snr_gamma: float
    ema_decay: float
    caption_dropout_rate: float


@dataclass(frozen=True)
class SamplingConfig:
    num_inference_steps: int
    guidance_scale: float


@dataclass(frozen=True)
class BaseConfig:
    seed: int
    clip: ClipConfig
    vae: VaeConfig
    unet: UnetConfig
    sampling: SamplingConfig


T = TypeVar("T")


def _build(kind: type[T], values: Any, where: str) -> T:
    """`values` as a `kind`; ValueError that names every missing, unknown or mistyped setting."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected settings, got {values!r}")
    types = typing.get_type_hints(kind)
    names = {field.name for field in fields(typing.cast(Any, kind))}
    if names != set(values):
        missing, unknown = sorted(names - set(values)), sorted(set(values) - names)
        raise ValueError(f"{where}: missing settings {missing}, unknown settings {unknown}")
    built: dict[str, Any] = {}
    for name, value in values.items():
        wanted = types[name]
        if is_dataclass(wanted):
            built[name] = _build(typing.cast(type, wanted), value, f"{where}: {name}")
        elif isinstance(value, typing.get_origin(wanted) or wanted):
            built[name] = value
        else:
            # YAML reads 1e-3 as text: the commonest mistake here.
            raise ValueError(f"{where}: {name} should be {wanted}, got {value!r} (write 1.0e-3)")
    return kind(**built)


def load(path: Path) -> BaseConfig:
    """Read a settings file; ValueError where a setting is missing, unknown or of a wrong type."""
    return _build(BaseConfig, yaml.safe_load(path.read_text()), str(path))
