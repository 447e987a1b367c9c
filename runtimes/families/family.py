"""The interface of a model family; each family's file has a subclass.

FLUX, FLUX.2, Qwen-Image and Z-Image share transformers over 2 x 2 patches of latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import LatentSample, stack_rows
from configs.errors import Refused
from runtimes.objective.noise_schedule import ResolutionShift

if TYPE_CHECKING:
    from PIL.Image import Image

Conditioning = dict[str, NDArray[Any]]
ClipStates = Literal["last", "penultimate"]


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder of a pipeline, and the outputs that condition the denoiser."""

    component: str  # text_encoder, text_encoder_2, ...: also its folder
    classes: tuple[str, ...]  # accepted classes of transformers
    #: CLIP encoders are trainable, so their token ids are stored; a T5 or LLM is not trainable.
    kind: Literal["clip", "t5", "llm"] = "clip"
    states: bool = True  # whether prompt_embeds contains its hidden states
    pooled: str | None = None  # its output that pooled_prompt_embeds contains: pooled_outputs
    tokens: int | None = None  # T5, LLM: maximum caption length, the default of encode_prompt
    call_tokens: int | None = None  # that of the pipeline's call, where it is shorter
    optional: bool = False  # whether a pipeline may lack it
    layers: tuple[int, ...] = (-1,)  # LLM: indices of its hidden states, concatenated along D
    prefix: int = 0  # LLM, lengths vary: the template's first tokens, which prompt_embeds lacks
    padded: bool = True  # whether prompt_embeds has states of padding; else lengths vary
    #: The pipeline's component that prepares references, which the LLM sees beside the caption.
    processor: str | None = None

    @property
    def tokenizer(self) -> str:
        """The pipeline's component that is its tokenizer."""
        return self.component.replace("text_encoder", "tokenizer")


@dataclass(frozen=True)
class Captioned:
    """A sample with the conditioning of its chosen caption.

    With `input_ids`, the step runs the CLIP encoders and the sample has no embeddings. A family
    with a T5 is the exception: the rows of prompt_embeds after CLIP's rows are T5's.

    Where lengths vary, rows of zeros follow the first `tokens` rows of prompt_embeds.
    """

    sample: LatentSample
    prompt_embeds: NDArray[Any] | None  # [T, D], f32 or bf16 bits (u16)
    pooled_prompt_embeds: NDArray[Any] | None  # [P], f32 or bf16 bits (u16)
    input_ids: NDArray[np.int32] | None = None  # [n, T], one row per CLIP encoder
    dropped: bool = False  # with input_ids: replace the embeddings by zeros
    tokens: int | None = None  # rows of prompt_embeds that are not padding; None: all
    references: tuple[NDArray[Any], ...] = ()  # the VAE's mean [C, h, w] of each; f32 or bf16 bits


class SeenPrompt(str):
    """A prompt with the references that a text encoder sees beside it.

    Args:
        names: of the references, which tell equal ones; a prompt's `repr` has them.
        pictures: results of `Family.condition_picture`.
    """

    names: tuple[str, ...]
    pictures: tuple[Image, ...]

    def __new__(cls, text: str, names: Sequence[str], pictures: Sequence[Image]) -> SeenPrompt:
        prompt = super().__new__(cls, text)
        prompt.names = tuple(names)
        prompt.pictures = tuple(pictures)
        return prompt

    def __repr__(self) -> str:
        return f"{super().__repr__()} with {self.names}"


def pictures_beside(prompt: str) -> tuple[Image, ...]:
    """What a text encoder sees beside a prompt."""
    return prompt.pictures if isinstance(prompt, SeenPrompt) else ()


def worded(prompt: str, text: str) -> str:
    """Another text beside the same references."""
    if not isinstance(prompt, SeenPrompt):
        return text
    return SeenPrompt(text, prompt.names, prompt.pictures)


@dataclass(frozen=True)
class KohyaLayer:
    """The place of a diffusers layer in sd-scripts: a layer, or rows of a fused layer's output."""

    layer: str  # name in sd-scripts, with dots
    first: int = 0  # first row of the fused layer's output
    rows: int | None = None  # all rows of the fused layer's output; None: the layer is not fused


