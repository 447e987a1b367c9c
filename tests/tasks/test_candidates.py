"""A person decides on a candidate, against the champion that its gate compared it with."""

from functools import partial
from typing import Any

import pytest
from registries import crown, model, recorded_swaps
from waiting import at_once

from artifacts import compare_and_swap as cas
from artifacts.store import KeyParts, Store
from configs.errors import Away, Refused
from tasks.publish import champion_alias
from tasks.publish.registry import Registry, Version

DAYS = 1.0


def propose(
    store: Store, registry: Registry, n: int, *, days: float = DAYS, bound: bool = True
) -> str:
    """Publish a model, and let it await approval; its version."""
    version = registry.publish(model(store, n))
    candidate, _ = registry.propose(
        version, days, expected=registry.history().champion, bound=bound, hub=None
    )
    assert candidate["version"] == version.name
    return version.name


def test_an_approved_candidate_is_the_champion_and_the_history_says_by_whom(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    crown(store, found, 1)
    propose(store, found, 2)
    champion, candidate = found.champion(), found.candidate()
    assert champion is not None and champion.name == "v1" and found.alias.target() == "v1"
    assert candidate is not None and found.find("candidate") == candidate
    assert found.approve("candidate", "anna", "clear strokes").name == "v2"
    assert found.alias.target() == "v2" and found.candidate() is None
    move = found.history().moves[-1]
    assert (move["by"], move["why"]) == ("anna", "approved: clear strokes")
    with pytest.raises(Refused, match="v2 was promoted by anna: approved: clear strokes"):
        found.reject("v2", "ben", "too late")


@pytest.mark.parametrize("bound", [True, False])
def test_a_candidate_that_was_compared_with_another_champion_is_not_promoted(
    any_registry: tuple[Store, Registry], bound: bool
) -> None:
    """If no rule names the champion, its verdict holds beside any."""
    store, found = any_registry
    crown(store, found, 1)
    propose(store, found, 2, bound=bound)
    crown(store, found, 3)
    if not bound:
        assert found.approve("v2", "anna", "").name == "v2"
        return
    said = "v2 was compared with v1, and v3 is the champion now: the next run .* measures it anew"
    with pytest.raises(Refused, match=said):
        found.approve("candidate", "anna", "")
    assert found.history().waiting is None and found.history().champion == "v3"
    assert found.promote("v2", by="anna").name == "v2", "by its number, a person promotes any"


def test_a_champion_that_comes_before_the_proposal_is_no_failure(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    crown(store, found, 1, 2)
    version = found.publish(model(store, 3))
    with pytest.raises(Away, match="the champion is v2, not v1: run again"):
        found.propose(version, DAYS, expected="v1", bound=True, hub=None)
    assert not found.history().candidates


def test_a_rejected_model_is_not_offered_again_whoever_is_the_champion(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry

    def compared(champion: str) -> Version:
        draft = store.draft(KeyParts("publish", 1, {}, {"model": "m", "champion": champion}))
        draft.write("model_index.json", b"m")
        return found.publish(draft.commit({}, {}))

    found.propose(compared("none"), DAYS, expected=None, bound=True, hub=None)
    assert found.reject("candidate", "anna", "too thin") == "v1"
    assert found.candidate() is None
    for which in ("v1", "candidate"):
        with pytest.raises(Refused, match="v1 was rejected by anna: too thin"):
            found.approve(which, "ben", "")
    crown(store, found, 9)
    again = compared("m9")
    assert again.name == "v3"
    candidate, is_new = found.propose(again, DAYS, expected="v2", bound=True, hub=None)
    assert candidate["rejected"]["by"] == "anna" and not is_new
    assert found.history().waiting is None


def test_a_rejection_has_a_reason(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    propose(store, found, 1)
    with pytest.raises(Refused, match="a rejection needs a reason"):
        found.reject("candidate", "anna", " ")
    assert found.history().waiting is not None


def test_an_expired_candidate_is_asked_for_anew(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    propose(store, found, 1, days=-1)
    with pytest.raises(Refused, match=r"v1 expired on .* UTC: the next run of its recipe asks"):
        found.approve("candidate", "anna", "")
    assert found.history().waiting is None
    propose(store, found, 1)
    history = found.history()
    expired, waiting = map(history.outcome, history.candidates)
    assert str(expired).startswith("v1 expired on ") and waiting is None
    assert found.approve("candidate", "anna", "").name == "v1"


def test_a_candidate_is_asked_for_once_and_replaced_by_the_next(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    first, second = (found.publish(model(store, n)) for n in (1, 2))
    ask = partial(found.propose, days=DAYS, expected=None, bound=True, hub=None)
    assert [ask(version)[1] for version in (first, first, second)] == [True, False, True]
    with pytest.raises(Refused, match="v1 was replaced by the candidate v2"):
        found.approve("v1", "anna", "")
    assert found.approve("v2", "anna", "").name == "v2"
    with pytest.raises(Refused, match="v9: no such version awaits approval"):
        found.approve("v9", "anna", "")


def test_a_waiting_candidate_is_not_deleted(any_registry: tuple[Store, Registry]) -> None:
    store, found = any_registry
    crown(store, found, 1)
    propose(store, found, 2, bound=False)
    crown(store, found, 3, 4)
    assert found.keep(1) == ["v1"]
    candidate = found.candidate()
    assert candidate is not None and candidate.name == "v2", "although v4 is newer"
    found.reject("v2", "anna", "too thin")
    assert found.keep(1) == ["v2"]


def test_one_of_two_concurrent_decisions_counts(any_registry: tuple[Store, Registry]) -> None:
    store, found = any_registry
    propose(store, found, 1)
    refused: list[str] = []

    def decide(by: str, decision: Any) -> None:
        try:
            decision("v1", by, "a reason")
        except Refused:
            refused.append(by)

    at_once(partial(decide, "anna", found.approve), partial(decide, "ben", found.reject))
    (loser,) = refused
    history = found.history()
    assert len(history.moves) == (loser == "ben")
    assert ("rejected" in history.candidates[0]) == (loser == "anna")


def test_a_candidate_is_new_although_the_answer_of_the_store_was_lost(
    registry: tuple[Store, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody would be notified."""
    store, found = registry
    version = found.publish(model(store, 1))

    def lost(*request: Any) -> Any:
        monkeypatch.setattr(champion_alias, "swap", cas.swap)
        cas.swap(*request)
        raise OSError("connection reset")

    monkeypatch.setattr(champion_alias, "swap", lost)
    assert found.propose(version, DAYS, expected=None, bound=True, hub=None)[1]
    assert len(found.history().candidates) == 1


def test_a_late_request_brings_no_decided_candidate_back(
    any_registry: tuple[Store, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found = any_registry
    requests = recorded_swaps(monkeypatch, "tasks.publish.champion_alias.swap")
    propose(store, found, 1)
    found.reject("v1", "anna", "too thin")
    for request in requests:
        cas.swap(*request)
    assert found.history().waiting is None
