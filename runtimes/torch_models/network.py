"""The trained network: a denoiser and, where the step encodes captions, its text encoders.

PEFT adds low-rank adapters to models of diffusers and transformers. Dropout is reproducible: a
resumed run draws the same masks.

`sample_batch` has the shapes of a run, to plan its step. A copy of the network on `meta` tensors
counts the FLOPs of a step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from artifacts.latent_shards import LatentSample
from configs.settings.train import Train
from configs.settings.train_parts import Lora
from runtimes.adapters import lora
from runtimes.adapters.lora_files import load_trained_components, read_scaled
from runtimes.contract import StepBatch, StoredRows
from runtimes.families import Captioned, Family
from runtimes.families.family import REFERENCE
from runtimes.families.inpainting_aesthetics import ExtraInputs
from runtimes.objective.random_draws import Stream, generator
from runtimes.pipeline_folder.folder import Base, trained_config
from runtimes.process.job import Drawing, HasNetwork, TrainJob
from runtimes.torch_models import control_network, loading
from runtimes.torch_models.activation_memory import recompute, without_recomputation
from runtimes.torch_models.quantized import quantize_blocks
from runtimes.torch_models.vae_text_encoders import (
    Encoded,
    FrozenTextEncoders,
    encode_ids,
    encode_in_step,
)

log = logging.getLogger("kiln")


def add_adapters(
    part: str,
    model: torch.nn.Module,
    settings: Lora,
    seed: int,
    attention: Sequence[str] = (),
    read: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
) -> None:
    """Freeze a component and add float32 LoRA adapters (arXiv 2106.09685) to its layers.

    The adapted model initially computes the same as the base: `up` is zero, and DoRA's magnitudes
    (arXiv 2402.09353) are the norms of the base weights.

    Args:
        part: component name, such as `unet`.
        model: the component, changed in place.
        settings: rank, alpha, dropout, targets and DoRA.
        seed: initializes `down`.
        attention: name suffixes of attention layers (families/family.py).
        read: values of a base weight, which may be on `meta`.

    Raises:
        Refused: the targets match no layer, or one target's name is a suffix of another's.
    """
    from peft import LoraConfig, inject_adapter_in_model  # seconds to import
    from peft.tuners.lora import LoraLayer

    chosen = lora.choose_layers(part, _layers(model), settings, attention)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=lora.alpha(settings),  # type: ignore[arg-type]  # takes any number
        lora_dropout=settings.dropout,
        target_modules=chosen,
        use_dora=settings.dora,
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # PEFT's initialization is replaced below
        inject_adapter_in_model(config, model, adapter_name=lora.ADAPTER)
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    lora.check_unambiguous(part, chosen, adapted)
    for name, layer in adapted.items():
        # PEFT would cast activations to float32, which autocast casts back to the compute dtype.
        layer.cast_input_dtype_enabled = False
        _initialize(f"{part}.{lora.stored_name(part, name)}", layer, seed, read)


@torch.no_grad()
def merge_adapters(
    part: str,
    model: torch.nn.Module,
    adapters: Mapping[str, lora.Adapter],
    read: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Merge adapters into the weights of a component; the sum is computed in float32.

    Args:
        part: component name, such as `unet`.
        model: the component, changed in place.
        adapters: stored layer name to adapter.
        read: name of a weight -> its values before the model's dtype rounded them; None: the
            model's own.

    Raises:
        Refused: the component lacks an adapted layer, or the layer has another shape.
    """
    layers = (name for name, module in model.named_modules() if _kind(module))
    names = {lora.stored_name(part, layer): f"{layer}.weight" for layer in layers}
    read = read or model.get_parameter

    def values(name: str) -> NDArray[np.float32]:
        return read(name).detach().float().numpy()

    for name, merged in lora.merged_weights(part, adapters, names, values):
        model.get_parameter(names[name]).copy_(torch.from_numpy(merged))


def _layers(model: torch.nn.Module) -> dict[str, lora.Layer]:
    return {name: kind for name, module in model.named_modules() if (kind := _kind(module))}


