"""The errors that a user meets, by what follows from them.

`Refused` is wrong input: exit status 2, no retry. `Away` may pass: Prefect tries the stage again.
`Failed` ends a run: exit status 1. An error of another class is a bug, and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from configs.secrets import without_secrets


class UserError(Exception):
    """An error whose message has the setting, what is wrong with it, and the remedy; no secrets.

    Args:
        what: what is wrong; with neither setting nor remedy it is the whole message.
        setting: dotted name of a recipe's setting.
        remedy: what the user can do.
    """

    def __init__(
        self, what: object = "", *, setting: str | None = None, remedy: str | None = None
    ) -> None:
        self.what = without_secrets(str(what))
        super().__init__(self.what)
        self.setting = setting
        self.remedy = None if remedy is None else without_secrets(remedy)

    def __str__(self) -> str:
        return ": ".join(part for part in (self.setting, self.what, self.remedy) if part)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class Refused(UserError, ValueError):
    """Wrong input, such as a setting, a model or a source; it is not tried again."""


class Away(UserError, RuntimeError):
    """What may pass, such as a lost network or a full disk: it is tried again."""


class Failed(UserError, RuntimeError):
    """Work that ended without its result, and would again."""


@contextmanager
def naming(setting: str, remedy: str | None = None) -> Iterator[None]:
    """Give an error that has no setting and remedy these ones."""
    try:
        yield
    except UserError as error:
        error.setting = error.setting or setting
        if isinstance(error, Refused):  # what is away is not mended by another setting
            error.remedy = error.remedy or remedy
        raise


@contextmanager
def naming_source(name: str) -> Iterator[None]:
    """Put the source of a mixture before the setting of an error; the name is "" without one."""
    try:
        yield
    except UserError as error:
        if name:
            error.setting = ".".join(filter(None, ("sources", name, error.setting)))
        raise
