"""The describer of text in pictures, by the package rapidocr, whose wheel has the weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.errors import Refused
from tasks.describe.describers import Describer, Picture, Spec, has_cuda


class Text(Describer):
    """share: fraction of the picture's area in boxes of text, 0 to 1 or more where boxes overlap.

    Watermarks of 30% opacity and less are missed on busy pictures.
    """

    fixed_batch = False

    @classmethod
    def transform(cls, dtype: str) -> dict[str, Any]:
        try:
            return {"rapidocr": version("rapidocr")}  # which stands for its weights
        except PackageNotFoundError:
            raise Refused(
                "it needs the package rapidocr, not installed here", remedy="make setup-ocr"
            ) from None

    @classmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        return {"share": pa.float32()}

    def __init__(self, spec: Spec, device: str) -> None:
        from rapidocr import RapidOCR

        super().__init__(spec, device)
        parameters: dict[str, Any] = {"Global.use_cls": False, "Global.log_level": "error"}
        kind, _, number = device.partition(":")
        if kind in ("auto", "cuda") and has_cuda():
            parameters["EngineConfig.onnxruntime.use_cuda"] = True
            parameters["EngineConfig.onnxruntime.cuda_ep_cfg.device_id"] = int(number or 0)
        self._engine = RapidOCR(params=parameters)

    def prepare(self, source: Picture) -> NDArray[np.uint8]:
        return np.ascontiguousarray(np.asarray(source.image)[..., ::-1])  # as OpenCV: BGR

    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        return [(self._share(pixels),) for pixels in prepared]

    def _share(self, pixels: NDArray[np.uint8]) -> float:
        found = self._engine(pixels, use_det=True, use_cls=False, use_rec=False)
        corners: Any = [] if found.boxes is None else found.boxes
        boxes = np.asarray(corners, np.float64).reshape(-1, 4, 2)
        one, other = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        # The area of a quadrilateral is half the cross product of its diagonals.
        areas = np.abs(one[:, 0] * other[:, 1] - one[:, 1] * other[:, 0]) / 2
        return float(areas.sum() / (pixels.shape[0] * pixels.shape[1]))
