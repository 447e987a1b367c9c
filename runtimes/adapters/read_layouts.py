"""Adapter files of other programs: diffusers', PEFT's and kohya's layouts, read for a base.

A file names a layer after diffusers' model or after its authors' code, with dots or underscores,
behind the name of a component. Names are looked up among those that the base's own layers have in
the layouts, so nothing is guessed from a name. A layer that the authors fuse has the adapters of
several layers here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.records import parse_json
from artifacts.safetensors import Arrays, read_floats
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.adapters.lora import Adapter, Float32, alpha, choose_layers, layers_of, stored_name
from runtimes.adapters.lora_files import DOWN, MAGNITUDE, METADATA, UP, Adapters
from runtimes.families.family import KohyaLayer
from runtimes.pipeline_folder.folder import Base
from runtimes.pipeline_folder.weights import weight_shapes

#: End of the name of `down` -> that of `up`, in each layout.
PAIRS = {
    DOWN: UP,
    ".lora_A.default.weight": ".lora_B.default.weight",
    ".lora.down.weight": ".lora.up.weight",
    ".lora_linear_layer.down.weight": ".lora_linear_layer.up.weight",
    ".lora_down.weight": ".lora_up.weight",
}
MAGNITUDES = (MAGNITUDE, f"{MAGNITUDE}.weight", f"{MAGNITUDE}.default.weight", ".dora_scale")
PEFT = "base_model.model."
PEFT_CONFIG = "adapter_config.json"  # beside a file of PEFT
#: What the names of a denoiser's layers begin with.
DENOISER = ("transformer.", "unet.", "diffusion_model.", PEFT, "lora_unet_", "lora_transformer_")


@dataclass(frozen=True)
class Layers:
    """The layers of a base's denoiser and CLIP encoders, which may have adapters."""

    base: Base

    @cached_property
    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Component -> layer -> shape of its weight."""
        family = self.base.family
        shapes = dict[str, dict[str, tuple[int, ...]]]()
        for part in (family.denoiser, *family.clip_encoders):
            stored = weight_shapes(self.base.part(part))
            named = {stored_name(part, name): shape for name, shape in stored.items()}
            shapes[part] = {name: named[f"{name}.weight"] for name in layers_of(named)}
        return shapes

    @cached_property
    def _prefixes(self) -> dict[str, str]:
        """Start of a name in a file -> component."""
        family = self.base.family
        prefixes = dict.fromkeys(DENOISER, family.denoiser)
        prefixes |= {f"{part}.": part for part in family.clip_encoders}
        texts = family.kohya.text_prefixes if family.kohya is not None else {}
        return prefixes | {f"{prefix}_": part for part, prefix in texts.items()}

    @cached_property
    def _places(self) -> dict[tuple[str, str], dict[str, KohyaLayer]]:
        """(component, name without dots) -> layer -> its place in what has that name."""
        places: dict[tuple[str, str], dict[str, KohyaLayer]] = {}
        family = self.base.family
        for part, layers in self.shapes.items():
            for layer in layers:
                found = [KohyaLayer(layer)]
                if part == family.denoiser and family.kohya is not None:
                    with suppress(ValueError):  # it has no name there
                        found.append(family.kohya.place(layer, self.base.denoiser) or found[0])
                for place in found:
                    name = place.layer.replace(".", "_")
                    places.setdefault((part, name), {})[layer] = place
        return places

    def find(self, name: str) -> tuple[str, dict[str, KohyaLayer]] | None:
        """The component and the layers that a file's name of a layer means; None: none."""
        for prefix, part in self._prefixes.items():
            rest = name.removeprefix(prefix).replace(".", "_")
            if name.startswith(prefix) and (part, rest) in self._places:
                return part, self._places[part, rest]
        return None


