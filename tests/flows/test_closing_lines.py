"""The last lines of `kiln run`: every compared model, what a rejection leaves, the next step."""

from typing import Any

import pytest

from configs.load_recipe import load_recipe
from flows.run_in_terminal import closing_lines, next_commands


def report(status: str = "published", **more: Any) -> dict[str, Any]:
    metrics = {
        "cmmd": {"base": {"value": 1.3125}, "tuned": {"value": 0.25}, "champion": {"value": 0.5}},
        "fd": {"base": {"value": 12345.0}, "tuned": {"value": 8.5}},
    }
    stages = {"evaluate": {"uri": "/store/evaluate/abc"}}
    move = {"version": "v2", "why": "published"}
    found = {"status": status, "metrics": metrics, "stages": stages, "champion": move}
    return {**found, "model": "store/registry/digits/v2", **more}


def next_of(found: dict[str, Any], *, has_server: bool = True, **settings: Any) -> list[str]:
    return list(next_commands(found, load_recipe("digits", settings), has_server=has_server))


def test_the_champion_has_its_column() -> None:
    assert list(closing_lines(report()))[:2] == [
        "  cmmd                     base 1.312      tuned 0.25       champion 0.5",
        "  fd                       base 1.234e+04  tuned 8.5",
    ]


def test_a_rejection_names_the_pictures() -> None:
    gate = [{"rule": "cmmd < base", "passed": True}, {"rule": "fd < 1", "passed": False}]
    verdict = {"uri": "/store/verdict/def"}
    found = report("rejected", gate=gate, verdict=verdict, model=None)
    assert list(closing_lines(found))[-3:] == [
        "rejected by the gate: fd < 1",
        "verdict:   /store/verdict/def",
        "pictures:  /store/evaluate/abc/before_after.png",
    ]
    assert next_of(found) == []


@pytest.mark.parametrize(
    ("champion", "settings", "named"),
    [
        ("v2", {}, "digits"),
        ("v1", {}, "store/registry/digits/v2"),
        ("v2", {"store": "elsewhere"}, "store/registry/digits/v2"),
        ("v2", {"publish.registry": "elsewhere"}, "store/registry/digits/v2"),
    ],
)
def test_a_published_model_comes_with_the_command_that_draws_with_it(
    champion: str, settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(champion={"version": champion, "why": ""})
    prompt = "'a handwritten zero in white chalk on a green board'"
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/kiln")
    told = f"next:      kiln generate {named} {prompt}"
    assert next_of(found, **settings)[:1] == [told]
    monkeypatch.setattr("shutil.which", lambda _: None)
    first, *_, second = next_of(found, has_server=False, **settings)
    assert first == f"next:      .venv/bin/kiln generate {named} {prompt}"
    assert second.split("#")[0].strip() == "make ui"
    assert next_of({**found, "status": "built"}) == []


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, ""),
        ({"store": "elsewhere"}, " --store elsewhere"),
        ({"publish.registry": "s3://models", "store": "elsewhere"}, " --registry s3://models"),
    ],
)
def test_a_model_that_is_not_the_champion_comes_with_the_command_that_promotes_it(
    settings: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/kiln")
    _, told = next_of(report(champion={"version": "v1", "why": "rolled back"}), **settings)
    assert told.split("#")[0].strip() == f"kiln promote digits v2{place}"
    assert len(next_of(report(), **settings)) == 1


def test_a_candidate_comes_with_the_commands_that_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/kiln")
    why = "v2 awaits approval until 2026-12-13 23:34 UTC"
    found = report("awaiting", candidate={"version": "v2"}, why=why)
    assert list(closing_lines(found))[-3] == f"awaiting: {why}"
    promote, reject = next_of(found, store="elsewhere")
    assert promote.split("#")[0].split() == [
        *("next:", "kiln", "promote", "digits", "v2", "--store", "elsewhere")
    ]
    assert reject.endswith("kiln reject digits v2 --store elsewhere --reason TEXT")
    rejected = report("rejected", candidate={"version": "v2"}, why="v2 was rejected by anna: thin")
    assert list(closing_lines(rejected))[-3] == "rejected: v2 was rejected by anna: thin"
    assert next_of(rejected) == []
