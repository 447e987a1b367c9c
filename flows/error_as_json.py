"""Print an error as JSON, for scripts that call `kiln` with `--json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from configs.secrets import without_secrets
from flows.prefect_settings import wrong_prefect_setting


@contextmanager
def error_as_json(as_json: bool) -> Iterator[None]:
    """Print an error as the JSON object of the last line, if `as_json`, and raise it."""
    try:
        yield
    except Exception as error:
        if as_json:
            message = wrong_prefect_setting(error) or str(error)
            found = {"status": "failed", "error": without_secrets(message)}
            print(json.dumps(found), flush=True)
        raise
