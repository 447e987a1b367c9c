"""Distances of picture sets equal torchmetrics', closed forms and direct implementations."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from tasks.evaluate import distances
from tasks.evaluate.distances import Resampling, difference, from_npz, normalise, to_npz
from tasks.evaluate.features import Clip
from tasks.evaluate.metrics import with_ranges


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
    assert distances.frechet_distance(x, y) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("n", [500, 20])  # more and fewer samples than features
def test_frechet_equals_the_root_of_the_product(n: int) -> None:
    x, y = _features(n, 24, 1), _features(n + 7, 24, 2, shift=0.3)
    c1, c2 = np.cov(x.T), np.cov(y.T)
    root = sqrtm(c1 @ c2).real if n > 24 else _root_by_eigenvalues(c1, c2)
    slow = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(c1 + c2) - 2 * np.trace(root)
    assert distances.frechet_distance(x, y) == pytest.approx(slow, rel=1e-6)
    assert distances.frechet_distance(x, x) == pytest.approx(0.0, abs=1e-9)


def _root_by_eigenvalues(c1: np.ndarray, c2: np.ndarray) -> np.ndarray:
    values = np.linalg.eigvals(c1 @ c2).real
    return np.diag(np.sqrt(np.maximum(values, 0.0)))


def test_cmmd_equals_a_direct_implementation() -> None:
    x, y = _features(30, 8, 1), _features(40, 8, 2, shift=0.5)
    nx, ny = normalise(x), normalise(y)

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        pairs = [np.exp(-((p - q) ** 2).sum() / (2 * 10.0**2)) for p in a for q in b]
        return float(np.mean(pairs))

    slow = 1000 * (kernel(nx, nx) + kernel(ny, ny) - 2 * kernel(nx, ny))
    assert distances.cmmd(x, y, Resampling(50, 0)).value == pytest.approx(slow, rel=1e-9)
    assert distances.cmmd(x * 7, y, Resampling(50, 0)).value == pytest.approx(slow, rel=1e-9)


def test_the_distance_of_a_set_to_itself_is_zero() -> None:
    x = _features(64, 8, 1)
    assert distances.cmmd(x, x, Resampling(50, 0)).value == pytest.approx(0.0, abs=1e-9)
    assert distances.frechet(x, x, Resampling(50, 0)).value == pytest.approx(0.0, abs=1e-9)


NAMED = {"cmmd": distances.cmmd, **distances.DISTANCES}


@pytest.mark.parametrize("name", ["cmmd", "kid", "precision", "recall"])
def test_pictures_are_compared_by_blocks_with_equal_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, resampling = _features(2500, 8, 1), _features(1500, 8, 2, 0.4), Resampling(10, 0)
    monkeypatch.setattr(distances, "BLOCK", 100)
    tracemalloc.start()
    found = NAMED[name](x, y, resampling)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if name in ("cmmd", "kid"):
        assert peak < 2500 * 2500 * 8 / 4  # a quarter of the numbers of all pairs
    monkeypatch.setattr(distances, "BLOCK", 2500)
    whole = NAMED[name](x, y, resampling)
    assert found.value == pytest.approx(whole.value, rel=1e-9)
    np.testing.assert_allclose(found.resampled, whole.resampled, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMED)
def test_intervals_contain_the_value_and_narrow_with_more_pictures(name: str) -> None:
    distance = NAMED[name]
    few, many = (
        distance(_features(n, 8, 1), _features(n, 8, 2, 0.4), Resampling(200, 0)) for n in (40, 640)
    )
    for found in (few, many):
        low, high = found.interval()
        assert low < found.value < high
    assert np.ptp(many.interval()) < 0.5 * np.ptp(few.interval())
    assert few.n == 40
    again = distance(_features(40, 8, 1), _features(40, 8, 2, 0.4), Resampling(200, 0))
    np.testing.assert_array_equal(again.resampled, few.resampled)


def test_the_frechet_bootstrap_has_as_many_resamples_as_its_cost_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = _features(70, 70, 1), _features(70, 70, 2)
    assert len(distances.frechet(x, y, Resampling(60, 0)).resampled) == 60
    monkeypatch.setattr(distances, "FRECHET_BUDGET", 45 * 70**3)
    assert len(distances.frechet(x, y, Resampling(60, 0)).resampled) == 45
    monkeypatch.setattr(distances, "FRECHET_BUDGET", 1)
    assert len(distances.frechet(x, y, Resampling(60, 0)).resampled) == distances.MIN_RESAMPLES


class _Encoder(torch.nn.Module):
    """Our image encoder as torchmetrics calls one: u8 [N, 3, H, W] -> features."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clip, self.num_features = Clip(folder, "cpu"), 24

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.clip.images(pictures.permute(0, 2, 3, 1).numpy()))


