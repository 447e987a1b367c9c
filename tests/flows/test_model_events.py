"""Events of a model: what automations get, and that a lost event fails no run."""

import logging
from typing import Any

import pytest

from flows import finetune


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The events, within a run."""
    found: list[dict[str, Any]] = []

    def emit(event: str, **more: Any) -> object:
        found.append({"event": event, **more})
        return object()

    monkeypatch.setattr(finetune, "emit_event", emit)
    monkeypatch.setattr(finetune.FlowRunContext, "get", classmethod(lambda _: object()))
    return found


def test_a_published_model_is_announced_without_the_secrets_of_its_url(
    sent: list[dict[str, Any]],
) -> None:
    finetune.emit_published("digits", "s3://user:word@kiln/registry/digits/v3", {"cmmd": 0.1})
    url = "s3://kiln/registry/digits/v3"
    resource = {"prefect.resource.id": "kiln.model.digits", "prefect.resource.name": "digits"}
    assert sent == [
        {
            "event": "kiln.model.published",
            "resource": resource,
            "payload": {
                "version": "v3",
                "model": url,
                "report": f"{url}/report.html",
                "metrics": {"cmmd": 0.1},
            },
        }
    ]


def test_a_rejected_model_is_announced_with_its_verdicts(sent: list[dict[str, Any]]) -> None:
    verdict = {"rule": "cmmd < base", "passed": False}
    finetune.emit_rejected("digits", "the gate rejected the model", [verdict])
    assert sent[0]["event"] == "kiln.model.rejected"
    assert sent[0]["payload"] == {"message": "the gate rejected the model", "gate": [verdict]}


def test_a_lost_event_is_a_warning(
    sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the server is away")

    monkeypatch.setattr(finetune, "emit_event", fail)
    with caplog.at_level(logging.WARNING, "kiln"):
        finetune.emit_published("digits", "/store/registry/digits/v1", {})
    assert "kiln.model.published of digits is lost" in caplog.text
    assert "the server is away" in caplog.text
