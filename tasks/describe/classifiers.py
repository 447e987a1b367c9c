"""Describers by image classifiers: those of `transformers`, and ONNX files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from configs.errors import Refused, naming
from configs.secrets import one_line
from runtimes.pipeline_folder.folder import read_config
from tasks.describe.describers import Describer, Picture, Spec, check_labels, has_cuda, label_values
from tasks.evaluate import features

Float32 = NDArray[np.float32]


class Classifier(Describer):
    """The probability of each label: softmax, or sigmoid if the model's labels are no choice."""

    @classmethod
    def transform(cls, dtype: str) -> dict[str, Any]:
        return {"dtype": dtype}

    @classmethod
    def check(cls, spec: Spec, setting: str, of: Spec | None) -> None:
        folder = _path(spec)
        features.model_type(folder, f"{setting}.model", "image classifier")
        parts = {"weights": features.WEIGHTS, "an image processor": features.PROCESSOR}
        features.check_parts(folder, f"{setting}.model", parts)
        labels = _labels(spec)
        if not any(name.endswith("ForImageClassification") for name in _config(spec)[1]):
            raise Refused(f"{folder} holds no image classifier", setting=f"{setting}.model")
        check_labels(labels, spec.settings["labels"], setting)

    @classmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        return label_values(spec.settings["labels"] or _labels(spec))

    def __init__(self, spec: Spec, device: str) -> None:
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        super().__init__(spec, device)
        local = {"local_files_only": True, "trust_remote_code": False}
        self._device = features.torch_device(device)
        self._dtype = getattr(torch, spec.transform["dtype"])
        with features.loading(f"{spec.model} does not load as an image classifier"):
            model = AutoModelForImageClassification.from_pretrained(
                spec.model, use_safetensors=True, **local
            )
            self._processor = AutoImageProcessor.from_pretrained(spec.model, **local)
        self._model = model.to(self._device, self._dtype).eval().requires_grad_(False)
        labels = _labels(spec)
        self._chosen = [labels.index(label) for label in spec.settings["labels"] or labels]

    def prepare(self, source: Picture) -> Any:
        return self._processor(images=source.image, return_tensors="pt").pixel_values

    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        import torch

        with torch.inference_mode():
            pixels = torch.cat([*prepared]).to(self._device, self._dtype)
            logits = self._model(pixel_values=pixels).logits.float().cpu().numpy()
        multiple = self._model.config.problem_type == "multi_label_classification"
        probabilities = _activated(logits, "sigmoid" if multiple else "softmax")
        return [tuple(row) for row in probabilities[:, self._chosen].tolist()]


def _path(spec: Spec) -> Path:
    assert spec.model is not None
    return Path(spec.model)


def _config(spec: Spec) -> tuple[dict[str, str], list[str]]:
    """Labels by their numbers as text, and names of classes, of a classifier's config."""
    config = read_config(_path(spec) / "config.json")
    count = int(config.get("num_labels", 2))
    labels = config.get("id2label") or {str(n): f"LABEL_{n}" for n in range(count)}
    return labels, config.get("architectures") or []


def _labels(spec: Spec) -> list[str]:
    labels, _ = _config(spec)
    return [labels[number] for number in sorted(labels, key=int)]


def _activated(outputs: Float32, activation: str) -> Float32:
    """Probabilities of outputs [N, L]."""
    if activation == "softmax":
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
    if activation == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-outputs)), np.float32)
    return outputs


class Onnx(Describer):
    """The outputs of an ONNX classifier; `_` among the labels leaves an output out."""

    @classmethod
    def check(cls, spec: Spec, setting: str, of: Spec | None) -> None:
        labels = [label for label in spec.settings["labels"] if label != "_"]
        check_labels(labels, (), setting)
        with naming(setting):
            onnx = cls(spec, "cpu")
            blank = Picture(Image.new("RGB", (64, 64)), "")
            outputs = onnx._run([onnx.prepare(blank)])
        if outputs.shape != (1, len(spec.settings["labels"])):
            raise Refused(
                f"{spec.model} has outputs of shape {list(outputs.shape)} for a picture, not one "
                f"for each of {len(spec.settings['labels'])} labels",
                setting=f"{setting}.labels",
            )

    @classmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        return label_values(label for label in spec.settings["labels"] if label != "_")

    def __init__(self, spec: Spec, device: str) -> None:
        import onnxruntime

        super().__init__(spec, device)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        providers: list[Any] = ["CPUExecutionProvider"]
        kind, _, number = device.partition(":")
        if kind in ("auto", "cuda") and has_cuda():
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": int(number or 0)}))
        try:
            self._session = onnxruntime.InferenceSession(spec.model, options, providers)
        except Exception as error:  # onnxruntime's errors have no common class
            raise Refused(f"{spec.model} is no usable ONNX file: {one_line(error)}") from None
        nodes = self._session.get_inputs()
        inputs = [node.name for node in nodes]
        self._input = spec.settings["input"] or inputs[0]
        if self._input not in inputs or (spec.settings["input"] is None and len(inputs) > 1):
            raise Refused(f"{spec.model} has the inputs {', '.join(inputs)}: set `input` to one")
        first = nodes[inputs.index(self._input)].shape[0]
        self._at_once = first if isinstance(first, int) else None  # of a model without free batch
        kept = enumerate(spec.settings["labels"])
        self._chosen = [number for number, label in kept if label != "_"]

    def prepare(self, source: Picture) -> Float32:
        settings = self.spec.settings
        size = settings["size"]
        side = settings["resize"] or size
        whole = source.image.resize((side, side), Image.Resampling.BILINEAR)
        start = (side - size) // 2
        pixels = np.asarray(whole.crop((start, start, start + size, start + size)), np.float32)
        if settings["channels"] == "bgr":
            pixels = pixels[..., ::-1]
        pixels = (pixels - np.float32(settings["mean"])) / np.float32(settings["std"])
        return pixels if settings["layout"] == "NHWC" else pixels.transpose(2, 0, 1)

    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        outputs = _activated(self._run(prepared), self.spec.settings["activation"])
        return [tuple(row) for row in outputs[:, self._chosen].tolist()]

    def _run(self, prepared: Sequence[Float32]) -> Float32:
        """Its first output of pictures, [N, L]. Raises Refused for another input."""
        count = self._at_once or len(prepared)
        try:
            outputs = [
                self._session.run(None, {self._input: np.stack(batch)})[0]
                for batch in features.batches(prepared, count)
            ]
        except Exception as error:
            raise Refused(f"{self.spec.model} takes other pictures: {one_line(error)}") from None
        return np.concatenate(outputs, dtype=np.float32).reshape(len(prepared), -1)