def _kind(module: torch.nn.Module) -> lora.Layer | None:
    if isinstance(module, torch.nn.Linear):
        return "linear"
    return "conv" if isinstance(module, torch.nn.Conv2d) else None


@torch.no_grad()
def _initialize(name: str, layer: Any, seed: int, read: Callable[[torch.Tensor], Any]) -> None:
    """Initialize one layer's adapter in float32, whatever the dtype of the base weights is."""
    down = layer.lora_A[lora.ADAPTER]
    up = layer.lora_B[lora.ADAPTER]
    initial = torch.from_numpy(lora.initial_down(seed, name, down.weight.shape))
    down.weight = torch.nn.Parameter(initial)
    up.weight = torch.nn.Parameter(torch.zeros(up.weight.shape))
    if lora.ADAPTER in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[lora.ADAPTER]
        lengths = torch.linalg.vector_norm(read(layer.weight).float().flatten(1), dim=1)
        magnitude.weight = torch.nn.Parameter(lengths.view(magnitude.weight.shape))


#: Name of the ControlNet among the network's modules, and of its folder: diffusers' own.
CONTROLNET = "controlnet"
#: No weights on `meta`, by the tensor's id.
NOTHING: Mapping[int, StoredRows] = {}


class Network(torch.nn.Module):
    """A denoiser with its text encoders; each trained child module is a pipeline component.

    Parameter names therefore begin with the component name, as the keys of State do.

    Args:
        family: family of the pipeline.
        parts: component name, such as `unet`, to module.
        frozen_clip: CLIP encoders in the family's order, if the step runs them untrained.
        control: the ControlNet beside the denoiser, if there is one.
    """

    def __init__(
        self,
        family: Family,
        parts: dict[str, torch.nn.Module],
        frozen_clip: Sequence[torch.nn.Module] = (),
        control: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.family = family
        for name, part in parts.items():
            self.add_module(name, part)
        if control is not None:
            self.add_module(CONTROLNET, control)
        self.frozen_clip = FrozenTextEncoders(frozen_clip).requires_grad_(False).eval()
        loading.keep_diffusers_formulas(self)

    @classmethod
    def load(cls, job: TrainJob, base: Base, settings: Train) -> Network:
        """Load the trained components to the CPU.

        Trained weights are float32; base weights under adapters have the compute dtype, or 8
        or 4 bits.

        Raises:
            Refused: weights are missing, damaged or do not match their config.
        """
        config = trained_config(base.denoiser, settings, job.denoiser_config)
        if settings.init == "random":
            denoiser = loading.random_init_denoiser(config, settings.seed)
        else:
            folder = base.denoiser_folder
            precision = _precision(settings)
            kept = base.family.unquantized
            dtype = _dtype(settings)
            about = (folder, dtype, config, settings.seed, precision, kept)
            denoiser = loading.load_denoiser(*about, _assistant(job, base))
        control = None
        if settings.method == "controlnet":
            start = job.control_start
            control = (
                control_network.new_control(base, settings)
                if start is None
                else control_network.load_control(base, Path(start))
            )
        return cls._of(base, denoiser, job, settings, control=control)

    @classmethod
    def load_unread(
        cls, job: TrainJob, base: Base, settings: Train
    ) -> tuple[Network, dict[str, StoredRows]]:
        """As `load`, but the base's denoiser stays on `meta`.

        Returns:
            The network, and its weights on `meta` by their names in the network's state_dict;
            indexing a weight reads its rows.
        """
        if settings.init == "random":
            return cls.load(job, base, settings), {}
        config = trained_config(base.denoiser, settings, job.denoiser_config)
        folder = base.denoiser_folder
        dtype = _dtype(settings)
        denoiser = loading.empty_denoiser(folder, config).to(dtype)
        about = (denoiser, folder, dtype, config, settings.seed)
        weights = loading.open_weights(*about, _assistant(job, base))
        tensors = denoiser.state_dict(keep_vars=True)
        unread = {id(tensors[name]): stored for name, stored in weights.items()}
        network = cls._of(base, denoiser, job, settings, unread=unread)
        tensors = network.state_dict(keep_vars=True)  # adapters change names
        return network, {n: unread[id(t)] for n, t in tensors.items() if id(t) in unread}

    @classmethod
    def without_weights(cls, request: HasNetwork, base: Base, settings: Train) -> Network:
        """Construct the network from config files alone, with uninitialized weights.

        Planning compiles a step with it, and needs shapes only.

        Raises:
            Refused: a config is missing or does not describe a supported model.
        """
        config = trained_config(base.denoiser, settings, request.denoiser_config)
        denoiser = loading.empty_denoiser(base.denoiser_folder, config).to(_dtype(settings))
        if precision := _precision(settings):
            quantize_blocks(denoiser, precision, base.family.unquantized)  # on `meta`

        def load(base: Base, name: str, dtype: torch.dtype) -> Any:
            return loading.empty_text_encoder(base, name).to(dtype).to_empty(device="cpu")

        control = None
        if settings.method == "controlnet":
            start = None if request.control_start is None else Path(request.control_start)
            control = control_network.empty_control(base, settings, start).to_empty(device="cpu")
        denoiser = denoiser.to_empty(device="cpu")
        return cls._of(base, denoiser, request, settings, load=load, control=control)

    @classmethod
    def _of(
        cls,
        base: Base,
        denoiser: Any,
        job: HasNetwork,
        settings: Train,
        *,
        load: Callable[[Base, str, torch.dtype], Any] = loading.load_text_encoder,
        unread: Mapping[int, StoredRows] = NOTHING,
        control: torch.nn.Module | None = None,
    ) -> Network:
        def read(weight: torch.Tensor) -> Any:
            return unread.get(id(weight), weight)[...]

        family = base.family
        parts = {family.denoiser: denoiser}
        frozen = list[torch.nn.Module]()
        names = family.clip_encoders
        if settings.train_text_encoder:
            parts |= {name: load(base, name, _dtype(settings)) for name in names}
        elif job.text_dtype is not None:
            frozen = [load(base, name, getattr(torch, job.text_dtype)) for name in names]
        full = settings.method == "full"
        targets = family.attention_layers
        for name, part in parts.items():
            part.requires_grad_(full)
            if settings.method == "lora":
                add_adapters(name, part, settings.lora, settings.seed, targets, read)
        for part in (*parts.values(), control):
            if settings.gradient_checkpointing != "none" and part is not None:
                recompute(part, settings.gradient_checkpointing)
        return cls(family, parts, frozen, control)

    def place(self, device: torch.device, memory_format: torch.memory_format) -> None:
        """Move the network to a device, with convolution weights in a memory format."""
        self.to(device, memory_format=memory_format)
        for name, parameter in self.named_parameters():
            if "lora_" in name:  # PEFT's DoRA calls .view on these weights
                parameter.data = parameter.data.contiguous()

    @property
    def denoiser(self) -> Any:
        """The diffusers denoiser: a UNet or a transformer."""
        return self.get_submodule(self.family.denoiser)

    @property
    def parts(self) -> dict[str, torch.nn.Module]:
        """The components of the pipeline that are trained, or that a ControlNet is beside."""
        others = (self.frozen_clip, self.control)
        return {name: child for name, child in self.named_children() if child not in others}

    @property
    def control(self) -> Any:
        """The ControlNet; None without one."""
        return getattr(self, CONTROLNET, None)

    @property
    def stored(self) -> dict[str, torch.nn.Module]:
        """What training stores: the components, or the ControlNet alone, by name."""
        return self.parts if self.control is None else {CONTROLNET: self.control}

    @property
    def text_encoders(self) -> list[torch.nn.Module]:
        """The trained CLIP encoders in the family's order; empty if they are not trained."""
        parts = self.parts
        return [parts[name] for name in self.family.clip_encoders if name in parts]

    @property
    def encodes_text(self) -> bool:
        """Whether the forward pass encodes captions, by trained or frozen encoders."""
        return bool(self.text_encoders) or len(self.frozen_clip) > 0

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by their keys in State."""
        return {
            lora.state_name(part, name): parameter
            for part, module in self.stored.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def constants(self) -> dict[str, NDArray[np.float32]]:
        """Persistent buffers, such as position embeddings, as float32 arrays by State's keys."""
        return {
            f"{prefix}.{name}": buffer.float().cpu().numpy()
            for part, root in self.stored.items()
            for prefix, module in root.named_modules(prefix=part)
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }

    def forward(
        self,
        noisy_latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """The denoiser's prediction [B, C, h, w].

        Args:
            noisy_latents: [B, C, h, w].
            timesteps: [B], in the family's units.
            conditioning: keyword to [B, ...], as Family.condition returns it. The text encoders
                encode `input_ids`; `inpainting` has the mask and the masked image's latents, and
                `control` what the ControlNet reads.
        """
        if "input_ids" in conditioning:
            conditioning = encode_in_step(self._encoding(noisy_latents.dtype), conditioning)
        if "inpainting" in conditioning:  # see families/inpainting_aesthetics.py
            noisy_latents = torch.cat([noisy_latents, conditioning["inpainting"]], dim=1)
        denoiser = self.denoiser
        if "control" in conditioning:
            control = conditioning["control"]
            denoiser = control_network.Controlled(self.family, denoiser, self.control, control)
        return self.family.predict(denoiser, noisy_latents, timesteps, conditioning)

    def _encoding(self, dtype: torch.dtype) -> Callable[[torch.Tensor], Encoded]:
        """The function that encodes token ids; frozen encoders return embeddings of `dtype`."""
        if trained := self.text_encoders:
            return partial(encode_ids, self.family, trained)
        return partial(self.frozen_clip.encode, self.family, dtype)


def prior_network(network: Network, settings: Train) -> Network:
    """The network that predicts the targets of prior rows, within `as_base`.

    With adapters it is the trained one. Full training changes all weights, so it is a copy with the
    base's weights in the compute dtype; frozen text encoders are shared.
    """
    if settings.method == "lora":
        return network
    copied = copy.deepcopy(network, {id(network.frozen_clip): network.frozen_clip})
    for part in copied.parts.values():
        torch.nn.Module.to(part, getattr(torch, settings.compute_dtype))
    return copied.requires_grad_(False)


@contextmanager
def as_base(network: Network) -> Iterator[None]:
    """Within the context, a network's adapters are switched off, and it has no dropout."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    was_training = network.training
    network.eval()
    for layer in layers:  # PEFT's `enable_adapters` would also change what requires gradients
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        network.train(was_training)


def load_frozen_clip(base: Base, dtype: str) -> list[torch.nn.Module]:
    """The CLIP encoders of a pipeline, in the family's order. Raises Refused."""
    names = base.family.clip_encoders
    return [loading.load_text_encoder(base, name, getattr(torch, dtype)) for name in names]


def _dtype(settings: Train) -> torch.dtype:
    """Dtype in which weights are loaded."""
    return torch.float32 if settings.method == "full" else getattr(torch, settings.compute_dtype)


def _precision(settings: Train) -> str | None:
    """Precision of the frozen base; None: the compute dtype."""
    return settings.lora.base_precision if settings.method == "lora" else None


def _assistant(job: TrainJob, base: Base) -> Mapping[str, lora.Adapter]:
    """The adapters that are part of the frozen denoiser."""
    return {} if job.assistant is None else read_scaled(job.assistant)[base.family.denoiser]


def has_dropout(network: torch.nn.Module) -> bool:
    """Whether a training forward pass draws dropout masks, in layers or in attention."""
    modules = list(network.modules())
    layers = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in modules)
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    return layers or any(getattr(config, "attention_dropout", 0) for config in configs)


def seed_dropout(seed: int, step: int, first: int, rank: int) -> None:
    """Seed PyTorch's default generators for the dropout masks of the next forward pass.

    Args:
        seed: seed of the run.
        step: number of the batch, from 0.
        first: index of the micro-batch's first sample within this rank's batch.
        rank: rank of this process; each rank draws other masks.
    """
    rng = generator(seed, Stream.DROPOUT, step, first, rank)
    torch.manual_seed(int(rng.integers(2**63)))


def sample_batch(
    base: Base,
    network: Network,
    size: tuple[int, int],
    *,
    text: bool,
    references: Sequence[tuple[int, int]] = (),
) -> StepBatch:
    """A batch of one zero sample, with the shapes of a run's latents and conditioning.

    Args:
        base: the pipeline; configs are enough.
        network: network of the run.
        size: (height, width) of the picture, in pixels.
        text: whether the step encodes token ids.
        references: (height, width) of each reference, in pixels.
    """
    family = network.family
    extras = ExtraInputs.from_config(network.denoiser.config)
    info = base.encoders
    rows, columns = (pixels // info["vae_scale_factor"] for pixels in size)
    latents = np.zeros((1, info["latent_channels"], rows, columns), np.float32)
    sample = LatentSample(latents[0], latents[0], bytes(32), size, (0, 0), size, False, (0,))
    pooled = info["pooled_dim"] and np.zeros(info["pooled_dim"], np.float32)
    ids = None
    if text:  # only CLIP encoders are trained; `info["tokens"]` of SD3 includes T5's tokens
        ids = np.zeros((len(family.clip_encoders), base.input_ids_length), np.int32)
    embeds = np.zeros((info["tokens"], info["prompt_dim"]), np.float32)
    conditioning = family.condition([Captioned(sample, embeds, pooled, ids)])
    if extras.inpainting:
        conditioning["inpainting"] = np.zeros((1, 1 + len(latents[0]), rows, columns), np.float32)
    if extras.aesthetic_score:
        conditioning["aesthetic_score"] = np.zeros(1, np.float32)
    for number, sides in enumerate(references):
        shape = (1, len(latents[0]), *(side // info["vae_scale_factor"] for side in sides))
        conditioning[f"{REFERENCE}{number}"] = np.zeros(shape, np.float32)
    if network.control is not None:
        pixels = np.zeros((1, 3, *size), np.float32)
        conditioning["control"] = pixels if family.control == "pixels" else latents
    return StepBatch(
        step=0,
        noisy_latents=latents,
        timesteps=base.schedule().timesteps(np.zeros(1, np.int32)),
        target=latents,
        weight=np.ones(1, np.float32),
        conditioning=conditioning,
        denominator=1,
    )


class FlopCounter:
    """Counts the FLOPs of a forward and a backward pass, without recomputation.

    It runs a copy of the network on `meta` tensors, so nothing is computed. The copy has no
    gradient checkpointing.

    Args:
        network: the trained network.
        devices: number of devices that share a batch.
    """

    def __init__(self, network: torch.nn.Module, devices: int = 1) -> None:
        self._devices = devices
        self.network = without_weights(network).float().train()
        for part in self.network.children():
            without_recomputation(part)
        self._counted: dict[object, int | None] = {}

    def of(self, batch: StepBatch) -> float | None:
        """FLOPs of a device's share of a batch; those of one sample are counted once per shape.

        None if an operation of the network does not run on `meta` tensors.
        """
        arrays = {"": batch.noisy_latents, **batch.conditioning}
        shapes = tuple((name, array.shape[1:]) for name, array in arrays.items())
        if shapes not in self._counted:
            try:
                self._counted[shapes] = self._count(batch)
            except RuntimeError as error:
                log.warning("FLOPs cannot be counted, so there is no MFU: %s", error)
                self._counted[shapes] = None
        per_sample = self._counted[shapes]
        return None if per_sample is None else per_sample * len(batch.timesteps) / self._devices

    def _count(self, batch: StepBatch) -> int:
        with FlopCounterMode(display=False) as counter:
            self._backward(batch)
        self.network.zero_grad(set_to_none=True)
        return int(counter.get_total_flops())

    def reached(self, batch: StepBatch) -> set[str]:
        """Names of the parameters on which the loss of a batch depends.

        Raises:
            RuntimeError: an operation of the network does not run on `meta` tensors.
        """
        self._backward(batch)
        reached = {name for name, p in self.network.named_parameters() if p.grad is not None}
        self.network.zero_grad(set_to_none=True)
        return reached

    def _backward(self, batch: StepBatch) -> None:
        """A forward and backward pass of one sample."""

        def empty(array: NDArray[Any]) -> torch.Tensor:
            dtype = torch.from_numpy(array[:0]).dtype
            return torch.empty((1, *array.shape[1:]), dtype=dtype, device="meta")

        conditioning = {name: empty(array) for name, array in batch.conditioning.items()}
        predicted = self.network(empty(batch.noisy_latents), empty(batch.timesteps), conditioning)
        predicted.square().mean().backward()


def without_weights(network: torch.nn.Module) -> torch.nn.Module:
    """A copy of a network on the `meta` device; no weights are copied."""
    kept: dict[int, Any] = {}
    for parameter in network.parameters():
        empty = torch.empty_like(parameter, device="meta")
        kept[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in network.buffers():
        kept[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(network, kept)


def load_network(
    drawing: Drawing,
    base: Base,
    dtype: torch.dtype,
    device: torch.device,
    text_dtype: str | None = None,
    text_encoders: Mapping[str, torch.nn.Module] = MappingProxyType({}),
) -> Network:
    """The frozen network of a drawing, in evaluation mode, on `device` in `dtype`.

    Adapters are merged in float32 before the weights are cast to `dtype`. On the CPU, weights that
    are stored in `dtype` and have no adapters are mapped from their files.

    Args:
        text_dtype: as GenerateJob.text_dtype; the base's text encoders then encode captions, unless
            the drawing has trained ones.
        text_encoders: the drawing's trained ones by name, if they are loaded: `load_text_encoders`.

    Raises:
        Refused: weights or adapters are missing, damaged or of another architecture.
    """
    family = base.family
    denoiser = _load_trained(drawing, base, dtype, without=family.clip_encoders)
    trained = text_encoders or load_text_encoders(drawing, base, dtype)
    frozen = list[torch.nn.Module]()
    if text_dtype is not None and not trained:
        frozen = load_frozen_clip(base, text_dtype)
    folder = drawing.parts.get(CONTROLNET)
    control = None if folder is None else control_network.load_control(base, Path(folder), dtype)
    network = Network(family, {**denoiser, **trained}, frozen, control)
    return network.to(device).requires_grad_(False).eval()


def load_text_encoders(
    drawing: Drawing, base: Base, dtype: torch.dtype
) -> dict[str, torch.nn.Module]:
    """The text encoders that were trained with a drawing, on the CPU; see load_network."""
    return _load_trained(drawing, base, dtype, without=(base.family.denoiser,))


def _load_trained(
    drawing: Drawing, base: Base, dtype: torch.dtype, without: Sequence[str]
) -> dict[str, torch.nn.Module]:
    def load(name: str, folder: Path, adapters: Mapping[str, Any]) -> Any:
        if name == base.family.denoiser:
            part = loading.load_denoiser(folder, dtype)
            # In float32 one by one: all of them would take twice the memory of `dtype`.
            stored = loading.open_weights(part, folder, torch.float32, None, 0) if adapters else {}
            merge_adapters(name, part, adapters, lambda weight: stored[weight][...])
            return part
        first = torch.float32 if adapters else dtype
        part = loading.load_text_encoder(base, name, first, folder)
        merge_adapters(name, part, adapters)
        # ModelMixin.to of diffusers logs a warning for every cast to half precision.
        return torch.nn.Module.to(part, dtype)

    return load_trained_components(drawing, base, load, without)
