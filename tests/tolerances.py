"""How far numbers may lie apart that should be equal: one tolerance per dtype, for every chip.

Chips differ in the last bits of roots, exponentials and sums. What differs by more is not the same
formula. Where a test compares statistics, or numbers that amplify those bits, it states its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Of one formula: of a value, and of numbers of order one that a value near zero is left of.
FORMULA = {
    "float32": {"rtol": 1e-5, "atol": 1e-6},
    "float64": {"rtol": 1e-12, "atol": 1e-14},
}
#: Losses and gradient norms of known runs (conformance/golden.json), by the dtype computed in.
#: Other processors and numbers of threads move the last bits of a sum; twenty steps multiply that.
GOLDEN = {"float32": 2e-5, "bfloat16": 5e-3, "float16": 2e-3}


def assert_close(found: Any, expected: Any, dtype: str = "float32") -> None:
    """Expect what a formula gives in a dtype to be what a reference gives."""
    np.testing.assert_allclose(found, expected, **FORMULA[dtype])
