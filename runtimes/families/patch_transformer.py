"""Code that FLUX, FLUX.2, Qwen-Image and Z-Image share: transformers over 2 x 2 latent patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.families.family import Family

PATCH = 2  # latent pixels along one side of a patch
#: Name suffixes of the attention layers of a text stream beside the image's.
TEXT_STREAM = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


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


def unpack(patches: Any, rows: int, columns: int) -> Any:
    """The inverse of `pack`, for patches [B, rows * columns, 4 C]."""
    batch = len(patches)
    values = patches.reshape(batch, rows, columns, -1, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return values.reshape(batch, -1, rows * PATCH, columns * PATCH)


@contextmanager
def calling(module: Any, function: Any) -> Iterator[None]:
    """Within the context, calls of a module run `function`, with the module's own hooks."""
    module.forward = function
    try:
        yield
    finally:
        del module.forward
