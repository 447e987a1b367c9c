"""Scores of the sample pictures that a training run draws."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from tasks.evaluate import metrics
from tasks.evaluate.clip_features import ClipFeatures, Float32
from tasks.evaluate.judges import judge_pictures


class SampleScorer:
    """Scores samples with a recipe's CLIP model and judges, on the CPU: training has the device.

    Args:
        judges: names in JUDGES.
        clip: folder of the CLIP model, loaded at the first call.
        prompts: one per picture.
    """

    def __init__(self, judges: Sequence[str], clip: Path, prompts: Sequence[str]) -> None:
        self._judges, self._folder, self._prompts = judges, clip, prompts

    def __call__(self, strip: bytes) -> dict[str, float]:
        """The mean CLIPScore ("clip_score") and the pass rate of each verdict, by name.

        Args:
            strip: PNG bytes with one picture per prompt, left to right, all of one width.

        Raises:
            WrongInput: the CLIP model fails to load, or a judge does not support the pictures.
        """
        whole = np.asarray(Image.open(io.BytesIO(strip)).convert("RGB"))
        pictures = np.stack(np.split(whole, len(self._prompts), axis=1))
        scores = metrics.clip_scores(self._clip.images(pictures), self._texts)
        verdicts = judge_pictures(self._judges, pictures, self._prompts)
        shares = {name: float(passed.mean()) for name, passed in verdicts.items()}
        return {"clip_score": float(scores.mean()), **shares}

    @cached_property
    def _clip(self) -> ClipFeatures:
        return ClipFeatures(self._folder, "cpu")

    @cached_property
    def _texts(self) -> Float32:
        return self._clip.texts(self._prompts)
