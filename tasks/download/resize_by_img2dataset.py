"""img2dataset's resizer and check of opt-out headers; our words for the resizer's errors."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache
from typing import Any

#: The resizer's error message -> the failure reason in our records.
REASONS = {
    "Image decoding error": "not an image",
    "image too small": "too small",
    "image area too large": "too many pixels",
    "aspect ratio too large": "too thin",
}


@cache
def img2dataset_parts() -> tuple[Any, Any]:
    """img2dataset's Resizer and is_disallowed, imported on demand: the import takes seconds."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no version check over the network
    import img2dataset.resizer
    from img2dataset.downloader import is_disallowed

    # It redirects the stdout and stderr of the whole process during decoding. Two threads that do
    # so at once lose the original streams, and other threads lose their output.
    img2dataset.resizer.SuppressStdoutStderr = nullcontext
    return img2dataset.resizer.Resizer, is_disallowed
