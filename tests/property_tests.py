"""Property tests: hypothesis draws the arguments, the same ones for the same KILN_TEST_SEED."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

SEED = os.environ.get("KILN_TEST_SEED", "0")
# Nothing of one run is kept for the next, and nothing lies in the tree.
set_hypothesis_home_dir(Path(os.environ.get("KILN_TEST_CACHE") or tempfile.gettempdir(), "drawn"))

#: Values that JSON has, whose names are text.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=12,
)  # fmt: skip


def holds_for(examples: int = 60, **arguments: Any) -> Callable[[Any], Any]:
    """The test holds for `examples` drawn arguments, given as strategies."""
    kept = settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: kept(seed(SEED)(given(**arguments)(test)))
