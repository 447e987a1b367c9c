"""Encode images and captions with a pipeline's VAE and text encoders, without its denoiser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from configs.secrets import one_line
from runtimes.contract import WrongInput
from runtimes.data.padding import pad_rows
from runtimes.families import family_named
from runtimes.mindspore.device import choose, precision, start
from runtimes.mindspore.encode_token_ids import encode_ids, pooled_outputs
from runtimes.mindspore.load_diffusers_weights import load_text_encoder, load_vae, text_config
from runtimes.pipeline_folder.describe_encoders import (
    TEXT_BATCH,
    caption_limits,
    describe_encoders,
    vae_path,
)
from runtimes.process.job import EncodeJob
from runtimes.torch_models.tokenize import TextTokenizer, check_vocabulary

Float32 = NDArray[np.float32]


class Encoder:
    """Implements contract.PipelineEncoder.

    Args:
        model_folder: local diffusers pipeline folder of a family that this runtime supports.
        vae_folder: folder of an AutoencoderKL that replaces the pipeline's VAE.
        dtype: float32, bfloat16 or float16. As in diffusers, a VAE with `force_upcast` in its
            config computes in float32 where `dtype` is float16.
        flash: whether the VAE uses fused attention, see load_diffusers_weights.load_vae.
        images, captions: rows to which every batch is padded: MindSpore compiles a program for
            each shape.
        embeds: whether `texts` is called; else no text encoder is loaded, tokenizers alone.

    Raises:
        WrongInput: weights are missing, damaged or do not match their config.
    """

    def __init__(
        self,
        model_folder: Path,
        vae_folder: Path | None = None,
        dtype: ms.Type = ms.float32,
        *,
        flash: bool = True,
        images: int = 1,
        captions: int = 1,
        embeds: bool = True,
    ) -> None:
        self._image_rows, self._caption_rows = images, captions
        self.info = describe_encoders(model_folder, vae_folder)
        self.limits = caption_limits(model_folder)
        self._dtype = dtype
        self.vae = load_vae(vae_path(model_folder, vae_folder), dtype, flash=flash)
        self.tokenizers = dict[str, Any]()
        self._tokenizers = list[TextTokenizer]()
        self.text_encoders = dict[str, Any]()
        self._family = family_named(self.info["family"])
        for text_encoder in self._family.clip:
            part, name = text_encoder.component, text_encoder.tokenizer
            self.tokenizers[name] = tokenizer = _tokenizer(model_folder, name, part)
            self._tokenizers.append(
                TextTokenizer(self._family, text_encoder, tokenizer, tokenizer.model_max_length)
            )
            if embeds:
                self.text_encoders[part] = load_text_encoder(model_folder, part, dtype)

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        """Mean and log-variance [B, C, h, w] f32 of the VAE posterior, without latent scaling.

        Numerical overflow in half precision is returned as NaN or infinity.

        Args:
            pixels: images [B, 3, H, W] f32 in -1..1.
        """
        batch = Tensor(pad_rows(pixels, self._image_rows)).astype(self.vae.dtype)
        moments = self.vae.encode(batch, return_dict=False)[0].astype(ms.float32)[: len(pixels)]
        mean, logvar = ops.split(moments, moments.shape[1] // 2, 1)
        return mean.asnumpy(), np.clip(logvar.asnumpy(), -30.0, 20.0)  # as diffusers

    def texts(self, captions: Sequence[str]) -> tuple[Float32, Float32 | None]:
        """Prompt embeddings [K, T, D] f32 and pooled embeddings [K, P] f32 of K captions.

        SD 1 and 2 have no pooled embeddings: the second value is None.
        """
        ids = Tensor(pad_rows(self.input_ids(captions), self._caption_rows))
        models = list(self.text_encoders.values())
        penultimate = self._family.clip_states == "penultimate"
        pooling = pooled_outputs(self._family, models)
        states, pooled = encode_ids(penultimate, models, pooling, ids)
        count = len(captions)
        embeds = states.astype(ms.float32).asnumpy()[:count]
        return embeds, None if pooled is None else pooled.astype(ms.float32).asnumpy()[:count]

    def input_ids(self, captions: Sequence[str]) -> NDArray[np.int64]:
        """Token ids [K, n, T] int64 from each of n CLIP tokenizers, padded and truncated."""
        rows = [tokenizer.ids(captions)[0] for tokenizer in self._tokenizers]
        return np.stack(rows, axis=1)

    def token_counts(self, captions: Sequence[str]) -> dict[str, list[int]]:
        """Text encoder -> number of tokens of each caption before it is cut, special ones too."""
        return {t.encoder.component: t.counts(captions) for t in self._tokenizers}


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises WrongInput."""
    dtype = precision(job.dtype, choose(job.device)[0], "encode.dtype")
    start(job.device)
    given = (job.model_folder, job.vae_folder, dtype)
    return Encoder(*given, images=job.batch_size, captions=TEXT_BATCH, embeds=job.embeds)


def _tokenizer(model_folder: Path, name: str, part: str) -> Any:
    """A tokenizer; its vocabulary must fit its text encoder `part`."""
    from transformers import CLIPTokenizerFast

    folder = model_folder / name
    try:
        tokenizer = CLIPTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise WrongInput(f"{folder} does not load: {one_line(error)}") from None
    check_vocabulary(str(folder), tokenizer, text_config(model_folder, part).vocab_size)
    return tokenizer
