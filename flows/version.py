"""The version of this code: that of pyproject.toml, its git commit, and a digest of its files."""

from __future__ import annotations

import tomllib

from configs.load_recipe import CHECKOUT
from tasks.stage import CODE, git_commit


def version() -> str:
    """The version, commit and digest: `0.1.0 (1a2b3c..., code 4d5e6f...)`.

    An image has no commit; the digest tells its code from other code of the same version.
    """
    file = CHECKOUT / "pyproject.toml"
    number = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]
    known = [commit] if (commit := git_commit()) else []
    return f"{number} ({', '.join([*known, f'code {CODE}'])})"
