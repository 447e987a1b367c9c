"""What a forward pass drops is drawn anew for each step, micro-batch and rank, and repeatable."""

import torch

from runtimes.torch_models.network import seed_dropout


def dropped(*place: int) -> tuple[bool, ...]:
    seed_dropout(*place)
    kept: torch.Tensor = torch.nn.functional.dropout(torch.ones(64), 0.5)
    return tuple((kept == 0).tolist())


def test_each_place_drops_something_else_and_always_the_same() -> None:
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    found = [dropped(*place) for place in places]  # seed, step, first sample, rank
    assert len(set(found)) == len(places)
    assert [dropped(*place) for place in places] == found
