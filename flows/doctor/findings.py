"""Findings of `kiln doctor`: what was checked, and the command that mends a problem."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from configs.secrets import one_line, without_secrets

#: Time limit in seconds of a check that needs a network; the clients of buckets have none.
NETWORK_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """One line: `problem` prevents work, `note` limits it."""

    level: Literal["ok", "note", "problem"]
    what: str
    mend: str | None = None  # a command, or what else to do

    @property
    def words(self) -> str:
        """The finding and its remedy."""
        return self.what if self.mend is None else f"{self.what}: {self.mend}"


Check = Callable[[], Iterable[Finding]]


def problem(what: str, mend: str | None = None) -> Finding:
    return Finding("problem", what, mend)


def note(what: str, mend: str | None = None) -> Finding:
    return Finding("note", what, mend)


def fine(what: str) -> Finding:
    return Finding("ok", what)


def named(name: str, check: Callable[..., Iterable[Finding]], *given: Any) -> Check:
    """A check with its arguments, and with a name for the message of its failure."""

    def run() -> Iterable[Finding]:
        return check(*given)

    run.__name__ = name
    return run


def collect(checks: Iterable[Check]) -> Iterator[Finding]:
    """The findings of all checks. One that fails is a problem and does not hide the others."""
    for check in checks:
        try:
            yield from list(check())
        except Exception as error:  # a machine may be broken in any way
            name = check.__name__.strip("_").replace("_", " ")
            words = without_secrets(one_line(error))
            yield problem(f"{name} failed: {type(error).__name__}: {words}")


def limited(
    check: Check,
    late: Callable[[str], Finding] = problem,
    seconds: float = NETWORK_SECONDS,
) -> Check:
    """A check that ends in time; one that does not is the finding of `late`.

    Its thread goes on until the program ends: few network clients can be interrupted.
    """

    @wraps(check)
    def run() -> Iterable[Finding]:
        found: Future[list[Finding]] = Future()

        def work() -> None:
            try:
                found.set_result(list(check()))
            except BaseException as error:  # raised below, in the thread of the caller
                found.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            return found.result(seconds)
        except TimeoutError:
            if found.done():  # the check's own
                raise
            name = check.__name__.strip("_").replace("_", " ")
            return [late(f"{name} did not answer within {seconds:g} s")]

    return run
