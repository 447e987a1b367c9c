"""The champion moves forth and back; its history survives kills, races and damage."""

import itertools
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from registries import crown, model, recorded_swaps
from store_servers import REMOTE, UrlOf
from waiting import at_once

from artifacts import compare_and_swap as cas
from artifacts.records import encode_record
from artifacts.store import KeyParts, Store
from configs.errors import Away, Refused
from tasks.publish import champion_alias
from tasks.publish.champion_alias import HISTORY
from tasks.publish.registry import Registry


def test_the_champion_moves_and_rolls_back_step_by_step(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    assert found.champion() is None and found.last_move() is None
    crown(store, found, 1, 2, 3)
    steps = [found.champion().name, found.rollback().name, found.rollback().name]
    assert steps == ["v3", "v2", "v1"]
    with pytest.raises(Refused, match=r"no champion before v. is kept"):
        found.rollback()
    found.promote("v3")
    assert found.rollback().name == "v1"
    move = found.last_move()
    assert move is not None and (move["version"], move["why"]) == ("v1", "rolled back")
    assert found.was_champion("v2")
    assert not found.was_champion("v4")


def test_the_candidate_is_the_newest_version_unless_it_was_the_champion(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    assert found.candidate() is None
    crown(store, found, 1)
    with pytest.raises(Refused, match="there is no candidate"):
        found.find("candidate")
    found.publish(model(store, 2))
    assert found.find("candidate").name == "v2" and found.find("champion").name == "v1"
    assert found.find("").name == found.find("v1").name == "v1"
    found.promote("v2")
    found.rollback()
    assert found.candidate() is None, "a rolled-back champion is no candidate"


def test_a_rolled_back_model_stays_rolled_back_after_its_version_was_deleted(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    crown(store, found, 1, 2)
    found.rollback()
    crown(store, found, 3)
    assert found.keep(1) == ["v2"]
    again = found.publish(model(store, 2)).name
    assert again == "v4" and found.was_champion(again) and found.candidate() is None
    assert not found.was_champion(found.publish(model(store, 4)).name)


def test_a_copy_of_a_deleted_champion_is_found_again(registry: tuple[Store, Registry]) -> None:
    """Otherwise each run under another champion would publish a copy."""
    store, found = registry
    crown(store, found, 1, 2, 3)
    assert found.keep(1) == ["v1"]
    one = model(store, 1)
    parts = one.manifest["settings"], one.manifest["inputs"]
    assert found.earlier_champion(*parts) is None
    copy = found.publish(one)
    assert found.earlier_champion(*parts) == copy


def test_a_rolled_back_model_stays_rolled_back_whoever_is_the_champion(
    registry: tuple[Store, Registry],
) -> None:
    """The key has the champion that the gate compared it with, which a rollback changes."""
    store, found = registry

    def compared(n: int, champion: str) -> str:
        inputs = {"model": f"m{n}", "champion": champion}
        draft = store.draft(KeyParts("publish", 1, {"gate": "old"}, inputs))
        draft.write("model_index.json", f"{n}".encode())
        return found.publish(draft.commit({}, {})).name

    for n in (1, 2, 3):
        found.promote(compared(n, f"m{n - 1}"))
    assert [found.rollback().name for _ in range(2)] == ["v2", "v1"]
    again = compared(3, "m1")
    assert again == "v4" and found.was_champion(again)
    assert found.keep(1) == ["v2", "v3"] and found.was_champion(again)
    assert not found.was_champion(compared(4, "m1"))
    changed = KeyParts("publish", 1, {"gate": "new"}, {"model": "m3", "champion": "m1"})
    draft = store.draft(changed)
    draft.write("model_index.json", b"3")
    assert not found.was_champion(found.publish(draft.commit({}, {})).name)


def write_history(found: Registry, data: bytes) -> None:
    path = f"{found.root}/{HISTORY}"
    assert cas.swap(found.fs, path, cas.read(found.fs, path), data) is not None


def test_a_promotion_killed_before_the_alias_is_completed_by_the_next(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    crown(store, found, 1)
    found.publish(model(store, 2))
    move = {"version": "v2", "key_without_champion": found.version("v2").model}
    moves = [*found.history().moves, {**move, "why": "published", "at": "", "token": "t"}]
    write_history(found, encode_record({"moves": moves}))
    assert found.was_champion("v2") and found.alias.target() == "v1"
    champion = found.champion()
    assert champion is not None and champion.name == "v2"
    found.promote("v2")
    assert [move["version"] for move in found.history().moves] == ["v1", "v2"]
    assert found.alias.target() == "v2"


@pytest.mark.parametrize("copy", ["folder", "file"])
def test_an_alias_that_was_copied_as_another_thing_is_written_again(
    tmp_path: Path, copy: str
) -> None:
    """As by `cp -rL`, or by a download from a bucket, where it is an object."""
    store, found = Store(str(tmp_path / "store")), Registry(str(tmp_path / "registry"), "digits")
    crown(store, found, 1, 2)
    alias = Path(found.root, "champion")
    alias.unlink()
    if copy == "file":
        alias.write_text("v2")
    else:
        shutil.copytree(f"{found.root}/v1", alias)
    found.promote("v1")
    assert alias.is_symlink() and alias.readlink() == Path("v1")
    assert not [path for path in Path(found.root).iterdir() if ".tmp" in path.name]


def test_a_promotion_gated_against_another_champion_is_refused(
    any_registry: tuple[Store, Registry],
) -> None:
    """Two runs were gated against v1: the second was never held against the first."""
    store, found = any_registry
    for n in (1, 2, 3):
        found.publish(model(store, n))
    found.promote("v1", expected=None)
    found.promote("v2", expected="v1")
    for expected in ("v1", None):
        with pytest.raises(Away, match="digits: the champion is v2, not"):
            found.promote("v3", expected=expected)
    found.promote("v2", expected="v1")  # an equal run has promoted it
    assert [move["version"] for move in found.history().moves] == ["v1", "v2"]
    assert found.alias.target() == "v2"


def test_one_of_two_concurrent_promotions_succeeds(
    any_registry: tuple[Store, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found = any_registry
    for n in (1, 2, 3):
        found.publish(model(store, n))
    found.promote("v1")
    both = threading.Barrier(2)

    def together(fs: Any, path: str, *given: Any) -> Any:
        if path.endswith(f"/{HISTORY}"):
            both.wait(60)
        return cas.swap(fs, path, *given)

    monkeypatch.setattr(champion_alias, "swap", together)
    refused: list[str] = []

    def promote(version: str) -> None:
        try:
            found.promote(version, expected="v1")
        except Away:
            refused.append(version)

    at_once(*(partial(promote, version) for version in ("v2", "v3")))
    (loser,) = refused
    winner = {"v2": "v3", "v3": "v2"}[loser]
    assert [move["version"] for move in found.history().moves] == ["v1", winner]


@pytest.mark.parametrize("kind", ["memory", *REMOTE])
def test_a_request_that_arrives_late_sets_no_earlier_champion(
    kind: str, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url_of(kind))
    found = Registry(f"{store.url}/registry", "digits")
    requests = recorded_swaps(monkeypatch, "tasks.publish.champion_alias.swap")
    crown(store, found, 1, 2, 3)
    assert len(requests) == 6
    for request in requests:
        cas.swap(*request)
    assert [move["version"] for move in found.history().moves] == ["v1", "v2", "v3"]
    assert found.alias.target() == "v3"


def test_concurrent_promotions_and_rollbacks_lose_nothing(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    crown(store, found, 1, 2, 3, 4)
    promotions = (partial(found.promote, version) for version in ("v1", "v2", "v3"))
    at_once(*promotions, found.rollback, found.rollback)
    moves = found.history().moves
    assert {"v1", "v2", "v3"} <= {move["version"] for move in moves[4:]}
    assert found.alias.target() == moves[-1]["version"]
    assert all(a["version"] != b["version"] for a, b in itertools.pairwise(moves))


def damages(data: bytes) -> Iterator[bytes]:
    """Truncations, flipped bits, and JSON that is no history."""
    yield from (data[:at] for at in range(0, len(data), 40))
    yield from (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data), 7))
    yield from (b"{}x", b"[{}]", b"[1]", b"1", b"[]", b"{}")


def test_a_damaged_history_is_one_error_and_changes_nothing(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    crown(store, found, 1, 2)
    data = cas.read(found.fs, f"{found.root}/{HISTORY}").data
    assert data is not None
    for damaged in damages(data):
        write_history(found, damaged)
        for act in (found.champion, found.rollback, lambda: found.promote("v1")):
            with pytest.raises(Refused, match=r"history\.json is damaged: restore it"):
                act()
    assert [version.name for version in found.versions()] == ["v1", "v2"]
    write_history(found, data)
    assert [move["version"] for move in found.history().moves] == ["v1", "v2"]


def test_a_deleted_history_begins_anew(any_registry: tuple[Store, Registry]) -> None:
    """The remedy for a damaged one."""
    store, found = any_registry
    crown(store, found, 1, 2)
    for path in found.fs.glob(f"{found.root}/{HISTORY}*"):
        found.fs.rm_file(path)
    assert found.champion() is None
    assert found.promote("v2").name == "v2" and found.alias.target() == "v2"


def test_a_promotion_whose_answer_was_lost_keeps_a_later_champion(
    registry: tuple[Store, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found = registry
    for n in (1, 2, 3):
        found.publish(model(store, n))
    found.promote("v1")

    def lost(*request: Any) -> Any:
        monkeypatch.setattr(champion_alias, "swap", cas.swap)
        assert cas.swap(*request) is not None
        found.promote("v3", expected="v2")
        return cas.swap(*request)

    monkeypatch.setattr(champion_alias, "swap", lost)
    assert found.promote("v2", expected="v1").name == "v2"
    assert [move["version"] for move in found.history().moves] == ["v1", "v2", "v3"]
    assert found.alias.target() == "v3"


def test_a_local_champion_is_a_loadable_folder(tmp_path: Path) -> None:
    store, found = Store(str(tmp_path)), Registry(str(tmp_path / "registry"), "digits")
    crown(store, found, 1)
    assert (tmp_path / "registry/digits/champion/model_index.json").read_bytes() == b"1"
