"""The trained network: a UNet and, where the step encodes captions, its CLIP text encoders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from configs.settings.train import Train
from runtimes.adapters.weight_names import state_name
from runtimes.check_support import check_family
from runtimes.families import Family, detect_family, repeated_blocks
from runtimes.families.inpainting_and_scores import ExtraInputs
from runtimes.mindspore.encode_token_ids import as_stored, encode_ids, pooled_outputs
from runtimes.mindspore.load_diffusers_weights import (
    load_denoiser,
    load_text_encoder,
    named_weights,
    random_init_denoiser,
)
from runtimes.mindspore.lora_injection import add_adapters
from runtimes.pipeline_folder.denoiser_config import job_config
from runtimes.process.job import TrainJob


class Network(nn.Cell):
    """A UNet with its text encoders.

    Parameter names begin with the component name, as the keys of State do.

    Args:
        family: of the pipeline.
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
        for part, cell in {**parts, **self.frozen_clip}.items():
            for name, parameter in named_weights(cell).items():
                parameter.name = f"{part}.{name}"
                parameter.requires_grad &= part in parts

    @classmethod
    def load(cls, job: TrainJob, settings: Train) -> Network:
        """Load the trained components.

        Trained weights are float32; base weights under adapters have the compute dtype.

        Raises:
            WrongInput: weights are missing, damaged or do not match their config.
        """
        folder = job.model_folder
        family = detect_family(folder)
        full = settings.method == "full"
        dtype = ms.float32 if full else getattr(ms, settings.compute_dtype)
        denoiser = folder / family.denoiser
        config = job_config(job, settings)
        if settings.init == "random":
            unet = random_init_denoiser(denoiser, config, settings.seed)
        else:
            unet = load_denoiser(denoiser, dtype, config, settings.seed)
        parts = {family.denoiser: unet}
        frozen = None
        if settings.train_text_encoder:
            names = family.clip_encoders
            parts |= {name: load_text_encoder(folder, name, dtype) for name in names}
        elif job.text_dtype is not None:
            frozen = load_frozen_clip(folder, family, job.text_dtype)
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

    def conditioning(self, given: dict[str, Any]) -> list[str]:
        """Names of a batch's conditioning, in the order of `construct`'s arguments."""
        inputs = list(self.family.inputs)
        if "input_ids" in given:
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
            state_name(part, name): parameter
            for part, cell in self.parts.items()
            for name, parameter in named_weights(cell).items()
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
            score, conditioning = conditioning[-1], conditioning[:-1]
        if self.inpaints:
            noisy_latents = ops.cat((noisy_latents, conditioning[-1]), axis=1)
        # `conditioning` is (input_ids, dropped, ...) with text encoders; without them it is
        # (prompt_embeds, ...) or (prompt_embeds, pooled_prompt_embeds, add_time_ids, ...).
        states, added = conditioning[0], None
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
            dtype: of the embeddings of frozen encoders.
        """
        states, pooled = encode_ids(self.penultimate, self.text_encoders, self.pooling, ids)
        if not self.trains_text:
            states = as_stored(states, dtype)
            pooled = None if pooled is None else as_stored(pooled, dtype)
        kept = (1 - dropped).astype(states.dtype)
        states = states * kept.reshape((-1, 1, 1))
        if pooled is None:
            return states, None
        return states, pooled * kept.reshape((-1, 1))


def load_frozen_clip(folder: Path, family: Family, dtype: str) -> dict[str, nn.Cell]:
    """The CLIP encoders of a pipeline folder, in the family's order. Raises WrongInput."""
    names = family.clip_encoders
    return {name: load_text_encoder(folder, name, getattr(ms, dtype)) for name in names}


def _recompute(part: nn.Cell) -> None:
    """Enable gradient checkpointing of a component's blocks."""
    blocks = repeated_blocks()
    for _, cell in part.cells_and_names():
        if type(cell).__name__ in blocks:
            cell.recompute()