def read_file(path: Path, base: Base, place: str) -> Adapters:
    """The adapters of a file in any layout, by the layers of a base.

    Args:
        path: local file.
        base: the model that they must fit.
        place: the file as a recipe names it, for messages.

    Raises:
        Refused: the file is damaged, of another method or layout, or for another model.
    """
    try:
        header, arrays = read_floats(path)
    except (OSError, ValueError) as error:
        raise Refused(f"{place} is no valid file of adapters: {error}") from None
    layers = Layers(base)
    scales = _Scales(path, header, place)
    adapters: Adapters = {}
    unread = set(arrays)
    for name in arrays:
        down = next((end for end in PAIRS if name.endswith(end)), None)
        if down is None:
            continue
        stem = name.removesuffix(down)
        found = layers.find(stem)
        if found is None:
            raise Refused(f"{place} is for another model: {base.family.name} has no layer {stem}")
        part, places = found
        ends = (down, PAIRS[down], ".alpha", *MAGNITUDES)
        own = {end: arrays[stem + end] for end in ends if stem + end in arrays}
        unread -= {stem + end for end in own}
        if PAIRS[down] not in own:
            raise Refused(f"{place} is damaged: it has no {stem}{PAIRS[down]}")
        scale = scales.of(part, stem, len(own[down]), own.get(".alpha"))
        magnitude = next((own[end].reshape(-1) for end in MAGNITUDES if end in own), None)
        whole = Adapter(own[down], own[PAIRS[down]], magnitude, scale)
        shapes = {layer: layers.shapes[part][layer] for layer in places}
        for layer, adapter in _parted(whole, places, shapes).items():
            fitting = _in_shape(adapter, shapes[layer])
            if fitting is None:
                raise Refused(f"{place} is for another model: {stem} has other shapes")
            adapters.setdefault(part, {})[layer] = fitting
    if unread or not adapters:
        odd = min(unread, default="nothing")
        raise Refused(
            f"{place} has {odd}, which is not of a LoRA or DoRA of diffusers, PEFT or kohya; "
            "a whole model belongs in model.path"
        )
    return adapters


