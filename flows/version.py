"""The version of this checkout: that of pyproject.toml, and its git commit."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tasks.build_or_reuse import git_commit

CHECKOUT = Path(__file__).parents[1]


def version() -> str:
    """The version, with the commit in brackets: `0.1.0 (1a2b3c...)`, or `(...-dirty)`."""
    file = CHECKOUT / "pyproject.toml"
    number = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]
    commit = git_commit()
    return f"{number} ({commit})" if commit else str(number)
