"""Loss weights: how much the error of a sample counts at its level of noise.

The papers weigh the error of the picture, |z' - z|^2. An error of the noise is SNR times that, one
of the velocity SNR + 1 times: divided by it, a weighting asks the same of every prediction type.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtimes.objective.noise import FlowSchedule, Levels, NoiseSchedule, Schedule

Array = NDArray[np.float32]
FlowWeighting = Literal["none", "sigma_sqrt", "cosmap"]


def loss_weight(
    schedule: Schedule,
    levels: Levels,
    *,
    snr_gamma: float | None = None,
    debiased_estimation_loss: bool = False,
    weighting_scheme: FlowWeighting = "none",
) -> Array:
    """Weight of each sample [B]: what is asked for is what goes with the kind of schedule."""
    if isinstance(schedule, FlowSchedule):
        return flow_weight(schedule.sigmas[levels], weighting_scheme)
    if snr_gamma is not None:
        return min_snr_weight(_snr(schedule, levels), snr_gamma, schedule.prediction_type)
    if debiased_estimation_loss:
        return debiased_weight(_snr(schedule, levels), schedule.prediction_type)
    return np.ones(len(levels), np.float32)


def min_snr_weight(snr: Array, gamma: float, prediction_type: str) -> Array:
    """Min-SNR-gamma (arXiv 2303.09556), each sample's by its own SNR: min(SNR, gamma) on the
    picture's error, over SNR for epsilon, over SNR + 1 for v-prediction; all finite at SNR 0."""
    if prediction_type == "v_prediction":
        return np.divide(np.minimum(snr, np.float32(gamma)), snr + 1, dtype=np.float32)
    if prediction_type == "sample":
        return np.minimum(snr, np.float32(gamma))
    with np.errstate(divide="ignore"):
        return np.minimum(np.float32(1), np.float32(gamma) / snr)


def debiased_weight(snr: Array, prediction_type: str) -> Array:
    """1 / sqrt(SNR) on the noise's error (arXiv 2310.08442), so sqrt(SNR) on the picture's.

    For v-prediction sqrt(SNR) / (SNR + 1): 1/2 at most, and 0 at SNR 0, which epsilon cannot have.
    """
    root: Array = np.sqrt(snr, dtype=np.float32)
    if prediction_type == "v_prediction":
        divided = np.divide(root, snr + 1, dtype=np.float32)
        return np.where(np.isinf(snr), np.float32(0), divided)
    return root if prediction_type == "sample" else np.reciprocal(root)


def flow_weight(sigma: Array, kind: FlowWeighting) -> Array:
    """Weights of rectified flow at sigma in (0, 1] [B] (SD3, arXiv 2403.03206, section 3.1).

    sigma_sqrt is diffusers' name for sigma^-2; cosmap is 2 / (pi - 2 pi sigma + 2 pi sigma^2).
    """
    if kind == "sigma_sqrt":
        return sigma**-2
    if kind == "cosmap":
        return np.float32(2 / np.pi) / (1 - 2 * sigma + 2 * sigma**2)
    return np.ones_like(sigma)


def _snr(schedule: NoiseSchedule, levels: Levels) -> Array:
    with np.errstate(divide="ignore"):  # endless where there is no noise
        return schedule.snr(levels)
