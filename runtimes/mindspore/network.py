"""The trained network: a UNet and, where the step encodes captions, its CLIP text encoders.

Low-rank adapters are added to mindone's models through mindone's PEFT. Text is encoded in a step as
in torch_models/vae_text_encoders.py. Micro-batches of a batch are MindSpore tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindone.peft import LoraConfig, inject_adapter_in_model
from mindone.peft.tuners.lora import LoraLayer
from mindspore import Parameter, Tensor, mint, nn, ops
from numpy.typing import NDArray

from configs.settings.train import Train
from configs.settings.train_parts import Lora
from runtimes.adapters import lora
from runtimes.contract import UNCAST, StepBatch
from runtimes.families import Family, repeated_blocks
from runtimes.families.inpainting_aesthetics import ExtraInputs
from runtimes.mindspore import load_diffusers_weights as loading
from runtimes.objective.training_objective import elementwise_loss
from runtimes.pipeline_folder.folder import Base, trained_config
from runtimes.process.job import TrainJob
from runtimes.registry import check_family

A = f".lora_A.{lora.ADAPTER}.weight"
B = f".lora_B.{lora.ADAPTER}.weight"


def add_adapters(
    part: str, model: nn.Cell, settings: Lora, seed: int, attention: Sequence[str] = ()
) -> None:
    """Freeze a component and add float32 LoRA adapters (arXiv 2106.09685) to its layers.

    The adapted model initially computes the same as the base: `up` is zero.

    Args:
        part: component name, such as `unet`.
        model: the component, changed in place.
        settings: rank, alpha, dropout and targets.
        seed: initializes `down`.
        attention: name suffixes of attention layers (families/family.py).

    Raises:
        Refused: the targets match no layer, or one target's name is a suffix of another's.
    """
    chosen = lora.choose_layers(part, _layers(model), settings, attention)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=lora.alpha(settings),
        lora_dropout=settings.dropout,
        target_modules=chosen,
    )
    inject_adapter_in_model(config, model, adapter_name=lora.ADAPTER)
    adapted = {name for name, cell in model.cells_and_names() if isinstance(cell, LoraLayer)}
    lora.check_unambiguous(part, chosen, adapted)
    for name, parameter in model.parameters_and_names():
        parameter.requires_grad = name.endswith((A, B))
        if name.endswith(A):
            stored = lora.state_name(part, name.removesuffix(A))
            loading.set_parameter(parameter, lora.initial_down(seed, stored, parameter.shape))
        elif name.endswith(B):
            loading.set_parameter(parameter, parameter.asnumpy() * 0)


def merge_adapters(part: str, model: nn.Cell, adapters: Mapping[str, lora.Adapter]) -> None:
    """Merge adapters into the float32 weights of a component.

    Args:
        part: component name, such as `unet`.
        model: the component, changed in place.
        adapters: stored layer name to adapter.

    Raises:
        Refused: the component lacks an adapted layer, or the layer has another shape.
    """
    parameters = loading.named_weights(model)
    weights = {name: parameters[f"{name}.weight"] for name in _layers(model)}
    for name, merged in lora.merged_weights(part, adapters, weights, lambda w: w.asnumpy()):
        loading.set_parameter(weights[name], merged)


def _layers(model: nn.Cell) -> dict[str, lora.Layer]:
    return {name: kind for name, cell in model.cells_and_names() if (kind := _kind(cell))}


def _kind(cell: nn.Cell) -> lora.Layer | None:
    if isinstance(cell, (mint.nn.Linear, nn.Dense)):
        return "linear"
    return "conv" if isinstance(cell, (mint.nn.Conv2d, nn.Conv2d)) else None


def pooled_outputs(family: Family, models: Sequence[Any]) -> tuple[str | None, ...]:
    """Family.pooled_outputs of CLIP encoders; empty without them."""
    projecting = [hasattr(model, "text_projection") for model in models]
    return family.pooled_outputs(projecting) if projecting else ()


def encode_ids(
    penultimate: bool,
    models: Sequence[Any],
    pooling: Sequence[str | None],
    positions: int,
    ids: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Hidden states [B, T, D] and pooled embeddings [B, P] or None of token ids.

    Args:
        penultimate: True returns the hidden states before the last layer of all encoders, and the
            pooled embeddings of one encoder (SDXL). False returns the states after the final norm
            of the only encoder (Stable Diffusion 1 and 2).
        models: n CLIP encoders.
        pooling: `pooled_outputs` of the encoders.
        positions: tokens that an encoder reads at once.
        ids: [B, n, T], one row of tokens per encoder, or of its chunks (tokenize.py).
    """
    chunks = max(1, ids.shape[2] // positions)
    if not penultimate:
        states = models[0](_by_chunk(ids[:, 0], chunks), return_dict=False)[0]
        return join_chunks(states, chunks), None
    all_states = []
    pooled = None
    for row, model in enumerate(models):
        tokens = _by_chunk(ids[:, row], chunks)
        output = model(tokens, output_hidden_states=True, return_dict=False)
        all_states.append(join_chunks(output[-1][-2], chunks))
        if pooling[row] is not None:
            pooled = output[0] if chunks == 1 else output[0][::chunks]
    return ops.concat(all_states, -1), pooled


def _by_chunk(ids: Tensor, chunks: int) -> Tensor:
    return ids if chunks == 1 else ids.reshape((ids.shape[0] * chunks, ids.shape[1] // chunks))


def join_chunks(states: Tensor, chunks: int) -> Tensor:
    """As torch_models/vae_text_encoders.py:join_chunks; the states themselves of one chunk."""
    if chunks == 1:
        return states
    rows, length, width = states.shape
    states = states.reshape((rows // chunks, chunks, length, width))
    inner = states[:, :, 1:-1].reshape((rows // chunks, chunks * (length - 2), width))
    return ops.concat((states[:, 0, :1], inner, states[:, -1, -1:]), 1)


def as_stored(embeds: Tensor, dtype: ms.Type) -> Tensor:
    """Embeddings of frozen encoders, without gradient, with the bits that a shard would store."""
    return ops.stop_gradient(embeds).astype(ms.bfloat16).astype(dtype)


class Network(nn.Cell):
    """A UNet with its text encoders.

    Parameter names begin with the component name, as the keys of State do.

    Args:
        family: family of the pipeline.
        parts: component name, such as `unet`, to cell.
        frozen_clip: CLIP encoders by component name, if the step runs them untrained.
    """

    def __init__(
        self,
        family: Family,
        parts: dict[str, nn.Cell],
        frozen_clip: Mapping[str, nn.Cell] | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        check_family("mindspore", family.name)
        self.family = family
        self.parts = parts
        self.pooled = "pooled_prompt_embeds" in family.inputs
        self.penultimate = family.clip_states == "penultimate"
        self.denoiser = parts[family.denoiser]
        extras = ExtraInputs.from_config(self.denoiser.config)
        self.inpaints = extras.inpainting
        self.has_aesthetic_score = extras.aesthetic_score
        names = [name for name in family.clip_encoders if name in parts]
        self.frozen_clip = frozen_clip or {}
        encoders = list(self.frozen_clip.values()) or [parts[name] for name in names]
        self.encodes_text = bool(encoders)
        self.trains_text = bool(names)
        self.text_encoders = nn.CellList(encoders, auto_prefix=False)
        self.pooling = pooled_outputs(family, encoders)
        self.positions = encoders[0].config.max_position_embeddings if encoders else 0
        for part, cell in {**parts, **self.frozen_clip}.items():
            for name, parameter in loading.named_weights(cell).items():
                parameter.name = f"{part}.{name}"
                parameter.requires_grad &= part in parts

    @classmethod
    def load(cls, job: TrainJob, base: Base, settings: Train) -> Network:
        """Load the trained components.

        Trained weights are float32; base weights under adapters have the compute dtype.

        Raises:
            Refused: weights are missing, damaged or do not match their config.
        """
        family = base.family
        full = settings.method == "full"
        dtype = ms.float32 if full else getattr(ms, settings.compute_dtype)
        denoiser = base.denoiser_folder
        config = trained_config(base.denoiser, settings, job.denoiser_config)
        if settings.init == "random":
            unet = loading.random_init_denoiser(denoiser, config, settings.seed)
        else:
            unet = loading.load_denoiser(denoiser, dtype, config, settings.seed)
        parts = {family.denoiser: unet}
        frozen = None
        if settings.train_text_encoder:
            names = family.clip_encoders
            parts |= {name: loading.load_text_encoder(base, name, dtype) for name in names}
        elif job.text_dtype is not None:
            frozen = load_frozen_clip(base, job.text_dtype)
        for name, part in parts.items():
            if not full:
                add_adapters(name, part, settings.lora, settings.seed, family.attention_layers)
            if settings.gradient_checkpointing == "blocks":
                _recompute(part)
        return cls(family, parts, frozen)

    def set_train(self, mode: bool = True) -> Network:
        super().set_train(mode)
        for cell in self.frozen_clip.values():
            cell.set_train(False)
        return self

    def train(self, mode: bool = True) -> None:
        """Set training mode, as PyTorch's `train`."""
        self.set_train(mode)

    def cast(self, dtype: ms.Type) -> None:
        """Cast all weights to a dtype, in place."""
        for part in self.parts.values():
            for parameter in part.get_parameters():
                parameter.set_dtype(dtype)

    def conditioning(self, arrays: dict[str, Any]) -> list[str]:
        """Names of a batch's conditioning, in the order of `construct`'s arguments."""
        inputs = list(self.family.inputs)
        if "input_ids" in arrays:
            others = [name for name in inputs if not name.endswith("_embeds")]
            inputs = ["input_ids", "dropped", *others]
        if self.inpaints:
            inputs.append("inpainting")
        if self.has_aesthetic_score:
            inputs.append("aesthetic_score")
        return inputs

    def trained(self) -> dict[str, Parameter]:
        """Trained parameters by their keys in State."""
        return {
            lora.state_name(part, name): parameter
            for part, cell in self.parts.items()
            for name, parameter in loading.named_weights(cell).items()
            if parameter.requires_grad
        }

    def receives_gradient(self, name: str) -> bool:
        """Whether the loss depends on the trained parameter of a State key.

        The last layers of a text encoder with penultimate hidden states receive no gradient.
        """
        part, _, rest = name.partition(".")
        if not part.startswith("text_encoder"):
            return True
        layers = self.parts[part].config.num_hidden_layers
        pooled = self.pooling[self.family.clip_encoders.index(part)]
        return not rest.startswith(self.family.unused_text_weights(pooled, layers))

    def construct(self, noisy_latents: Tensor, timesteps: Tensor, *conditioning: Tensor) -> Tensor:
        """The UNet's prediction [B, C, h, w].

        Args:
            noisy_latents: [B, C, h, w].
            timesteps: [B].
            conditioning: [B, ...] each, in the order of `self.conditioning`.
        """
        score = None
        if self.has_aesthetic_score:
            score = conditioning[-1]
            conditioning = conditioning[:-1]
        if self.inpaints:
            noisy_latents = ops.cat((noisy_latents, conditioning[-1]), axis=1)
        # `conditioning` is (input_ids, dropped, ...) with text encoders; without them it is
        # (prompt_embeds, ...) or (prompt_embeds, pooled_prompt_embeds, add_time_ids, ...).
        states = conditioning[0]
        added = None
        if self.encodes_text:
            states, pooled = self.encode(conditioning[0], conditioning[1], noisy_latents.dtype)
        elif self.pooled:
            pooled = conditioning[1]
        if self.pooled:
            added = {"text_embeds": pooled, "time_ids": conditioning[2]}
        return self.denoiser(
            noisy_latents,
            timesteps,
            states,
            class_labels=score,
            added_cond_kwargs=added,
            return_dict=False,
        )[0]

    def encode(self, ids: Tensor, dropped: Tensor, dtype: ms.Type) -> tuple[Tensor, Tensor | None]:
        """Prompt embeddings [B, T, D] and pooled embeddings [B, P] or None of token ids.

        Args:
            ids: [B, n, T], one row of tokens per text encoder.
            dropped: [B]; 1 replaces the embeddings by zeros.
            dtype: dtype of the embeddings of frozen encoders.
        """
        about = (self.penultimate, self.text_encoders, self.pooling, self.positions)
        states, pooled = encode_ids(*about, ids)
        if not self.trains_text:
            states = as_stored(states, dtype)
            pooled = None if pooled is None else as_stored(pooled, dtype)
        kept = (1 - dropped).astype(states.dtype)
        states = states * kept.reshape((-1, 1, 1))
        return states, None if pooled is None else pooled * kept.reshape((-1, 1))


def load_frozen_clip(base: Base, dtype: str) -> dict[str, nn.Cell]:
    """The CLIP encoders of a pipeline, in the family's order. Raises Refused."""
    names = base.family.clip_encoders
    return {name: loading.load_text_encoder(base, name, getattr(ms, dtype)) for name in names}


def prior_network(network: Network, job: TrainJob, base: Base, settings: Train) -> Network:
    """As torch_models/network.py's `prior_network`: the network of a base's predictions."""
    if settings.method == "lora":
        return network
    loaded = Network.load(replace(job, text_dtype=None), base, settings)
    copied = Network(network.family, loaded.parts, network.frozen_clip)
    if settings.compute_dtype != "float32":
        copied.cast(getattr(ms, settings.compute_dtype))
    for parameter in copied.get_parameters():
        parameter.requires_grad = False
    return copied


@contextmanager
def as_base(network: Network) -> Iterator[None]:
    """Within the context, a network's adapters are switched off, and it has no dropout."""
    layers = [cell for _, cell in network.cells_and_names() if isinstance(cell, LoraLayer)]
    network.set_train(False)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        network.set_train(True)


def _recompute(part: nn.Cell) -> None:
    """Enable gradient checkpointing of a component's blocks."""
    blocks = repeated_blocks()
    for _, cell in part.cells_and_names():
        if type(cell).__name__ in blocks:
            cell.recompute()


def losses_of(
    prediction: Tensor, target: Tensor, delta: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Mean loss per sample [B] f32 of [B, C, h, w] arrays; `elementwise_loss` has the others."""
    squares = ops.square(prediction.astype(ms.float32) - target)
    return elementwise_loss(squares, delta, mask).mean((1, 2, 3))


class Inputs:
    """One micro-batch: samples `first` to `end` (exclusive) of a batch.

    Args:
        batch: this rank's batch on the host.
        network: orders the conditioning.
        dtype: dtype of the latents and of all conditioning that is not in contract.UNCAST.
        first: index of the first sample.
        end: index after the last sample; None is the end of the batch.

    Attributes:
        seen: arguments of the network: noisy latents [B, C, h, w], timesteps [B] and the
            conditioning [B, ...] in the order of Network.conditioning.
        target: [B, C, h, w] f32, the objective's regression target.
        share: [B] f32, each sample's loss weight divided by the global batch size.
        delta, mask: StepBatch's huber_delta and loss_mask, or None.
        has_prior: whether a row's target is a base's prediction.
    """

    def __init__(
        self,
        batch: StepBatch,
        network: Network,
        dtype: ms.Type,
        first: int = 0,
        end: int | None = None,
    ) -> None:
        part = slice(first, end)
        self.first = first
        # Cast on the host: a cast on the device would wait behind the previous step's operators.
        kind = ms.dtype_to_nptype(dtype)
        latents = tensor(batch.noisy_latents[part].astype(kind))
        arrays = batch.conditioning
        conditioning = [
            tensor(arrays[name][part] if name in UNCAST else arrays[name][part].astype(kind))
            for name in network.conditioning(arrays)
        ]
        self.seen = (latents, tensor(batch.timesteps[part]), *conditioning)
        self.target = tensor(batch.target[part])
        self.share = tensor(batch.weight[part] / np.float32(batch.denominator))
        rows = (batch.huber_delta, batch.loss_mask, batch.is_prior)
        parts = [None if array is None else tensor(array[part]) for array in rows]
        self.delta, self.mask, self._is_prior = parts
        self.has_prior = batch.is_prior is not None and bool(batch.is_prior[part].any())

    def errors(self, network: Network) -> Tensor:
        """Mean loss per sample [B] f32, without loss weights."""
        return losses_of(network(*self.seen), self.target, self.delta, self.mask)

    def set_prior_targets(self, base: Network) -> None:
        """Set the targets of prior rows to a base's prediction."""
        assert self._is_prior is not None
        rows = self._is_prior.reshape((-1, 1, 1, 1))
        prediction = ops.stop_gradient(base(*self.seen)).astype(ms.float32)
        self.target = ops.where(rows, prediction, self.target)

    def to_device(self) -> Inputs:
        """Start an asynchronous copy to the NPU; returns self."""
        self.seen = tuple(array.move_to("Ascend", blocking=False) for array in self.seen)
        for name in ("target", "share", "delta", "mask", "_is_prior"):
            if (array := getattr(self, name)) is not None:
                setattr(self, name, array.move_to("Ascend", blocking=False))
        return self


def micro_batches(
    batch: StepBatch, size: int | None, network: Network, dtype: ms.Type
) -> Iterator[Inputs]:
    """Yield micro-batches of at most `size` samples; None is the whole batch."""
    for first, end in batch.micro_batches(size):
        yield Inputs(batch, network, dtype, first, end)


def tensor(array: NDArray[Any]) -> Tensor:
    """A tensor with a contiguous copy of an array."""
    return Tensor(np.ascontiguousarray(array))
