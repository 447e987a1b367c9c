"""Intervals cover a known truth at their level, for values and for paired differences."""

import numpy as np
import pytest

from tasks.evaluate import distances
from tasks.evaluate.distances import (
    DISTANCES,
    Distance,
    Estimate,
    Resampling,
    cmmd,
    difference,
    differences,
    from_npz,
    mean,
    share,
    to_npz,
)

pytestmark = pytest.mark.slow

DRAWS = 1000
SEEDS = 4  # of the bootstrap: its weights are drawn once for each


def binomial_bounds(level: float) -> tuple[float, float]:
    """Four standard errors of a share of DRAWS around a level."""
    error = 4 * (level * (1 - level) / DRAWS) ** 0.5
    return level - error, level + error


@pytest.mark.parametrize("count", [2, 5, 80])
def test_the_interval_of_a_mean_covers_the_truth_at_its_level(count: int) -> None:
    rng = np.random.default_rng(0)
    for level in (0.8, 0.95):
        found = [
            mean(rng.normal(size=count), Resampling(300, n % SEEDS)).interval(level)
            for n in range(DRAWS)
        ]
        covered = np.mean([low <= 0.0 <= high for low, high in found])
        low, high = binomial_bounds(level)
        assert low < covered < high


def test_a_mean_of_one_value_has_no_interval() -> None:
    tuned, base = (
        mean(np.array([0.2999]), Resampling(300, 0)),
        mean(np.array([0.3]), Resampling(300, 0)),
    )
    assert tuned.interval() == difference(tuned, base) == (-np.inf, np.inf)
    assert tuned.metric()["ci"] is None
    assert differences({"loss": tuned}, {"loss": base})["loss"]["ci"] is None


@pytest.mark.parametrize("level", [0.95, 0.998])
def test_the_interval_of_few_resamples_covers_the_truth_at_its_level(level: float) -> None:
    """A Fréchet distance of long features has 40."""
    rng = np.random.default_rng(4)
    models = [mean(rng.normal(size=80), Resampling(40, n)) for n in range(DRAWS)]
    found = [one.interval(level) for one in models]
    covered = np.mean([low <= 0.0 <= high for low, high in found])
    low, high = binomial_bounds(level)
    assert low - 0.01 < covered < high


def test_the_interval_of_a_paired_difference_covers_the_truth_and_is_the_narrower_one() -> None:
    """Two models on equal prompts: a prompt is hard for both."""
    rng = np.random.default_rng(1)
    covered, widths, apart = 0, [], []
    for number in range(DRAWS):
        seed = number % SEEDS
        prompt = rng.normal(size=100)
        tuned, base = (prompt + 0.3 * rng.normal(size=100) + shift for shift in (0.1, 0.0))
        a, b = mean(tuned, Resampling(300, seed)), mean(base, Resampling(300, seed))
        low, high = difference(a, b)
        covered += low <= 0.1 <= high
        widths.append(high - low)
        alone = [np.subtract(*one.interval()[::-1]) for one in (a, b)]
        apart.append(np.hypot(*alone))
    low, high = binomial_bounds(0.95)
    assert low < covered / DRAWS < high
    assert np.mean(widths) < 0.4 * np.mean(apart)


def test_the_interval_of_two_shares_covers_the_truth_and_has_a_width_at_one() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for number in range(DRAWS):
        seed = number % SEEDS
        hard = rng.random(200)
        tuned, base = hard < 0.95, np.where(rng.random(200) < 0.8, hard, rng.random(200)) < 0.9
        low, high = difference(
            share(tuned, Resampling(200, seed)), share(base, Resampling(200, seed))
        )
        covered += low <= 0.05 <= high
    low, high = binomial_bounds(0.95)
    assert low - 0.01 < covered / DRAWS < high + 0.02
    perfect = share(np.ones(200, bool), Resampling(200, 0))
    low, high = difference(perfect, perfect)
    assert low < -0.01 and high > 0.01


def test_shares_of_models_that_agree_on_few_pictures_may_differ() -> None:
    """Two models agree on 27 passes and 27 failures. Expected: Newcombe 1998, method 10."""
    passed = share(np.repeat([True, False], 27), Resampling(2000, 0))
    assert difference(passed, passed) == pytest.approx((-0.0351, 0.0351), abs=1e-3)
    few = share(np.array([True, True, False, False]), Resampling(2000, 0))
    assert difference(few, few) == pytest.approx((-0.35, 0.35), abs=0.02)


