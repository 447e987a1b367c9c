"""Times of both sides of a comparison stay apart, whichever goes first."""

from pathlib import Path

from bench.steps import Context


def test_each_side_has_its_own_results_and_goes_first_in_turn(tmp_path: Path) -> None:
    calls: list[str] = []

    def side(name: str, folder: Path) -> str:
        assert folder.is_dir() and not list(folder.iterdir())
        calls.append(name)
        return f"{name} {calls.count(name)}"

    context = Context(tmp_path, None, rounds=3, steps=2)
    found = context.in_turns(lambda f: side("theirs", f), lambda f: side("ours", f))
    assert found == ([f"theirs {n}" for n in (1, 2, 3)], [f"ours {n}" for n in (1, 2, 3)])
    assert calls == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]
