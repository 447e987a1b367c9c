"""Numbers are a function of (seed, stream, counter), and streams do not touch."""

import numpy as np
from tolerances import assert_close

from runtimes.objective.random_draws import Stream, generator


def test_the_same_place_gives_the_same_numbers() -> None:
    first = generator(7, Stream.NOISE, 123).standard_normal(100)
    generator(7, Stream.NOISE, 122).standard_normal(100_000)
    np.testing.assert_array_equal(first, generator(7, Stream.NOISE, 123).standard_normal(100))


def test_seed_stream_and_each_counter_matter() -> None:
    places = [
        (0, Stream.NOISE, 0),
        (1, Stream.NOISE, 0),
        (0, Stream.POSTERIOR, 0),
        (0, Stream.NOISE, 1),
        (0, Stream.NOISE, 0, 1),
        (0, Stream.NOISE, 0, 0, 1),
        (2**63 - 1, Stream.NOISE, 2**40),
    ]
    drawn = {tuple(generator(*place).integers(2**62, size=2)) for place in places}
    assert len(drawn) == len(places)


def test_a_stream_is_what_it_was_in_every_version() -> None:
    """Changing what is drawn would break the resuming of runs made by an older version."""
    drawn = generator(42, Stream.NOISE, 5).standard_normal(3, dtype=np.float32)
    assert_close(drawn, [-1.2711216, -0.08273474, -1.0674361])


def test_what_else_is_drawn_is_what_it_was_in_every_version() -> None:
    """The order of samples, and each one's timestep, caption and dropout."""
    order = generator(42, Stream.SHARDS, 5, 1).permutation(8)
    assert order.tolist() == [0, 2, 1, 7, 5, 4, 6, 3]
    choices = generator(42, Stream.CHOICES, 5).random(3)
    np.testing.assert_allclose(choices, [0.99127488, 0.41834226, 0.57084267], rtol=1e-7)
