"""Prompts of files and their order; judges and prompts that an evaluation refuses."""

from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from evaluation_world import World, evaluation_recipe
from loopback_server import LoopbackServer, refusing

from artifacts.records import digest_json
from configs.errors import Away, Refused
from tasks.evaluate import stage as evaluate
from tasks.evaluate.metrics import read_prompts, sample_prompts

pytestmark = pytest.mark.slow


def test_a_store_that_refuses_a_prompt_file_may_give_it_later(refusing_url: str) -> None:
    """Each stage reads it again: days of training must not end in wrong input."""
    with pytest.raises(Away, match=r"^evaluate\.prompts\.a\.file: .*: run again later$"):
        read_prompts("evaluate.prompts.a.file", f"{refusing_url}/prompts.txt")


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (503, Away, r"cannot be read now \(503.*\): run again later$"),
        (None, Away, r"cannot be read now \(.*\): run again later$"),
        (404, Refused, "prompts.txt: no such file or folder$"),
        (403, Refused, "cannot be read: 403"),
        (401, Refused, "cannot be read: 401"),
    ],
)
def test_a_web_server_that_is_away_may_give_a_prompt_file_later(
    answer: int | None, error: type[Exception], words: str
) -> None:
    """fsspec calls each of its answers, and none, a file that does not exist."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer or 200)
            self.end_headers()

    with LoopbackServer(Answers) as server, refusing() as closed:
        host = closed if answer is None else server.host
        with pytest.raises(error, match=words):
            read_prompts("evaluate.prompts.a.file", f"http://{host}/prompts.txt")


def test_prompt_files_are_read_and_checked(world: World, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo\n")
    sets = {"a": {"file": str(tmp_path / "prompts.txt"), "images_per_prompt": 2}}
    recipe = evaluation_recipe(
        tmp_path, world.model, world.clip, prompts=sets | {"b": {"prompts": ["x"]}}
    )
    assert evaluate.settings_for_key(recipe)["prompts"]["a"] == ["one", "one", "two", "two"]
    assert sample_prompts(recipe.evaluate) == ("one", "x", "two")
    evaluate.check(recipe)
    (tmp_path / "prompts.txt").unlink()
    with pytest.raises(Refused, match=r"evaluate\.prompts\.a\.file"):
        evaluate.check(recipe)
    with pytest.raises(Refused, match=r"evaluate\.judges: digits"):
        evaluate.check(evaluation_recipe(tmp_path, world.model, world.clip, judges=["digits"]))


def test_the_order_of_prompt_sets_is_in_the_key(tmp_path: Path) -> None:
    """It selects the noise of every picture."""
    one, other = {"prompts": ["a"], "compare": False}, {"prompts": ["b"]}
    keys = [
        digest_json(
            evaluate.settings_for_key(evaluation_recipe(tmp_path, tmp_path, tmp_path, prompts=sets))
        )
        for sets in ({"one": one, "other": other}, {"other": other, "one": one})
    ]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("name", ["clip_score", "cmmd", "digit", "holdout_loss"])
def test_a_judge_with_the_name_of_another_metric_is_refused(name: str, tmp_path: Path) -> None:
    judge = {"name": name, "path": "a-model"}
    prompts = {"new": {"prompts": ["a blue seven on black"]}}
    given = {"judges": ["digits", judge], "prompts": prompts}
    recipe = evaluation_recipe(tmp_path, tmp_path, tmp_path, **given)
    with pytest.raises(Refused, match=f"evaluate.judges: {name} is the name of another metric"):
        evaluate.check(recipe)
