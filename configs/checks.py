"""What checks find, and the two ways to ask them: a run stops at the first problem, `kiln doctor`
lists them all.

A check is a function that raises Refused or Away for a problem, and yields notes and what is fine.
A door is a list of checks.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from configs.errors import Refused, UserError
from configs.secrets import one_line, without_secrets

#: Time limit in seconds of a check, when all problems are listed; clients of buckets have none.
SECONDS = 60.0
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class Finding:
    """One line: `problem` prevents work, `note` limits it."""

    level: Literal["ok", "note", "problem"]
    what: str
    mend: str | None = None  # a command, or what else to do
    setting: str | None = None  # dotted name

    @property
    def words(self) -> str:
        """The finding, with its setting and remedy."""
        return ": ".join(part for part in (self.setting, self.what, self.mend) if part)


def problem(what: str, mend: str | None = None) -> Finding:
    return Finding("problem", what, mend)


def note(what: str, mend: str | None = None) -> Finding:
    return Finding("note", what, mend)


def fine(what: str) -> Finding:
    return Finding("ok", what)


@dataclass(frozen=True)
class Check:
    """One check of a door.

    Attributes:
        name: for the message of a check that fails by itself.
        find: raises Refused or Away, and may return findings.
        remote: whether it asks another machine, or fetches something.
    """

    name: str
    find: Callable[[], Iterable[Finding] | None]
    remote: bool = False


def enter(checks: Iterable[Check], *, remote: bool = True) -> None:
    """Pass the doors: log the notes, and raise the first problem.

    Args:
        remote: whether checks of other machines are made. Without them, all are made later, which
            then log the notes.

    Raises:
        Refused, Away: as the check.
    """
    for check in checks:
        if remote or not check.remote:
            for finding in check.find() or ():
                if finding.level == "problem":
                    raise Refused(finding.what, setting=finding.setting, remedy=finding.mend)
                if remote and finding.level == "note":
                    log.warning("%s", finding.words)


def collect(checks: Iterable[Check], seconds: float = SECONDS) -> Iterator[Finding]:
    """The findings of all checks; a check that fails or takes too long does not hide the others."""
    for check in checks:
        findings: list[Finding] = []
        try:
            _gather(check, findings, seconds)
        except UserError as error:
            findings.append(Finding("problem", error.what, error.remedy, error.setting))
        except Exception as error:  # a machine may be broken in any way
            words = without_secrets(one_line(error))
            findings.append(problem(f"{check.name} failed: {type(error).__name__}: {words}"))
        yield from findings


def _gather(check: Check, findings: list[Finding], seconds: float) -> None:
    """Append the findings of a check, within the time limit.

    Its thread goes on until the program ends: few network clients can be interrupted.
    """
    done: Future[Any] = Future()

    def work() -> None:
        try:
            for finding in check.find() or ():
                findings.append(finding)
            done.set_result(None)
        except BaseException as error:  # raised below, in the thread of the caller
            done.set_exception(error)

    context = contextvars.copy_context()  # Prefect's settings are in one
    threading.Thread(target=context.run, args=(work,), daemon=True).start()
    try:
        done.result(seconds)
    except TimeoutError:
        if done.done():  # the check's own
            raise
        raise Refused(f"{check.name} did not answer within {seconds:g} s") from None
