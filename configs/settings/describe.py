"""Settings of the section `describe`: what is computed of each picture."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from configs.settings.base_section import Dtype, Fraction, ModelPlace, NullDrops, Section, setting

#: Columns of every description.
RESERVED_DESCRIBERS = {"id", "row", "tar"}
Triple = tuple[float, float, float]


class HashDescriber(Section):
    """Perceptual hashes of a picture and of its mirror image, and a thumbnail, for duplicates."""

    kind: Literal["hash"]


class QualityDescriber(Section):
    """Sharpness, brightness and contrast."""

    kind: Literal["quality"]


class ClipDescriber(Section):
    """Embedding of a CLIP model, and the picture's likeness to its first caption."""

    kind: Literal["clip"]
    model: ModelPlace = setting(not_in_key="content")
    """CLIPModel with image processor and tokenizer: hub id, local path or fsspec URL."""
    revision: str | None = setting(None, not_in_key="content")
    """Branch, tag or commit of a hub id."""


class AestheticDescriber(Section):
    """Score of a linear head on the embedding of a describer of kind clip; reads no picture."""

    kind: Literal["aesthetic"]
    of: str = setting(not_in_key="content")
    """Describer of kind clip, whose embedding the head takes."""
    head: ModelPlace = setting(not_in_key="content")
    """Safetensors file: one linear layer, or those of LAION's improved aesthetic predictor; local
    path or fsspec URL."""


class ClassifierDescriber(Section):
    """Probabilities of the labels of an image classifier of `transformers`."""

    kind: Literal["classifier"]
    model: ModelPlace = setting(not_in_key="content")
    """AutoModelForImageClassification with image processor: hub id, local path or fsspec URL."""
    revision: str | None = setting(None, not_in_key="content")
    """Branch, tag or commit of a hub id."""
    labels: tuple[str, ...] = ()
    """Labels with a column each; `[]`: all."""


class OnnxDescriber(Section):
    """Outputs of an image classifier in an ONNX file."""

    kind: Literal["onnx"]
    model: ModelPlace = setting(not_in_key="content")
    """ONNX file: local path or fsspec URL."""
    labels: tuple[str, ...] = setting(min_length=1)
    """Names of the outputs, in their order, with a column each; `_` leaves one out."""
    input: str | None = None
    """Name of the model's input; null: its only one."""
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    """Order of the input's axes."""
    size: PositiveInt = 224
    """Side of the input's square, in pixels."""
    resize: PositiveInt | None = None
    """Side to which the whole picture is resized, of which the middle `size` is cut out, in pixels;
    null: `size`."""
    channels: Literal["rgb", "bgr"] = "rgb"
    """Order of the channels."""
    mean: Triple = (0.0, 0.0, 0.0)
    """Subtracted from the channels, whose values are 0 to 255, in their order."""
    std: Triple = (255.0, 255.0, 255.0)
    """The channels' divisors after `mean`, in their order."""
    activation: Literal["none", "softmax", "sigmoid"] = "none"
    """Function that makes probabilities of the outputs; none: they are probabilities already."""


class TextDescriber(Section):
    """Share of the picture that text covers, by RapidOCR."""

    kind: Literal["text"]


Describer = Annotated[
    HashDescriber
    | QualityDescriber
    | ClipDescriber
    | AestheticDescriber
    | ClassifierDescriber
    | OnnxDescriber
    | TextDescriber,
    Field(discriminator="kind"),
]


class Describe(Section):
    """Describe pictures: hashes, embeddings and scores, for `select` and for people."""

    describers: Annotated[dict[str, Describer], NullDrops] = setting(
        {"hash": {"kind": "hash"}, "quality": {"kind": "quality"}}, min_length=1
    )
    """Name -> describer. Its values are columns: the name, or the name, `_` and the value's name.
    null instead of a describer drops that of the extended recipe."""
    batch_size: PositiveInt = setting(32, not_in_key="execution")
    """Pictures per call of a model."""
    device: str = setting("auto", not_in_key="execution")
    """Device: see train.device; without a number, all devices of its kind."""
    processes: PositiveInt | None = setting(None, not_in_key="execution")
    """Processes per machine; null: one per accelerator, one on a CPU."""
    hosts: PositiveInt | None = setting(None, not_in_key="execution")
    """Machines of the recipe's cluster that describe; null: the machine of the flow."""
    dtype: Dtype = "float32"
    """Compute precision of models of `transformers`."""
    max_bad: Fraction = setting(0.05, not_in_key="limit")
    """Maximum fraction of pictures that a describer cannot read, 0 to 1. Above it the stage
    fails."""
    beam: dict[str, Any] = setting({}, not_in_key="execution")
    """Beam pipeline options of this stage, over those of section `beam`."""

    @property
    def models(self) -> dict[str, str]:
        """Dotted setting -> folder, file, hub id or URL of each model."""
        return {
            f"describe.describers.{name}.{field}": place
            for name, describer in self.describers.items()
            for field in ("model", "head")
            if (place := getattr(describer, field, None)) is not None
        }

    def faults(self) -> Iterator[str]:
        for name, describer in self.describers.items():
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in RESERVED_DESCRIBERS:
                yield (
                    f"describers.{name}: a name has small letters, digits and _, and is none of "
                    f"{', '.join(sorted(RESERVED_DESCRIBERS))}"
                )
            if isinstance(describer, AestheticDescriber):
                of = self.describers.get(describer.of)
                if not isinstance(of, ClipDescriber):
                    clips = [n for n, d in self.describers.items() if d.kind == "clip"]
                    known = ", ".join(clips) or "none"
                    yield (
                        f"describers.{name}.of: {describer.of} is no describer of kind clip "
                        f"(those here: {known})"
                    )