@pytest.mark.filterwarnings("ignore")
def test_distances_equal_those_of_torchmetrics_on_the_same_pictures(tiny_clip: Path) -> None:
    rng = np.random.default_rng(0)
    dark, light = (rng.integers(low, low + 128, (60, 32, 32, 3), np.uint8) for low in (0, 100))
    encoder = _Encoder(tiny_clip)
    x, y = (encoder.clip.images(pictures) for pictures in (dark, light))
    for ours, theirs in (
        (distances.frechet(x, y, Resampling(2, 0)).value, FrechetInceptionDistance(encoder)),
        (
            distances.kid(x, y, Resampling(2, 0)).value,
            KernelInceptionDistance(encoder, subsets=1, subset_size=60),
        ),
    ):
        theirs.update(torch.from_numpy(light).permute(0, 3, 1, 2), real=True)
        theirs.update(torch.from_numpy(dark).permute(0, 3, 1, 2), real=False)
        computed = theirs.compute()
        expected = float(computed[0] if isinstance(computed, tuple) else computed)
        assert abs(expected) > 1e-3
        assert ours == pytest.approx(expected, rel=1e-3)


def test_precision_and_recall_equal_the_paper_s_pseudocode() -> None:
    """Kynkäänniemi et al. 2019, algorithm 1, one picture after another."""

    def manifold_share(manifold: np.ndarray, points: np.ndarray) -> float:
        radii = []
        for one in manifold:
            apart = sorted(np.linalg.norm(one - other) for other in manifold)
            radii.append(apart[distances.NEIGHBOURS])  # apart[0] is the picture itself
        inside = [
            any(
                np.linalg.norm(point - one) <= radius
                for one, radius in zip(manifold, radii, strict=True)
            )
            for point in points
        ]
        return float(np.mean(inside))

    pictures = _features(50, 3, 1)
    reference = np.concatenate([_features(40, 3, 2), _features(25, 3, 3, shift=6.0)])
    precision = distances.precision(pictures, reference, Resampling(20, 0))
    recall = distances.recall(pictures, reference, Resampling(20, 0))
    assert precision.value == pytest.approx(manifold_share(reference, pictures))
    assert recall.value == pytest.approx(manifold_share(pictures, reference))
    assert precision.value > 0.8 and recall.value < 0.7  # a mode is missing
    for found in (precision, recall):
        low, high = found.interval()
        assert 0 <= low < found.value < high <= 1


@pytest.mark.parametrize("name", ["cmmd", *distances.DISTANCES, *distances.INCEPTION_DISTANCES])
def test_a_stored_distance_has_the_range_of_its_metric(name: str) -> None:
    known = {"cmmd": distances.cmmd, **distances.DISTANCES, **distances.INCEPTION_DISTANCES}
    found = known[name](_features(9, 4, 1), _features(9, 4, 2), Resampling(20, 0))
    models, metrics = {"tuned": {name: found}}, {name: {"tuned": found.metric()}}
    read = with_ranges(from_npz(to_npz(models), metrics, "tuned"))[name]
    assert (read.low, read.high) == (found.low, found.high)
    assert (read.is_share, read.counted) == (found.is_share, found.counted)


@pytest.mark.parametrize("n", [12, 64])
def test_perfect_precision_and_no_recall_have_an_interval_with_a_width(n: int) -> None:
    """Within the range, whatever the resamples: no rule may pass by a lack of pictures."""
    references = _features(40, 4, 1)
    near = np.resize(references, (n, 4)) * 0.1
    precise, other = (
        distances.precision(near * k, references, Resampling(100, 0)) for k in (1.0, 1.1)
    )
    lost = distances.recall(near + 50, references, Resampling(100, 0))
    assert (precise.value, other.value, lost.value) == (1.0, 1.0, 0.0)
    assert precise.interval() == pytest.approx((n / (n + 1.96**2), 1.0), abs=1e-4)  # Wilson's
    assert lost.interval() == pytest.approx((0.0, 1.96**2 / (40 + 1.96**2)), abs=1e-4)
    low, high = difference(precise, other)
    assert low < -0.01 and high > 0.01


@pytest.mark.parametrize("seed", range(20))
def test_the_interval_of_precision_holds_its_value_in_its_range(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pictures, references = rng.normal(size=(12, 4)) * 0.5, rng.normal(size=(40, 4))
    found = distances.precision(pictures, references, Resampling(100, 0))
    low, high = found.interval()
    assert 0.0 <= low <= found.value <= high <= 1.0 and low < high


@pytest.mark.parametrize("name", NAMED)
def test_a_resample_has_all_pictures_of_a_prompt(name: str) -> None:
    """With equal pictures per prompt, those of one prompt each tell as much."""
    references, prompts = _features(40, 8, 2, 0.4), tuple(range(6)) * 3
    pictures = np.tile(_features(6, 8, 1), (3, 1))
    found = NAMED[name](pictures, references, Resampling(60, 0, prompts))
    assert found.prompts == 6
    if name in ("cmmd", "precision"):  # they do not change with copies of all pictures
        once = NAMED[name](pictures[:6], references, Resampling(60, 0))
        np.testing.assert_allclose(found.resampled, once.resampled, atol=1e-9)


def test_a_resample_of_one_picture_has_a_finite_kernel_distance() -> None:
    assert np.isfinite(
        distances.kid(_features(2, 4, 1), _features(2, 4, 2), Resampling(50, 0)).resampled
    ).all()


def test_too_few_pictures_are_an_error() -> None:
    for distance in (distances.frechet, distances.kid):
        with pytest.raises(ValueError, match="at least two"):
            distance(np.zeros((1, 4)), np.zeros((5, 4)), Resampling(2, 0))
