"""The best checkpoint of a run, and early stop, by the rule `train.best_checkpoint`.

Both follow from the history alone. A checkpoint contains the history, so a resumed run stops at the
same step and chooses the same checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from configs.settings.train import Train
from configs.settings.train_parts import BestCheckpoint

#: The name of the held-out loss in history.jsonl and in trackers.
VALIDATION_LOSS = "validation_loss"


class CheckpointRanking:
    """Ranks the checkpoints of a run: the scheduled ones, and the last step.

    A checkpoint of a stop request between them is no candidate, since another run may lack it.

    Args:
        settings: without a rule, candidates are ranked by held-out loss.

    Attributes:
        field: field of a history line with the score.
    """

    def __init__(self, settings: Train) -> None:
        self._chooses = settings.best_checkpoint is not None
        self._rule = settings.best_checkpoint or BestCheckpoint()
        self._sign = 1 if self._rule.lower_is_better else -1
        self._interval, self._steps = settings.checkpointing_steps, settings.steps
        self.field = self._rule.metric if self._rule.by_samples else VALIDATION_LOSS

    def is_candidate(self, step: int) -> bool:
        """Whether the rule may choose a step; False without a rule."""
        return self._chooses and (step % self._interval == 0 or step == self._steps)

    def needs_holdout_loss(self, step: int) -> bool:
        """Whether the rule needs the held-out loss of a step."""
        return self.is_candidate(step) and not self._rule.by_samples

    def needs_samples(self, step: int) -> bool:
        """Whether the rule needs scored sample pictures of a step."""
        return self.is_candidate(step) and self._rule.by_samples

    def scores(self, history: Sequence[str]) -> dict[int, float]:
        """Step -> score of each scored candidate, in order.

        Args:
            history: JSON lines, one per step.
        """
        steps = {*range(self._interval, len(history) + 1, self._interval)}
        steps |= {self._steps} if len(history) >= self._steps else set()
        found = ((step, json.loads(history[step - 1]).get(self.field)) for step in sorted(steps))
        return {step: score for step, score in found if score is not None}

    def best_first(self, history: Sequence[str]) -> list[int]:
        """Steps of the scored candidates, the best first; the earlier step wins a tie."""
        scores = self.scores(history)
        return sorted(scores, key=lambda step: (self._sign * scores[step], step))

    def is_exhausted(self, history: Sequence[str]) -> bool:
        """Whether `patience` candidates in a row improved the score by `min_delta` or less."""
        if self._rule.patience is None:
            return False
        best, without = float("inf"), 0
        for score in self.scores(history).values():
            if self._sign * score < best - self._rule.min_delta:
                best, without = self._sign * score, 0
            else:
                without += 1
        return without >= self._rule.patience

    def reason(self, chosen: int, history: Sequence[str]) -> str:
        """Why a step was chosen, for people; empty without a rule."""
        scores, metric = self.scores(history), self._rule.metric
        if not self._chooses:
            return ""
        if chosen not in scores:
            return f"the last step, since no checkpoint with a {metric} was left"
        word = "lowest" if self._rule.lower_is_better else "highest"
        text = f"the {word} {metric} of {len(scores)} checkpoints: {scores[chosen]:.4g}"
        if (best := self.best_first(history)[0]) != chosen:
            text += f"; the checkpoint of step {best} was lost"
        return text
