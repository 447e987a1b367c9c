"""Tolerances of comparisons: one per dtype, for every chip.

Chips differ in the last bits of roots, exponentials and sums. A larger difference means another
formula. Tests of statistics, or of values that amplify these bits, have tolerances of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: One formula. `atol` is for values near zero that are differences of values near one.
FORMULA = {"float32": {"rtol": 1e-5, "atol": 1e-6}, "float64": {"rtol": 1e-12, "atol": 1e-14}}
#: Relative, for losses and gradient norms of conformance/golden.json, by compute dtype. Processors
#: and thread counts change the last bits of a sum, and twenty steps amplify that.
GOLDEN = {"float32": 2e-5, "bfloat16": 5e-3, "float16": 2e-3}
#: Relative, of two runtimes over twenty steps in float32: losses, gradient norms (which differ by
#: more than a loss does), and weights, relative to the largest weight of a tensor.
LOSS, NORM, WEIGHTS = 1e-4, 1e-3, 1e-3
#: Levels of 255 by which two runtimes' pictures may differ.
PICTURE = 1


def assert_close(found: Any, expected: Any, dtype: str = "float32") -> None:
    """Check the values of a formula in a dtype against a reference."""
    np.testing.assert_allclose(found, expected, **FORMULA[dtype])