@dataclass(frozen=True)
class KohyaBase:
    """The names of a base in headers of adapters, by which web UIs show adapters beside it."""

    version: str  # the trainer's, ss_base_model_version: sdxl_base_v1-0
    architecture: str  # Stability AI's modelspec.architecture: stable-diffusion-xl-v1-base
    implementation: str  # modelspec.implementation: the code that defines the architecture


@dataclass(frozen=True)
class KohyaNames:
    """The names of a family's adapters in kohya's layout, and what reads them."""

    text_prefixes: Mapping[str, str]  # component -> prefix, such as lora_te1
    #: (layer name in diffusers, denoiser's config) -> the layer's place in the trainer; None: none.
    place: Callable[[str, Mapping[str, Any]], KohyaLayer | None]
    #: (denoiser's config, scheduler's prediction type) -> the base's names.
    base: Callable[[Mapping[str, Any], str], KohyaBase]
    trainer: str = "kohya's sd-scripts"
    network_module: str = "networks.lora"  # the trainer's module
    ignored: str = "layers outside of blocks"  # by the trainer
    in_comfyui: bool = True  # whether ComfyUI maps these names; else it reads diffusers' layout
    in_invokeai: bool = True  # the same of InvokeAI


class Family:
    """A model architecture: classes, text encoders, conditioning and layers.

    Subclasses set the class attributes and override methods where they differ.
    """

    name: ClassVar[str]
    #: diffusers' pipeline classes in model_index.json: first text-to-image, then inpainting.
    pipelines: ClassVar[tuple[str, ...]]
    #: diffusers' class that draws from prompts alone, where `pipelines[0]` does not; else None.
    plain_pipeline: ClassVar[str | None] = None
    denoiser: ClassVar[str]  # the denoiser's component and folder: unet, transformer
    denoiser_class: ClassVar[str]  # diffusers' class of the denoiser
    vae_class: ClassVar[str] = "AutoencoderKL"  # diffusers' class of the VAE
    default_scaling_factor: ClassVar[float] = 0.18215  # for a VAE whose config lacks it
    draws_latents: ClassVar[bool] = True  # training draws from the VAE's posterior; else its mean
    blocks: ClassVar[tuple[str, ...]]  # classes of the denoiser's repeated blocks
    #: Classes whose consecutive equal blocks runtime jax may run as a loop. The first argument
    #: is hidden_states, the output the next block's input; further arguments are the same for all.
    #: With two outputs, encoder_hidden_states is the second argument and the first output.
    chained_blocks: ClassVar[tuple[str, ...]] = ()
    #: Parts of names of the blocks' layers that `train.lora.base_precision` leaves as they are.
    unquantized: ClassVar[tuple[str, ...]] = ()
    text_encoders: ClassVar[tuple[TextEncoder, ...]]
    #: CLIP hidden states: `last` is after the final norm, `penultimate` before the last layer.
    clip_states: ClassVar[ClipStates] = "penultimate"
    #: Keywords of `condition` that the denoiser uses.
    inputs: ClassVar[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
    #: Name suffixes of the attention layers, the default targets of adapters.
    attention_layers: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    #: Constructor arguments of the pipeline that its folder lacks.
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    #: Whether the guidance scale is a denoiser input, `guidance` [B], which replaces the
    #: unconditional pass.
    guidance_input: ClassVar[bool] = False
    #: Defaults of the call of diffusers' pipeline, for models without a recipe.
    num_inference_steps: ClassVar[int] = 50
    guidance_scale: ClassVar[float] = 5.0
    #: Arguments of the pipeline's call by which it takes a reference as it is.
    reference_arguments: ClassVar[Mapping[str, Any]] = {}
    kohya: ClassVar[KohyaNames | None] = None
    #: Most references of a sample, which `predict` gets as conditioning `reference_0`,
    #: `reference_1`... [B, C, h, w] f32, scaled as latents are and without noise; 0: none.
    max_references: ClassVar[int] = 0
    #: What the family's ControlNet of diffusers reads of a control picture: its pixels [3, H, W]
    #: in 0..1, or the VAE's scaled latents [C, h, w]. None: there is no such network here.
    control: ClassVar[Literal["pixels", "latents"] | None] = None
    #: diffusers' class of the ControlNet, and the pipeline that draws with it.
    control_class: ClassVar[str] = ""
    control_pipeline: ClassVar[str] = ""
    control_argument: ClassVar[str] = "image"  # of the pipeline's call
    #: Kind of device -> why the denoiser does not run on it.
    refused_devices: ClassVar[Mapping[str, str]] = {}

    @property
    def key_facts(self) -> dict[str, str]:
        """What the keys of trained weights and of losses contain about the family, if anything."""
        return {} if self.draws_latents else {"posterior": "mean"}

    @property
    def clip(self) -> tuple[TextEncoder, ...]:
        """The CLIP encoders, in the order of their rows in input_ids."""
        return tuple(encoder for encoder in self.text_encoders if encoder.kind == "clip")

    @property
    def clip_encoders(self) -> tuple[str, ...]:
        """The trainable text encoders: components whose token ids are stored."""
        return tuple(encoder.component for encoder in self.clip)

    @property
    def frozen_text(self) -> TextEncoder | None:
        """The T5 or LLM, if any. A pipeline may lack it."""
        return next((encoder for encoder in self.text_encoders if encoder.kind != "clip"), None)

    @property
    def varying_lengths(self) -> bool:
        """Whether a caption's embeddings are as long as the caption, and the denoiser masks."""
        return self.frozen_text is not None and not self.frozen_text.padded

    @property
    def sees_references(self) -> bool:
        """Whether a caption's embeddings depend on the references beside it."""
        return self.frozen_text is not None and self.frozen_text.processor is not None

    def pooled_outputs(self, projecting: Sequence[bool]) -> tuple[str | None, ...]:
        """Each CLIP encoder's output that pooled_prompt_embeds contains, or None.

        Args:
            projecting: whether each encoder is a CLIPTextModelWithProjection.
        """
        return tuple(encoder.pooled for encoder in self.clip)

    def chat(self, tokenizer: Any, caption: str) -> str:
        """The text that the LLM reads: the caption in the pipeline's chat template."""
        return caption

    def chat_with_pictures(self, tokenizer: Any, caption: str, pictures: int) -> str:
        """As `chat`, with a place for each of the pictures that the LLM sees."""
        raise NotImplementedError

    def condition_picture(self, image: Image) -> Image:
        """An RGB reference of any size as the LLM sees it."""
        raise NotImplementedError

    def zero_empty_prompt(self, index: Mapping[str, Any]) -> bool:
        """Whether embeddings of zeros replace the empty caption's, by model_index.json."""
        return False

    def text_tokens(self, config: Mapping[str, Any]) -> int:
        """Maximum caption length of a T5 or LLM, by the denoiser's config."""
        assert self.frozen_text is not None and self.frozen_text.tokens is not None
        return self.frozen_text.tokens

    def prompt_width(self, config: Mapping[str, Any]) -> int:
        """Width D of prompt_embeds of a family with a T5 or LLM, by the denoiser's config."""
        return int(config["joint_attention_dim"])

    def takes_guidance(self, config: Mapping[str, Any]) -> bool:
        """Whether the denoiser, by its config, uses its guidance input."""
        return self.guidance_input

    def is_distilled(self, index: Mapping[str, Any]) -> bool:
        """Whether the pipeline ignores the guidance scale, by its model_index.json."""
        return False

    def draws_in_few_steps(
        self, index: Mapping[str, Any], config: Mapping[str, Any], scheduler: Mapping[str, Any]
    ) -> bool:
        """Whether the model is distilled to few steps, where its configs tell.

        Args:
            index: model_index.json.
            config: the denoiser's.
            scheduler: the scheduler's.
        """
        return self.is_distilled(index)

    def guidance_weight(self, sampler: Mapping[str, Any]) -> float:
        """Weight w of guidance: prediction = unconditional + w (conditional - unconditional).

        At most 1 is no guidance (arXiv 2207.12598). The `guidance_scale` of a family with a
        guidance input is that input. Such a family has `true_cfg_scale`, as FluxPipeline has.

        Args:
            sampler: as GenerateJob.sampler.
        """
        if self.guidance_input:
            return float(sampler.get("true_cfg_scale", 1.0))
        return float(sampler["guidance_scale"])

    def is_guided(self, sampler: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
        """Whether a step applies classifier-free guidance.

        Args:
            info: description of the pipeline's encoders, `Base.encoders`.
        """
        return self.guidance_weight(sampler) > 1 and not info.get("distilled", False)

    def guide(self, unconditional: Any, conditional: Any, weight: Any) -> Any:
        """Classifier-free guidance (arXiv 2207.12598), as the pipeline computes it.

        Args:
            unconditional: the denoiser's output [B, C, h, w] without caption; any library's array.
            conditional: the denoiser's output [B, C, h, w] with caption.
            weight: from `guidance_weight`.
        """
        return unconditional + weight * (conditional - unconditional)

    def latent_statistics(self, vae: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """`latents_mean` and `latents_std` of the VAE's latents; each may be None.

        They have one value per channel, or one for each latent pixel of a channel's p x p patch,
        ordered (C, p, p).

        Args:
            vae: folder of the VAE; its weights may be absent.
            config: config of the VAE.
        """
        return {name: config.get(name) for name in ("latents_mean", "latents_std")}

    def vae_layout(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """(latent channels, image pixels per latent pixel) of a VAE, by its config."""
        return config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1)

    def encode_pictures(self, vae: Any, pixels: Any) -> tuple[Any, Any]:
        """Mean and log-variance [B, C, h, w] of the VAE's posterior of pixels [B, 3, H, W]."""
        posterior = vae.encode(pixels).latent_dist
        return posterior.mean, posterior.logvar

    def decode_latents(self, vae: Any, latents: Any) -> Any:
        """Pixels [B, 3, H, W] in -1..1 of the VAE's latents [B, C, h, w]."""
        return vae.decode(latents, return_dict=False)[0]

    def make_constants(self, denoiser: Any) -> None:
        """Make tensors of a denoiser built on `meta` that are neither its weights nor buffers."""

    def latent_multiple(self, config: Mapping[str, Any]) -> int:
        """The divisor of the latents' height and width, by the denoiser's config.

        For a transformer it is the side of a patch: a token has its square of latent pixels, and
        the shift of noise levels counts such tokens.
        """
        return 1

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """Number of latent channels C that the denoiser predicts, by its config."""
        return int(config["in_channels"])

    def sample_size(self, config: Mapping[str, Any]) -> int:
        """Default height and width of sampled latents, by the denoiser's config."""
        return int(config["sample_size"])

    def condition(self, samples: Sequence[Captioned], guidance_scale: float = 1.0) -> Conditioning:
        """A batch's conditioning: keyword -> array [B, ...].

        `prompt_embeds` [B, T, D] and, if it is in `inputs`, `pooled_prompt_embeds` [B, P]. With
        text encoders in the step: `input_ids` [B, n, T], `dropped` [B] f32 (1: replace the
        embeddings by zeros) and, with a T5, `t5_prompt_embeds` [B, T5, D]. With a guidance input:
        `guidance` [B] f32. With varying lengths: `prompt_embeds_mask` [B, T] f32 (1: no padding).

        Args:
            guidance_scale: the training's; an input of some denoisers.

        Raises:
            Refused: the latents lack an array.
        """
        conditioning: Conditioning = {}
        if self.guidance_input:
            conditioning["guidance"] = np.full(len(samples), guidance_scale, np.float32)
        if samples[0].input_ids is None:
            embeds = (name for name in self.inputs if name.endswith("_embeds"))
            conditioning |= {name: stack_arrays(name, samples) for name in embeds}
            if self.varying_lengths:
                length = conditioning["prompt_embeds"].shape[1]
                mask = token_mask([item.tokens for item in samples], length)
                conditioning["prompt_embeds_mask"] = mask
            return conditioning
        ids = stack_arrays("input_ids", samples)
        conditioning["input_ids"] = ids
        conditioning["dropped"] = np.array([sample.dropped for sample in samples], np.float32)
        if self.frozen_text is not None:
            clip_rows = ids.shape[-1] if any(encoder.states for encoder in self.clip) else 0
            conditioning["t5_prompt_embeds"] = stack_arrays("prompt_embeds", samples)[:, clip_rows:]
        return conditioning

    def drawing_condition(self, size: tuple[int, int], guidance_scale: float) -> dict[str, Any]:
        """Conditioning of a sampled image in addition to text: keyword -> f32 array, no batch axis.

        Args:
            size: (height, width) in pixels.
            guidance_scale: guidance scale of the sampler; an input of some denoisers.
        """
        return {"guidance": np.array(guidance_scale, np.float32)} if self.guidance_input else {}

    def arguments(self, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the denoiser's forward method.

        Args:
            conditioning: as `condition`, with embeddings, on the device.
        """
        raise NotImplementedError

    def predict(
        self, denoiser: Any, noisy_latents: Any, timesteps: Any, conditioning: Mapping[str, Any]
    ) -> Any:
        """The denoiser's prediction [B, C, h, w] for noisy latents [B, C, h, w].

        Args:
            timesteps: [B]; for a flow, sigma times the number of training timesteps.
            conditioning: as `condition`, with embeddings, on the device. Families with
                `max_references` read the latents of `reference_latents`.
        """
        arguments = self.arguments(conditioning)
        return denoiser(noisy_latents, timestep=timesteps, **arguments, return_dict=False)[0]

    def append_references(
        self, tokens: Any, positions: Any, references: Sequence[Any]
    ) -> tuple[Any, Any]:
        """A picture's tokens and position ids, followed by those of its references.

        Args:
            tokens: [B, N, D].
            positions: [N, P] or, with a batch axis, [B, N, P].
            references: scaled latents of each reference [B, C, h, w]; sizes may differ.
        """
        raise NotImplementedError

    def reading(self, denoiser: Any, references: Sequence[Any]) -> AbstractContextManager[None]:
        """Within the context, a pipeline's calls of the denoiser read references.

        The pipeline itself draws from text alone; diffusers' pipelines have one set of references
        for all pictures of a batch, and other limits of their size.

        Args:
            references: scaled latents of each reference [B, C, h, w], on the device.
        """
        raise NotImplementedError

    def empty_control(self, denoiser: Any, scale: int, layers: Mapping[str, int]) -> Any:
        """A new ControlNet of a denoiser's architecture, without the denoiser's weights.

        Its output layers are zero, so that it has no effect at first.

        Args:
            denoiser: the denoiser, perhaps on `meta`.
            scale: image pixels per latent pixel.
            layers: `num_layers` and `num_single_layers`, where they are not the default.
        """
        raise NotImplementedError

    def control_residuals(
        self, network: Any, control: Any, scale: float, inputs: Sequence[Any], named: Any
    ) -> dict[str, Any]:
        """Keyword arguments by which a call of the denoiser takes a ControlNet's outputs.

        Args:
            network: the ControlNet.
            control: [B, 3, H, W] or [B, C, h, w], as `control`.
            scale: factor of the outputs, diffusers' `conditioning_scale`.
            inputs: positional arguments of the call of the denoiser.
            named: its keyword arguments.
        """
        raise NotImplementedError

    def sigmas(self, steps: int) -> NDArray[np.float64] | None:
        """The `sigmas` [N] that the diffusers pipeline passes to set_timesteps, or None."""
        return None

    def sampling_shift(self, shift: ResolutionShift, tokens: int, steps: int) -> float:
        """The `mu` that the pipeline passes to a scheduler with dynamic shifting.

        Args:
            shift: shift of the scheduler's config.
            tokens: tokens of the image.
            steps: steps of sampling.
        """
        return shift.mu_of(tokens)

    def pipeline_arguments(
        self, pipe: Any, options: Mapping[str, Any], count: int
    ) -> dict[str, Any]:
        """The keyword arguments of a diffusers pipeline for shared names, such as guidance_scale.

        Args:
            pipe: the pipeline.
            count: number of prompts.
            options: `guidance_scale` and, where it is set, `negative_prompt` (a list), and others.
        """
        return dict(options)

    def pipeline_latents(self, noise: Any) -> Any:
        """Initial noise [B, C, h, w] in the layout of the pipeline's `latents` argument."""
        return noise

    def unused_text_weights(self, pooled: str | None, layers: int) -> tuple[str, ...]:
        """Name prefixes of a CLIP encoder's weights without gradient.

        Args:
            pooled: the encoder's entry of `pooled_outputs`.
            layers: number of its layers.
        """
        if pooled is not None or self.clip_states == "last":
            return ()
        last = f"text_model.encoder.layers.{layers - 1}."
        return (last, "text_model.final_layer_norm.", "text_projection.")


#: The keyword of a reference's latents in conditioning, before its number from 0.
REFERENCE = "reference_"


def reference_latents(conditioning: Mapping[str, Any]) -> list[Any]:
    """The latents [B, C, h, w] of a batch's references, in order: `reference_0`, ..."""
    found: list[Any] = []
    while (name := f"{REFERENCE}{len(found)}") in conditioning:
        found.append(conditioning[name])
    return found


def token_mask(counts: Sequence[int | None], length: int) -> NDArray[np.float32]:
    """1 for the first `counts[i]` of a row's `length` tokens (None: all), else 0: [B, T] f32."""
    ends = np.array([length if count is None else count for count in counts])
    return (np.arange(length) < ends[:, None]).astype(np.float32)


def stack_arrays(name: str, samples: Sequence[Captioned]) -> NDArray[Any]:
    """An attribute of all samples, stacked [B, ...]. Raises Refused if it is None."""
    rows = [getattr(sample, name) for sample in samples]
    if any(row is None for row in rows):
        raise Refused(f"the latents have no {name}, which this model needs: encode again")
    return stack_rows(rows)


PATCH = 2  # latent pixels along one side of a patch
#: Name suffixes of the attention layers of an image stream, and of a text stream beside it.
TWO_STREAMS = (*Family.attention_layers, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
#: Why a transformer does not run on Gaudi.
FLOAT64_ROPE = {"hpu": "its rotary embeddings are computed in float64, which Gaudi lacks"}
COMPLEX_ROPE = {"hpu": "its rotary embeddings are complex numbers, which Gaudi lacks"}


class PatchTransformer(Family):
    """A flow's transformer whose patches are its pipeline's, not its own, so its config lacks them.

    `in_channels` of the config counts the values of a patch.
    """

    denoiser = "transformer"

    def latent_multiple(self, config: Mapping[str, Any]) -> int:
        return PATCH

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return int(config["in_channels"]) // PATCH**2

    def sample_size(self, config: Mapping[str, Any]) -> int:
        """The pipelines draw 1024 x 1024 pixels by default."""
        return 128

    def sigmas(self, steps: int) -> NDArray[np.float64] | None:
        return np.linspace(1.0, 1 / steps, steps)

    def reference_positions(self, latents: Any, number: int) -> Any:
        """Position ids [N, P] of a reference's patches.

        Args:
            latents: [B, C, h, w] of the reference.
            number: of the reference, from 0.
        """
        raise NotImplementedError

    def append_references(
        self, tokens: Any, positions: Any, references: Sequence[Any]
    ) -> tuple[Any, Any]:
        if not references:
            return tokens, positions
        import torch  # runtimes without PyTorch import this module too

        more = [self.reference_positions(*pair) for pair in zip(references, count(), strict=False)]
        appended = torch.cat(more).to(positions.dtype)
        if positions.ndim == 3:
            appended = appended.expand(len(positions), -1, -1)
        patches = [pack(latents).to(tokens.dtype) for latents in references]
        return torch.cat([tokens, *patches], 1), torch.cat([positions, appended], -2)

    @contextmanager
    def reading(self, denoiser: Any, references: Sequence[Any]) -> Iterator[None]:
        own = denoiser.forward

        def forward(hidden_states: Any, img_ids: Any, **named: Any) -> tuple[Any, ...]:
            tokens, places = self.append_references(hidden_states, img_ids, references)
            predicted, *more = own(hidden_states=tokens, img_ids=places, **named)
            return predicted[:, : hidden_states.shape[1]], *more

        with calling(denoiser, forward):
            yield


def chat_of_qwen3(tokenizer: Any, caption: str, *, enable_thinking: bool) -> str:
    """A caption in the chat template of a Qwen3 tokenizer, up to where the answer begins."""
    messages = [{"role": "user", "content": caption}]
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
    )
    return text


def pack(latents: Any) -> Any:
    """Latents [B, C, h, w] as patches [B, h w / 4, 4 C]; a patch's values are ordered (C, 2, 2)."""
    batch, channels, height, width = latents.shape
    rows = height // PATCH
    columns = width // PATCH
    patches = latents.reshape(batch, channels, rows, PATCH, columns, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)


def unpack(patches: Any, latents: Any) -> Any:
    """The inverse of `pack`: patches [B, h w / 4, 4 C] in the shape of latents [B, C, h, w].

    Patches of references may follow them, and are cut off.
    """
    rows, columns = (size // PATCH for size in latents.shape[-2:])
    values = patches[:, : rows * columns].reshape(len(patches), rows, columns, -1, PATCH, PATCH)
    return values.permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)


@contextmanager
def calling(module: Any, function: Any) -> Iterator[None]:
    """Within the context, calls of a module run `function`, with the module's own hooks."""
    hooked = vars(module).get("forward")  # of offloaded layers
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if hooked is not None:
            module.forward = hooked