PROMPTS, PICTURES = 4, 8  # as in recipes of large models
PROMPT_OF = tuple(np.repeat(np.arange(PROMPTS), PICTURES).tolist())


def test_the_difference_of_means_over_several_pictures_per_prompt_covers_the_truth() -> None:
    """Each prompt gains or loses by itself: equal models are called better no more than at 2.5%."""
    rng = np.random.default_rng(5)
    covered = better = 0
    for number in range(DRAWS):
        hard, gain = rng.normal(0, 2, PROMPTS), rng.normal(0, 1, PROMPTS)
        tuned, base = (
            mean(
                one[list(PROMPT_OF)] + rng.normal(size=32),
                Resampling(300, number % SEEDS, PROMPT_OF),
            )
            for one in (hard + gain, hard)
        )
        low, high = difference(tuned, base)
        covered, better = covered + (low <= 0.0 <= high), better + (low > 0.0)
    low, high = binomial_bounds(0.95)
    assert low < covered / DRAWS < high
    assert better / DRAWS < binomial_bounds(0.025)[1]


@pytest.mark.parametrize(("prompts", "pictures"), [(4, 8), (20, 5)])
def test_a_share_over_several_pictures_per_prompt_covers_the_truth(
    prompts: int, pictures: int
) -> None:
    rng = np.random.default_rng(6)
    prompt_of = np.repeat(np.arange(prompts), pictures)
    covered = both = 0
    for number in range(DRAWS):
        tuned, base = (
            share(
                rng.random(len(prompt_of)) < rng.beta(6, 2, prompts)[prompt_of],
                Resampling(200, number % SEEDS, tuple(prompt_of.tolist())),
            )
            for _ in range(2)
        )
        low, high = tuned.interval()
        covered += low <= 0.75 <= high
        low, high = difference(tuned, base)
        both += low <= 0.0 <= high
    low, high = binomial_bounds(0.95)
    assert low < covered / DRAWS  # Student's t of few prompts is cautious
    assert low < both / DRAWS


def test_one_picture_per_prompt_or_one_prompt_is_resampled_by_picture() -> None:
    values = np.random.default_rng(0).normal(size=9)
    counts = np.random.default_rng((3, 0, 9)).multinomial(9, np.full(9, 1 / 9), size=50)
    for prompts in (None, tuple(range(9)), (0,) * 9):
        found = mean(values, Resampling(50, 3, prompts))
        np.testing.assert_array_equal(found.resampled, (counts / 9) @ values)
        assert "prompts" not in found.metric()
        judged = share(values > 0, Resampling(50, 3, prompts))
        assert judged.metric() == share(values > 0, Resampling(50, 3)).metric()


