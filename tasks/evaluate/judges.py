"""Judges: pictures, their prompts and references in, one score per picture out.

A judge is registered in JUDGES, or is a preference model (`evaluate.judges` with a path). CLIPScore
and preference scores are the similarity of a picture and its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from configs.settings.evaluate import JudgeName, PreferenceModel
from demo.captions import parse
from tasks.evaluate.distances import Float64, normalise
from tasks.evaluate.features import Clip

#: Scores [N]: bool for pass or fail, else float. Higher is better.
Scores = NDArray[Any]
#: The first reference u8 [H, W, 3] of each picture of an edit model, else None.
References = Sequence[NDArray[np.uint8] | None]
#: A function of pictures u8 [N, H, W, 3], their N prompts and their N references.
Judge = Callable[[NDArray[np.uint8], Sequence[str], References], Scores]


@dataclass(frozen=True)
class JudgeEntry:
    """Registered judges of one name. A judge imports its module when it is called."""

    judges: Mapping[str, Judge]  # metric name -> judge
    #: Raises ValueError for an unsupported prompt; its second argument: has it a reference?
    parse: Callable[[str, bool], object]
    side: int | None = None  # of the pictures that they support, in pixels; None: any


def _shows_digit(
    images: NDArray[np.uint8], prompts: Sequence[str], references: References
) -> Scores:
    from demo.digit_judges import judge_digit

    return judge_digit(images, prompts, references)


def _shows_style(
    images: NDArray[np.uint8], prompts: Sequence[str], references: References
) -> Scores:
    from demo.digit_judges import judge_style

    return judge_style(images, prompts)


JUDGES: dict[JudgeName, JudgeEntry] = {
    "digits": JudgeEntry({"digit": _shows_digit, "style": _shows_style}, parse, side=32)
}


def judge_names(settings: Sequence[JudgeName | PreferenceModel]) -> list[str]:
    """The metric name of every judge of `evaluate.judges`."""
    names: list[str] = []
    for judge in settings:
        names += [judge.name] if isinstance(judge, PreferenceModel) else JUDGES[judge].judges
    return names


def open_judges(
    settings: Sequence[JudgeName | PreferenceModel],
    models: Mapping[str, Path],
    device: str,
    prompts: Sequence[str] = (),
) -> dict[str, Judge]:
    """Metric name -> judge.

    Args:
        models: name of a preference model -> local folder; others are left out.
        prompts: all that will be judged; the log has how many a preference model cuts.

    Raises:
        Refused: a preference model fails to load.
    """
    judges: dict[str, Judge] = {}
    for judge in settings:
        if not isinstance(judge, PreferenceModel):
            judges |= JUDGES[judge].judges
        elif judge.name in models:
            clip = Clip(models[judge.name], device, f"evaluate.judges.{judge.name}")
            clip.tell_cut_prompts(prompts)
            judges[judge.name] = partial(_preference, clip)
    return judges


def _preference(
    clip: Clip, images: NDArray[np.uint8], prompts: Sequence[str], references: References
) -> Scores:
    """The judgement of a CLIPModel tuned on people's choices, such as PickScore or HPSv2."""
    return preference_scores(clip.images(images), clip.texts(prompts), clip.logit_scale)


def judge_pictures(
    judges: Mapping[str, Judge],
    images: NDArray[np.uint8],
    prompts: Sequence[str],
    references: References = (),
) -> dict[str, Scores]:
    """Metric name -> scores [N] of pictures u8 [N, H, W, 3].

    Args:
        references: one per picture; none: no picture has one.

    Raises:
        Refused: a judge does not support these pictures.
    """
    scores = {}
    for name, judge in judges.items():
        try:
            scores[name] = judge(images, prompts, references or [None] * len(prompts))
        except ValueError as error:
            raise Refused(f"{name}: {error}", setting="evaluate.judges") from None
    return scores


def clip_scores(images: NDArray[Any], texts: NDArray[Any]) -> Float64:
    """CLIPScore f64 [N]: 100 * max(cos, 0) of image features [N, D] and text features [N, D].

    Hessel et al. 2021 (arXiv 2104.08718), with w = 100 as in torchmetrics instead of 2.5.
    """
    return 100.0 * np.maximum(cosine(images, texts), 0.0)


def preference_scores(images: NDArray[Any], texts: NDArray[Any], logit_scale: float) -> Float64:
    """Preference f64 [N]: exp(logit_scale) * cos, as PickScore and HPSv2 compute it.

    Kirstain et al. 2023 (arXiv 2305.01569), Wu et al. 2023 (arXiv 2306.09341).
    """
    return float(np.exp(logit_scale)) * cosine(images, texts)


def cosine(x: NDArray[Any], y: NDArray[Any]) -> Float64:
    """The cosine of each row of x [N, D] with that of y [N, D]."""
    return np.asarray((normalise(x) * normalise(y)).sum(axis=1))
