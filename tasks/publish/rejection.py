"""The verdict on a rejected model, an artifact with every number that the gate judged."""

from __future__ import annotations

import json
from typing import Any

from artifacts.records import digest_json
from artifacts.store import Draft, KeyParts
from tasks.publish.stage import CHAMPION_EVALUATION, Rejected
from tasks.stage import GATE, METRICS

STAGE = "verdict"
VERSION = 2


def key_parts(publication: KeyParts, rejection: Rejected) -> KeyParts:
    """The key: settings and inputs of the publication, and what was judged.

    One model may be rejected for other reasons later, such as by the smoke test.
    """
    judged = {"gate": rejection.as_json(), "metrics": rejection.measured}
    inputs = {**publication.inputs, "judged": digest_json(judged)}
    return KeyParts(STAGE, VERSION, publication.settings, inputs)


def build(rejection: Rejected, draft: Draft) -> dict[str, Any]:
    """Write the verdicts, and the metrics of all models with their intervals."""
    verdicts = rejection.as_json()
    draft.write(GATE, json.dumps(verdicts, indent=1).encode())
    draft.write(METRICS, json.dumps(rejection.measured, indent=1, allow_nan=False).encode())
    again = rejection.champion_evaluation
    return {
        "status": "rejected",
        "failed": [verdict["rule"] for verdict in verdicts if not verdict["passed"]],
        "compared_with": rejection.compared_with,
        "parents": {} if again is None else {CHAMPION_EVALUATION: again},
    }
