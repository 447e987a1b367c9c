"""The held-out loss: at eight equidistant noise levels, each with all held-out samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from configs.settings.train_parts import HOLDOUT_LOSS
from tasks.evaluate.bootstrap import Estimate, Resampling, mean

#: As MLPerf's text-to-image benchmark validates: equidistant levels with equal counts. Ours are the
#: middles of eight equal bands, so that their mean approximates the loss over all levels.
LEVELS = 8
#: Metric names of the bands, from the least noise to the most.
BANDS = tuple(f"{HOLDOUT_LOSS}/level{number}" for number in range(1, LEVELS + 1))


def holdout_losses(losses: NDArray[np.float64], resampling: Resampling) -> dict[str, Estimate]:
    """The mean loss, and that of each band. Intervals resample held-out samples.

    Args:
        losses: f64 [N, 8], one row per held-out sample; N may be 0.
    """
    if not len(losses):
        return {}
    bands = {name: mean(losses[:, n], resampling) for n, name in enumerate(BANDS)}
    return {HOLDOUT_LOSS: mean(losses.mean(axis=1), resampling), **bands}