def test_all_passes_of_few_prompts_have_a_wider_interval_than_those_of_many() -> None:
    passed = np.ones(32, bool)
    few, many, apart = (
        share(passed, Resampling(50, 0, prompts)).interval()[0]
        for prompts in (PROMPT_OF, tuple(n // 2 for n in range(32)), None)
    )
    assert 0.5 < few < many < apart < 1.0


def test_a_share_of_one_by_weights_has_the_interval_of_one() -> None:
    """Weighted sums of a precision of 1 differ from 1 in the last bit, resamples in that of f32."""
    found = []
    for noise, of_f32 in ((0.0, 0.0), (2e-16, 6e-8)):
        resampled = 1.0 - of_f32 * (np.arange(50) % 2)
        found.append(Estimate(1.0 - noise, 22, resampled, is_share=True, prompts=4, counted=22))
    assert found[0].interval() == pytest.approx(found[1].interval())
    assert difference(found[0], found[0]) == pytest.approx(difference(found[1], found[1]))


POINTS = np.array([[2.0, 0, 0], [0, 2, 0], [0, 0, 2], [1, 1, 0], [0, 1, 1], [1, 0, 1.5]])
#: Probabilities of the points for the references, the tuned model and the base.
REFERENCE, TUNED, BASE = (
    np.array(weights) / sum(weights)
    for weights in ([1, 1, 1, 1, 1, 1], [2, 1, 1, 1, 1, 1], [4, 1, 2, 1, 1, 3])
)


def truth(name: str, probabilities: np.ndarray) -> float:
    """The distance of two distributions over POINTS, by the kernel's expectations."""
    if name == "kid":
        kernel = (POINTS @ POINTS.T / 3 + 1) ** 3
    else:
        unit = POINTS / np.linalg.norm(POINTS, axis=1, keepdims=True)
        squared = ((unit[:, None] - unit[None]) ** 2).sum(-1)
        kernel = 1000 * np.exp(-squared / 200)
    gap = probabilities - REFERENCE
    return float(gap @ kernel @ gap)


@pytest.mark.parametrize(
    ("name", "distance"),
    [("cmmd", cmmd), pytest.param("kid", DISTANCES["kid"], marks=pytest.mark.extended)],
)
def test_the_interval_of_a_difference_of_distances_covers_the_truth(
    name: str, distance: Distance
) -> None:
    rng = np.random.default_rng(3)
    expected = truth(name, TUNED) - truth(name, BASE)
    covered = []
    for number in range(DRAWS):
        reference, tuned, base = (
            POINTS[rng.choice(6, size=n, p=p)]
            for n, p in ((150, REFERENCE), (120, TUNED), (120, BASE))
        )
        a, b = (distance(one, reference, Resampling(200, number % SEEDS)) for one in (tuned, base))
        low, high = difference(a, b)
        covered.append(low <= expected <= high)
    low, high = binomial_bounds(0.95)
    assert low - 0.02 < np.mean(covered) < high + 0.01


def test_a_resample_has_the_same_pictures_for_every_metric_and_model() -> None:
    values = np.random.default_rng(0).normal(size=50)
    a, b = mean(values, Resampling(100, 7)), mean(values + 2, Resampling(100, 7))
    np.testing.assert_allclose(b.resampled - a.resampled, 2.0)
    assert difference(b, a) == pytest.approx((2.0, 2.0))
    assert difference(b, a, factor=2.0, offset=1.0)[0] < 2 - values.mean() - 1
    assert not np.allclose(mean(values, Resampling(100, 8)).resampled, a.resampled)


def test_metrics_of_different_pictures_have_no_difference() -> None:
    a, b = mean(np.arange(5.0), Resampling(20, 0)), mean(np.arange(6.0), Resampling(20, 0))
    with pytest.raises(ValueError, match="different pictures"):
        difference(a, b)
    assert differences({"x": a, "y": a}, {"x": b, "y": a, "z": a}).keys() == {"y"}


def test_resampled_values_survive_the_file() -> None:
    models = {
        "base": {"clip_score/new": mean(np.arange(9.0), Resampling(30, 0))},
        "tuned": {"clip_score/new": mean(np.arange(9.0) ** 2, Resampling(30, 0))},
    }
    models["tuned"]["digit/new"] = share(np.array([True, False, True]), Resampling(30, 0))
    models["tuned"]["clip_score/old"] = mean(np.arange(32.0), Resampling(30, 0, PROMPT_OF))
    models["tuned"]["digit/old"] = share(np.arange(32) < 29, Resampling(30, 0, PROMPT_OF))
    metrics: dict[str, dict[str, distances.Metric]] = {}
    for model, estimates in models.items():
        for name, one in estimates.items():
            metrics.setdefault(name, {})[model] = one.metric()
    data = to_npz(models)
    assert data == to_npz(models)
    for model, estimates in models.items():
        read = from_npz(data, metrics, model)
        assert read.keys() == estimates.keys()
        for name, one in estimates.items():
            assert (read[name].value, read[name].n) == (one.value, one.n)
            assert read[name].interval() == pytest.approx(one.interval(), rel=1e-5)


def test_a_share_has_wilsons_interval() -> None:
    found = share(np.array([True] * 8 + [False] * 2), Resampling(20, 0)).metric()
    assert found["value"] == 0.8 and found["n"] == 10
    assert found["ci"] == pytest.approx([0.4902, 0.9433], abs=1e-4)
    assert share(np.ones(200, bool), Resampling(20, 0)).metric()["ci"] == pytest.approx(
        [0.9812, 1], abs=1e-4
    )
    assert share(np.zeros(200, bool), Resampling(20, 0)).interval()[0] == 0.0


def test_an_interval_of_a_distance_has_the_percentiles_of_its_level() -> None:
    found = Estimate(0.0, 9, np.linspace(-1.0, 1.0, 2001)).interval(0.9)
    assert found == pytest.approx((-0.9, 0.9))


def test_an_interval_stays_in_the_range_of_its_metric() -> None:
    spread = np.linspace(-1, 3, 41)
    assert Estimate(1.0, 9, spread, low=0.0, high=2.0).interval() == (0.0, 2.0)


def test_empty_input_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        mean(np.zeros(0), Resampling(10, 0))
    with pytest.raises(ValueError, match="no pictures"):
        share(np.zeros(0, bool), Resampling(10, 0))
