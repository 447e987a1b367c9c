"""FD, KID, precision and recall equal torch-fidelity's on the same features."""

import json
from pathlib import Path

import numpy as np
import pytest
from inception_weights import in_fidelity, require_fidelity

from tasks.evaluate import distances
from tasks.evaluate.distances import Resampling

pytestmark = pytest.mark.soak
#: Reads two arrays, prints torch-fidelity's metrics.
THEIRS = """
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

x, y = (torch.from_numpy(np.load(path)) for path in sys.argv[1:])
found = fid_statistics_to_metric(*map(fid_features_to_statistics, (x, y)), verbose=False)
whole = {"kid_subsets": 1, "kid_subset_size": len(x), "verbose": False}
found |= kid_features_to_metric(x, y, **whole)
found |= prc_features_to_metric(x, y, verbose=False)
print(json.dumps(found))
"""
NAMES = {
    "fd": "frechet_inception_distance",
    "kid": "kernel_inception_distance_mean",
    "precision": "precision",
    "recall": "recall",
}


def features(n: int, dims: int, seed: int, spread: float, shift: float) -> np.ndarray:
    """Correlated features f64 [N, D]."""
    mix = np.random.default_rng(99).normal(size=(dims, dims)) / dims**0.5
    drawn = np.random.default_rng(seed).normal(size=(n, dims)) * spread
    return drawn @ mix + shift


@pytest.mark.parametrize("dims", [16, 64])
def test_distances_equal_those_of_torch_fidelity(tmp_path: Path, dims: int) -> None:
    require_fidelity()
    x, y = features(300, dims, 1, 0.8, 0.1), features(300, dims, 2, 1.0, 0.0)
    paths = [tmp_path / "x.npy", tmp_path / "y.npy"]
    for path, array in zip(paths, (x, y), strict=True):
        np.save(path, array)
    theirs = json.loads(in_fidelity(THEIRS, *paths))
    for name, distance in distances.DISTANCES.items():
        expected = theirs[NAMES[name]]
        assert abs(expected) > 1e-3 and expected != 1.0, "a value that can differ"
        assert distance(x, y, Resampling(2, 0)).value == pytest.approx(expected, rel=1e-3), name
