"""Errors of the command `kiln` in one line, or as JSON.

The error of a command line that Typer refuses has one line like every other error. Prefect's own
settings have errors about their variables, the files that it reads, and HOME. With `--json`,
scripts get an error as JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from typer.exceptions import TyperException

from configs.explain_errors import did_you_mean, hint_of
from configs.secrets import one_line, without_secrets

_EXTRA = re.compile(r"Got unexpected extra argument\(s\) \(([a-z0-9_.]+=.*)\)")
_NOT_ONE_OF = re.compile(r"(?:Value error, )?'(.*)' is not one of ('.*')\.?")


def usage_error(error: TyperException) -> str:
    """The command, its option or argument, what is wrong, and what was probably meant."""
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    name = "" if context is None or context.parent is None else f"{context.info_name} "
    command = name and f"{name.strip()}: "
    options = f"see kiln {name}-h"
    wrong = getattr(error, "option_name", None)
    if wrong is not None and context is not None:
        near = did_you_mean(sorted(getattr(error, "possibilities", None) or ()))
        return f"{command}{wrong}: no such option ({near or options})"
    if not error.message:
        missing = parameter.opts[0]
        missing = missing if missing.startswith("-") else missing.upper()
        return f"{command}{missing} is missing ({options})"
    if (extra := _EXTRA.fullmatch(error.message)) is not None:
        settings = re.sub(r" (?=[a-z0-9_.]+=)", " -o ", extra[1])  # each of several settings
        return f"{command}write a setting with -o: -o {settings}"
    named = "" if parameter is None else f"{parameter.opts[0]}: "
    if (choice := _NOT_ONE_OF.fullmatch(error.message)) is not None:
        known = re.findall("'(.*?)'", choice[2])
        return f"{command}{named}{choice[1]!r} is unknown ({hint_of(choice[1], known)})"
    return f"{command}{named}{error.message.rstrip('.?')} ({options})"


def import_prefect() -> None:
    """Import Prefect, whose first import prints an error of its settings before it is raised.

    The next reader of the settings raises the error, which `wrong_prefect_setting` words.
    """
    with redirect_stderr(StringIO()) as printed:
        import prefect.settings
    try:
        prefect.settings.get_current_settings()
    except Exception:
        return
    sys.stderr.write(printed.getvalue())


#: The modules of Prefect that read its files.
READERS = ("/prefect/settings/sources.py", "/prefect/settings/profiles.py")


def wrong_prefect_setting(error: Exception) -> str | None:
    """What is wrong with Prefect's settings, in one line; None for any other error."""
    if str(error) == "Could not determine home directory.":  # pathlib's own words
        return "HOME is not set, and this user has no home folder: set HOME to a folder"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, ValidationError) and any("/prefect/settings/" in file for file in files):
        wrong = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
        return "; ".join(f"{_variables(e['loc'])}: {e['msg']}" for e in wrong)
    if not any(file.endswith(READERS) for file in files):
        return None
    path, why = next(_unreadable_files(), None) or (_settings_files(), one_line(error))
    return f"{path}: Prefect cannot read it ({why}): correct or remove it"


def _variables(location: Sequence[int | str]) -> str:
    """The variables of the environment that may set a setting, else its name."""
    name = "_".join(str(part) for part in location)
    variables = [n for n in os.environ if n.startswith("PREFECT_") and n.endswith(name.upper())]
    return " or ".join(sorted(variables)) or f"{_settings_files()}: {name}"


def _paths() -> Iterator[Path]:
    """The files that Prefect reads settings from."""
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    profiles = os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml"
    here = Path.cwd()
    yield from (here / "prefect.toml", here / "pyproject.toml", Path(profiles), here / ".env")


def _settings_files() -> str:
    """The files that are there and may set something of Prefect."""
    paths = [path for path in _paths() if path.is_file()]
    named = [path for path in paths if "prefect" in path.read_text("utf-8", "replace").lower()]
    return " or ".join(map(str, named or paths)) or "Prefect's settings"


def _unreadable_files() -> Iterator[tuple[Path | str, str]]:
    """The files of Prefect's settings that cannot be read, and why."""
    for path in _paths():
        try:
            text = path.read_text("utf-8")
            if path.suffix == ".toml":
                tomllib.loads(text)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            yield path, getattr(error, "strerror", None) or one_line(error)


@contextmanager
def error_as_json(as_json: bool) -> Iterator[None]:
    """Print an error as the JSON object of the last line, if `as_json`, and raise it."""
    try:
        yield
    except Exception as error:
        if as_json:
            message = wrong_prefect_setting(error) or str(error)
            report = {"status": "failed", "error": without_secrets(message)}
            print(json.dumps(report), flush=True)
        raise
