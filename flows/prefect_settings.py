"""Errors of Prefect's own settings: of its variables, of the files that it reads, of HOME."""

from __future__ import annotations

import os
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from configs.secrets import one_line

#: The modules of Prefect that read its files.
READERS = ("/prefect/settings/sources.py", "/prefect/settings/profiles.py")
SETTINGS_FILES = "prefect.toml, pyproject.toml, Prefect's profile or .env"


def wrong_prefect_setting(error: Exception) -> str | None:
    """What is wrong with Prefect's settings, in one line; None if the error is another one."""
    if str(error) == "Could not determine home directory.":  # pathlib's own words
        return "HOME is not set, and this user has no home folder: set HOME to a folder"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, ValidationError) and any("/prefect/settings/" in file for file in files):
        return "; ".join(f"{_variables(one['loc'])}: {one['msg']}" for one in error.errors())
    if not any(file.endswith(READERS) for file in files):
        return None
    path, why = next(_unreadable_files(), (SETTINGS_FILES, one_line(error)))
    return f"{path}: Prefect cannot read it ({why}): correct or remove it"


def _variables(location: Sequence[int | str]) -> str:
    """The variables of the environment that may set a setting, else its name."""
    name = "_".join(str(part) for part in location)
    known = [one for one in os.environ if one.startswith("PREFECT_") and one.endswith(name.upper())]
    return " or ".join(sorted(known)) or f"{name} of {SETTINGS_FILES}"


def _unreadable_files() -> Iterator[tuple[Path | str, str]]:
    """The files of Prefect's settings that cannot be read, and why."""
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    profiles = os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml"
    here = Path.cwd()
    for path in (here / "prefect.toml", here / "pyproject.toml", Path(profiles), here / ".env"):
        try:
            text = path.read_text("utf-8")
            if path.suffix == ".toml":
                tomllib.loads(text)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            yield path, getattr(error, "strerror", None) or one_line(error)
