"""A command line that Typer refuses, in one line like every other error."""

from __future__ import annotations

import re
from typing import Any

from typer.exceptions import TyperException

from configs.explain_errors import did_you_mean, hint_of

_EXTRA = re.compile(r"Got unexpected extra argument\(s\) \(([a-z0-9_.]+=.*)\)")
_NOT_ONE_OF = re.compile(r"(?:Value error, )?'(.*)' is not one of ('.*')\.?")


def usage_error(error: TyperException) -> str:
    """The command, its option or argument, what is wrong, and what was probably meant."""
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    name = "" if context is None or context.parent is None else f"{context.info_name} "
    command, options = name and f"{name.strip()}: ", f"see kiln {name}-h"
    wrong = getattr(error, "option_name", None)
    if wrong is not None and context is not None:
        near = did_you_mean(sorted(getattr(error, "possibilities", None) or ()))
        return f"{command}{wrong}: no such option ({near or options})"
    if not error.message:
        return f"{command}{parameter.opts[0].upper()} is missing ({options})"
    if (extra := _EXTRA.fullmatch(error.message)) is not None:
        given = re.sub(r" (?=[a-z0-9_.]+=)", " -o ", extra[1])  # each of several settings
        return f"{command}write a setting with -o: -o {given}"
    named = "" if parameter is None else f"{parameter.opts[0]}: "
    if (choice := _NOT_ONE_OF.fullmatch(error.message)) is not None:
        known = re.findall("'(.*?)'", choice[2])
        return f"{command}{named}{choice[1]!r} is unknown ({hint_of(choice[1], known)})"
    return f"{command}{named}{error.message.rstrip('.?')} ({options})"
