"""Encode pictures and captions with a pipeline's VAE and text encoders, without its UNet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.utils.logging import disable_progress_bar

from runtimes.base import WrongInput
from runtimes.encoders import describe_encoders, vae_path
from runtimes.torch.device import choose_device, make_deterministic
from runtimes.torch.models import weight_variant

Float32 = NDArray[np.float32]
#: Tokens that spell any text: CLIP's byte alphabet. Fewer means that a vocabulary was not read.
LEAST_VOCABULARY = 256
#: Nothing is fetched and nothing is unpickled.
SAFE = {"local_files_only": True, "use_safetensors": True}


class Encoder:
    """The encoders of a Stable Diffusion 1, 2 or XL folder on one device.

    Args:
        model_folder: local diffusers pipeline folder.
        vae_folder: an AutoencoderKL in place of the pipeline's own.
        device: auto (CUDA when there is one), cpu, cuda or cuda:N.
        dtype: float32, bfloat16 or float16; a VAE that says `force_upcast` stays float32 in half
            precision, as in diffusers.

    Raises:
        WrongInput: weights are missing or do not fit, or the device is not there.
    """

    def __init__(
        self,
        model_folder: Path,
        vae_folder: Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        self.info = describe_encoders(model_folder, vae_folder)
        make_deterministic()  # a rebuilt shard must have the bytes it had
        self.device, self.dtype = choose_device(device), getattr(torch, dtype)
        try:
            self._load_vae(vae_path(model_folder, vae_folder))
            self._load_texts(model_folder)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise WrongInput(f"model {model_folder}: its encoders do not load: {reason}") from None

    def _load_vae(self, folder: Path) -> None:
        upcast = self.dtype == torch.float16 and AutoencoderKL.load_config(folder).get(
            "force_upcast", True
        )
        self._vae_dtype = torch.float32 if upcast else self.dtype
        vae = AutoencoderKL.from_pretrained(
            folder, torch_dtype=self._vae_dtype, variant=weight_variant(folder), **SAFE
        )
        self._vae = vae.to(self.device).eval().requires_grad_(False)

    def _load_texts(self, folder: Path) -> None:
        disable_progress_bar()  # loading is announced by the stage, not by transformers
        self._texts = [_load_text(CLIPTextModel, folder, "", self.device, self.dtype)]
        if self.info["family"] == "sdxl":
            second = _load_text(CLIPTextModelWithProjection, folder, "_2", self.device, self.dtype)
            self._texts.append(second)
        # The tokenizers keep padding and truncation as state, which threads must not share.
        self._tokenizing = threading.Lock()

    @torch.inference_mode()
    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        """Moments of the posterior of pictures [B, 3, H, W] in -1..1: mean and log-variance.

        Both are [B, C, h, w] f32, unscaled. Diverged pictures come back as NaN or infinity.
        """
        batch = torch.from_numpy(pixels).to(self.device, self._vae_dtype)
        posterior = self._vae.encode(batch).latent_dist
        return posterior.mean.float().cpu().numpy(), posterior.logvar.float().cpu().numpy()

    @torch.inference_mode()
    def texts(self, captions: Sequence[str]) -> tuple[Float32, Float32 | None]:
        """Prompt embeddings [K, T, D] and, for SDXL, pooled ones [K, P]; f32.

        The same as `encode_prompt` of diffusers' pipelines: SDXL concatenates the penultimate
        hidden states of both encoders (Podell et al. 2023, section 2.1); SD 1 and 2 take the last
        hidden state after the final layer norm.
        """
        states, pooled = [], None
        for tokenizer, model in self._texts:
            ids = self._ids(tokenizer, captions).to(self.device)
            if self.info["family"] == "sd":
                states.append(model(ids, attention_mask=None)[0])
                continue
            output = model(ids, output_hidden_states=True)
            states.append(output.hidden_states[-2])
            pooled = output[0]
        embeds = torch.concat(states, dim=-1).float().cpu().numpy()
        return embeds, None if pooled is None else pooled.float().cpu().numpy()

    def token_counts(self, captions: Sequence[str]) -> list[int]:
        """Tokens of each caption before truncation, with the start and end mark."""
        tokenizer = self._texts[0][0]
        with self._tokenizing:
            return [len(ids) for ids in tokenizer(list(captions), verbose=False).input_ids]

    def _ids(self, tokenizer: CLIPTokenizer, captions: Sequence[str]) -> torch.Tensor:
        with self._tokenizing:
            return tokenizer(
                list(captions),
                padding="max_length",
                max_length=tokenizer.model_max_length,
                truncation=True,
                return_tensors="pt",
            ).input_ids


def _load_text(
    kind: Any, folder: Path, suffix: str, device: torch.device, dtype: torch.dtype
) -> tuple[CLIPTokenizer, Any]:
    weights = folder / f"text_encoder{suffix}"
    variant = weight_variant(weights)
    model = kind.from_pretrained(weights, torch_dtype=dtype, variant=variant, **SAFE)
    tokenizer = CLIPTokenizer.from_pretrained(folder / f"tokenizer{suffix}", local_files_only=True)
    # transformers 5 may read no vocabulary and say nothing; every caption would be the same.
    if not LEAST_VOCABULARY < len(tokenizer) <= model.config.vocab_size:
        raise ValueError(
            f"tokenizer{suffix} has {len(tokenizer)} tokens, its text encoder "
            f"{model.config.vocab_size}"
        )
    return tokenizer, model.to(device).eval().requires_grad_(False)
