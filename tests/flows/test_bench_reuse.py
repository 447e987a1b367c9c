"""`python -m bench.reuse` times a fully reused run, and refuses any other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import reuse
from configs.load_and_extend_recipe import dump, load_recipe


@pytest.mark.soak
def test_a_reused_run_is_timed_against_an_empty_flow(
    first: dict[str, Any],
    small: dict[str, Any],
    at_home: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump(load_recipe("digits", small)), encoding="utf-8")
    assert reuse.main([str(path), "--rounds", "1"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = told["figures"][str(path)]
    run, alone, beyond = (
        figures[f"{name}_seconds"]["median"]
        for name in ("reused_run", "prefect_alone", "beyond_prefect")
    )
    assert beyond == pytest.approx(run - alone)

    path.write_text(dump(load_recipe("digits", {**small, "train.seed": 5})), encoding="utf-8")
    assert reuse.main([str(path), "--rounds", "1"]) == 1
