"""The progress that `kiln run` prints without a terminal, and its bars at one."""

import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from flows import finetune, run_in_terminal
from flows.run_in_terminal import _Display

#: An evaluation: (done, total, text), of pictures that are drawn, then measured.
DRAWN = [(n, 600, f"{n} of 600 pictures drawn") for n in range(0, 601, 50)]
MEASURED = [(n, 300, f"{n} of 300 pictures of the base measured") for n in (128, 256, 300)]
AGAIN = [(n, 300, f"{n} of 300 pictures of the tuned model measured") for n in (128, 256, 300)]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_says_that_it_works_before_slow_imports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def importing() -> None:
        raise SystemExit

    monkeypatch.setattr(run_in_terminal, "_prepare_prefect", importing)
    with pytest.raises(SystemExit):
        run_in_terminal.run("finetune", recipe="digits", overrides={}, as_json=as_json)
    with pytest.raises(SystemExit):
        run_in_terminal.generate(
            model="digits", prompts=["a"], settings={}, out="", as_json=as_json
        )
    told = capsys.readouterr()
    assert (told.err if as_json else told.out) == "checking digits …\n" * 2


def test_each_phase_of_a_stage_has_its_first_tenths_and_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _Display(as_json=False) as display:
        for done, total, text in [*DRAWN, *MEASURED, *AGAIN]:
            display.update("evaluate", done, total, text)
    told = [line.removeprefix("evaluate: ") for line in capsys.readouterr().out.splitlines()]
    same_tenth = "350 of 600 pictures drawn"  # as 300, it is above five tenths
    every = [text for _, _, text in [*DRAWN, *MEASURED, *AGAIN]]
    assert told == [text for text in every if text != same_tenth]


def test_a_training_has_a_line_per_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with _Display(as_json=False) as display:
        for step in range(1, 101):
            display.update("train", step, 100, "loss 0.1")
    told = capsys.readouterr().out.splitlines()
    assert told == [f"train: {step}/100 loss 0.1" for step in (1, *range(10, 101, 10))]


def test_a_bar_belongs_to_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich stops the clock of a bar at its first end."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with _Display(as_json=False) as display:
        for done, total, text in [*DRAWN, *MEASURED, *AGAIN]:
            display.update("evaluate", done, total, text)
        display.update("publish", 1, 3, "gate passed")
        assert display.bar is not None
        shown = [(bar.description, bar.completed, bar.total) for bar in display.bar.tasks]
        ends = [bar.fields["text"] for bar in display.bar.tasks]
    assert shown == [
        ("evaluate", 600, 600),
        ("evaluate", 300, 300),
        ("evaluate", 300, 300),
        ("publish", 1, 3),
    ]
    assert ends == [*(phase[-1][2] for phase in (DRAWN, MEASURED, AGAIN)), "gate passed"]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_server_that_is_lost_at_the_end_fails_no_run(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefect sends a run's final state after the model is published."""
    report: dict[str, Any] = {"status": "published"}

    def flow() -> None:
        if has_ended:
            finetune.final_state(report, SimpleNamespace())  # type: ignore[arg-type]
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(finetune, "reports", [])
    monkeypatch.setattr(logging.getLogger("kiln"), "level", logging.INFO)
    monkeypatch.setattr(run_in_terminal, "import_module", lambda _: SimpleNamespace(finetune=flow))
    monkeypatch.setattr(run_in_terminal, "configured_server", lambda: "http://127.0.0.1:9/api")
    monkeypatch.setattr(run_in_terminal, "check_server", lambda _: None)
    if not has_ended:
        with pytest.raises(httpx.ConnectError):
            run_in_terminal._run_flow("finetune", False)
        return
    assert run_in_terminal._run_flow("finetune", False) == report
    told = "warning: Prefect does not show the end of the run: connection refused\n"
    assert capsys.readouterr().out == told
