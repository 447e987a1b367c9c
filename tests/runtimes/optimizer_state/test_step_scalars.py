"""The scalars that compiled updates receive in float32."""

import numpy as np
import pytest

from configs.settings.train import Train
from runtimes.optimizer_state import step_scalars


@pytest.mark.parametrize("decay", [0.999, 0.9999, 0.99999])
def test_the_weights_share_of_an_average_is_as_exact_as_pytorch_s(decay: float) -> None:
    """1 - float32(0.9999) is 1.0002e-4, and 0.99999's is off by 0.1%."""
    share = step_scalars(10**6, 1e-4, Train(ema_decay=decay))[3]
    assert share == np.float32(1 - decay)
