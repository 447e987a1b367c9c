"""Remove credentials from URLs before they are stored or displayed."""

from __future__ import annotations

import re

#: Query parameters whose values are kept: they select a picture or its rendering. Of all others the
#: value is removed, because each service has its own names for signatures and tokens.
HARMLESS = re.compile(
    "auto|crop|dl|download|dpr|ext|file|filename|fit|fm|format|h|height|id|image|image_id|img|lang"
    "|mode|name|page|q|quality|rect|resize|revision|size|split|type|v|ver|version|w|width",
    re.IGNORECASE,
)
#: user:password@ or token@. A name without a colon is a revision (hf) or a container (Azure).
USERINFO = re.compile(
    r"(?<=://)[^\s/?#:@]*:[^\s/?#]*@|(?<!hf)(?<!abfs)(?<!abfss)(?<!az)(://)[^\s/?#]*@"
)
#: The end of a value, which keeps the punctuation of the sentence around it.
END = r"(?=[:,.'\")\]]*(?:[\s&;#]|$))"
#: A value that is already removed.
REMOVED = rf"\.\.\.{END}"
PARAMETER = re.compile(rf"(?<=[?&;#])([^\s?&;#=/]+)=(?!{REMOVED})[^\s&;#]*?{END}")
#: A query that is one value without a name.
UNNAMED = re.compile(rf"(https?://[^\s?#]*\?)(?!{REMOVED})[^\s?&;#=]+?{END}")


def without_secrets(text: str) -> str:
    """A text whose URLs have no user and password, and "..." for values that may be secret.

    Values of HARMLESS parameters are unchanged, and so is other text, unless it looks like a
    parameter (`;name=value`).
    """
    text = UNNAMED.sub(r"\1...", USERINFO.sub(r"\1", text))
    return PARAMETER.sub(_masked, text)


def _masked(parameter: re.Match[str]) -> str:
    return parameter[0] if HARMLESS.fullmatch(parameter[1]) else f"{parameter[1]}=..."
