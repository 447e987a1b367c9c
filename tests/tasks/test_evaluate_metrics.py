"""Metrics equal closed forms and direct implementations; their intervals are valid."""

import numpy as np
import pytest
from scipy.linalg import sqrtm

from tasks.evaluate import metrics


def _features(n: int, dims: int, seed: int, shift: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(99).normal(size=(dims, dims)) / dims**0.5
    return rng.normal(size=(n, dims)) @ mix + shift


def test_frechet_of_two_gaussians_equals_the_formula() -> None:
    # independent dimensions: |m1 - m2|² + sum (s1 - s2)²
    rng = np.random.default_rng(0)
    s1, s2, shift = np.array([1.0, 2.0, 0.5]), np.array([2.0, 1.0, 0.5]), np.array([1.0, 0.0, 3.0])
    x, y = rng.normal(size=(200_000, 3)) * s1, rng.normal(size=(200_000, 3)) * s2 + shift
    expected = (shift**2).sum() + ((s1 - s2) ** 2).sum()
    assert metrics.frechet_distance(x, y) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("n", [500, 20])  # more and fewer samples than features
def test_frechet_equals_the_root_of_the_product(n: int) -> None:
    x, y = _features(n, 24, 1), _features(n + 7, 24, 2, shift=0.3)
    c1, c2 = np.cov(x.T), np.cov(y.T)
    root = sqrtm(c1 @ c2).real if n > 24 else _root_by_eigenvalues(c1, c2)
    slow = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(c1 + c2) - 2 * np.trace(root)
    assert metrics.frechet_distance(x, y) == pytest.approx(slow, rel=1e-6)
    assert metrics.frechet_distance(x, x) == pytest.approx(0.0, abs=1e-9)


def _root_by_eigenvalues(c1: np.ndarray, c2: np.ndarray) -> np.ndarray:
    values = np.linalg.eigvals(c1 @ c2).real
    return np.diag(np.sqrt(np.maximum(values, 0.0)))


def test_cmmd_equals_a_direct_implementation() -> None:
    x, y = _features(30, 8, 1), _features(40, 8, 2, shift=0.5)
    nx, ny = metrics.normalise(x), metrics.normalise(y)

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        pairs = [np.exp(-((p - q) ** 2).sum() / (2 * 10.0**2)) for p in a for q in b]
        return float(np.mean(pairs))

    slow = 1000 * (kernel(nx, nx) + kernel(ny, ny) - 2 * kernel(nx, ny))
    assert metrics.cmmd(x, y, 50, 0)["value"] == pytest.approx(slow, rel=1e-9)
    assert metrics.cmmd(x * 7, y, 50, 0)["value"] == pytest.approx(slow, rel=1e-9)


def test_the_distance_of_a_set_to_itself_is_zero() -> None:
    x = _features(64, 8, 1)
    assert metrics.cmmd(x, x, 50, 0)["value"] == pytest.approx(0.0, abs=1e-9)
    assert metrics.frechet(x, x, 50, 0)["value"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", ["cmmd", "fd"])
def test_intervals_of_distances_contain_the_value_and_narrow(name: str) -> None:
    distance = metrics.DISTANCES[name]
    few, many = (distance(_features(n, 8, 1), _features(n, 8, 2, 0.4), 200, 0) for n in (40, 640))
    for found in (few, many):
        assert found["ci"][0] < found["value"] < found["ci"][1]
    assert many["ci"][1] - many["ci"][0] < 0.5 * (few["ci"][1] - few["ci"][0])
    assert few["n"] == 40
    assert distance(_features(40, 8, 1), _features(40, 8, 2, 0.4), 200, 0) == few


def test_a_metric_states_its_number_of_resamples() -> None:
    x, y = _features(700, 700, 1), _features(700, 700, 2)
    assert metrics.frechet(x, y, 11, 0)["resamples"] == 11
    assert metrics.cmmd(x[:50], y[:50], 200, 0)["resamples"] == 200
    assert metrics.frechet(x[:50], y[:50], 60, 0)["resamples"] == 60


def test_the_interval_of_a_mean_covers_the_truth_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.exponential(size=80) for _ in range(400)]
    intervals = [metrics.mean(s, 300, seed)["ci"] for seed, s in enumerate(samples)]
    covered = np.mean([low <= 1.0 <= high for low, high in intervals])
    assert 0.90 < covered < 0.98


def test_a_proportion_has_wilsons_interval() -> None:
    found = metrics.share(np.array([True] * 8 + [False] * 2))
    assert found["value"] == 0.8 and found["n"] == 10
    assert found["ci"] == pytest.approx([0.4902, 0.9433], abs=1e-4)
    assert metrics.share(np.ones(200, bool))["ci"] == pytest.approx([0.9812, 1.0], abs=1e-4)
    assert metrics.share(np.zeros(200, bool))["ci"][0] == 0.0


def test_clip_score_is_a_hundredfold_cosine_and_never_negative() -> None:
    images = np.array([[1.0, 0.0], [3.0, 3.0], [1.0, 0.0]])
    texts = np.array([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    np.testing.assert_allclose(metrics.clip_scores(images, texts), [100.0, 50 * 2**0.5, 0.0])


def test_empty_input_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        metrics.mean(np.zeros(0), 10, 0)
    with pytest.raises(ValueError, match="no pictures"):
        metrics.share(np.zeros(0, bool))
    with pytest.raises(ValueError, match="at least two"):
        metrics.frechet_distance(np.zeros((1, 4)), np.zeros((5, 4)))
