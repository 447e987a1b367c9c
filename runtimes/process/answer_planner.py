"""Answer tasks/base_training_plan.py, which runs a planner's module on a request file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtimes.contract import WrongInput


def answer_planner(path: str, request: type[Any], compute: Callable[[Any], Any]) -> None:
    """Print the result of a request, or its error, as one JSON object.

    Args:
        path: JSON file with the request's fields.
        request: the request's dataclass.
        compute: returns a dataclass, or raises WrongInput.
    """
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        found = asdict(compute(request(**fields)))
    except WrongInput as error:
        found = {"wrong_input": str(error)}
    print(json.dumps(found))
