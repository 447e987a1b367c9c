"""What tells one model family from another: each family's file fills in this class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from artifacts.latents import LatentSample, stack_rows
from runtimes.contract import WrongInput

Conditioning = dict[str, NDArray[Any]]
ClipStates = Literal["last", "penultimate"]


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder of a pipeline, and what of its output the denoiser is conditioned on."""

    component: str  # text_encoder, text_encoder_2, ...: its folder, too
    classes: tuple[str, ...]  # of transformers, that it may be of
    #: A CLIP encoder may be trained, and its token ids are stored; a T5 is never trained.
    kind: Literal["clip", "t5"] = "clip"
    states: bool = True  # whether its hidden states are part of prompt_embeds
    pooled: str | None = None  # name in its output of what is part of pooled_prompt_embeds
    tokens: int | None = None  # that a T5's pipeline truncates captions to by default
    optional: bool = False  # whether a pipeline may be without it

    @property
    def tokenizer(self) -> str:
        """The pipeline's component that tokenizes for it."""
        return self.component.replace("text_encoder", "tokenizer")


@dataclass(frozen=True)
class Captioned:
    """A sample with what the caption that was chosen for it is conditioned on.

    With `input_ids`, the CLIP encoders run in the step. Embeddings are then left out, except for a
    family with a T5: its rows of prompt_embeds are below CLIP's.
    """

    sample: LatentSample
    prompt_embeds: NDArray[Any] | None  # [T, D], f32 or bf16 bits (u16)
    pooled_prompt_embeds: NDArray[Any] | None  # [P], as well
    input_ids: NDArray[np.int32] | None = None  # [n, T], a row for each CLIP encoder
    dropped: bool = False  # with input_ids: the embeddings are to be zeros


@dataclass(frozen=True)
class KohyaNames:
    """The names that kohya's sd-scripts give to a family's adapters."""

    text_prefixes: Mapping[str, str]  # component -> prefix, such as lora_te1
    #: (layer's name in diffusers, denoiser's config) -> its name there, with dots.
    layer: Callable[[str, Mapping[str, Any]], str]


