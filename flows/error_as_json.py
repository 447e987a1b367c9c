"""Print an error as JSON, for scripts that call `kiln` with `--json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from configs.redact_urls import without_secrets


@contextmanager
def error_as_json(as_json: bool) -> Iterator[None]:
    """Print an error as the JSON object of the last line, if `as_json`, and raise it."""
    try:
        yield
    except Exception as error:
        if as_json:
            found = {"status": "failed", "error": without_secrets(str(error))}
            print(json.dumps(found), flush=True)
        raise
