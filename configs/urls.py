"""Remove credentials from URLs before they are stored or displayed."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

#: Query parameters that grant access: signatures of S3, GCS and Azure URLs, and tokens.
SECRET_PARAMETERS = re.compile(
    r"([?&;](?:x-amz-signature|x-amz-security-token|x-amz-credential|x-goog-signature"
    r"|x-goog-credential|sig|signature|token|access_token|api_key|apikey|key|password)=)[^&;#\s]*",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """A URL without user and password, and with "..." for the values of SECRET_PARAMETERS.

    Other text is returned unchanged.
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        return text
    if (
        "://" in text
        and "@" in parts.netloc
        and not parts.scheme.endswith(("hf", "abfs", "abfss", "az"))
    ):
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        text = urlunsplit(parts)
    return SECRET_PARAMETERS.sub(r"\1...", text)
