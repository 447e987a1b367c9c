"""VAE and text encoders of a pipeline: captions and pictures to latents and embeddings.

A step encodes token ids to the embeddings of each family's pipeline. Frozen text encoders are a T5,
or a language model (LLM) that reads a chat template. An `Encoder` has the VAE and the text encoders
of a pipeline, without its denoiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from artifacts.latent_shards import LatentScale
from configs.errors import Refused
from configs.secrets import one_line
from runtimes.data.loader import pad_rows
from runtimes.families import Family, TextEncoder
from runtimes.families.family import pictures_beside
from runtimes.pipeline_folder.folder import Base, vae_overflows
from runtimes.pipeline_folder.weights import weight_variant
from runtimes.torch_models.activation_memory import Send, sender
from runtimes.torch_models.loading import SAFE, empty_text_encoder, load_text_encoder
from runtimes.torch_models.offload import offload_layers
from runtimes.torch_models.qwen_pictures import load_image_processor, read_with_pictures
from runtimes.torch_models.tokenize import (
    TextTokenizer,
    check_vocabulary,
    load_tokenizer,
    weigh_states,
)

Encoded = tuple[torch.Tensor | None, torch.Tensor | None]
#: Every attention kernel of PyTorch, which then chooses; kernels of NPU and HPU are OVERRIDEABLE.
KERNELS = list(SDPBackend.__members__.values())


def encode_ids(family: Family, models: Sequence[Any], ids: torch.Tensor) -> Encoded:
    """Encode token ids with CLIP text encoders.

    Args:
        family: selects the hidden layer, and the encoders that have pooled embeddings.
        models: n CLIP encoders.
        ids: [B, n, T], one row of tokens per encoder, or of its chunks (tokenize.py).

    Returns:
        Hidden states [B, T, D] and pooled embeddings [B, P], both concatenated over encoders along
        the last dimension as in the diffusers pipeline's `encode_prompt`; None where the family
        has none.
    """
    states = []
    pooled = []
    penultimate = family.clip_states == "penultimate"
    names = family.pooled_outputs([hasattr(model, "text_projection") for model in models])
    for row, (encoder, model, name) in enumerate(zip(family.clip, models, names, strict=True)):
        tokens = ids[:, row].long()
        chunks = max(1, tokens.shape[1] // model.config.max_position_embeddings)
        if chunks > 1:
            tokens = tokens.unflatten(1, (chunks, -1)).flatten(0, 1)
        output = model(tokens, output_hidden_states=penultimate)
        if encoder.states:
            own = output.hidden_states[-2] if penultimate else output.last_hidden_state
            states.append(own if chunks == 1 else join_chunks(own, chunks))
        if name is not None:
            own = getattr(output, name)
            pooled.append(own if chunks == 1 else own[::chunks])
    return _concatenate(states), _concatenate(pooled)


def join_chunks(states: torch.Tensor, chunks: int) -> torch.Tensor:
    """States [B, 2 + chunks (T - 2), D] of captions, from those [B chunks, T, D] of their chunks.

    Marks between chunks are left out.
    """
    states = states.unflatten(0, (-1, chunks))
    inner = states[:, :, 1:-1].flatten(1, 2)
    return torch.cat([states[:, 0, :1], inner, states[:, -1, -1:]], dim=1)


def join_t5(states: torch.Tensor | None, t5_states: torch.Tensor) -> torch.Tensor:
    """Concatenate CLIP's states [B, T, D] and T5's [B, T5, D'] along the sequence dimension.

    CLIP's states are padded to D' with zeros, as in StableDiffusion3Pipeline.encode_prompt.
    """
    if states is None:
        return t5_states
    padded = torch.nn.functional.pad(states, (0, t5_states.shape[-1] - states.shape[-1]))
    return torch.cat([padded, t5_states], dim=1)


class FrozenTextEncoders(torch.nn.ModuleList):
    """A base's CLIP encoders, for latents that store token ids; they stay in evaluation mode."""

    def train(self, mode: bool = True) -> FrozenTextEncoders:
        return super().train(False)

    @torch.no_grad()
    def encode(self, family: Family, dtype: torch.dtype, ids: torch.Tensor) -> Encoded:
        """As `encode_ids`, with the bits that a latent shard would store: rounded to bfloat16.

        Args:
            family: family of the pipeline.
            dtype: dtype of the embeddings.
            ids: [B, n, T].
        """
        # The encode stage has no autocast, and chooses no kernel: `train.attention` may name one
        # that float32 encoders lack.
        with _without_autocast(ids.device.type), sdpa_kernel(KERNELS):
            states, pooled = encode_ids(family, self, ids)
        return _as_stored(states, dtype), _as_stored(pooled, dtype)


def encode_in_step(
    encode: Callable[[torch.Tensor], Encoded], conditioning: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Replace the `input_ids` of a batch's conditioning by embeddings.

    Args:
        encode: token ids [B, n, T] to hidden states [B, T, D] and pooled embeddings [B, P].
        conditioning: `input_ids` [B, n, T], `dropped` [B] (1 replaces the embeddings by zeros) and,
            with a frozen T5, `t5_prompt_embeds` [B, T5, D]; other keys are passed through.

    Returns:
        `prompt_embeds` [B, T, D] and, where the family has them, `pooled_prompt_embeds` [B, P].
    """
    arrays = dict(conditioning)
    ids = arrays.pop("input_ids")
    dropped = arrays.pop("dropped")
    t5_states = arrays.pop("t5_prompt_embeds", None)
    states, pooled = encode(ids)
    if t5_states is not None:
        states = join_t5(states, t5_states if states is None else t5_states.to(states.dtype))
    assert states is not None, "each family has CLIP's states or a T5"
    kept = (1 - dropped).to(states.dtype)
    arrays["prompt_embeds"] = states * kept[:, None, None]
    if pooled is not None:
        arrays["pooled_prompt_embeds"] = pooled * kept[:, None]
    return arrays


def _as_stored(embeds: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if embeds is None else embeds.to(torch.bfloat16).to(dtype)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast; `meta` and torchax's devices have none."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else nullcontext()


def _concatenate(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    if not tensors:
        return None
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


class FrozenText(TextTokenizer):
    """A pipeline's frozen text encoder, with its tokenizer.

    Args:
        base: the pipeline.
        encoder: that of its family.
        tokenizer: a tokenizer of transformers.
        model: the encoder.

    Raises:
        OSError, ValueError: the processor of an encoder that sees references does not load.
    """

    def __init__(self, base: Base, encoder: TextEncoder, tokenizer: Any, model: Any) -> None:
        super().__init__(base, encoder, tokenizer)
        self.model = model
        self._image_processor = None
        if encoder.processor is not None:
            self._image_processor = load_image_processor(base.part(encoder.processor))

    def states_with_pictures(
        self, caption: str, pictures: Sequence[Image.Image], send: Send
    ) -> torch.Tensor:
        """Prompt embeddings [T, D] of a caption, uncut as in the pipeline, and its references.

        Args:
            pictures: results of `Family.condition_picture`.
        """
        text = self._family.chat_with_pictures(self._tokenizer, caption, len(pictures))
        with self._tokenizing:
            about = (self._tokenizer, self._image_processor)
            inputs = read_with_pictures(*about, [text], [pictures])
        sent = {name: send(tensor.numpy()) for name, tensor in inputs.items()}
        states: torch.Tensor = self.model.base_model(**sent, use_cache=False).last_hidden_state
        return states[0, self.encoder.prefix :]

    def kept(self, mask: NDArray[Any]) -> list[NDArray[Any]] | None:
        """Places of the tokens to store of each caption; None: all, with those of padding."""
        if self.encoder.padded:
            return None
        # Padding is before the tokens where the tokenizer's `padding_side` is left.
        return [np.flatnonzero(row)[self.encoder.prefix :] for row in mask]


def frozen_states(
    encoder: TextEncoder, model: Any, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Hidden states [K, T, D] of token ids and their mask [K, T].

    As in the pipelines, T5 gets no mask: its states of padding depend on the caption.
    """
    if encoder.kind == "t5":
        return model(ids)[0]
    inner = encoder.layers != (-1,)
    # The language model's own head would compute logits, which nobody needs.
    output = model.base_model(
        input_ids=ids, attention_mask=mask, output_hidden_states=inner, use_cache=False
    )
    if not inner:  # the states of all layers would be the largest part of the memory
        return output.last_hidden_state
    return torch.cat([output.hidden_states[index] for index in encoder.layers], dim=-1)


Float32 = NDArray[np.float32]
#: Prompt embeddings of K captions: [K, T, D] or, where lengths vary, K of [T, D].
Embeds = Float32 | list[Float32]


class Encoder:
    """VAE, tokenizers and text encoders of a diffusers pipeline, on one device.

    Args:
        base: the pipeline.
        device: PyTorch device, already initialized.
        send: copies a host array [B, ...] to the device; None is a plain copy.
        fetch: copies a device tensor [B, ...] to the host.
        dtype: float32, bfloat16 or float16. As in diffusers, a VAE with `force_upcast` in its
            config computes in float32 where `dtype` is float16.
        embeds: whether `texts` is called; else no text encoder is loaded, tokenizers alone.
        text_precision: as EncodeJob.text_precision.
        offload: as EncodeJob.offload, for devices in offload.OFFLOADING.

    Raises:
        Refused: weights are missing, damaged or do not match their config.
    """

    def __init__(
        self,
        base: Base,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        send: Send | None = None,
        fetch: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu,
        embeds: bool = True,
        text_precision: str | None = None,
        offload: bool = False,
    ) -> None:
        self.info = base.encoders
        self.limits = base.caption_limits
        self.family = base.family
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype)
        self._text_precision = text_precision
        self._offload = offload
        self._send = sender(self.device) if send is None else send
        self._fetch = fetch
        vae_class = getattr(diffusers, self.family.vae_class)
        options = {"variant": weight_variant(base.vae), **SAFE}
        try:
            self._vae_dtype = vae_dtype(vae_class.load_config(base.vae), self.dtype)
            vae = vae_class.from_pretrained(base.vae, torch_dtype=self._vae_dtype, **options)
            self.vae = vae.to(self.device).eval().requires_grad_(False)
            self._load_texts(base, embeds)
        except (OSError, RuntimeError, ValueError) as error:
            raise Refused(
                f"model {base.folder}: its encoders do not load: {one_line(error)}"
            ) from None

    def _load_texts(self, base: Base, embeds: bool) -> None:
        self._clip: list[tuple[TextTokenizer, Any]] = []
        for encoder in self.family.clip:
            tokenizer, model = self._load_text(encoder, base, embeds)
            self._clip.append((TextTokenizer(base, encoder, tokenizer), model))
        self._frozen: FrozenText | None = None
        frozen = self.family.frozen_text
        counts = embeds or self.family.sees_references  # of tokens, for which no model is loaded
        if counts and frozen is not None and frozen.component in self.limits:
            self._frozen = FrozenText(base, frozen, *self._load_text(frozen, base, embeds))

    def _load_text(self, encoder: TextEncoder, base: Base, embeds: bool) -> tuple[Any, Any]:
        """The tokenizer and the model."""
        if embeds:
            precision = None if encoder.kind == "clip" else self._text_precision
            model = load_text_encoder(base, encoder.component, self.dtype, precision=precision)
            model.requires_grad_(False)
            if self._offload:
                offload_layers(model, self.device)
            else:
                model.to(self.device)
        else:  # on `meta`, for its vocabulary's size
            model = empty_text_encoder(base, encoder.component)
        tokenizer = load_tokenizer(base, encoder)
        check_vocabulary(encoder.tokenizer, tokenizer, model.config.get_text_config().vocab_size)
        return tokenizer, model

    @torch.no_grad()
    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        """Mean and log-variance [B, C, h, w] f32 of the VAE posterior, without latent scaling.

        Numerical overflow in half precision is returned as NaN or infinity.

        Args:
            pixels: images [B, 3, H, W] f32 in -1..1.
        """
        batch = self._send(pixels).to(self._vae_dtype)
        mean, logvar = self.family.encode_pictures(self.vae, batch)
        return self._host(mean), self._host(logvar)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode scaled latents [B, C, h, w] to images [B, 3, H, W] f32 in -1..1."""
        scale, shift = (
            torch.from_numpy(array).to(latents.device, self._vae_dtype)
            for array in LatentScale.from_info(self.info).unscaled(tuple(latents.shape[1:]))
        )
        latents = latents.to(self._vae_dtype) * scale + shift
        return self.family.decode_latents(self.vae, latents).float()

    @torch.no_grad()
    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[Embeds, Float32 | None]:
        """Prompt embeddings and pooled embeddings [K, P] f32 of K captions.

        SD 1 and 2 have no pooled embeddings: the second value is None. The embeddings equal those
        of the diffusers pipeline's `encode_prompt`, without the zeros that SD3 appends where T5 is
        absent; the data loader appends them.

        Args:
            captions: K prompts; a SeenPrompt has references beside it.
            clip: CLIP encoders that replace the pipeline's, such as trained ones.
        """
        if self.family.sees_references:
            return self.texts_with_pictures(captions, [*map(pictures_beside, captions)]), None
        states = None
        pooled = None
        kept = None
        if self._clip:
            models = clip or [model for _, model in self._clip]
            states, pooled = encode_ids(self.family, models, self._send(self.input_ids(captions)))
        if self._frozen is not None:
            frozen, kept = self._frozen_states(captions)
            states = join_t5(states, frozen)
        assert states is not None, "each family has CLIP's states or a frozen text encoder"
        weighed = self.weighed(self._host(states), captions)
        return unpadded(weighed, kept), None if pooled is None else self._host(pooled)

    @torch.no_grad()
    def texts_with_pictures(
        self, captions: Sequence[str], pictures: Sequence[Sequence[Image.Image]]
    ) -> list[Float32]:
        """Prompt embeddings, K of [T, D], of K captions with the references of each.

        Each is encoded alone, as in the pipeline: its bits do not depend on the others.

        Args:
            captions: K prompts.
            pictures: K lists of results of `Family.condition_picture`, any of which may be empty.
        """
        frozen = self._frozen
        assert frozen is not None, "a family whose text encoder sees references has one"
        pairs = zip(captions, pictures, strict=True)
        return [self._host(frozen.states_with_pictures(*pair, self._send)) for pair in pairs]

    def weighed(self, states: Float32, captions: Sequence[str]) -> Float32:
        """The states [K, T, D] of captions, by the weights in them."""
        tokenizers = [tokenizer for tokenizer, _ in self._clip]
        widths = [model.config.hidden_size for _, model in self._clip]
        return weigh_states(states, captions, tokenizers, widths)

    def t5(self, captions: Sequence[str]) -> Float32 | None:
        """T5's hidden states [K, T, D] f32, or None where the pipeline has no T5."""
        with torch.no_grad():
            return None if self._frozen is None else self._host(self._frozen_states(captions)[0])

    def _frozen_states(
        self, captions: Sequence[str]
    ) -> tuple[torch.Tensor, list[NDArray[Any]] | None]:
        """Hidden states [K, T, D], and the rows to keep of each caption."""
        assert self._frozen is not None
        ids, mask = self._frozen.ids(captions)
        inputs = self._send(ids), self._send(mask)
        states = frozen_states(self._frozen.encoder, self._frozen.model, *inputs)
        return states, self._frozen.kept(mask)

    def _host(self, tensor: torch.Tensor) -> Float32:
        return self._fetch(tensor.float()).numpy()

    def input_ids(self, captions: Sequence[str]) -> NDArray[np.int64]:
        """Token ids [K, n, T] int64 from each of n CLIP tokenizers, padded and truncated."""
        if not self._clip:
            return np.zeros((len(captions), 0, 0), np.int64)
        return np.stack([tokenizer.ids(captions)[0] for tokenizer, _ in self._clip], axis=1)

    def token_counts(self, captions: Sequence[str]) -> dict[str, list[int]]:
        """Text encoder -> number of tokens of each caption before it is cut, special ones too."""
        frozen = [] if self._frozen is None else [self._frozen]
        tokenizers = [*(tokenizer for tokenizer, _ in self._clip), *frozen]
        return {t.encoder.component: t.counts(captions) for t in tokenizers}


class PaddedEncoder(Encoder):
    """An encoder that pads every batch to one size, so that one program encodes all of them.

    The bits of an image then do not depend on the size of its batch.

    Args:
        images: rows of a batch of images.
        captions: rows of a batch of captions.
        save_compiled: saves newly compiled programs to the cache.
        more: as Encoder.
    """

    def __init__(
        self,
        base: Base,
        *,
        images: int,
        captions: int,
        save_compiled: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> None:
        super().__init__(base, **more)
        self._image_rows = images
        self._caption_rows = captions
        self._save_compiled = save_compiled

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        mean, logvar = super().images(pad_rows(pixels, self._image_rows))
        self._save_compiled()
        return mean[: len(pixels)], logvar[: len(pixels)]

    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[Embeds, Float32 | None]:
        if self.family.sees_references:  # each is encoded alone
            return super().texts(captions)
        padding = [""] * (self._caption_rows - len(captions))
        states, pooled = super().texts([*captions, *padding], clip)
        return states[: len(captions)], None if pooled is None else pooled[: len(captions)]


def unpadded(states: Float32, kept: list[NDArray[Any]] | None) -> Embeds:
    """States [K, T, D], or the rows `kept[i]` of each caption."""
    if kept is None:
        return states
    return [rows[places] for rows, places in zip(states, kept, strict=True)]


def vae_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Compute dtype of a VAE: float32 in place of float16 if its config has `force_upcast`."""
    return torch.float32 if vae_overflows(config, float16=dtype == torch.float16) else dtype
