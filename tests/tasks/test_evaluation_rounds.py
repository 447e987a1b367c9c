"""Rounds of pictures: their prompts, their noise, and the metrics of all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_world import NEW, World, evaluation_recipe, metrics_in

from configs.errors import Refused
from configs.load_recipe import load_recipe
from tasks.evaluate.draw import read_pictures
from tasks.evaluate.inputs import texts_of
from tasks.evaluate.metrics import most_rounds, pictures_by_set, prompt_numbers, prompt_rounds

ALL = [f"prompt {number}" for number in range(5)]


def settings(**old: Any) -> Any:
    new = {"prompts": ["a", "b"], "images_per_prompt": 2}
    sets = {"new": new, "old": {"prompts": ALL, "images_per_prompt": 1, **old}}
    return load_recipe("sdxl", {"evaluate.prompts": sets, "publish.gate": []}).evaluate


def test_a_round_has_the_next_prompts_of_a_set_and_begins_again_after_the_last() -> None:
    chosen = settings(prompts_per_round=2)
    rounds = prompt_rounds(chosen, 4)
    texts = [texts_of(sets) for sets in rounds]
    assert [sets["new"] for sets in texts] == [["a", "a", "b", "b"]] * 4
    old = [tuple(sets["old"]) for sets in texts]
    assert old == [(ALL[0], ALL[1]), (ALL[2], ALL[3]), (ALL[4], ALL[0]), (ALL[1], ALL[2])]
    assert pictures_by_set(*rounds[:2]) == {"new": [0, 1, 2, 3, 6, 7, 8, 9], "old": [4, 5, 10, 11]}
    assert prompt_numbers(*rounds[:2]) == (0, 0, 1, 1, 2, 3, 0, 0, 1, 1, 4, 5)


@pytest.mark.parametrize(("most", "rounds"), [(None, 1), (6, 1), (17, 2), (18, 3)])
def test_rounds_are_whole(most: int | None, rounds: int) -> None:
    chosen = settings(prompts_per_round=2).model_copy(update={"max_pictures": most})
    assert most_rounds(chosen) == rounds


def test_a_limit_below_one_round_is_refused() -> None:
    chosen = settings(prompts_per_round=2).model_copy(update={"max_pictures": 5})
    with pytest.raises(Refused, match=r"max_pictures: is 5, but a round has 6 pictures"):
        most_rounds(chosen)


@pytest.mark.slow
def test_a_second_round_draws_its_own_pictures_alone(world: World) -> None:
    sets = {
        "new": {"prompts": NEW, "images_per_prompt": 2},
        "old": {"prompts": ["a house", "a tree"], "prompts_per_round": 1},
    }
    recipe = evaluation_recipe(Path(world.recipe.store), world.model, world.clip, prompts=sets)
    trained = world.trained(0.5)
    once = world.evaluate(trained, recipe)
    twice = world.evaluate(trained, recipe, rounds=2)
    first, second = world.jobs
    assert second.prompts == (*NEW[:1] * 2, *NEW[1:] * 2, "a tree")
    assert (first.first, second.first) == (0, 5)
    assert first.latents is not None and second.latents is None
    assert (once.summary["rounds"], twice.summary["rounds"]) == (1, 2)
    assert once.summary["drawn"] == twice.summary["drawn"]
    assert once.summary["measured_by"]["model"]["path"] == world.recipe.model.path
    tars = [Path(entry.path).name for entry in twice.files if entry.path.endswith(".tar")]
    keys = [name.partition(".")[0] for name in tars]
    assert len(set(keys)) == 4, "two models, two rounds"
    before = metrics_in(once)
    after = metrics_in(twice)
    assert list(before) == list(after)
    assert [m["clip_score/new"]["tuned"]["n"] for m in (before, after)] == [4, 8]
    assert [m["clip_score/old"]["base"]["n"] for m in (before, after)] == [1, 2]
    assert before["holdout_loss"] == after["holdout_loss"]
    assert once.summary["fingerprint"] != twice.summary["fingerprint"]
    shards = [world.store.shard("evaluate", key) for key in dict.fromkeys(keys)]
    drawn = [p.tobytes() for s in shards if s is not None for p in read_pictures(world.store, s)]
    assert len(set(drawn)) == len(drawn) == 20, "equal prompts have noise of their own"
    values = [after["clip_score/old"]["tuned"]["value"], before["clip_score/old"]["tuned"]["value"]]
    assert np.isfinite(values).all()
