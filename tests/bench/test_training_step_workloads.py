"""Context.alternate keeps the results of the sides apart and rotates their order."""

from pathlib import Path

from bench.training_step_workloads import Context


def test_alternate_rotates_the_sides_and_returns_results_by_side(tmp_path: Path) -> None:
    calls: list[str] = []

    def side(name: str, folder: Path) -> str:
        assert folder.is_dir() and not list(folder.iterdir())
        calls.append(name)
        return f"{name} {calls.count(name)}"

    context = Context(tmp_path, None, rounds=3, steps=2)
    found = context.alternate(lambda f: side("theirs", f), lambda f: side("ours", f))
    assert found == [[f"{name} {n}" for n in (1, 2, 3)] for name in ("theirs", "ours")]
    assert calls == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]
