"""CLIP features of pictures and prompts, computed by any `transformers` CLIPModel folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.redact_errors_and_logs import one_line
from runtimes.contract import WrongInput
from runtimes.pipeline_folder.describe_encoders import read_config

Picture = NDArray[np.uint8]  # [H, W, 3]
Float32 = NDArray[np.float32]
BATCH = 64
Item = TypeVar("Item")


#: Part of a CLIPModel folder -> its possible files; one of them is enough.
PARTS = {
    "weights": ("model.safetensors", "model.safetensors.index.json"),
    "a tokenizer": ("tokenizer.json", "vocab.json"),
    "an image processor": ("preprocessor_config.json", "processor_config.json"),
}


def check_clip(folder: Path) -> None:
    """Raise WrongInput unless a folder has a CLIPModel's files; no weights are loaded."""
    if not (folder / "config.json").is_file():
        raise WrongInput(f"evaluate.clip: {folder} has no config.json: it is no CLIPModel folder")
    kind = read_config(folder / "config.json").get("model_type")
    if kind != "clip":
        raise WrongInput(f"evaluate.clip: {folder} holds no CLIPModel (its model_type is {kind})")
    for part, files in PARTS.items():
        if not any((folder / name).is_file() for name in files):
            raise WrongInput(f"evaluate.clip: {folder} has no {' or '.join(files)} ({part})")


class ClipFeatures:
    """A CLIPModel with its image processor and tokenizer, in float32 and inference mode.

    Args:
        folder: local `transformers` folder that holds all three.
        device: torch device; "auto" selects the best one. Gaudi ("hpu") falls back to "auto".

    Raises:
        WrongInput: a part is missing or fails to load.
    """

    def __init__(self, folder: Path, device: str = "auto") -> None:
        from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer
        from transformers.utils.logging import disable_progress_bar

        from runtimes.torch.device import choose_device

        disable_progress_bar()
        # One process owns a Gaudi. The sampling processes need it, so this one must not open it.
        self._device = choose_device("auto" if device.startswith("hpu") else device)
        try:
            model = CLIPModel.from_pretrained(folder, use_safetensors=True, local_files_only=True)
            self._processor = CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
            self._tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise WrongInput(
                f"evaluate.clip: {folder} does not load as a CLIPModel: {one_line(error)}"
            ) from None
        tokens, rows = len(self._tokenizer), model.config.text_config.vocab_size
        if not 256 < tokens <= rows:
            raise WrongInput(
                f"evaluate.clip: {folder}: the tokenizer has {tokens} tokens only,"
                f" it needs 257 to {rows}"
            )
        self._model: Any = model.to(self._device).float().eval().requires_grad_(False)

    def images(self, pictures: Iterable[Picture]) -> Float32:
        """Projected image features, f32 [N, D], not normalised. Picture sizes may differ."""
        import torch

        rows: list[Float32] = []
        with torch.inference_mode():
            for batch in batches(pictures, BATCH):
                pixels = self._processor(images=batch, return_tensors="pt").pixel_values
                output = self._model.get_image_features(pixel_values=pixels.to(self._device))
                rows.append(output.pooler_output.cpu().numpy())
        return np.concatenate(rows) if rows else np.zeros((0, self._width), np.float32)

    def texts(self, prompts: Sequence[str]) -> Float32:
        """Projected text features, f32 [N, D], not normalised.

        Prompts are truncated to the text encoder's maximum length.
        """
        import torch

        distinct = list(dict.fromkeys(prompts))
        rows: list[Float32] = []
        with torch.inference_mode():
            for batch in batches(distinct, BATCH):
                inputs = self._tokenizer(
                    batch,
                    padding="max_length",
                    max_length=self._model.config.text_config.max_position_embeddings,
                    truncation=True,
                    return_tensors="pt",
                ).to(self._device)
                output = self._model.get_text_features(**inputs)
                rows.append(output.pooler_output.cpu().numpy())
        features = dict(zip(distinct, np.concatenate(rows), strict=True))
        return np.stack([features[prompt] for prompt in prompts])

    @property
    def _width(self) -> int:
        return int(self._model.config.projection_dim)


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of up to `size` items, in order."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
