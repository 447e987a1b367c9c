"""Captions by servers of chat completions: retries, shared load, budgets and errors."""

from collections.abc import Iterator

import pytest
from caption_server import CaptionServer
from loopback_server import refusing
from PIL import Image

from artifacts.records import Damaged
from configs.errors import Away, Failed
from configs.settings.caption import Endpoint
from tasks.caption.captioner import Answer, Decoding, Question
from tasks.caption.endpoint import EndpointCaptioner, check_endpoint, key_of

KEY = "sk-of-the-test"


def captions_of(*urls: str, pictures: int = 20, **settings: object) -> dict[int, Answer | None]:
    endpoint = Endpoint(urls=urls, model="tiny", **{"backoff": 0.01, **settings})
    captioner = EndpointCaptioner(endpoint, Decoding(64, 0.0, 0), {"short": "describe"}, KEY)
    answers: dict[int, Answer | None] = {}
    colours = (Image.new("RGB", (32, 32), (10 * n, 0, 0)) for n in range(pictures))
    questions = (Question(n, colour, ("short",)) for n, colour in enumerate(colours))
    captioner.caption(questions, lambda row, name, answer: answers.update({row: answer}))
    return answers


def test_faults_that_pass_are_tried_again_until_each_picture_has_its_own_caption() -> None:
    faults = [429, "ok", 500, "cut", "ok", 408, 409, 503, "cut"]
    with CaptionServer(faults) as server:
        answers = captions_of(server.base_url, max_connections=4)
    assert len({answer.text for answer in answers.values() if answer}) == len(answers) == 20
    assert len(server.keys) == 20 + 7
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert server.most <= 4


def test_servers_share_the_pictures_and_one_alone_does_all_when_the_other_is_away() -> None:
    with CaptionServer() as one, CaptionServer() as other:
        captions_of(one.base_url, other.base_url, max_connections=8)
        assert 5 <= len(one.asked) <= 15
    with CaptionServer() as one, refusing() as away:
        answers = captions_of(f"http://{away}/v1", one.base_url)
    assert all(answers.values())
    assert len(one.asked) == 20


def test_without_any_server_the_stage_is_away_and_says_which() -> None:
    with refusing() as away, pytest.raises(Away, match=rf"no server answers \(http://{away}/v1"):
        captions_of(f"http://{away}/v1", retries=1)


def test_an_answer_that_is_nested_too_deep_is_no_caption() -> None:
    with CaptionServer(["nested", "nested"]) as server:
        answers = captions_of(server.base_url, retries=1, pictures=1)
    assert answers == {0: None}


def test_a_picture_that_a_server_fails_on_has_no_caption_and_the_others_have_theirs() -> None:
    with CaptionServer() as server:
        server.refuses = "#640000"  # the picture of row 10, as its JPEG
        answers = captions_of(server.base_url, retries=1, pictures=11)
    assert [row for row, answer in answers.items() if answer is None] == [10]


@pytest.mark.parametrize("status", [400, 401, 404, 307])
def test_a_final_refusal_ends_the_stage_and_quotes_no_key(status: int) -> None:
    with CaptionServer([status] * 99) as server, pytest.raises(Failed) as failed:
        captions_of(server.base_url, max_connections=1)
    assert f"status {status}" in str(failed.value)
    assert KEY not in str(failed.value)
    assert len(server.keys) <= 2  # one may be on its way already


def test_the_budget_ends_the_stage_and_no_request_exceeds_it() -> None:
    with CaptionServer() as server, pytest.raises(Failed, match="budget of 7 requests is spent"):
        captions_of(server.base_url, max_requests=7)
    assert len(server.keys) == 7


def test_a_line_break_at_the_end_of_the_key_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_CAPTION_KEY", f"{KEY}\n")
    assert key_of("digits") == KEY
    with CaptionServer() as server:
        settings = Endpoint(urls=(server.base_url,), model="tiny")
        assert not [*check_endpoint(settings, key_of("digits"))]


def test_no_proxy_of_the_environment_sees_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with CaptionServer() as server, CaptionServer() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        captions_of(server.base_url, pictures=2)
    assert not proxy.keys


def test_a_damaged_image_shard_is_told_as_such() -> None:
    def damaged() -> Iterator[Question]:
        yield Question(0, Image.new("RGB", (32, 32)), ("short",))
        raise Damaged("the tar is damaged")

    with CaptionServer() as server, pytest.raises(Damaged, match="the tar is damaged"):
        endpoint = Endpoint(urls=(server.base_url,), model="tiny")
        captioner = EndpointCaptioner(endpoint, Decoding(64, 0.0, 0), {"short": "describe"}, None)
        captioner.caption(damaged(), lambda *_: None)
