"""Loss weights: the factor of a sample's squared error, by its noise level.

The papers define weights for the error of the latents, |z' - z|^2. The error of eps is SNR times
that, the error of v is SNR + 1 times that. The weight is divided by this factor, so that the loss
is the same for every prediction type.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtimes.objective.noise_schedule import FlowSchedule, Levels, NoiseSchedule, Schedule

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
    """Loss weight per sample [B] f32; 1 without an option for this kind of schedule."""
    if isinstance(schedule, FlowSchedule):
        return flow_weight(schedule.sigmas[levels], weighting_scheme)
    if snr_gamma is not None:
        return min_snr_weight(_snr(schedule, levels), snr_gamma, schedule.prediction_type)
    if debiased_estimation_loss:
        return debiased_weight(_snr(schedule, levels), schedule.prediction_type)
    return np.ones(len(levels), np.float32)


def min_snr_weight(snr: Array, gamma: float, prediction_type: str) -> Array:
    """Min-SNR-gamma weights [B] (arXiv 2303.09556), finite at SNR 0.

    min(SNR, gamma) for sample, divided by SNR for epsilon and by SNR + 1 for v_prediction.
    """
    if prediction_type == "v_prediction":
        return np.divide(np.minimum(snr, np.float32(gamma)), snr + 1, dtype=np.float32)
    if prediction_type == "sample":
        return np.minimum(snr, np.float32(gamma))
    with np.errstate(divide="ignore"):
        return np.minimum(np.float32(1), np.float32(gamma) / snr)


def debiased_weight(snr: Array, prediction_type: str) -> Array:
    """Debiased estimation weights [B] (arXiv 2310.08442).

    1 / sqrt(SNR) for epsilon, sqrt(SNR) for sample, sqrt(SNR) / (SNR + 1) for v_prediction. The
    last is 0 at SNR 0; the objective rejects epsilon there.
    """
    root: Array = np.sqrt(snr, dtype=np.float32)
    if prediction_type == "v_prediction":
        divided = np.divide(root, snr + 1, dtype=np.float32)
        return np.where(np.isinf(snr), np.float32(0), divided)
    return root if prediction_type == "sample" else np.reciprocal(root)


def flow_weight(sigma: Array, kind: FlowWeighting) -> Array:
    """Weights [B] of rectified flow for sigma [B] in (0, 1] (SD3, arXiv 2403.03206, section 3.1).

    sigma_sqrt, a name of diffusers, is sigma^-2; cosmap is 2 / (pi - 2 pi sigma + 2 pi sigma^2).
    """
    if kind == "sigma_sqrt":
        return sigma**-2
    if kind == "cosmap":
        return np.float32(2 / np.pi) / (1 - 2 * sigma + 2 * sigma**2)
    return np.ones_like(sigma)


def _snr(schedule: NoiseSchedule, levels: Levels) -> Array:
    with np.errstate(divide="ignore"):  # SNR is infinite without noise
        return schedule.snr(levels)
