"""Scores of the sample pictures that a training run draws."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from configs.settings.evaluate import JudgeName, PreferenceModel
from tasks.evaluate.clip_score import clip_scores
from tasks.evaluate.feature_encoders import Clip, Float32
from tasks.evaluate.judges import judge_names, judge_pictures, open_judges
from tasks.evaluate.metric_names import CLIP_SCORE


def sample_metrics(judges: Sequence[JudgeName | PreferenceModel]) -> list[str]:
    """Names of the scores that `SampleScorer` computes."""
    small = [one for one in judges if not isinstance(one, PreferenceModel)]
    return [CLIP_SCORE, *judge_names(small)]


class SampleScorer:
    """Scores samples with a recipe's CLIP model and judges, on the CPU: training has the device.

    Args:
        judges: of the recipe; preference models are left out, since they are large.
        clip: folder of the CLIP model, loaded at the first call.
        prompts: one per picture.
    """

    def __init__(
        self,
        judges: Sequence[JudgeName | PreferenceModel],
        clip: Path,
        prompts: Sequence[str],
    ) -> None:
        self._judges, self._folder, self._prompts = open_judges(judges, {}, "cpu"), clip, prompts

    def __call__(self, strip: bytes) -> dict[str, float]:
        """The mean CLIPScore ("clip_score") and the mean score of each judge, by name.

        Args:
            strip: PNG bytes with one picture per prompt, left to right, all of one width.

        Raises:
            WrongInput: the CLIP model fails to load, or a judge does not support the pictures.
        """
        whole = np.asarray(Image.open(io.BytesIO(strip)).convert("RGB"))
        pictures = np.stack(np.split(whole, len(self._prompts), axis=1))
        scores = clip_scores(self._clip.images(pictures), self._texts)
        judged = judge_pictures(self._judges, pictures, self._prompts)
        means = {name: float(found.mean()) for name, found in judged.items()}
        return {CLIP_SCORE: float(scores.mean()), **means}

    @cached_property
    def _clip(self) -> Clip:
        return Clip(self._folder, "cpu")

    @cached_property
    def _texts(self) -> Float32:
        return self._clip.texts(self._prompts)