@dataclass(frozen=True)
class _Scales:
    """The scale of adapters: alpha / rank, where the layout says what alpha is."""

    path: Path
    header: Mapping[str, Any]
    place: str

    @cached_property
    def _diffusers(self) -> Mapping[str, Any]:
        return dict(parse_json(self.header[METADATA])) if METADATA in self.header else {}

    @cached_property
    def _peft(self) -> Mapping[str, Any]:
        try:
            return dict(parse_json((self.path.parent / PEFT_CONFIG).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise Refused(
                f"{self.place} is in PEFT's layout, and there is no {PEFT_CONFIG} beside it with "
                "its alpha: put it there, or convert the file"
            ) from None

    def of(self, part: str, stem: str, rank: int, stored: Float32 | None) -> float:
        if stored is not None:
            return float(stored) / rank
        if stem.startswith(PEFT):
            settings, layer = self._peft, stem.removeprefix(PEFT)
        else:
            start = f"{part}."
            named = self._diffusers.items()
            settings = {n.removeprefix(start): v for n, v in named if n.startswith(start)}
            layer = stem.removeprefix(start)
        patterns = settings.get("alpha_pattern") or {}
        ours = patterns.get(layer, settings.get("lora_alpha", rank))
        return float(ours) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _parted(
    whole: Adapter, places: Mapping[str, KohyaLayer], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Adapter]:
    """The adapters of the layers that a file's layer fuses: rows of `up`, with all of `down`.

    What this project and diffusers write has a block of `up` for each layer, and zeros elsewhere.
    """
    if len(places) == 1 and next(iter(places.values())).rows is None:
        return dict.fromkeys(places, whole)
    ordered = sorted(places, key=lambda layer: places[layer].first)
    ends = {layer: places[layer].first + shapes[layer][0] for layer in ordered}
    rows = {layer: slice(places[layer].first, ends[layer]) for layer in ordered}
    parted = {layer: whole.rows(rows[layer]) for layer in ordered}
    adapted = [layer for layer in ordered if parted[layer].up.any()]
    size, rest = divmod(len(whole.down), max(1, len(adapted)))
    if not rest and adapted:
        blocks = {layer: slice(n * size, (n + 1) * size) for n, layer in enumerate(adapted)}
        up = whole.up.copy()
        for layer, block in blocks.items():
            up[rows[layer], block] = 0
        if not up.any():
            return {
                layer: replace(parted[layer], down=whole.down[block], up=parted[layer].up[:, block])
                for layer, block in blocks.items()
            }
    return parted


def _in_shape(adapter: Adapter, shape: tuple[int, ...]) -> Adapter | None:
    """The adapter in the shape of the layer's weight [out, in, ...]; None if it does not fit."""
    rank = len(adapter.down)
    out, *into = shape
    magnitude = adapter.magnitude
    fits = adapter.down.size == rank * math.prod(into) and adapter.up.size == out * rank
    if not fits or (magnitude is not None and magnitude.size != out):
        return None
    up = adapter.up.reshape(out, rank, *[1] * (len(into) - 1))
    return replace(adapter, down=adapter.down.reshape(rank, *into), up=up)


def state_arrays(adapters: Adapters, scale: float = 1.0) -> Arrays:
    """The arrays of adapters with State's names, for adapters that are scaled by `scale`."""
    arrays: Arrays = {}
    for part, layers in adapters.items():
        for layer, adapter in layers.items():
            arrays[f"{part}.{layer}{DOWN}"] = adapter.down
            arrays[f"{part}.{layer}{UP}"] = adapter.up * np.float32(adapter.scale / scale)
            if adapter.magnitude is not None:
                arrays[f"{part}.{layer}{MAGNITUDE}"] = adapter.magnitude
    return arrays


def read_start(path: Path, base: Base, train: Train, place: str) -> Arrays:
    """The weights of step 0 from a file, with State's names.

    Raises:
        Refused: the file is not read, or its adapters have other layers or another rank than the
            training's.
    """
    adapters = read_file(path, base, place)
    settings = train.lora
    family = base.family
    parts = (family.denoiser, *(family.clip_encoders if train.train_text_encoder else ()))
    if more := adapters.keys() - set(parts):
        raise Refused(f"{place} adapts the {min(more)}: set train.train_text_encoder: true")
    every = Layers(base).shapes
    for part in parts:
        shapes = {f"{layer}.weight": shape for layer, shape in every[part].items()}
        chosen = choose_layers(part, layers_of(shapes), settings, family.attention_layers)
        _check_layers(adapters.get(part, {}), chosen, f"{place}: of the {part} it")
    for part, layers in adapters.items():
        for layer, adapter in layers.items():
            if len(adapter.down) != settings.rank:
                raise Refused(
                    f"{place} has rank {len(adapter.down)} at {part}.{layer}, train.lora.rank is "
                    f"{settings.rank}: set that"
                )
            if (adapter.magnitude is not None) != settings.dora:
                has = "has no" if settings.dora else "has"
                wanted = "false" if settings.dora else "true"
                raise Refused(f"{place} {has} magnitudes (DoRA): set train.lora.dora: {wanted}")
    return state_arrays(adapters, alpha(settings) / settings.rank)


def _check_layers(adapters: Mapping[str, Adapter], chosen: Sequence[str], what: str) -> None:
    """Raise Refused if adapters are of other layers than the training's."""
    for verb, layers in (
        ("adapts", adapters.keys() - set(chosen)),
        ("does not adapt", set(chosen) - adapters.keys()),
    ):
        if layers:
            why = "leaves out" if verb == "adapts" else "names"
            raise Refused(
                f"{what} {verb} {len(layers)} layers that train.lora.target_modules {why}, such as "
                f"{min(layers)}: set the file's layers there"
            )


def read_assistant(path: Path, base: Base, place: str) -> Arrays:
    """The adapters of a file that are merged into the denoiser, with State's names.

    Raises:
        Refused: the file is not read, or adapts a text encoder too.
    """
    adapters = read_file(path, base, place)
    if more := adapters.keys() - {base.family.denoiser}:
        raise Refused(f"{place} adapts the {min(more)}: an assistant adapts the denoiser alone")
    return state_arrays(adapters)
