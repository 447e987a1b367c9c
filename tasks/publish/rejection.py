"""The verdict on a rejected model, an artifact with every number that the gate judged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from artifacts.records import digest_json
from artifacts.store import Artifact, Draft
from tasks.publish.stage import CHAMPION_EVALUATION, PublishStage, Rejected
from tasks.stage import GATE, METRICS, Stage

STAGE = "verdict"
VERSION = 2


@dataclass(frozen=True)
class VerdictStage(Stage):
    """The reasons of a rejection, and the metrics of all models with their intervals."""

    publication: PublishStage
    rejection: Rejected

    name = STAGE
    version = VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the publication."""
        return self.publication.parts.settings

    @property
    def inputs(self) -> dict[str, str]:
        """Inputs of the publication, and what was judged.

        One model may be rejected for other reasons later, such as by the smoke test.
        """
        judged = {"gate": self.rejection.as_json(), "metrics": self.rejection.measured}
        return {**self.publication.parts.inputs, "judged": digest_json(judged)}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The trained weights and their evaluation."""
        return self.publication.parents

    def build(self, draft: Draft, progress: object) -> dict[str, Any]:
        """Write the verdicts, and the metrics of all models."""
        rejection = self.rejection
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