class Family:
    """One architecture: its classes, text encoders, conditioning and layers.

    Class attributes are data that other code reads; methods are what a family may do otherwise.
    """

    name: ClassVar[str]
    #: diffusers classes, as model_index.json names them: of text to image first, of inpainting.
    pipelines: ClassVar[tuple[str, ...]]
    denoiser: ClassVar[str]  # the component that predicts, and its folder
    denoiser_class: ClassVar[str]  # of diffusers
    blocks: ClassVar[tuple[str, ...]]  # classes that repeat in the denoiser
    text_encoders: ClassVar[tuple[TextEncoder, ...]]
    #: Which hidden states of CLIP: after the final norm, or those before the last layer.
    clip_states: ClassVar[ClipStates] = "penultimate"
    #: Conditioning that the denoiser takes, by the keywords of `condition`.
    inputs: ClassVar[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
    #: Ends of the names of attention's layers, which get adapters by default.
    attention_layers: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    #: Constructor arguments of the pipeline that its folder does not give.
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    #: Whether the guidance scale is an input of the denoiser, in place of a pass without caption.
    guidance_input: ClassVar[bool] = False
    kohya: ClassVar[KohyaNames | None] = None

    @property
    def clip(self) -> tuple[TextEncoder, ...]:
        """The CLIP encoders, in the order of their rows in input_ids."""
        return tuple(encoder for encoder in self.text_encoders if encoder.kind == "clip")

    @property
    def clip_encoders(self) -> tuple[str, ...]:
        """Components whose token ids are stored, and which may be trained."""
        return tuple(encoder.component for encoder in self.clip)

    @property
    def t5(self) -> TextEncoder | None:
        """The T5, if the family has one; a pipeline may be without it."""
        return next((encoder for encoder in self.text_encoders if encoder.kind == "t5"), None)

    def zero_empty_prompt(self, index: Mapping[str, Any]) -> bool:
        """Whether zeros stand for the empty caption, by the pipeline's model_index.json."""
        return False

    def prompt_width(self, config: Mapping[str, Any]) -> int:
        """Numbers per token that a denoiser of a family with a T5 takes, by its config."""
        return int(config["joint_attention_dim"])

    def latent_multiple(self, config: Mapping[str, Any]) -> int:
        """What the sides of latents must be multiples of, by the denoiser's config."""
        return 1

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """Channels of the latents that a denoiser of this config makes."""
        return int(config["in_channels"])

    def sample_size(self, config: Mapping[str, Any]) -> int:
        """Sides of the latents that are drawn where no size is asked for, by the config."""
        return int(config["sample_size"])

    def condition(self, samples: Sequence[Captioned]) -> Conditioning:
        """A batch's conditioning: keyword -> [B, ...].

        `prompt_embeds` [B, T, D] and, if the family pools, `pooled_prompt_embeds` [B, P]. Where
        captions are encoded in the step: `input_ids` [B, n, T], `dropped` [B] f32 (1 where the
        embeddings are to be zeros) and T5's `t5_prompt_embeds` [B, T5, D].

        Raises:
            WrongInput: the latents lack what the family needs.
        """
        if samples[0].input_ids is None:
            embeds = (name for name in self.inputs if name.endswith("_embeds"))
            return {name: stack(name, samples) for name in embeds}
        found: Conditioning = {
            "input_ids": stack("input_ids", samples),
            "dropped": np.array([sample.dropped for sample in samples], np.float32),
        }
        if self.t5 is not None:
            clip_rows = found["input_ids"].shape[-1] if any(e.states for e in self.clip) else 0
            found["t5_prompt_embeds"] = stack("prompt_embeds", samples)[:, clip_rows:]
        return found

    def drawing_condition(self, size: tuple[int, int], guidance_scale: float) -> dict[str, Any]:
        """What a picture of (height, width) pixels is conditioned on beside text: keyword -> [...].

        An array of one picture, without a batch dimension, in float32.
        """
        return {}

    def arguments(self, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        """The denoiser's keywords, of a batch's conditioning on the device."""
        raise NotImplementedError

    def predict(
        self, denoiser: Any, noisy_latents: Any, timesteps: Any, conditioning: Mapping[str, Any]
    ) -> Any:
        """The denoiser's prediction [B, C, h, w] for noisy latents [B, C, h, w].

        Args:
            timesteps: [B]; of a flow, sigma times the number of timesteps.
            conditioning: as `condition`, embedded, on the device.
        """
        arguments = self.arguments(conditioning)
        return denoiser(noisy_latents, timestep=timesteps, **arguments, return_dict=False)[0]

    def sigmas(self, steps: int) -> NDArray[np.float64] | None:
        """The noise levels [N] that the diffusers pipeline gives its scheduler; None: it asks."""
        return None

    def pipeline_latents(self, noise: Any) -> Any:
        """Start noise [B, C, h, w] as the diffusers pipeline takes it."""
        return noise

    def unused_text_weights(self, component: str, layers: int) -> tuple[str, ...]:
        """Beginnings of the names of a CLIP encoder's weights that no gradient reaches.

        Args:
            layers: number of the encoder's layers.
        """
        encoder = next(e for e in self.clip if e.component == component)
        if encoder.pooled is not None or self.clip_states == "last":
            return ()
        last = f"text_model.encoder.layers.{layers - 1}."
        return (last, "text_model.final_layer_norm.", "text_projection.")


def stack(name: str, samples: Sequence[Captioned]) -> NDArray[Any]:
    """An attribute of all samples [B, ...]. Raises WrongInput if one lacks it."""
    rows = [getattr(sample, name) for sample in samples]
    if any(row is None for row in rows):
        raise WrongInput(f"the latents have no {name}, which this model needs: encode again")
    return stack_rows(rows)
