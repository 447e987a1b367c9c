"""Scores of the pictures that a run draws while it trains."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from tasks.evaluate import metrics
from tasks.evaluate.features import ClipFeatures, Float32
from tasks.evaluate.judges import ask


class SampleScorer:
    """By the CLIP model and the judges of a recipe's evaluation, on the host: the chip trains.

    Args:
        judges: of the recipe, by name.
        clip: folder of the CLIP model, which is opened when the first pictures come.
        prompts: of the pictures.
    """

    def __init__(self, judges: Sequence[str], clip: Path, prompts: Sequence[str]) -> None:
        self._judges, self._folder, self._prompts = judges, clip, prompts

    def __call__(self, strip: bytes) -> dict[str, float]:
        """The mean CLIPScore, and the share that each verdict is yes for.

        Args:
            strip: a PNG with the prompts' pictures side by side.

        Raises:
            WrongInput: the CLIP model does not load, or a judge cannot take the pictures.
        """
        whole = np.asarray(Image.open(io.BytesIO(strip)).convert("RGB"))
        pictures = np.stack(np.split(whole, len(self._prompts), axis=1))
        scores = metrics.clip_scores(self._clip.images(pictures), self._texts)
        verdicts = ask(self._judges, pictures, self._prompts)
        shares = {name: float(passed.mean()) for name, passed in verdicts.items()}
        return {"clip_score": float(scores.mean()), **shares}

    @cached_property
    def _clip(self) -> ClipFeatures:
        return ClipFeatures(self._folder, "cpu")

    @cached_property
    def _texts(self) -> Float32:
        return self._clip.texts(self._prompts)
